"""The client of asyncio code: the only place that makes a `Call` there."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Self, TypeVar

import redis
from tenacity import AsyncRetrying

from reliq.call import Call, Clock, Command, Request, T
from reliq.client.errors import translated
from reliq.client.partial_replies import PartialReplies
from reliq.errors import RedisUnavailableError, ReliqError
from reliq.events import Observer, notify
from reliq.message import Confirmed
from reliq.retry import Tries
from reliq.transport.connection import Connection
from reliq.transport.known_scripts import is_denied_eval, is_unknown_script
from reliq.transport.many import AsyncWire

S = TypeVar("S")


class AsyncClient:
    """
    Makes calls over one wire and tells the observers what happened.

    Args:
        clock: what scripts take for the time; None is Redis' own clock.
    """

    def __init__(self, wire: AsyncWire, observers: Sequence[Observer] = (), clock: Clock | None = None) -> None:
        self._wire, self._clock = wire, clock
        self.observers = observers

    @classmethod
    def to(cls, connection: Connection, timeout_seconds: float, observers: Sequence[Observer] = ()) -> Self:
        """As `Client.to`, for the running event loop."""
        return cls(connection.async_wire(timeout_seconds), observers, connection.clock)

    async def run(self, request: Request[T], *, for_seconds: float = 0.0) -> T:
        """
        Make `request` and return its answer; while Redis is away, try again until `for_seconds` are over.

        A caller that is cancelled does not cut off the exchange: its connection stays clean.

        Raises:
            RedisUnavailableError: Redis cannot be reached or cannot answer now.
            RedisRefusedError: Redis refused, for good.
        """
        return await asyncio.shield(asyncio.ensure_future(self._try(self._one, request, for_seconds)))

    async def run_all(
        self, requests: Sequence[Request[Any]], *, for_seconds: float = 0.0, once_sent: bool = False
    ) -> list[Any]:
        """As `Client.run_all`."""
        if not requests:
            return []
        return await asyncio.shield(asyncio.ensure_future(self._run_all(requests, for_seconds, once_sent)))

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
        return await asyncio.shield(asyncio.ensure_future(self._try(self._both, (request, wait), for_seconds)))

    async def _one(self, request: Request[T]) -> T:
        return await self._read(request, (await self._exchange([request]))[0])

    async def _both(self, pair: tuple[Request[T], Command[Confirmed]]) -> tuple[T, Confirmed | Exception]:
        request, wait = pair
        replies = await self._exchange([request, wait])
        if is_denied_eval(replies[0]):
            replies = await self._exchange([request, wait])  # by its digest
        elif is_unknown_script(replies[0]):
            replies = await self._exchange([request, wait], in_full=True)
        answer = await self._read(request, replies[0])
        try:
            return answer, await self._read(wait, replies[1])
        except ReliqError as error:
            return answer, error

    async def _run_all(self, requests: Sequence[Request[Any]], for_seconds: float, once_sent: bool) -> list[Any]:
        replies = await (self._try_all(requests, for_seconds, once_sent) if for_seconds else self._exchange(requests))
        answers: list[Any] = []
        for request, reply in zip(requests, replies, strict=True):
            try:
                answers.append(await self._read(request, reply))
            except Exception as error:
                answers.append(error)
        return answers

    async def _try(self, make: Callable[[S], Awaitable[T]], asked: S, for_seconds: float) -> T:
        """Return what `make(asked)` does, tried again until `for_seconds` are over while Redis is away."""
        began = time.monotonic()
        try:
            return await make(asked)
        except RedisUnavailableError as error:
            if not for_seconds:
                raise
            tries = Tries(for_seconds, error, time.monotonic() - began)
        try:
            return await tries.of(AsyncRetrying)(make, asked)
        except ReliqError as error:
            tries.mark(error)
            raise

    async def _try_all(self, requests: Sequence[Request[Any]], for_seconds: float, once_sent: bool) -> list[Any]:
        """Return the replies to `requests`; those that a server failed to give are asked for again."""
        made = PartialReplies(requests, once_sent=once_sent)
        try:
            await self._try(self._fill, made, for_seconds)
        except RedisUnavailableError:
            if not made.replies:
                raise
        return made.replies

    async def _fill(self, made: PartialReplies) -> None:
        made.put(await self._exchange(made.requests))
        made.check()

    async def _exchange(self, requests: Sequence[Request[Any]], *, in_full: bool = False) -> list[Any]:
        if self._clock is not None:
            requests = [one.at(self._clock()) for one in requests]
        try:
            return await self._wire.exchange([one.command_in_full if in_full else one.command for one in requests])
        except (redis.RedisError, OSError) as error:
            raise translated(requests[0], error) from None

    async def _read(self, request: Request[T], reply: Any) -> T:
        if isinstance(reply, Exception):
            reply = await self._refused(request, reply)
        answer = request.read(reply)
        if self.observers:
            notify(self.observers, request.events(answer))
        return answer

    async def _refused(self, request: Request[Any], refusal: Exception) -> Any:
        """Return the reply to a script that Redis did not know, or not take, as it was sent; raise any other refusal."""
        if isinstance(request, Call):
            reply: Any = refusal
            if is_denied_eval(reply):
                [reply] = await self._exchange([request])
            if is_unknown_script(reply):
                [reply] = await self._exchange([request], in_full=True)
            if not isinstance(reply, Exception):
                return reply
            refusal = reply
        raise translated(request, refusal) from None
