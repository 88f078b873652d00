"""The client of asyncio code: the only place that makes a `Call` there."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import redis
from tenacity import AsyncRetrying

from reliq.call import Call, Command, Request, T
from reliq.client.errors import result, translated, unknown_script
from reliq.errors import RedisUnavailableError, ReliqError
from reliq.events import Observer, notify
from reliq.message import Confirmed
from reliq.retry import Tries
from reliq.transport.cluster import AsyncWire


class AsyncClient:
    """Makes calls over one wire and tells the observers what happened."""

    def __init__(self, wire: AsyncWire, observers: Sequence[Observer] = ()) -> None:
        self._wire = wire
        self.observers = observers

    async def run(self, request: Request[T], *, for_seconds: float = 0.0) -> T:
        """
        Make `request` and return its answer; while Redis is away, try again until `for_seconds` are over.

        A caller that is cancelled does not cut off the exchange: its connection stays clean.

        Raises:
            RedisUnavailableError: Redis cannot be reached or cannot answer now.
            RedisRefusedError: Redis refused, for good.
        """

        async def once() -> T:
            return await self._read(request, (await self._exchange([request]))[0])

        return await asyncio.shield(asyncio.ensure_future(self._try(once, for_seconds)))

    async def run_all(self, requests: Sequence[Request[Any]], *, for_seconds: float = 0.0) -> list[Any]:
        """Make `requests` in one round trip; what Redis refused is an exception in its place."""
        return await asyncio.shield(asyncio.ensure_future(self._run_all(requests, for_seconds)))

    async def run_confirmed(
        self, request: Request[T], wait: Command[Confirmed], *, for_seconds: float = 0.0
    ) -> tuple[T, Confirmed | Exception]:
        """
        Make `request` and, on the same connection in the same round trip, `wait` for its confirmation.

        Returns:
            both answers; a wait that Redis refused is an exception in its place, for the request has been made.

        Raises:
            RedisUnavailableError: Redis cannot be reached or cannot answer now.
            RedisRefusedError: Redis refused the request, for good.
        """

        async def once() -> tuple[T, Confirmed | Exception]:
            return await self._both(request, wait)

        return await asyncio.shield(asyncio.ensure_future(self._try(once, for_seconds)))

    async def _both(self, request: Request[T], wait: Command[Confirmed]) -> tuple[T, Confirmed | Exception]:
        replies = await self._exchange([request, wait])
        if unknown_script(replies[0]):
            replies = await self._exchange([request, wait], in_full=True)
        answer = await self._read(request, replies[0])
        try:
            return answer, await self._read(wait, replies[1])
        except ReliqError as error:
            return answer, error

    async def _run_all(self, requests: Sequence[Request[Any]], for_seconds: float) -> list[Any]:
        async def once() -> list[Any]:
            return await self._exchange(requests)

        replies = await self._try(once, for_seconds)
        answers: list[Any] = []
        for request, reply in zip(requests, replies, strict=True):
            try:
                answers.append(await self._read(request, reply))
            except Exception as error:
                answers.append(error)
        return answers

    async def _try(self, once: Callable[[], Awaitable[T]], for_seconds: float) -> T:
        began = time.monotonic()
        try:
            return await once()
        except RedisUnavailableError as error:
            if not for_seconds:
                raise
            tries = Tries(for_seconds, error, time.monotonic() - began)
        try:
            return await tries.of(AsyncRetrying)(once)
        except ReliqError as error:
            tries.mark(error)
            raise

    async def _exchange(self, requests: Sequence[Request[Any]], *, in_full: bool = False) -> list[Any]:
        try:
            return await self._wire.exchange([one.command_in_full if in_full else one.command for one in requests])
        except (redis.RedisError, OSError) as error:
            raise translated(requests[0], error) from None

    async def _read(self, request: Request[T], reply: Any) -> T:
        if unknown_script(reply) and isinstance(request, Call):
            reply = (await self._exchange([request], in_full=True))[0]
        answer = result(request, reply)
        if self.observers:
            notify(self.observers, request.events(answer))
        return answer
