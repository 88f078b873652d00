"""The lifespan of a worker process, plain or async: entered before the first claim, left after the last handler."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from reliq.worker.event_loop import AsyncExecutor

#: An async lifespan has this long to end, because a handler may hold its event loop.
LEAVE_SECONDS = 10.0


class Lifespan:
    """Enters and leaves a context manager; an async one within one task of the handlers' own event loop."""

    def __init__(self, make: Callable[[], Any] | None, tasks: AsyncExecutor) -> None:
        self._make, self._tasks = make, tasks
        self._leave: Callable[[], Any] = lambda: None

    def enter(self) -> Any:
        """Enter it and return what it yields; whatever it raises is raised here."""
        if self._make is None:
            return None
        manager = self._make()
        if hasattr(manager, "__aenter__"):
            return self._enter_async(manager)
        state = manager.__enter__()
        self._leave = lambda: manager.__exit__(None, None, None)
        return state

    def leave(self) -> None:
        """Leave it, if it was entered."""
        leave, self._leave = self._leave, lambda: None
        leave()

    def _enter_async(self, manager: Any) -> Any:
        entered: Future[Any] = Future()
        over = asyncio.Event()
        ended = self._tasks.run(live(manager, entered, over))

        def leave() -> None:
            self._tasks.run(_set(over)).result(LEAVE_SECONDS)
            ended.result(LEAVE_SECONDS)

        self._leave = leave
        return entered.result()


async def live(manager: Any, entered: Future[Any] | asyncio.Future[Any], over: asyncio.Event) -> None:
    """Enter `manager`, tell `entered` what it yields or raises, and leave it when it is `over`, all in one task."""
    try:
        state = await manager.__aenter__()
    except BaseException as error:
        entered.set_exception(error)
        return
    entered.set_result(state)
    await over.wait()
    await manager.__aexit__(None, None, None)


async def _set(event: asyncio.Event) -> None:
    event.set()
