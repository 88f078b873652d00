"""Calls of handlers in the caller's own thread, and the lifespan around them: one twin for blocking code, one for async."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, Self

from reliq.errors import ConfigurationError
from reliq.worker.lifespan import live

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterator

    from reliq.worker.delivery import HandlerCall
    from reliq.worker.runner import Returned, Runner


class Calls:
    """Makes calls in this thread, those of coroutine handlers on an event loop that is made for them."""

    def __init__(self) -> None:
        self._loop = asyncio.Runner()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.close()

    def run(self, runner: Runner, call: HandlerCall) -> Returned:
        """Make one call, to its outcome; return what its handler returned, and what it raised."""
        if not call.handler.is_async:
            return runner.run(call)
        if not runner.begin(call):
            return None, None
        return self._await(runner.arun(call))  # type: ignore[no-any-return]

    @contextmanager
    def lifespan(self, make: Callable[[], Any] | None) -> Iterator[Any]:
        """Enter a lifespan, an async one within one task, and leave it at the end; give what it yields."""
        manager = None if make is None else make()
        if manager is None:
            yield None
        elif hasattr(manager, "__aenter__"):
            entered: asyncio.Future[Any] = self._loop.get_loop().create_future()
            over = asyncio.Event()
            living = self._loop.get_loop().create_task(live(manager, entered, over))
            try:
                yield self._await(_result(entered))
            finally:
                over.set()
                self._await(_result(living))
        else:
            with manager as state:
                yield state

    def _await(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        try:
            return self._loop.run(coroutine)
        except RuntimeError as error:
            coroutine.close()
            if asyncio._get_running_loop() is None:  # noqa: SLF001
                raise
            raise ConfigurationError(
                "this thread runs an event loop already: `await reliq.adrain(…)`, or `await reliq.aperform(…)`"
            ) from error


class AsyncCalls:
    """Makes calls on the running event loop; a plain handler holds it up."""

    async def run(self, runner: Runner, call: HandlerCall) -> Returned:
        """As `Calls.run`."""
        if not call.handler.is_async:
            return runner.run(call)
        if not runner.begin(call):
            return None, None
        answer, error = await runner.arun(call)
        if isinstance(error, asyncio.CancelledError):  # the test itself is cancelled
            raise error
        return answer, error

    @asynccontextmanager
    async def lifespan(self, make: Callable[[], Any] | None) -> AsyncIterator[Any]:
        """As `Calls.lifespan`."""
        manager = None if make is None else make()
        if manager is None:
            yield None
        elif hasattr(manager, "__aenter__"):
            async with manager as state:
                yield state
        else:
            with manager as state:
                yield state


async def _result(future: asyncio.Future[Any]) -> Any:
    return await future
