"""
The testing kit: a test has a Redis of its own, whatever its queues name, looks at what was published, and works it off.

The pytest plugin has it as the fixture `reliq`; `with isolated() as reliq` is the same without pytest.
"""

from typing import TYPE_CHECKING

from reliq.distribution import lazy_names

if TYPE_CHECKING:
    from reliq.testing.drain import DrainResult as DrainResult
    from reliq.testing.kit import JobOptions as JobOptions, Reliq as Reliq, isolated as isolated
    from reliq.testing.published import Match as Match, Published as Published, State as State

if not TYPE_CHECKING:  # a type checker sees every name above, and that there is no other
    __getattr__, __dir__, __all__ = lazy_names(
        __name__,
        {
            "reliq.testing.drain": "DrainResult",
            "reliq.testing.kit": "JobOptions Reliq isolated",
            "reliq.testing.published": "Match Published State",
        },
    )
