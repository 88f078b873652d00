"""Clients that send the requests of a queue to Redis, and retry them while Redis is unavailable."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, Self, TypeVar

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
    ServerConnections,
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
    Sends requests (scripts and plain commands) to Redis, and passes the events of their results to the observers.

    With the driver BLOCKING, the methods block their thread. With ASYNCIO, a request runs to its end even if the
    task that awaits it is cancelled.

    Args:
        transport: the connections over which the requests are sent.
        observers: callables that get the events, such as a published message.
        clock: returns the current time for scripts, in unix microseconds; None if scripts use the clock of Redis.
    """

    def __init__(self, transport: Transport, observers: Sequence[Observer] = (), clock: Clock | None = None) -> None:
        self._transport = transport
        self._driver = transport.driver
        self._clock = clock
        self.observers = observers

    async def run(self, request: Request[T], *, for_seconds: float = 0.0, once_sent: bool = False) -> T:
        """
        Run `request` and return its result: the parsed reply of Redis.

        Args:
            for_seconds: for how long to retry the request while Redis is unavailable.
            once_sent: retry only if Redis may have run the request. Otherwise raise the error immediately, so that the
                caller may choose another server.

        Raises:
            RedisUnavailableError: Redis cannot be reached, or cannot serve the request now.
            RedisRefusedError: Redis refused the request; a retry would not help.
        """
        return await self._driver.complete(self._try(self._one, request, for_seconds, once_sent=once_sent))

    async def run_all(
        self, requests: Sequence[Request[Any]], *, for_seconds: float = 0.0, once_sent: bool = False
    ) -> list[Any]:
        """
        Run `requests` in one round trip and return the list of their results.

        If Redis refuses a request, the result of this request is the exception. Redis runs the requests in the given
        order. Only scripts that Redis has not cached run last, in a second round trip.

        With several servers, the result of a request whose server failed is a RedisUnavailableError. With `once_sent`,
        a request that could not be sent to its server is not retried.

        Raises:
            RedisUnavailableError: the only server cannot be reached.
        """
        if not requests:
            return []
        return await self._driver.complete(self._run_all(requests, for_seconds, once_sent=once_sent))

    async def _run_all(self, requests: Sequence[Request[Any]], for_seconds: float, *, once_sent: bool) -> list[Any]:
        if not for_seconds:
            return self._answers(requests, await self._exchange(requests))
        replies: list[Any] = []  # the replies of Redis; empty until a round trip succeeds
        left: Sequence[int] = range(len(requests))  # indexes of the requests to send in the next try

        async def fill(requests: Sequence[Request[Any]]) -> None:
            nonlocal left
            made = await self._exchange([requests[at] for at in left])
            replies.extend([None] * (len(requests) - len(replies)))
            for at, reply in zip(left, made, strict=True):
                # If an earlier try sent the request and failed, keep the earlier error: Redis may have run the request.
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

    async def run_at(self, node: ServerConnections, requests: Sequence[Request[Any]]) -> list[Any]:
        """
        Run `requests` on one server, without retries, and return the list of their results.

        If the server refuses a request, the result of this request is the exception.

        Raises:
            RedisUnavailableError: the server cannot be reached.
        """
        try:
            self._transport.check(node)
            replies = await node.exchange([one.command for one in requests])
        except (redis.RedisError, OSError) as error:
            self._transport.note(node, error)
            raise translated(request=requests[0], error=error) from None
        return self._answers(requests, replies)

    async def run_confirmed(
        self, request: Request[T], wait: Command[Confirmed], *, for_seconds: float = 0.0
    ) -> tuple[T, Confirmed | Exception]:
        """
        Run `request` and then `wait` (WAIT or WAITAOF), in one round trip on one connection.

        Returns:
            The result of `request` and the confirmation. If Redis refused only `wait`, the exception replaces the
            confirmation and is not raised, because `request` has run.

        Raises:
            RedisUnavailableError: Redis cannot be reached, or cannot serve the request now.
            RedisRefusedError: Redis refused the request; a retry would not help.
        """
        return await self._driver.complete(self._try(self._both, (request, wait), for_seconds))

    async def _one(self, request: Request[T]) -> T:
        timed = request if self._clock is None else request.at(self._clock())
        try:
            [reply] = await self._transport.exchange([timed.command])
            if isinstance(reply, Exception) and is_unknown_script(reply):
                [reply] = await self._transport.exchange([timed.command_in_full])
        except (redis.RedisError, OSError) as error:
            raise translated(request=request, error=error) from None
        return self._answer(request, reply)

    async def _both(self, pair: tuple[Request[T], Command[Confirmed]]) -> tuple[T, Confirmed | Exception]:
        request, wait = pair
        replies = await self._exchange(pair, together=True)
        answer = self._answer(request, replies[0])
        try:
            return answer, self._answer(wait, replies[1])
        except ReliqError as error:
            return answer, error

    async def _try(
        self, make: Callable[[S], Awaitable[T]], asked: S, for_seconds: float, *, once_sent: bool = False
    ) -> T:
        """
        Call `make(asked)` and return its result. While Redis is unavailable, call it again for up to `for_seconds`.

        The first retry is immediate. A later retry starts only if the time left is longer than the average duration of
        the earlier tries. If Redis may have run the request in any try, the raised error has `maybe_ran` set.
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
                if not for_seconds or isinstance(error, RedisRefusedError) or (once_sent and not maybe_ran):
                    raise
                made += 1
                if made == 1:
                    continue
                since = time.monotonic() - began
                # The longest possible pause before the next try: the time left, minus the average duration of a try.
                left = for_seconds - since - (since - paused) / made
                if left <= 0:
                    raise
            pause = max(0.0, min(seconds_after(RECONNECT, made - 1), left))
            paused += pause
            await self._driver.sleep(pause)

    async def _exchange(self, requests: Sequence[Request[Any]], *, together: bool = False) -> list[Any]:
        """
        Send `requests` in one round trip and return the replies of Redis.

        If Redis has not cached some of the scripts, a second round trip sends their full text.

        Args:
            together: whether the second round trip repeats all requests. If false, it repeats only the requests whose
                scripts were not cached.
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
                failure.maybe_ran = True  # the first round trip succeeded, so Redis may have run its requests
            raise failure from None
        return replies

    def _answers(self, requests: Sequence[Request[Any]], replies: Sequence[Any]) -> list[Any]:
        """Parse `replies` and return the results of `requests`. The result of a failed request is its exception."""
        answers: list[Any] = []
        for request, reply in zip(requests, replies, strict=True):
            try:
                answers.append(self._answer(request, reply))
            except Exception as error:
                answers.append(error)
        return answers

    def _answer(self, request: Request[T], reply: Any) -> T:
        if isinstance(reply, Exception):
            raise translated(request=request, error=reply) from None
        answer = request.read(reply)
        if self.observers:
            notify(self.observers, request.events(answer))
        return answer


