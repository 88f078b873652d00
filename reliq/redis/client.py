"""The clients that send a queue's calls to Redis and retry them until Redis has answered."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Self, TypeVar

from reliq.errors import RedisRefusedError, RedisUnavailableError, ReliqError
from reliq.events import Observer, notify
from reliq.message import Confirmed
from reliq.redis import server as transport
from reliq.redis.cluster import ClusterTransport, Transport
from reliq.redis.commands import Clock, Command, Request, T
from reliq.redis.connection import (
    ASYNCIO,
    Driver,
    NotSentError,
    is_failure,
    is_unknown_script,
    run_blocking,
    translated,
)
from reliq.redis.redis_py import redis
from reliq.redis.server import PUBLISH_TIMEOUT_SECONDS, Connection
from reliq.redis.url import Target
from reliq.redis.wakeups import WakeTokens
from reliq.settings import RECONNECT, seconds_after

S = TypeVar("S")


class AnyClient:
    """
    Makes calls over one transport and notifies the observers. Its methods wait as the transport's driver does.

    Args:
        clock: returns the current time for scripts, in unix microseconds; None means Redis' own clock.
    """

    def __init__(self, transport: Transport, observers: Sequence[Observer] = (), clock: Clock | None = None) -> None:
        self._transport = transport
        self._clock = clock
        self.observers = observers

    async def run(self, request: Request[T], *, for_seconds: float = 0.0) -> T:
        """
        Make `request` and return its answer. While Redis is unavailable, retry for `for_seconds`.

        Raises:
            RedisUnavailableError: Redis cannot be reached or cannot answer now.
            RedisRefusedError: Redis refused the request; a retry would not help.
        """
        return await self._try(self._one, request, for_seconds)

    async def run_once_sent(self, request: Request[T], *, for_seconds: float) -> T:
        """
        Make `request` as `run` does, but do not retry a request that could not be sent: raise RedisUnavailableError.

        The caller may then send the request to another server, because this server has not received it.
        """
        try:
            return await self.run(request)
        except RedisUnavailableError as error:
            if not error.maybe_ran:
                raise
        try:
            return await self.run(request, for_seconds=for_seconds)
        except (RedisUnavailableError, RedisRefusedError) as error:
            error.maybe_ran = True
            raise

    async def run_all(
        self, requests: Sequence[Request[Any]], *, for_seconds: float = 0.0, once_sent: bool = False
    ) -> list[Any]:
        """
        Make `requests` in one round trip. A request that Redis refused has the exception as its answer.

        The requests run in their order, except that scripts which Redis has not cached run after the others.

        With several servers, the answer is a RedisUnavailableError where a server failed. With `once_sent`, a request
        that could not be sent is not retried.

        Raises:
            RedisUnavailableError: the only server cannot be reached.
        """
        if not requests:
            return []
        if not for_seconds:
            return self._answers(requests, await self._exchange(requests))
        replies: list[Any] = []  # empty until the first round trip
        left: Sequence[int] = range(len(requests))  # indexes of the failed requests, which are retried

        async def fill(requests: Sequence[Request[Any]]) -> None:
            nonlocal left
            made = await self._exchange([requests[at] for at in left])
            replies.extend([None] * (len(requests) - len(replies)))
            for at, reply in zip(left, made, strict=True):
                # An earlier try may have run the request, even if the last try was not sent.
                if not (isinstance(reply, NotSentError) and is_failure(replies[at])):
                    replies[at] = reply
            done = (NotSentError,) if once_sent else ()
            left = [at for at in left if is_failure(replies[at]) and not isinstance(replies[at], done)]
            if left:
                error = translated(requests[left[0]], replies[left[0]])
                if isinstance(error, RedisUnavailableError):
                    raise error

        try:
            await self._try(fill, requests, for_seconds)
        except RedisUnavailableError:
            if not replies:
                raise
        return self._answers(requests, replies)

    async def run_everywhere(self, requests: Sequence[Request[Any]]) -> dict[str, list[Any]]:
        """
        Make `requests` at every server at the same time. Return each server's answers by its name, as `run_all` does.

        Raises:
            RedisUnavailableError: no server is known, or the only server cannot be reached.
        """
        try:
            found = await self._transport.everywhere([one.command for one in requests])
        except (redis.RedisError, OSError) as error:
            raise translated(requests[0], error) from None
        return {server: self._answers(requests, replies) for server, replies in found.items()}

    async def run_confirmed(
        self, request: Request[T], wait: Command[Confirmed], *, for_seconds: float = 0.0
    ) -> tuple[T, Confirmed | Exception]:
        """
        Make `request` and `wait` for its confirmation, on the same connection in the same round trip.

        Returns:
            Both answers. If Redis refused the wait, its answer is the exception, because the request has been made.

        Raises:
            RedisUnavailableError: Redis cannot be reached or cannot answer now.
            RedisRefusedError: Redis refused the request; a retry would not help.
        """
        return await self._try(self._both, (request, wait), for_seconds)

    async def _one(self, request: Request[T]) -> T:
        timed = request if self._clock is None else request.at(self._clock())
        try:
            [reply] = await self._transport.exchange([timed.command])
            if isinstance(reply, Exception) and is_unknown_script(reply):
                [reply] = await self._transport.exchange([timed.command_in_full])
        except (redis.RedisError, OSError) as error:
            raise translated(request, error) from None
        return self._answer(request, reply)

    async def _both(self, pair: tuple[Request[T], Command[Confirmed]]) -> tuple[T, Confirmed | Exception]:
        request, wait = pair
        replies = await self._exchange(pair, together=True)
        answer = self._answer(request, replies[0])
        try:
            return answer, self._answer(wait, replies[1])
        except ReliqError as error:
            return answer, error

    async def _try(self, make: Callable[[S], Awaitable[T]], asked: S, for_seconds: float) -> T:
        """
        Return the result of `make(asked)`. While Redis is unavailable, retry for `for_seconds`, first without a pause.

        The last try is made at the end of that time, so a shorter outage fails no request. When tries are slow, no try
        is started that would end too late. An earlier try may have run the request although its reply was lost.
        """
        began = time.monotonic()
        made = 0
        paused = 0.0
        maybe_ran = False
        while True:
            try:
                return await make(asked)
            except (RedisUnavailableError, RedisRefusedError) as error:
                maybe_ran = error.maybe_ran = error.maybe_ran or maybe_ran
                if not for_seconds or isinstance(error, RedisRefusedError):
                    raise
                made += 1
                if made == 1:
                    continue
                since = time.monotonic() - began
                left = for_seconds - since - (since - paused) / made  # a try takes the average time so far
                if left <= 0:
                    raise
            pause = max(0.0, min(seconds_after(RECONNECT, made - 1), left))
            paused += pause
            await self._transport.driver.sleep(pause)

    async def _exchange(self, requests: Sequence[Request[Any]], *, together: bool = False) -> list[Any]:
        """
        Make `requests` in one round trip. Send scripts that Redis has not cached again with their texts.

        Args:
            together: repeat all requests in the second round trip, not only the missing scripts.
        """
        if self._clock is not None:
            requests = [one.at(self._clock()) for one in requests]
        replies: list[Any] = []
        try:
            replies = await self._transport.exchange([one.command for one in requests])
            unknown = [at for at, one in enumerate(replies) if isinstance(one, Exception) and is_unknown_script(one)]
            if unknown:
                again = range(len(requests)) if together else unknown
                made = await self._transport.exchange([requests[at].command_in_full for at in again])
                for at, reply in zip(again, made, strict=True):
                    replies[at] = reply
        except (redis.RedisError, OSError) as error:
            failure = translated(requests[0], error)
            if replies and isinstance(failure, RedisUnavailableError):
                failure.maybe_ran = True  # some requests ran in the first round trip
            raise failure from None
        return replies

    def _answers(self, requests: Sequence[Request[Any]], replies: Sequence[Any]) -> list[Any]:
        """Return the answers to requests; a request that failed has the exception as its answer."""
        answers: list[Any] = []
        for request, reply in zip(requests, replies, strict=True):
            try:
                answers.append(self._answer(request, reply))
            except Exception as error:
                answers.append(error)
        return answers

    def _answer(self, request: Request[T], reply: Any) -> T:
        if isinstance(reply, Exception):
            raise translated(request, reply) from None
        answer = request.read(reply)
        if self.observers:
            notify(self.observers, request.events(answer))
        return answer


class AsyncClient(AnyClient):
    """
    Makes calls from the tasks of one event loop.

    Cancelling a caller does not interrupt the exchange, so no connection is left with unread replies.
    """

    @classmethod
    def to(cls, connection: Connection, timeout_seconds: float, observers: Sequence[Observer] = ()) -> Self:
        """Async version of `Client.to`, for the running event loop."""
        return cls(connection.async_wire(timeout_seconds), observers, connection.clock)

    async def run(self, request: Request[T], *, for_seconds: float = 0.0) -> T:
        """Run one request, see `AnyClient.run`."""
        return await _uncut(super().run(request, for_seconds=for_seconds))

    async def run_all(
        self, requests: Sequence[Request[Any]], *, for_seconds: float = 0.0, once_sent: bool = False
    ) -> list[Any]:
        """Run several requests, see `AnyClient.run_all`."""
        return await _uncut(super().run_all(requests, for_seconds=for_seconds, once_sent=once_sent))

    async def run_confirmed(
        self, request: Request[T], wait: Command[Confirmed], *, for_seconds: float = 0.0
    ) -> tuple[T, Confirmed | Exception]:
        """Run a request and wait for its confirmation, see `AnyClient.run_confirmed`."""
        return await _uncut(super().run_confirmed(request, wait, for_seconds=for_seconds))


async def _uncut(call: Coroutine[Any, Any, T]) -> T:
    """Await a call that continues when this caller is cancelled; asyncio then logs no failure of the call."""
    task = asyncio.ensure_future(call)
    task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    return await asyncio.shield(task)


class Client:
    """
    Makes calls from blocking code.

    Args:
        clock: returns the current time for scripts, in unix microseconds; None means Redis' own clock.

    Attributes:
        driven: the client for code that is written once for blocking and async callers.
    """

    def __init__(self, transport: Transport, observers: Sequence[Observer] = (), clock: Clock | None = None) -> None:
        self.driven = AnyClient(transport, observers, clock)
        self.observers = observers
        self._transport = transport
        self.place = transport.place

    @classmethod
    def to(cls, connection: Connection, timeout_seconds: float, observers: Sequence[Observer] = ()) -> Self:
        """Return a client of `connection`, with its clock, that waits at most `timeout_seconds` for a reply."""
        return cls(connection.wire(timeout_seconds), observers, connection.clock)

    def run(self, request: Request[T], *, for_seconds: float = 0.0) -> T:
        """Run one request, see `AnyClient.run`."""
        return run_blocking(self.driven.run(request, for_seconds=for_seconds))

    def run_all(
        self, requests: Sequence[Request[Any]], *, for_seconds: float = 0.0, once_sent: bool = False
    ) -> list[Any]:
        """Run several requests, see `AnyClient.run_all`."""
        return run_blocking(self.driven.run_all(requests, for_seconds=for_seconds, once_sent=once_sent))

    def run_everywhere(self, requests: Sequence[Request[Any]]) -> dict[str, list[Any]]:
        """Run requests at every server, see `AnyClient.run_everywhere`."""
        return run_blocking(self.driven.run_everywhere(requests))

    def run_confirmed(
        self, request: Request[T], wait: Command[Confirmed], *, for_seconds: float = 0.0
    ) -> tuple[T, Confirmed | Exception]:
        """Run a request and wait for its confirmation, see `AnyClient.run_confirmed`."""
        return run_blocking(self.driven.run_confirmed(request, wait, for_seconds=for_seconds))

    def wake_tokens(self) -> WakeTokens:
        """Return waits for wake tokens, which run beside the calls of this client."""
        return WakeTokens(self, self._transport)

    @property
    def has_many(self) -> bool:
        """Whether there are several servers, each with a part of the data."""
        return isinstance(self._transport, ClusterTransport)


class Clients:
    """
    The clients of one queue. Blocking clients are kept; each async call gets its own.

    New clients are made in a forked process and when connections are redirected. If `target` is None, RELIQ_URL is
    read again then.

    Attributes:
        observers: callables that get the events of these clients.
        epoch: the epoch of the current connections, see `reliq.redis.server`.
        named, maps: the attributes of the current connection with these names.
        waits: the `Listener` that waits over a thread's own connections, if there is one.
    """

    waits: Any = None

    def __init__(self, target: Target | None, observers: Sequence[Observer]) -> None:
        import redis.asyncio  # noqa: F401, PLC0415  before this process forks, and before the first publish is timed

        self._target = target
        self.observers = observers
        self.epoch = transport.epoch
        self._connection: Connection | None = None
        self._blocking: dict[float, Client] = {}
        self.named: dict[str, float] = {}
        self.maps: dict[str, Any] = {}

    def connection(self) -> Connection:
        """Return the connection to the queue's Redis; raise ConfigurationError when none was named."""
        connection = self._connection
        if self.epoch is not transport.epoch:
            # Drop everything that belongs to another Redis or to the parent process.
            self.epoch = transport.epoch
            connection = self._connection = None
            self._blocking = {}
            self.waits = None
        if connection is None:
            connection = self._connection = Connection.to(self._target)
            self.named = connection.named
            self.maps = connection.maps
        return connection

    def blocking(self, longer_seconds: float = 0.0) -> Client:
        """Return the client that waits for a reply for a publish's timeout plus `longer_seconds`."""
        if self.epoch is transport.epoch and (known := self._blocking.get(longer_seconds)):
            return known
        connection = self.connection()
        timeout_seconds = PUBLISH_TIMEOUT_SECONDS + longer_seconds
        # Threads that start at the same time get the same client.
        return self._blocking.setdefault(longer_seconds, Client.to(connection, timeout_seconds, self.observers))

    def asynchronous(self, longer_seconds: float = 0.0) -> AsyncClient:
        """Return the client for the running event loop, see `blocking`."""
        return AsyncClient.to(self.connection(), PUBLISH_TIMEOUT_SECONDS + longer_seconds, self.observers)

    def driven(self, driver: Driver, longer_seconds: float = 0.0) -> AnyClient:
        """Return the client that waits as `driver` does."""
        return self.asynchronous(longer_seconds) if driver is ASYNCIO else self.blocking(longer_seconds).driven

    def close(self) -> None:
        """Stop waiting for wake-ups and close the blocking connections."""
        connection = self.connection()
        if self.waits:
            self.waits.close()
        connection.close()

    async def aclose(self) -> None:
        """Stop waiting for wake-ups and close the running event loop's connections."""
        connection = self.connection()
        if self.waits:
            await asyncio.to_thread(self.waits.close)
        await connection.aclose()
