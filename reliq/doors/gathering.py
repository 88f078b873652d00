"""Calls of one event loop that are made at about the same time share a round trip."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from reliq.errors import RedisUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable

    from reliq.call import Request, T
    from reliq.doors.asynchronous import AsyncDoor

#: The most calls in one round trip.
TOGETHER_LIMIT = 500


class Gathering:
    """Makes the calls of many tasks: one that is alone goes at once; while some are under way, the next fill up."""

    def __init__(self, door: Callable[[], AsyncDoor], *, for_seconds: float) -> None:
        self._door, self._for_seconds = door, for_seconds
        self._waiting: list[tuple[Request[Any], asyncio.Future[Any]]] = []
        self._task: asyncio.Task[None] | None = None

    async def run(self, request: Request[T]) -> T:
        """
        Make `request` and return its answer, as `AsyncDoor.run` does.

        A caller that is cancelled does not stop its request.
        """
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, future))
        if self._task is None:
            self._task = asyncio.create_task(self._run_all())
        answer = await future
        if isinstance(answer, RedisUnavailableError):  # Redis answered the others: it may answer this one in a moment
            return await self._door().run(request, for_seconds=self._for_seconds)
        if isinstance(answer, BaseException):
            raise answer
        result: T = answer
        return result

    async def _run_all(self) -> None:
        try:
            while self._waiting:
                together, self._waiting = self._waiting[:TOGETHER_LIMIT], self._waiting[TOGETHER_LIMIT:]
                await self._make(together)
        finally:
            self._task = None

    async def _make(self, together: list[tuple[Request[Any], asyncio.Future[Any]]]) -> None:
        """Make the calls in one round trip, and tell each caller that still waits."""
        waiting = [future for _, future in together]
        try:
            answers = await self._door().run_all([request for request, _ in together], for_seconds=self._for_seconds)
        except asyncio.CancelledError:
            for future in waiting:
                future.cancel()
            raise
        except Exception as error:
            for future in waiting:
                if not future.done():
                    future.set_exception(error)
            return
        for future, answer in zip(waiting, answers, strict=True):
            if not future.done():
                future.set_result(answer)