class Timed(NamedTuple):
    """The results of the requests to one server, and how many seconds these requests took."""

    answers: list[Any]
    seconds: float


class Client:
    """
    Sends requests to Redis from blocking code.

    Args:
        clock: returns the current time for scripts, in unix microseconds; None if scripts use the clock of Redis.

    Attributes:
        driven: the `AnyClient` that runs the requests, for code that is written once for blocking and async callers.
    """

    def __init__(self, transport: Transport, observers: Sequence[Observer] = (), clock: Clock | None = None) -> None:
        self.driven = AnyClient(transport, observers, clock)
        self.observers = observers
        self._transport = transport
        self.place = transport.place

    @classmethod
    def to(cls, connection: Connection, timeout_seconds: float, observers: Sequence[Observer] = ()) -> Self:
        """Return a client for `connection` that uses its clock and waits at most `timeout_seconds` for a reply."""
        return cls(connection.wire(timeout_seconds), observers, connection.clock)

    def run(self, request: Request[T], *, for_seconds: float = 0.0) -> T:
        """Run one request and return its result, see `AnyClient.run`."""
        return run_blocking(self.driven.run(request, for_seconds=for_seconds))

    def run_all(
        self, requests: Sequence[Request[Any]], *, for_seconds: float = 0.0, once_sent: bool = False
    ) -> list[Any]:
        """Run several requests and return the list of their results, see `AnyClient.run_all`."""
        return run_blocking(self.driven.run_all(requests, for_seconds=for_seconds, once_sent=once_sent))

    def start_everywhere(self, requests: Sequence[Request[Any]]) -> dict[str, Future[Timed]]:
        """
        Start `requests` on every server, with one thread for each server.

        Returns:
            For each server name, a future with the results of the requests on this server.

        Raises:
            RedisUnavailableError: no server is known.
        """
        try:
            nodes = self._transport.nodes()
        except (redis.RedisError, OSError) as error:
            raise translated(request=requests[0], error=error) from None

        def ask(node: ServerConnections, result: Future[Timed]) -> None:
            began = time.monotonic()
            try:
                answers = run_blocking(self.driven.run_at(node, requests))
                result.set_result(Timed(answers, time.monotonic() - began))
            except BaseException as error:
                result.set_exception(error)

        results: dict[str, Future[Timed]] = {server: Future() for server in nodes}
        for server, node in nodes.items():
            threading.Thread(target=ask, args=(node, results[server]), name=f"reliq-ask-{server}", daemon=True).start()
        return results

    def run_everywhere(self, requests: Sequence[Request[Any]]) -> dict[str, list[Any]]:
        """
        Run `requests` on every server in parallel. Return for each server name the list of the results.

        Raises:
            RedisUnavailableError: no server is known, or the only server cannot be reached.
        """
        answers: dict[str, list[Any]] = {}
        for server, result in self.start_everywhere(requests).items():
            try:
                answers[server] = result.result().answers
            except (RedisUnavailableError, RedisRefusedError) as error:
                if not self.has_many:
                    raise
                answers[server] = [error] * len(requests)
        return answers

    def avoid(self, servers: Iterable[str]) -> None:
        """Let requests to these servers of a Cluster fail immediately, until the servers answer a PING."""
        for server, node in self._transport.nodes().items():
            if server in servers:
                self._transport.note(node, redis.TimeoutError("it answers slowly"))

    def run_confirmed(
        self, request: Request[T], wait: Command[Confirmed], *, for_seconds: float = 0.0
    ) -> tuple[T, Confirmed | Exception]:
        """Run a request, then WAIT or WAITAOF for its confirmation, see `AnyClient.run_confirmed`."""
        return run_blocking(self.driven.run_confirmed(request, wait, for_seconds=for_seconds))

    def wake_tokens(self) -> WakeTokens:
        """Create an object that waits for wake tokens. It opens its own connections to the same Redis."""
        return WakeTokens(self, self._transport)

    @property
    def has_many(self) -> bool:
        """Whether this client uses a Cluster, where each server has a part of the data."""
        return isinstance(self._transport, ClusterTransport)


