"""
Connections to one server: send commands and read replies, in one round trip and without retries.

The server is a single server, the primary of a Sentinel setup, or one node of a Cluster. `reliq.redis.cluster` sends to
several servers. The modules above do not depend on the kind.

Code for Redis is written once for blocking and async callers: as coroutines that wait only in the operations of a
driver. The operations of `BLOCKING` block and never suspend, so `run_blocking` runs such a coroutine to its end without
an event loop.
"""

from __future__ import annotations

import asyncio
import re
import select
import threading
import time
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

from hiredis import pack_command

from reliq.errors import (
    ConfigurationError,
    LoginError,
    RedisRefusedError,
    RedisUnavailableError,
    ReliqError,
    WrongKeyTypeError,
)
from reliq.redis.commands import Arg, Call, Command, Request, read_facts
from reliq.redis.redis_py import redis

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Hashable, Iterable, Mapping, Sequence

T = TypeVar("T")


def run_blocking(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that waits only in operations of `BLOCKING`, and return its result."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    coroutine.close()
    raise RuntimeError("a blocking call waited for an event loop")


class Blocking:
    """Operations that block their thread, on the connections and pools of `redis`."""

    #: Returns the socket of a connection, None while it is closed. `is_connected` needs redis-py 7.
    stream = staticmethod(attrgetter("_sock"))

    async def get_connection(self, pool: Any) -> Any:
        """Return an open connection of a pool, without unread input."""
        return pool.get_connection()

    async def release(self, pool: Any, connection: Any) -> None:
        """Return a connection to its pool."""
        pool.release(connection)

    async def connect(self, connection: Any) -> None:
        """Open a connection."""
        connection.connect()

    async def disconnect(self, connection: Any, *, is_broken: bool = True) -> None:  # noqa: ARG002  no difference here
        """Close a connection; the next use opens it again."""
        connection.disconnect()

    async def disconnect_pool(self, pool: Any) -> None:
        """Close every connection of a pool, and its connections to Sentinel."""
        pool.disconnect()
        if hasattr(pool, "sentinel_manager"):
            for sentinel in pool.sentinel_manager.sentinels:
                sentinel.close()

    def input_check(self, stream: Any) -> Callable[[], Any]:
        """Return a function that checks whether a stream has input or is closed; `can_read` of redis-py is slow."""
        return partial(_poll_of(stream), 0)

    async def write(self, connection: Any, packed: list[bytes]) -> None:
        """Send packed commands."""
        connection.send_packed_command(packed)

    async def read(self, connection: Any, count: int, within_seconds: float | None) -> tuple[list[Any], bool]:
        """
        Read `count` replies. Return them, with exceptions for errors, and whether there is an error among them.

        Raises:
            redis.TimeoutError: no reply within `within_seconds`, by default the connection's timeout.
        """
        if within_seconds is not None and not _poll_of(connection._sock)(1000 * within_seconds):  # noqa: SLF001
            raise redis.TimeoutError("no reply came in time")
        replies: list[Any] = []
        is_refused = False
        for _ in range(count):
            if within_seconds is not None and within_seconds > connection.socket_timeout:
                connection.can_read(within_seconds)  # the reply to a WAIT comes later than earlier replies
            try:
                replies.append(connection.read_response())
            except redis.ConnectionError:
                raise
            except redis.ResponseError as error:
                replies.append(error)
                is_refused = True
        return replies, is_refused

    async def sleep(self, seconds: float) -> None:
        """Sleep for `seconds`."""
        time.sleep(seconds)  # noqa: ASYNC251  not run by an event loop

    async def in_thread(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function that may block."""
        return function(*args)


def _poll_of(socket: Any) -> Callable[[float], Any]:
    """Return a function that waits up to a number of ms for input on `socket` and returns whether there is some."""
    if not hasattr(select, "poll"):  # missing on Windows and with eventlet
        return lambda ms: select.select([socket], [], [], ms / 1000)[0]
    poll = select.poll()
    poll.register(socket, select.POLLIN)
    return poll.poll


class Asyncio:
    """The same operations for an event loop, on the connections and pools of `redis.asyncio`."""

    #: Returns the stream of a connection, None while it is closed.
    stream = staticmethod(attrgetter("_reader"))

    async def get_connection(self, pool: Any) -> Any:
        """Return an open connection of a pool, without unread input."""
        return await pool.get_connection()

    async def release(self, pool: Any, connection: Any) -> None:
        """Return a connection to its pool."""
        await pool.release(connection)

    async def connect(self, connection: Any) -> None:
        """Open a connection."""
        await connection.connect()

    async def disconnect(self, connection: Any, *, is_broken: bool = True) -> None:
        """Close a connection and, unless it is broken, wait until it is closed; the next use opens it again."""
        await connection.disconnect(nowait=is_broken)

    async def disconnect_pool(self, pool: Any) -> None:
        """Close every connection of a pool, and its connections to Sentinel."""
        await pool.disconnect()
        if hasattr(pool, "sentinel_manager"):
            for sentinel in pool.sentinel_manager.sentinels:
                await sentinel.aclose()

    def input_check(self, stream: Any) -> Callable[[], Any]:
        """Return a function that checks whether a stream has input or is closed."""
        return lambda: stream._buffer or stream._eof or stream.exception()  # noqa: SLF001  public methods would suspend

    async def write(self, connection: Any, packed: list[bytes]) -> None:
        """Send packed commands."""
        await connection.send_packed_command(packed)

    async def read(self, connection: Any, count: int, within_seconds: float | None) -> tuple[list[Any], bool]:
        """
        Read `count` replies. Return them, with exceptions for errors, and whether there is an error among them.

        Raises:
            redis.TimeoutError: a reply did not come within `within_seconds`, by default the connection's timeout.
        """
        replies: list[Any] = []
        is_refused = False
        for _ in range(count):
            late_at = None if within_seconds is None else time.monotonic() + within_seconds
            try:
                reply = await connection.read_response(timeout=within_seconds)
                if reply is None and late_at is not None and time.monotonic() >= late_at:
                    raise redis.TimeoutError("no reply came in time")  # redis-py returns None after a timeout
                replies.append(reply)
            except redis.ConnectionError:
                raise
            except redis.ResponseError as error:
                replies.append(error)
                is_refused = True
        return replies, is_refused

    async def sleep(self, seconds: float) -> None:
        """Sleep for `seconds`."""
        await asyncio.sleep(seconds)

    async def in_thread(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function that may block, in a thread."""
        return await asyncio.to_thread(function, *args)


Driver = Blocking | Asyncio
BLOCKING = Blocking()
ASYNCIO = Asyncio()


#: Error codes of a server that is not the right one now; another server behind the same address may be.
ELSEWHERE = {"READONLY", "LOADING", "MASTERDOWN", "NOREPLICAS", "UNBLOCKED"}
#: Error codes of a temporary condition.
NOT_NOW = ELSEWHERE | {"BUSY", "CLUSTERDOWN", "TRYAGAIN", "MISCONF", "MOVED", "ASK"}
#: The oldest server version that has all commands of the scripts.
OLDEST_SERVER = (6, 2)

#: redis-py removes the error code from some replies; the exception class identifies the code.
_CODES = {
    "ReadOnlyError": "READONLY",
    "BusyLoadingError": "LOADING",
    "MasterDownError": "MASTERDOWN",
    "ClusterDownError": "CLUSTERDOWN",
    "TryAgainError": "TRYAGAIN",
    "AskError": "ASK",
    "MovedError": "MOVED",
}
#: Before 7.0, Redis wraps the error of a command inside a script in a text like this.
_IN_SCRIPT = re.compile(r"^(?:ERR )?Error running script .*: -([A-Z]+) ")
#: The scripts write this before the name of a key with the wrong type.
_KEY_MARK = " RELIQ_KEY "


class NotSentError(ConnectionError):
    """
    No connection was available, so the command was not sent and has not run.

    Attributes:
        is_crowded: whether all connections of the pool are in use. The server itself may be available.
    """

    is_crowded = False


def broken() -> tuple[type[Exception], ...]:
    """Return the exceptions after which a connection must be closed."""
    return redis.ConnectionError, redis.TimeoutError, OSError


def is_failure(reply: Any) -> bool:
    """Return whether a reply is a connection failure: the server did not answer or could not be reached."""
    return (
        isinstance(reply, Exception)
        and isinstance(reply, broken())
        and not isinstance(reply, redis.AuthenticationError)
    )


def connect_error(error: Exception, pool: Any) -> Exception:
    """Return the exception for a failed connection attempt; a refused login is returned unchanged."""
    if isinstance(error, redis.AuthenticationError):
        return error
    if isinstance(error, redis.ResponseError):  # from SELECT or AUTH
        return redis.AuthenticationError(str(error))
    text = str(error)
    if text.startswith("No connection available"):
        crowded = NotSentError(text)
        crowded.is_crowded = True
        return crowded
    kind = pool.connection_class
    is_secure = issubclass(kind, redis.SSLConnection | redis.asyncio.SSLConnection)
    if is_secure and ("Timeout connecting" in text or "WRONG_VERSION_NUMBER" in text):
        return NotSentError(f"{text}; if that port speaks no TLS, the URL begins with redis://")
    if not is_secure and "connecting to" not in text:  # the server closed the connection at the greeting
        return NotSentError(f"{text}; if that port speaks TLS, the URL begins with rediss://")
    return NotSentError(text)


def error_code(error: Exception) -> str:
    """Return the code of an error reply, its first word; a proxy may write ERR before it."""
    if known := _CODES.get(type(error).__name__):
        return known
    text = str(error)
    wrapped = _IN_SCRIPT.match(text)
    return wrapped[1] if wrapped else text.removeprefix("ERR ").partition(" ")[0]


def is_elsewhere(replies: Iterable[Any]) -> bool:
    """Return whether one of `replies` means that another server must be used."""
    return any(isinstance(reply, redis.ResponseError) and error_code(reply) in ELSEWHERE for reply in replies)


def is_unknown_script(reply: Any) -> bool:
    """Return whether a reply means that Redis has not cached a script."""
    return isinstance(reply, redis.ResponseError) and (
        isinstance(reply, redis.exceptions.NoScriptError) or str(reply).startswith("NOSCRIPT")
    )


def translated(request: Request[Any], error: Exception) -> ReliqError:
    """Return an exception of redis-py as an exception of reliq."""
    name = request.script.name if isinstance(request, Call) else f"the command {request.command[0]!s}"
    text = str(error)
    if _KEY_MARK in text:
        return WrongKeyTypeError(text.partition(_KEY_MARK)[2].split()[0].rstrip(","))
    if text.startswith("WRONGTYPE") and isinstance(request, Command):
        return WrongKeyTypeError(str(request.command[1]))
    if isinstance(error, redis.AuthenticationError | redis.exceptions.AuthorizationError):
        return LoginError(
            f"Redis lets nobody in by this user, password or database: {text}; give them in RELIQ_URL, as "
            "redis://:PASSWORD@host or redis://USER:PASSWORD@host:6379/0"
        )
    if isinstance(request, Call) and isinstance(error, redis.exceptions.NoPermissionError) and "'eval'" in text:
        return RedisRefusedError(f"{name}: this user may not EVAL, and Redis lacks the script: run `reliq acl --load`")
    if (code := error_code(error)) in NOT_NOW:
        answer = text if code in text else f"{code} {text}"  # redis-py removes some codes
        return RedisUnavailableError(f"{name}: Redis answered: {answer}", maybe_ran=False, refusal=code)
    if isinstance(error, NotSentError):
        return RedisUnavailableError(text, maybe_ran=False)
    if isinstance(error, broken()):
        return RedisUnavailableError(f"{name}: {text}", maybe_ran=True)
    return RedisRefusedError(f"{name}: Redis answered: {text}")


@dataclass(frozen=True, slots=True)
class ServerVersion:
    """
    The release of a server, from its INFO. The numbers are empty if the server hides it.

    Valkey reports two releases: the Redis release that it is compatible with, and its own.
    """

    text: str
    numbers: tuple[int, ...]

    @classmethod
    def read(cls, facts: Mapping[str, str], product: str = "redis") -> ServerVersion:
        """Return the version of `product`, `redis` or `valkey`, from the section `server` of INFO."""
        text = facts.get(f"{product}_version", "")
        return cls(text, tuple(int(part) for part in text.split(".") if part.isdigit()))

    def is_before(self, release: tuple[int, ...]) -> bool:
        """Return whether the server is older than `release`; False if the server hides its version."""
        return bool(self.numbers) and self.numbers < release

    def check(self) -> None:
        """Raise ConfigurationError if the server is too old for reliq."""
        if self.is_before(OLDEST_SERVER):
            raise ConfigurationError(f"Redis must be 6.2 or newer, not {self.text}")


class WrongKindError(ConfigurationError):
    """A URL names a Cluster node as a single server, or a single server as a Cluster node."""

    @classmethod
    def single(cls, place: str) -> WrongKindError:
        """Return the error for a single server that a URL names as a Cluster node."""
        return cls(
            f"{place} is a single server and no node of a Redis Cluster; write redis://HOST:PORT/0 "
            "(rediss:// for TLS) instead of redis+cluster://"
        )


@dataclass(slots=True)
class ServerFacts:
    """
    Facts about a server, shared by all connections of this process to it.

    Attributes:
        is_checked: whether its version and kind have been checked and are right.
    """

    is_checked: bool = False


class PooledConnection:
    """
    A connection of redis-py while it is open.

    Attributes:
        stream: its socket or stream. A new object means a reconnect, possibly to another server.
        has_input: returns whether there is unread input or the connection is closed.
        failures: the server's failure count when this connection last worked.
    """

    __slots__ = ("failures", "has_input", "redis", "stream")

    def __init__(self, connection: Any, stream: Any, has_input: Callable[[], Any], failures: int) -> None:
        self.redis = connection
        self.stream = stream
        self.has_input = has_input
        self.failures = failures


class ServerConnections:
    """
    Sends commands to one server, over connections from a pool of redis-py.

    Idle connections are kept here, because the bookkeeping of redis-py for each use takes as long as sending a command.
    For the pool they count as in use, so its limit holds. While a caller waits for a connection, connections go back
    to the pool.

    A load balancer or firewall drops idle connections silently, and after a failover every connection leads to the old
    server. So after a failure, every connection that has not worked since then is reopened before its next use.

    Args:
        place: the server's address, for error messages.
        in_cluster: whether the URL names it as a node of a Cluster.
        facts: the server's facts, shared by all connections of this process to it.

    Attributes:
        server: the server's name in error messages and results when there are several.
        pool: the pool of redis-py.
    """

    def __init__(self, driver: Driver, pool: Any, place: str, *, in_cluster: bool, facts: ServerFacts) -> None:
        self.driver = driver
        self.pool = pool
        self.server = place if in_cluster else ""
        self._place = place
        self._facts = facts
        self._lock = threading.Lock()
        self._idle: list[PooledConnection] = []
        # A pool that uses Sentinel must get every connection back: it closes the idle ones when the primary changes.
        self._waiting = 1 if hasattr(pool, "sentinel_manager") else 0
        #: Connection of redis-py -> its `PooledConnection`.
        self._known: dict[Any, PooledConnection] = {}
        self._failures = 0

    async def exchange(self, commands: Sequence[Sequence[Arg]]) -> list[Any]:
        """Send `commands` together and return the replies; a refused command has the exception as reply."""
        return await self.receive(await self.send(commands), len(commands))

    async def send(self, commands: Sequence[Sequence[Arg]]) -> PooledConnection:
        """Send `commands` together; return the connection, which must be passed to `receive` or `drop`."""
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        if connection is None or connection.failures < self._failures or connection.has_input():
            connection = await self._replacement(connection)
        try:
            if not self._facts.is_checked:
                await self._check_server(connection)
            await self.driver.write(connection.redis, packed(commands))
        except BaseException as error:
            await self.drop(connection, error)
            raise
        return connection

    async def receive(self, connection: PooledConnection, count: int, within_seconds: float | None = None) -> list[Any]:
        """
        Return the replies to `count` commands that were sent over `connection`, and free the connection.

        Raises:
            redis.TimeoutError: a reply did not come within `within_seconds`, by default the pool's timeout.
        """
        try:
            replies, is_refused = await self.driver.read(connection.redis, count, within_seconds)
        except BaseException as error:
            await self.drop(connection, error)
            raise
        if is_refused and is_elsewhere(replies):
            self._failures += 1
            await self._close(connection)
            return replies
        connection.failures = self._failures
        with self._lock:
            if not self._waiting and connection.stream is self.driver.stream(connection.redis):
                self._idle.append(connection)
                return replies
        await self.driver.release(self.pool, connection.redis)
        return replies

    async def drop(self, connection: PooledConnection, error: BaseException | None = None) -> None:
        """Close and free a connection with unread replies, so that the next command does not read them."""
        if isinstance(error, broken()):
            self._failures += 1
        await self._close(connection)

    async def close_idle(self) -> None:
        """Close the connections that are not in use."""
        with self._lock:
            idle = self._idle
            self._idle = []
        for connection in idle:
            await self.driver.disconnect(connection.redis, is_broken=False)
            await self.driver.release(self.pool, connection.redis)

    async def close(self) -> None:
        """Close every connection; the next use opens them again."""
        await self.close_idle()
        await self.driver.disconnect_pool(self.pool)

    def place(self, _key: str) -> Hashable:
        """Return a value that is equal for keys which one command may name: here the same for all keys."""
        return self.server

    def node_for(self, _key: str) -> ServerConnections:
        """Return the connections to the server with a key: always this object."""
        return self

    async def everywhere(self, commands: Sequence[Sequence[Arg]]) -> dict[str, list[Any]]:
        """Send `commands` to every server at the same time; return each server's replies by its name."""
        return {self.server: await self.exchange(commands)}

    def each(self, *, replicas: bool = False) -> dict[str, ServerConnections]:  # noqa: ARG002  there are none here
        """Return the connections to all servers."""
        return {self.server: self}

    def note(self, node: ServerConnections, error: Exception) -> None:
        """Do nothing: with one server, a failure outside of an exchange has no consequences."""

    def lone_connection(self) -> Any:
        """Return an unopened connection to the server that does not belong to the pool and its limit."""
        return self.pool.connection_class(**self.pool.connection_kwargs)

    async def _replacement(self, unusable: PooledConnection | None) -> PooledConnection:
        """Close a connection that is stale or closed by the server; return another connection that is ready to send."""
        while True:
            if unusable:
                await self._close(unusable)
            with self._lock:  # one lock for both: a connection returned between check and wait would be missed
                unusable = self._idle.pop() if self._idle else None
                if unusable is None:
                    self._waiting += 1
                    break
            if unusable.failures >= self._failures and not unusable.has_input():
                return unusable
        try:
            opened = await self.driver.get_connection(self.pool)
            known = self._known.get(opened)
            if known and known.failures < self._failures and known.stream is self.driver.stream(opened):
                try:
                    await self.driver.disconnect(opened)
                    await self.driver.connect(opened)
                except BaseException:
                    await self.driver.release(self.pool, opened)
                    raise
        except (redis.RedisError, OSError) as error:
            raise connect_error(error, self.pool) from error
        finally:
            with self._lock:
                self._waiting -= 1
        stream = self.driver.stream(opened)
        if known is None or known.stream is not stream:
            known = PooledConnection(opened, stream, self.driver.input_check(stream), self._failures)
            self._known[opened] = known
        return known

    async def _close(self, connection: PooledConnection) -> None:
        """Close a connection and return it to its pool."""
        try:
            await self.driver.disconnect(connection.redis)
        finally:
            await self.driver.release(self.pool, connection.redis)

    async def _check_server(self, connection: PooledConnection) -> None:
        """
        Check once that the server is new enough and of the kind that the URL names, before the first command.

        A server that hides its version or kind passes.

        Raises:
            ConfigurationError: the server is too old, or of the other kind.
        """
        try:
            await self.driver.write(connection.redis, packed([("INFO", "server")]))
            [reply], _ = await self.driver.read(connection.redis, 1, None)
        except broken() as error:
            raise connect_error(error, self.pool) from error
        facts = read_facts(reply) if isinstance(reply, bytes) else {}
        ServerVersion.read(facts).check()
        mode = facts.get("redis_mode", facts.get("server_mode"))  # Valkey's name of the field
        if mode == "cluster" and not self.server:
            raise WrongKindError(
                f"{self._place} is a node of a Redis Cluster; write redis+cluster://HOST:PORT, with one node or several "
                "(rediss+cluster:// for TLS), instead of redis://"
            )
        if self.server and mode == "standalone":
            raise WrongKindError.single(self._place)
        self._facts.is_checked = True


def packed(commands: Sequence[Sequence[Arg]]) -> list[bytes]:
    """Return `commands` in the wire format; foreign ids may be any bytes (see `commands.id_text`)."""
    pack: Callable[[Any], bytes] = pack_command  # the type stub allows only tuples of one argument
    try:
        return [b"".join(map(pack, map(tuple, commands)))]
    except UnicodeEncodeError:
        raw = [
            tuple(arg.encode("utf-8", "surrogateescape") if isinstance(arg, str) else arg for arg in command)
            for command in commands
        ]
        return [b"".join(map(pack, raw))]
