"""The threads in which pages are made, few and apart from those of the application in which the page is mounted."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from anyio import CapacityLimiter, to_thread
from anyio.lowlevel import RunVar

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")
T = TypeVar("T")

#: Pages that are made at once; who asks for a further one waits.
PAGES_AT_ONCE = 16
_limiter: RunVar[CapacityLimiter] = RunVar("reliq.web.threads")


async def in_thread(function: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
    """Call a function in a thread, and return what it returns."""
    try:
        limiter = _limiter.get()
    except LookupError:  # the first page of this event loop
        limiter = CapacityLimiter(PAGES_AT_ONCE)
        _limiter.set(limiter)
    return await to_thread.run_sync(partial(function, *args, **options), limiter=limiter)
