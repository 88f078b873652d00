"""
The test kit: gives each test an empty Redis and its own clock, checks published messages, and runs handlers.

With pytest, use the fixture `reliq`; without pytest, `with isolated() as reliq`.
"""

from typing import TYPE_CHECKING

from reliq.distribution import lazy_names

if TYPE_CHECKING:
    from reliq.testing.drain import DrainResult as DrainResult
    from reliq.testing.kit import (
        JobOptions as JobOptions,
        Match as Match,
        Published as Published,
        Reliq as Reliq,
        State as State,
        isolated as isolated,
    )

if not TYPE_CHECKING:  # type checkers read the imports above, to report unknown names
    __getattr__, __dir__, __all__ = lazy_names(
        __name__,
        {
            "reliq.testing.drain": "DrainResult",
            "reliq.testing.kit": "JobOptions Match Published Reliq State isolated",
        },
    )
