"""Calls that tasks of one event loop make at about the same time share a round trip."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from reliq.errors import RedisUnavailableError
from reliq.settings import MIB

if TYPE_CHECKING:
    from collections.abc import Callable

    from reliq.call import Request, T
    from reliq.client.aio import AsyncClient

#: One round trip carries at most this many calls, and this many bytes of bodies unless one call alone has more.
TOGETHER_LIMIT, TOGETHER_BYTES = 500, 8 * MIB
#: After this many seconds the next round trip begins beside one that has no answer: Redis may be away.
OVERLAP_SECONDS = 0.1


class Waiting(NamedTuple):
    """A request, how many bytes it carries, and the answer to come."""

    request: Request[Any]
    weight: int
    answer: asyncio.Future[Any]


class Batcher:
    """Makes the calls of many tasks: one that is alone goes at once; while some are under way, the next fill up."""

    def __init__(self, client: Callable[[], AsyncClient], *, for_seconds: float) -> None:
        self._client, self._for_seconds = client, for_seconds
        self._waiting: deque[Waiting] = deque()
        self._task: asyncio.Task[None] | None = None
        self._rounds: set[asyncio.Task[None]] = set()  # under way; the event loop itself keeps no hold of its tasks

    async def run(self, request: Request[T], weight: int, *, once_sent: bool = False) -> T:
        """
        Make `request`, which carries `weight` bytes, and return its answer, as `AsyncClient.run` does.

        With `once_sent` it is tried again only when it was sent, as by `Client.run_once_sent`. A caller that is
        cancelled does not stop its request.
        """
        one = Waiting(request, weight, asyncio.get_running_loop().create_future())
        self._waiting.append(one)
        if self._task is None:
            self._start()
        answer = await one.answer
        if isinstance(answer, RedisUnavailableError):  # Redis answered the others: it may answer this one in a moment
            if once_sent and not answer.maybe_ran:
                raise answer
            return await self._client().run(request, for_seconds=self._for_seconds)
        if isinstance(answer, BaseException):
            raise answer
        result: T = answer
        return result

    def _start(self) -> None:
        self._task = asyncio.create_task(self._run_all())
        self._task.add_done_callback(self._ended)

    def _ended(self, _task: asyncio.Task[None]) -> None:
        """Begin again for those who still wait: the end of an event loop cancels this task as any other."""
        self._task = None
        self._waiting = deque(one for one in self._waiting if not one.answer.done())
        if self._waiting:
            self._start()

    async def _run_all(self) -> None:
        while self._waiting:
            one_round = asyncio.create_task(self._make(self._next()))
            self._rounds.add(one_round)
            one_round.add_done_callback(self._rounds.discard)
            await asyncio.wait([one_round], timeout=OVERLAP_SECONDS)

    def _next(self) -> list[Waiting]:
        """Take what goes in one round trip."""
        together = [self._waiting.popleft()]
        weight = together[0].weight
        while self._waiting and len(together) < TOGETHER_LIMIT:
            weight += self._waiting[0].weight
            if weight > TOGETHER_BYTES:
                break
            together.append(self._waiting.popleft())
        return together

    async def _make(self, together: list[Waiting]) -> None:
        """Make the calls in one round trip, and tell each caller that still waits."""
        try:
            answers = await self._client().run_all([one.request for one in together], for_seconds=self._for_seconds)
        except asyncio.CancelledError:
            for one in together:
                one.answer.cancel()
            raise
        except Exception as error:
            for one in together:
                if not one.answer.done():
                    one.answer.set_exception(error)
            return
        for one, answer in zip(together, answers, strict=True):
            if not one.answer.done():
                one.answer.set_result(answer)
