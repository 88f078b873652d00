"""Requests of one round trip and their replies, of which some may come from a further try."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Any, Protocol, Self, TypeVar

import redis
from tenacity import AsyncRetrying, Retrying

from reliq.errors import RedisRefusedError, RedisUnavailableError, ReliqError
from reliq.events import Observer, notify
from reliq.message import Confirmed
from reliq.redis import server as transport
from reliq.redis.cluster import AsyncWire, ClusterTransport, Wire
from reliq.redis.commands import Call, Clock, Command, Request, T
from reliq.redis.connection import NotSentError, is_denied_eval, is_failure, is_unknown_script, translated
from reliq.redis.server import PUBLISH_TIMEOUT_SECONDS, Connection, default_url
from reliq.redis.url import Target
from reliq.redis.wakeups import WakeTokens
from reliq.settings import Tries


class PartialReplies:
    """
    The replies to `requests`, each in its place.

    One of several servers may fail and the others answer: a further try makes the failed requests alone, of those only
    the sent ones when `once_sent` is true.

    Attributes:
        replies: empty until there was a round trip.
        left: the places whose servers failed.
    """

    def __init__(self, requests: Sequence[Request[Any]], *, once_sent: bool = False) -> None:
        self._requests = requests
        self._once_sent = once_sent
        self.replies: list[Any] = []
        self.left: Sequence[int] = range(len(requests))

    @property
    def requests(self) -> list[Request[Any]]:
        """The requests to be made."""
        return [self._requests[at] for at in self.left]

    def put(self, replies: list[Any]) -> None:
        """Take the replies to the requests that were left."""
        self.replies = self.replies or [None] * len(self._requests)
        for at, reply in zip(self.left, replies, strict=True):
            # Whether a request ran is not known of its last try alone.
            if not (isinstance(reply, NotSentError) and is_failure(self.replies[at])):
                self.replies[at] = reply
        done = (NotSentError,) if self._once_sent else ()
        self.left = [at for at in self.left if is_failure(self.replies[at]) and not isinstance(self.replies[at], done)]

    def check(self) -> None:
        """Raise RedisUnavailableError when there are places left."""
        if self.left:
            error = translated(self._requests[self.left[0]], self.replies[self.left[0]])
            if isinstance(error, RedisUnavailableError):
                raise error


S = TypeVar("S")


class AsyncClient:
    """
    Makes calls over one wire and tells the observers what happened.

    Args:
        clock: what scripts take for the time; None is Redis' own clock.
    """

    def __init__(self, wire: AsyncWire, observers: Sequence[Observer] = (), clock: Clock | None = None) -> None:
        self._wire = wire
        self._clock = clock
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


class Closes(Protocol):
    """Something with a thread and connections to close."""

    def close(self) -> None:
        """Close them."""


class Client:
    """
    Makes calls over one wire and tells the observers what happened.

    Args:
        clock: what scripts take for the time; None is Redis' own clock.
    """

    def __init__(self, wire: Wire, observers: Sequence[Observer] = (), clock: Clock | None = None) -> None:
        self._wire = wire
        self._clock = clock
        self.observers = observers

    @classmethod
    def to(cls, connection: Connection, timeout_seconds: float, observers: Sequence[Observer] = ()) -> Self:
        """Return a client of `connection`, by its clock, that awaits a reply for at most `timeout_seconds`."""
        return cls(connection.wire(timeout_seconds), observers, connection.clock)

    def run(self, request: Request[T], *, for_seconds: float = 0.0) -> T:
        """
        Make `request` and return its answer; while Redis is away, try again until `for_seconds` are over.

        Raises:
            RedisUnavailableError: Redis cannot be reached or cannot answer now.
            RedisRefusedError: Redis refused, for good.
        """
        return self._try(self._one, request, for_seconds)

    def run_once_sent(self, request: Request[T], *, for_seconds: float) -> T:
        """
        Make `request` as `run` does; when it was not even sent, raise RedisUnavailableError without another try.

        Another server may have what this one did not hear of.
        """
        try:
            return self.run(request)
        except RedisUnavailableError as error:
            if not error.maybe_ran:
                raise
        try:
            return self.run(request, for_seconds=for_seconds)
        except (RedisUnavailableError, RedisRefusedError) as error:
            error.maybe_ran = True
            raise

    def run_all(
        self, requests: Sequence[Request[Any]], *, for_seconds: float = 0.0, once_sent: bool = False
    ) -> list[Any]:
        """
        Make `requests` in one round trip; what Redis refused is an exception in its place.

        They run in their order, but a script that Redis has lost since this process saw it there runs after the others.

        Where there are several servers, what one of them failed to answer is a RedisUnavailableError in its place. With
        `once_sent`, a request that could not be sent is not tried again.

        Raises:
            RedisUnavailableError: there is one server, and it cannot be reached.
        """
        if not requests:
            return []
        replies = self._try_all(requests, for_seconds, once_sent) if for_seconds else self._exchange(requests)
        return self._read_all(requests, replies)

    def wake_tokens(self) -> WakeTokens:
        """Return waits for wake tokens that go on beside the calls of this client."""
        return WakeTokens(self, self._wire)

    def place(self, key: str) -> Hashable:
        """Return what `key` has in common with all keys that may stand in one command with it."""
        return self._wire.place(key)

    @property
    def has_many(self) -> bool:
        """Whether there are several servers, of which none speaks for all."""
        return isinstance(self._wire, ClusterTransport)

    def run_everywhere(self, requests: Sequence[Request[Any]]) -> dict[str, list[Any]]:
        """
        Make `requests` at every server at once; return the answers of each by its name, as `run_all` does.

        Raises:
            RedisUnavailableError: no server is known, or there is one and it cannot be reached.
        """
        try:
            found = self._wire.everywhere([one.command for one in requests])
        except (redis.RedisError, OSError) as error:
            raise translated(requests[0], error) from None
        return {server: self._read_all(requests, replies) for server, replies in found.items()}

    def run_confirmed(
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
        return self._try(self._both, (request, wait), for_seconds)

    def _one(self, request: Request[T]) -> T:
        return self._read(request, self._exchange([request])[0])

    def _both(self, pair: tuple[Request[T], Command[Confirmed]]) -> tuple[T, Confirmed | Exception]:
        request, wait = pair
        replies = self._exchange([request, wait])
        if is_denied_eval(replies[0]):
            replies = self._exchange([request, wait])  # by its digest
        elif is_unknown_script(replies[0]):
            replies = self._exchange([request, wait], in_full=True)
        answer = self._read(request, replies[0])
        try:
            return answer, self._read(wait, replies[1])
        except ReliqError as error:
            return answer, error

    def _try(self, make: Callable[[S], T], asked: S, for_seconds: float) -> T:
        """Return `make(asked)`, tried again until `for_seconds` are over while Redis is away."""
        began = time.monotonic()
        try:
            return make(asked)
        except RedisUnavailableError as error:
            if not for_seconds:
                raise
            tries = Tries(for_seconds, error, time.monotonic() - began)
        try:
            return tries.of(Retrying)(make, asked)
        except ReliqError as error:
            tries.mark(error)
            raise

    def _read_all(self, requests: Sequence[Request[Any]], replies: Sequence[Any]) -> list[Any]:
        answers: list[Any] = []
        for request, reply in zip(requests, replies, strict=True):
            try:
                answers.append(self._read(request, reply))
            except Exception as error:
                answers.append(error)
        return answers

    def _try_all(self, requests: Sequence[Request[Any]], for_seconds: float, once_sent: bool) -> list[Any]:
        """Return the replies to `requests`; those that a server failed to give are asked for again."""
        made = PartialReplies(requests, once_sent=once_sent)
        try:
            self._try(self._fill, made, for_seconds)
        except RedisUnavailableError:
            if not made.replies:
                raise
        return made.replies

    def _fill(self, made: PartialReplies) -> None:
        made.put(self._exchange(made.requests))
        made.check()

    def _exchange(self, requests: Sequence[Request[Any]], *, in_full: bool = False) -> list[Any]:
        if self._clock is not None:
            requests = [one.at(self._clock()) for one in requests]
        commands = [one.command_in_full if in_full else one.command for one in requests]
        try:
            return self._wire.exchange(commands)
        except (redis.RedisError, OSError) as error:
            raise translated(requests[0], error) from None

    def _read(self, request: Request[T], reply: Any) -> T:
        if isinstance(reply, Exception):
            reply = self._refused(request, reply)
        answer = request.read(reply)
        if self.observers:
            notify(self.observers, request.events(answer))
        return answer

    def _refused(self, request: Request[Any], refusal: Exception) -> Any:
        """Return the reply to a script that Redis did not know, or not take, as it was sent; raise any other refusal."""
        if isinstance(request, Call):
            reply: Any = refusal
            if is_denied_eval(reply):
                [reply] = self._exchange([request])
            if is_unknown_script(reply):
                [reply] = self._exchange([request], in_full=True)
            if not isinstance(reply, Exception):
                return reply
            refusal = reply
        raise translated(request, refusal) from None


class Clients:
    """
    The clients of one queue: blocking ones, which are kept, and one for each call in async code.

    They are made anew in a forked process, when connections are redirected and, where `target` is None, when RELIQ_URL
    names another Redis.

    Attributes:
        observers: who hears of what the clients do.
        epoch: of the connections that it has, as `reliq.redis.server` counts them.
        named_until: the queue need not be named in the registry before, by the monotonic clock.
        mapped_until: the map of its shards need not be read again before; 0.0: it was never read.
        waits: what waits over a thread's own connections, if anything does.
    """

    waits: Closes | None = None

    def __init__(self, target: Target | None, observers: Sequence[Observer]) -> None:
        self._target = target
        self.observers = observers
        self.epoch = transport.epoch
        self._url = ""
        self._blocking: dict[float, Client] = {}
        self.named_until = self.mapped_until = 0.0

    def connection(self) -> Connection:
        """Return the connection to the queue's Redis; raise ConfigurationError when none was named."""
        return Connection.to(self._target)

    def blocking(self, longer_seconds: float = 0.0) -> Client:
        """Return the client that awaits a reply for a publish's time-out and `longer_seconds`."""
        if self._target is None or self.epoch is not transport.epoch:
            self._follow()
        if known := self._blocking.get(longer_seconds):
            return known
        timeout_seconds = PUBLISH_TIMEOUT_SECONDS + longer_seconds
        # Threads that begin at once get the same one.
        return self._blocking.setdefault(longer_seconds, Client.to(self.connection(), timeout_seconds, self.observers))

    def asynchronous(self, longer_seconds: float = 0.0) -> AsyncClient:
        """As `blocking`, for the running event loop."""
        self._follow()
        return AsyncClient.to(self.connection(), PUBLISH_TIMEOUT_SECONDS + longer_seconds, self.observers)

    def close(self) -> None:
        """End what waits, and close the blocking connections."""
        self._follow()
        if self.waits:
            self.waits.close()
        self.connection().close()

    async def aclose(self) -> None:
        """End what waits, and close the running event loop's connections."""
        self._follow()
        if self.waits:
            await asyncio.to_thread(self.waits.close)
        await self.connection().aclose()

    def _follow(self) -> None:
        """Forget what belongs to another Redis, or to the process that this one was forked from."""
        url = default_url() if self._target is None else ""
        if self.epoch is not transport.epoch or self._url != url:
            self.epoch = transport.epoch
            self._url = url
            self._blocking = {}
            self.waits = None
            self.named_until = self.mapped_until = 0.0
