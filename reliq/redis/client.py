"""The clients that send a queue's calls to Redis and retry them until Redis has answered."""

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
    Makes calls over one transport and notifies the observers.

    Its methods block or await, depending on the driver of the transport. In async code, a started call
    runs to its end even if its caller is cancelled.

    Args:
        clock: returns the current time for scripts, in unix microseconds; None means Redis' own clock.
    """

    def __init__(self, transport: Transport, observers: Sequence[Observer] = (), clock: Clock | None = None) -> None:
        self._transport = transport
        self._driver = transport.driver
        self._clock = clock
        self.observers = observers

    async def run(self, request: Request[T], *, for_seconds: float = 0.0, once_sent: bool = False) -> T:
        """
        Make `request` and return its answer. While Redis is unavailable, retry for `for_seconds`.

        With `once_sent`, do not retry a request that could not be sent. The caller may then send it to another server.

        Raises:
            RedisUnavailableError: Redis cannot be reached or cannot answer now.
            RedisRefusedError: Redis refused the request; a retry would not help.
        """
        return await self._driver.complete(self._try(self._one, request, for_seconds, once_sent=once_sent))

    async def run_all(
        self, requests: Sequence[Request[Any]], *, for_seconds: float = 0.0, once_sent: bool = False
    ) -> list[Any]:
        """
        Make `requests` in one round trip and return their answers.

        The answer to a refused request is the exception. Redis runs the requests in their order, except that scripts
        which it has not cached run last, in a second round trip.

        With several servers, the answer to a request whose server failed is a RedisUnavailableError. With `once_sent`,
        a request that could not be sent is not retried.

        Raises:
            RedisUnavailableError: the only server cannot be reached.
        """
        if not requests:
            return []
        return await self._driver.complete(self._run_all(requests, for_seconds, once_sent=once_sent))

    async def _run_all(self, requests: Sequence[Request[Any]], for_seconds: float, *, once_sent: bool) -> list[Any]:
        if not for_seconds:
            return self._answers(requests, await self._exchange(requests))
        replies: list[Any] = []  # the replies, empty until a round trip has succeeded
        left: Sequence[int] = range(len(requests))  # indexes of the failed requests, which are retried

        async def fill(requests: Sequence[Request[Any]]) -> None:
            nonlocal left
            made = await self._exchange([requests[at] for at in left])
            replies.extend([None] * (len(requests) - len(replies)))
            for at, reply in zip(left, made, strict=True):
                # If an earlier try of a request was sent and failed, keep that error: Redis may have run the request.
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
        Make `requests` at one server, and return their answers as `run_all` does.

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
        Make `request`, then `wait` for its confirmation, in one round trip on one connection.

        Returns:
            The answers to both. If Redis refused only `wait`, its answer is the exception, because `request` has run.

        Raises:
            RedisUnavailableError: Redis cannot be reached or cannot answer now.
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
        Call `make(asked)` and return its result; while Redis is unavailable, retry for `for_seconds`.

        The first retry is immediate. A further retry starts only if there is time for it, by the average duration of
        the tries before. If any try was sent and got no reply, the raised error has `maybe_ran` set.
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
                # How long to pause at most: the time left, minus the average duration of a try.
                left = for_seconds - since - (since - paused) / made
                if left <= 0:
                    raise
            pause = max(0.0, min(seconds_after(RECONNECT, made - 1), left))
            paused += pause
            await self._driver.sleep(pause)

    async def _exchange(self, requests: Sequence[Request[Any]], *, together: bool = False) -> list[Any]:
        """
        Make `requests` in one round trip and return the replies.

        A second round trip sends the full text of scripts that Redis has not cached.

        Args:
            together: if true, the second round trip repeats all requests, otherwise only requests with these scripts.
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
                failure.maybe_ran = True  # Redis may have run requests of the first round trip
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
            raise translated(request=request, error=reply) from None
        answer = request.read(reply)
        if self.observers:
            notify(self.observers, request.events(answer))
        return answer


