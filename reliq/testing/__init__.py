"""
The test kit: each test gets its own Redis and clock, checks the published messages, and runs their handlers.

pytest has it as the fixture `reliq`; without pytest use `with isolated() as reliq`.
"""

from typing import TYPE_CHECKING

from reliq.distribution import lazy_names

if TYPE_CHECKING:
    from reliq.testing.drain import DrainResult as DrainResult
    from reliq.testing.kit import JobOptions as JobOptions, Reliq as Reliq, isolated as isolated
    from reliq.testing.published import Match as Match, Published as Published, State as State

if not TYPE_CHECKING:  # a type checker sees the names above and reports any other
    __getattr__, __dir__, __all__ = lazy_names(
        __name__,
        {
            "reliq.testing.drain": "DrainResult",
            "reliq.testing.kit": "JobOptions Reliq isolated",
            "reliq.testing.published": "Match Published State",
        },
    )