class Clients:
    """
    Creates the clients of one queue. Blocking clients are reused; each async call gets a new client.

    After a fork, or after `reliq.redis.server.redirected` has changed the connections of the process, new clients
    replace the old clients. If `target` is None, the clients connect to the URL in RELIQ_URL.

    Attributes:
        observers: callables that get the events of these clients.
        epoch: the value of `reliq.redis.server.epoch` for which the current clients were created.
        named, maps: the same objects as `named` and `maps` of the current `Connection`.
        waits: the `Listener` that `Queue.receive` uses; None before the first `receive`. `close` stops it.
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
        """Return the connection to the queue's Redis. Raise ConfigurationError if no URL or client is given."""
        connection = self._connection
        if self.epoch is not transport.epoch:
            # The known clients belong to another Redis or to the parent process, so drop them.
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
        """Return a blocking client that waits PUBLISH_TIMEOUT_SECONDS plus `longer_seconds` for a reply."""
        if self.epoch is transport.epoch and (known := self._blocking.get(longer_seconds)):
            return known
        connection = self.connection()
        timeout_seconds = PUBLISH_TIMEOUT_SECONDS + longer_seconds
        # If several threads create the client at the same time, `setdefault` gives all of them the same client.
        return self._blocking.setdefault(longer_seconds, Client.to(connection, timeout_seconds, self.observers))

    def asynchronous(self, longer_seconds: float = 0.0) -> AnyClient:
        """Return a client for the running event loop, with the same timeouts as `blocking`."""
        connection = self.connection()
        transport = connection.async_wire(PUBLISH_TIMEOUT_SECONDS + longer_seconds)
        return AnyClient(transport, self.observers, connection.clock)

    def driven(self, driver: Driver, longer_seconds: float = 0.0) -> AnyClient:
        """Return a client whose methods await if `driver` is ASYNCIO, or block their thread if it is BLOCKING."""
        return self.asynchronous(longer_seconds) if driver is ASYNCIO else self.blocking(longer_seconds).driven

    def close(self) -> None:
        """Stop the listener of `Queue.receive`, and close the connections of blocking code."""
        connection = self.connection()
        if self.waits:
            self.waits.close()
        connection.close()

    async def aclose(self) -> None:
        """Stop the listener of `Queue.receive`, and close the connections of the running event loop."""
        connection = self.connection()
        if self.waits:
            await asyncio.to_thread(self.waits.close)
        await connection.aclose()