class Timed(NamedTuple):
    """The answers of one server, and how many seconds they took."""

    answers: list[Any]
    seconds: float


class Client:
    """
    Makes calls from blocking code.

    Args:
        clock: returns the current time for scripts, in unix microseconds; None means Redis' own clock.

    Attributes:
        driven: the `AnyClient` behind this client, for code that is written once for blocking and async callers.
    """

    def __init__(self, transport: Transport, observers: Sequence[Observer] = (), clock: Clock | None = None) -> None:
        self.driven = AnyClient(transport, observers, clock)
        self.observers = observers
        self._transport = transport
        self.place = transport.place

    @classmethod
    def to(cls, connection: Connection, timeout_seconds: float, observers: Sequence[Observer] = ()) -> Self:
        """Return a client that uses `connection` and its clock, and waits at most `timeout_seconds` for a reply."""
        return cls(connection.wire(timeout_seconds), observers, connection.clock)

    def run(self, request: Request[T], *, for_seconds: float = 0.0) -> T:
        """Run one request, see `AnyClient.run`."""
        return run_blocking(self.driven.run(request, for_seconds=for_seconds))

    def run_all(
        self, requests: Sequence[Request[Any]], *, for_seconds: float = 0.0, once_sent: bool = False
    ) -> list[Any]:
        """Run several requests, see `AnyClient.run_all`."""
        return run_blocking(self.driven.run_all(requests, for_seconds=for_seconds, once_sent=once_sent))

    def start_everywhere(self, requests: Sequence[Request[Any]]) -> dict[str, Future[Timed]]:
        """
        Send `requests` to every server, each in its own thread; return the futures by server name.

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
        Send `requests` to every server in parallel; return the list of answers of each server, by server name.

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
        """Make calls to these servers of a Cluster fail immediately, until they answer a ping."""
        for server, node in self._transport.nodes().items():
            if server in servers:
                self._transport.note(node, redis.TimeoutError("it answers slowly"))

    def run_confirmed(
        self, request: Request[T], wait: Command[Confirmed], *, for_seconds: float = 0.0
    ) -> tuple[T, Confirmed | Exception]:
        """Run a request and wait for its confirmation, see `AnyClient.run_confirmed`."""
        return run_blocking(self.driven.run_confirmed(request, wait, for_seconds=for_seconds))

    def wake_tokens(self) -> WakeTokens:
        """Return an object that waits for wake tokens; it opens its own connections to the same Redis."""
        return WakeTokens(self, self._transport)

    @property
    def has_many(self) -> bool:
        """Whether there are several servers, each with a part of the data."""
        return isinstance(self._transport, ClusterTransport)


class Clients:
    """
    The clients of one queue: blocking clients are reused, and each async call gets a new client.

    After a fork, or when `redirected` changes the connections of the process, new clients are created. If `target` is
    None, they use the current value of RELIQ_URL.

    Attributes:
        observers: callables that get the events of these clients.
        epoch: identifies the current connections, see `epoch` in `reliq.redis.server`.
        named, maps: the same objects as `named` and `maps` of the current `Connection`.
        waits: the `Listener` of `Queue.receive` if it was used; `close` stops it.
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
        """Return the connection to the queue's Redis; raise ConfigurationError if no Redis is given."""
        connection = self._connection
        if self.epoch is not transport.epoch:
            # Drop the clients, which belong to another Redis or to the parent process.
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
        # Threads that start at the same time get the same client.
        return self._blocking.setdefault(longer_seconds, Client.to(connection, timeout_seconds, self.observers))

    def asynchronous(self, longer_seconds: float = 0.0) -> AnyClient:
        """Return the client for the running event loop, see `blocking`."""
        connection = self.connection()
        transport = connection.async_wire(PUBLISH_TIMEOUT_SECONDS + longer_seconds)
        return AnyClient(transport, self.observers, connection.clock)

    def driven(self, driver: Driver, longer_seconds: float = 0.0) -> AnyClient:
        """Return the async client for the driver ASYNCIO, and the blocking client for BLOCKING."""
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
