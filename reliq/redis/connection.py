"""
Connections to one Redis server: send commands and read their replies, in one round trip and without retries.

The server is a single server, the primary that Sentinel names, or one node of a Cluster. `reliq.redis.cluster` sends
commands to several nodes. It has the same methods, so other modules need not know the kind of server.

Code that uses Redis is written once for blocking and async callers, as coroutines. These coroutines wait only in the
methods of a driver, `BLOCKING` or `ASYNCIO`. The methods of `BLOCKING` block the thread and do not suspend the
coroutine, so `run_blocking` can run the coroutine to its end without an event loop.
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
    """Run a coroutine without an event loop, and return its result. It may await only methods of `BLOCKING`."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    coroutine.close()
    raise RuntimeError("a blocking call waited for an event loop")


class Blocking:
    """The driver for blocking code. Its methods use the connections and pools of `redis`, and block their thread."""

    #: Returns the socket of a connection; None if the connection is closed. (redis-py has `is_connected` only since 7.)
    stream = staticmethod(attrgetter("_sock"))

    async def get_connection(self, pool: Any) -> Any:
        """Take an open connection without unread input from a pool."""
        return pool.get_connection()

    async def release(self, pool: Any, connection: Any) -> None:
        """Return a connection to its pool."""
        pool.release(connection)

    async def connect(self, connection: Any) -> None:
        """Open a connection."""
        connection.connect()

    async def disconnect(self, connection: Any, *, is_broken: bool = True) -> None:  # noqa: ARG002  no difference here
        """Close a connection. Its next use opens it again."""
        connection.disconnect()

    async def disconnect_pool(self, pool: Any) -> None:
        """Close all connections of a pool. If the pool uses Sentinel, also close its connections to the sentinels."""
        pool.disconnect()
        if hasattr(pool, "sentinel_manager"):
            for sentinel in pool.sentinel_manager.sentinels:
                sentinel.close()

    def input_check(self, stream: Any) -> Callable[[], Any]:
        """Return a function that checks for unread input or a closed stream, faster than `can_read` of redis-py."""
        return partial(_poll_of(stream), 0)

    async def write(self, connection: Any, packed: list[bytes]) -> None:
        """Send commands that `packed` has encoded."""
        connection.send_packed_command(packed)

    async def read(self, connection: Any, count: int, within_seconds: float | None) -> tuple[list[Any], bool]:
        """
        Read `count` replies. Return the list of replies, and whether any of them is an error reply.

        An error reply is an exception in the list.

        Raises:
            redis.TimeoutError: no reply came within `within_seconds`, or by default within the connection's timeout.
        """
        if within_seconds is not None and not _poll_of(connection._sock)(1000 * within_seconds):  # noqa: SLF001
            raise redis.TimeoutError("no reply came in time")
        replies: list[Any] = []
        is_refused = False
        for _ in range(count):
            if within_seconds is not None and within_seconds > connection.socket_timeout:
                connection.can_read(within_seconds)  # for example, WAIT needs longer than the socket's timeout
            try:
                replies.append(connection.read_response())
            except redis.ConnectionError:
                raise
            except redis.ResponseError as error:
                replies.append(error)
                is_refused = True
        return replies, is_refused

    def complete(self, call: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, T]:
        """Return the coroutine `call` unchanged, because blocking code cannot be cancelled."""
        return call

    async def sleep(self, seconds: float) -> None:
        """Sleep for `seconds`."""
        time.sleep(seconds)  # noqa: ASYNC251  not run by an event loop

    async def in_thread(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function that may block the thread, and return its result."""
        return function(*args)


def _poll_of(socket: Any) -> Callable[[float], Any]:
    """Return a function `wait(ms)` that waits at most `ms` for input on `socket` and returns whether input came."""
    if not hasattr(select, "poll"):  # `poll` is missing on Windows and with eventlet
        return lambda ms: select.select([socket], [], [], ms / 1000)[0]
    poll = select.poll()
    poll.register(socket, select.POLLIN)
    return poll.poll


class Asyncio:
    """The driver for event loops. It has the methods of `Blocking`, and uses connections of `redis.asyncio`."""

    #: Returns the stream of a connection; None if the connection is closed.
    stream = staticmethod(attrgetter("_reader"))

    async def get_connection(self, pool: Any) -> Any:
        """Take an open connection without unread input from a pool."""
        return await pool.get_connection()

    async def release(self, pool: Any, connection: Any) -> None:
        """Return a connection to its pool."""
        await pool.release(connection)

    async def connect(self, connection: Any) -> None:
        """Open a connection."""
        await connection.connect()

    async def disconnect(self, connection: Any, *, is_broken: bool = True) -> None:
        """Close a connection, and wait until it is closed unless it is broken. Its next use opens it again."""
        await connection.disconnect(nowait=is_broken)

    async def disconnect_pool(self, pool: Any) -> None:
        """Close all connections of a pool. If the pool uses Sentinel, also close its connections to the sentinels."""
        await pool.disconnect()
        if hasattr(pool, "sentinel_manager"):
            for sentinel in pool.sentinel_manager.sentinels:
                await sentinel.aclose()

    def input_check(self, stream: Any) -> Callable[[], Any]:
        """Return a function that checks for unread input or a closed stream."""
        return lambda: stream._buffer or stream._eof or stream.exception()  # noqa: SLF001  public methods would suspend

    async def write(self, connection: Any, packed: list[bytes]) -> None:
        """Send commands that `packed` has encoded."""
        await connection.send_packed_command(packed)

    async def read(self, connection: Any, count: int, within_seconds: float | None) -> tuple[list[Any], bool]:
        """
        Read `count` replies. Return the list of replies, and whether any of them is an error reply.

        An error reply is an exception in the list.

        Raises:
            redis.TimeoutError: a reply did not come within `within_seconds`, or by default within the connection's
                timeout.
        """
        replies: list[Any] = []
        is_refused = False
        for _ in range(count):
            late_at = None if within_seconds is None else time.monotonic() + within_seconds
            try:
                reply = await connection.read_response(timeout=within_seconds)
                if reply is None and late_at is not None and time.monotonic() >= late_at:
                    raise redis.TimeoutError("no reply came in time")  # after a timeout, redis-py returns None
                replies.append(reply)
            except redis.ConnectionError:
                raise
            except redis.ResponseError as error:
                replies.append(error)
                is_refused = True
        return replies, is_refused

    async def complete(self, call: Coroutine[Any, Any, T]) -> T:
        """Await `call`. If the caller is cancelled, `call` still ends, so that it leaves no reply unread."""
        task = asyncio.ensure_future(call)
        # If the caller is cancelled and then `call` fails, asyncio must not log the failure.
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        return await asyncio.shield(task)

    async def sleep(self, seconds: float) -> None:
        """Sleep for `seconds`."""
        await asyncio.sleep(seconds)

    async def in_thread(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function that may block, in a thread, and return its result."""
        return await asyncio.to_thread(function, *args)


Driver = Blocking | Asyncio
BLOCKING = Blocking()
ASYNCIO = Asyncio()


#: Error codes of a server that cannot run commands now, for example after a failover. A new connection to the same
#: address may reach another server.
ELSEWHERE = {"READONLY", "LOADING", "MASTERDOWN", "NOREPLICAS", "UNBLOCKED"}
#: Error codes of requests that may succeed if they are retried later.
NOT_NOW = ELSEWHERE | {"BUSY", "CLUSTERDOWN", "TRYAGAIN", "MISCONF", "MOVED", "ASK"}
#: The oldest version of Redis that has all commands which reliq's scripts use.
OLDEST_SERVER = (6, 2)

#: redis-py removes the error code from the texts of some exceptions. For the name of such a class, this is the code.
_CODES = {
    "ReadOnlyError": "READONLY",
    "BusyLoadingError": "LOADING",
    "MasterDownError": "MASTERDOWN",
    "ClusterDownError": "CLUSTERDOWN",
    "TryAgainError": "TRYAGAIN",
    "AskError": "ASK",
    "MovedError": "MOVED",
}
#: Matches an error text of a Redis before 7.0 for a command that failed inside a script. The group is the error code.
_IN_SCRIPT = re.compile(r"^(?:ERR )?Error running script .*: -([A-Z]+) ")
#: If a script finds a Redis key of the wrong type, its error text has this mark and then the key.
_KEY_MARK = " RELIQ_KEY "


#: Exceptions that redis-py and `poll` raise if another thread closes the connection while they use it, for example
#: after a failover by Sentinel.
_CLOSED_IN_USE = (AttributeError, TypeError, ValueError)


class NotSentError(ConnectionError):
    """
    No connection to the server was available, so the command was not sent and Redis has not run it.

    Attributes:
        is_crowded: whether the reason is that all connections of the pool were in use. The server may be available.
    """

    is_crowded = False


def broken() -> tuple[type[Exception], ...]:
    """Return the exception classes after which a connection is unusable and must be closed."""
    return redis.ConnectionError, redis.TimeoutError, OSError


def is_failure(reply: Any) -> bool:
    """Return whether `reply` is an exception that means that the server was not reached or did not answer."""
    return (
        isinstance(reply, Exception)
        and isinstance(reply, broken())
        and not isinstance(reply, redis.AuthenticationError)
    )


def connect_error(error: Exception, pool: Any) -> Exception:
    """Convert the exception of a failed attempt to connect: to AuthenticationError or to NotSentError."""
    if isinstance(error, redis.AuthenticationError):
        return error
    if isinstance(error, redis.ResponseError):  # the reply to SELECT or AUTH is an error
        return redis.AuthenticationError(str(error))
    text = str(error)
    if isinstance(error, _CLOSED_IN_USE):
        return NotSentError(f"connecting to Redis failed, or another thread closed the connection: {text}")
    if text.startswith("No connection available"):
        crowded = NotSentError(text)
        crowded.is_crowded = True
        return crowded
    kind = pool.connection_class
    is_secure = issubclass(kind, redis.SSLConnection | redis.asyncio.SSLConnection)
    if is_secure and ("Timeout connecting" in text or "WRONG_VERSION_NUMBER" in text):
        return NotSentError(f"{text}; if the port does not use TLS, begin the URL with redis://")
    if not is_secure and "connecting to" not in text:  # the server accepted the connection and closed it
        return NotSentError(f"{text}; if the port uses TLS, begin the URL with rediss://")
    return NotSentError(text)


def error_code(error: Exception) -> str:
    """Return the error code of an error reply: its first word, or the second after the ERR that a proxy adds."""
    if known := _CODES.get(type(error).__name__):
        return known
    text = str(error)
    wrapped = _IN_SCRIPT.match(text)
    return wrapped[1] if wrapped else text.removeprefix("ERR ").partition(" ")[0]


def is_elsewhere(replies: Iterable[Any]) -> bool:
    """Return whether a reply in `replies` has an error code of `ELSEWHERE`, so that a new connection is needed."""
    return any(isinstance(reply, redis.ResponseError) and error_code(reply) in ELSEWHERE for reply in replies)


def is_unknown_script(reply: Any) -> bool:
    """Return whether `reply` is the error NOSCRIPT: Redis has not cached the script."""
    return isinstance(reply, redis.ResponseError) and (
        isinstance(reply, redis.exceptions.NoScriptError) or str(reply).startswith("NOSCRIPT")
    )


def translated(request: Request[Any], error: Exception) -> ReliqError:
    """Convert `error`, the exception of redis-py with which `request` failed, to an exception of reliq."""
    name = request.script.name if isinstance(request, Call) else f"the command {request.command[0]!s}"
    text = str(error)
    if _KEY_MARK in text:
        return WrongKeyTypeError(text.partition(_KEY_MARK)[2].split()[0].rstrip(","))
    if text.startswith("WRONGTYPE") and isinstance(request, Command):
        return WrongKeyTypeError(str(request.command[1]))
    if isinstance(error, redis.AuthenticationError | redis.exceptions.AuthorizationError):
        return LoginError(
            f"Redis refused this user, password or database: {text}; set them in RELIQ_URL, as "
            "redis://:PASSWORD@host or redis://USER:PASSWORD@host:6379/0"
        )
    if isinstance(request, Call) and isinstance(error, redis.exceptions.NoPermissionError) and "'eval'" in text:
        return RedisRefusedError(f"{name}: this user may not EVAL, and Redis lacks the script: run `reliq acl --load`")
    if (code := error_code(error)) in NOT_NOW:
        answer = text if code in text else f"{code} {text}"  # redis-py has removed the code from some error texts
        return RedisUnavailableError(f"{name}: Redis answered: {answer}", maybe_ran=False, refusal=code)
    if isinstance(error, NotSentError):
        return RedisUnavailableError(text, maybe_ran=False)
    if isinstance(error, broken()):
        return RedisUnavailableError(f"{name}: {text}", maybe_ran=True)
    return RedisRefusedError(f"{name}: Redis answered: {text}")


@dataclass(frozen=True, slots=True)
class ServerVersion:
    """
    The version of a Redis server, read from INFO. `numbers` is empty if INFO contains no version.

    Valkey reports two versions: its own version, and the Redis version with which it is compatible.
    """

    text: str
    numbers: tuple[int, ...]

    @classmethod
    def read(cls, facts: Mapping[str, str], product: str = "redis") -> ServerVersion:
        """Read the version of `product` (`redis` or `valkey`) from `facts`, the section `server` of INFO."""
        text = facts.get(f"{product}_version", "")
        return cls(text, tuple(int(part) for part in text.split(".") if part.isdigit()))

    def is_before(self, release: tuple[int, ...]) -> bool:
        """Return whether the server is older than `release`. If its version is unknown, return False."""
        return bool(self.numbers) and self.numbers < release

    @classmethod
    def check(cls, facts: Mapping[str, str]) -> None:
        """Raise ConfigurationError if `facts` (the section `server` of INFO) is from Dragonfly or a too old Redis."""
        # Dragonfly runs Lua 5.4. It also refuses scripts that compute the names of Redis keys, which reliq's scripts
        # for message keys do.
        if dragonfly := facts.get("dragonfly_version"):
            raise ConfigurationError(f"Dragonfly ({dragonfly}) is not supported; use Redis 6.2 or newer, or Valkey")
        version = cls.read(facts)
        if version.is_before(OLDEST_SERVER):
            raise ConfigurationError(f"Redis must be 6.2 or newer, not {version.text}")


class WrongKindError(ConfigurationError):
    """The URL is for a single server, but the server is a Cluster node, or the other way round."""

    @classmethod
    def single(cls, place: str) -> WrongKindError:
        """Return the error for a Cluster URL whose server is a single server."""
        return cls(
            f"{place} is a single server and no node of a Redis Cluster; write redis://HOST:PORT/0 "
            "(rediss:// for TLS) instead of redis+cluster://"
        )


class PooledConnection:
    """
    An open connection of redis-py.

    Attributes:
        redis: the connection of redis-py.
        stream: the socket or stream of the connection. If the connection has another stream, it was opened again.
        has_input: a function that returns whether the connection has unread input or is closed.
        failures: the number of failures that `ServerConnections` had counted when this connection last worked.
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

    This object keeps its idle connections and does not return them to the pool, because taking a connection from the
    pool takes as long as sending a command. For the pool, these connections are in use, so its limit still holds. While
    a caller waits for the pool, other callers return their connections to the pool.

    Load balancers and firewalls drop idle connections silently, and after a failover all connections lead to the old
    server. So after a failure, each connection that has not worked since then is opened again before its next use.

    Args:
        place: the server's address. Error messages contain it.
        in_cluster: whether the server is used as a node of a Cluster.
        checked: the servers whose version and kind were checked. All connections of this process share this set.

    Attributes:
        server: the server's address if it is a node of a Cluster; empty for a single server.
        pool: the pool of redis-py.
    """

    def __init__(self, driver: Driver, pool: Any, place: str, *, in_cluster: bool, checked: set[str]) -> None:
        self.driver = driver
        self.pool = pool
        self.server = place if in_cluster else ""
        self._place = place
        self._checked = checked
        self._lock = threading.Lock()
        self._idle: list[PooledConnection] = []
        # While `_waiting` is above 0, every connection is returned to the pool after its use. With Sentinel it is
        # always above 0, because a pool with Sentinel closes its idle connections when the primary changes.
        self._waiting = 1 if hasattr(pool, "sentinel_manager") else 0
        #: For each connection of redis-py, its `PooledConnection`.
        self._known: dict[Any, PooledConnection] = {}
        self._failures = 0

    async def exchange(self, commands: Sequence[Sequence[Arg]]) -> list[Any]:
        """Send `commands` in one round trip and return their replies. An error reply is returned as an exception."""
        return await self.receive(await self.send(commands), len(commands))

    async def send(self, commands: Sequence[Sequence[Arg]]) -> PooledConnection:
        """Send `commands` and return their connection. The caller must pass it to `receive` or `drop`."""
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        if connection is None or connection.failures < self._failures or connection.has_input():
            connection = await self._replacement(connection)
        try:
            if self.server not in self._checked:
                await self._check_server(connection)
            await self.driver.write(connection.redis, packed(commands))
        except BaseException as error:
            await self.drop(connection, error)
            raise
        return connection

    async def receive(self, connection: PooledConnection, count: int, within_seconds: float | None = None) -> list[Any]:
        """
        Read the replies to the `count` commands that `send` sent over `connection`, and make the connection idle.

        Raises:
            redis.TimeoutError: a reply did not come within `within_seconds`, or by default within the pool's timeout.
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
        """Close a connection that may have unread replies, so that the next command does not read them."""
        if isinstance(error, broken()):
            self._failures += 1
        was_closed = isinstance(error, _CLOSED_IN_USE) and self.driver.stream(connection.redis) is not connection.stream
        await self._close(connection)
        if was_closed:
            raise redis.ConnectionError("another thread closed the connection") from error

    async def close_idle(self) -> None:
        """Close the connections that are not in use."""
        with self._lock:
            idle = self._idle
            self._idle = []
        for connection in idle:
            await self.driver.disconnect(connection.redis, is_broken=False)
            await self.driver.release(self.pool, connection.redis)

    async def close(self) -> None:
        """Close all connections. A connection is opened again at its next use."""
        await self.close_idle()
        await self.driver.disconnect_pool(self.pool)

    def place(self, _key: str) -> Hashable:
        """Return the same value for all Redis keys, because on a single server one command may use any keys."""
        return self.server

    def node_for(self, _key: str) -> ServerConnections:
        """Return this object, because the single server has all Redis keys."""
        return self

    def nodes(self) -> dict[str, ServerConnections]:
        """Return a dict with only this object, because there is only one server."""
        return {self.server: self}

    def each(self, *, replicas: bool = False) -> dict[str, ServerConnections]:  # noqa: ARG002  there are none here
        """Return the same as `nodes`, because reliq does not use the replicas of a single server."""
        return self.nodes()

    def check(self, node: ServerConnections) -> None:
        """Do nothing, because commands are sent to a single server even after it has timed out."""

    def note(self, node: ServerConnections, error: Exception) -> None:
        """Do nothing: only `ClusterTransport` processes errors that occurred outside of `exchange`."""

    def lone_connection(self) -> Any:
        """Create a connection to the server outside of the pool, without opening it. The pool does not count it."""
        return self.pool.connection_class(**self.pool.connection_kwargs)

    async def _replacement(self, unusable: PooledConnection | None) -> PooledConnection:
        """Close the connection `unusable`, if given, and return an open connection that can be used."""
        while True:
            if unusable:
                await self._close(unusable)
            with self._lock:  # so that no connection becomes idle after the check and before `_waiting` is increased
                unusable = self._idle.pop() if self._idle else None
                if unusable is None:
                    self._waiting += 1
                    break
            if unusable.failures >= self._failures and not unusable.has_input():
                return unusable
        try:
            opened = await self.driver.get_connection(self.pool)
            try:
                known = self._known.get(opened)
                if known and known.failures < self._failures and known.stream is self.driver.stream(opened):
                    await self.driver.disconnect(opened)
                    await self.driver.connect(opened)
                stream = self.driver.stream(opened)
                if known is None or known.stream is not stream:
                    known = PooledConnection(opened, stream, self.driver.input_check(stream), self._failures)
                    self._known[opened] = known
            except BaseException:
                await self.driver.release(self.pool, opened)
                raise
            return known
        except (redis.RedisError, OSError, *_CLOSED_IN_USE) as error:
            raise connect_error(error=error, pool=self.pool) from error
        finally:
            with self._lock:
                self._waiting -= 1

    async def _close(self, connection: PooledConnection) -> None:
        """Close a connection and return it to its pool."""
        try:
            await self.driver.disconnect(connection.redis)
        finally:
            await self.driver.release(self.pool, connection.redis)

    async def _check_server(self, connection: PooledConnection) -> None:
        """
        Check that reliq supports the version of the server, and that the URL is for this kind of server.

        This runs once for each server, before the first command. If INFO does not contain the version or the kind of
        the server, accept the server.

        Raises:
            ConfigurationError: the server is too old or is Dragonfly, or the URL is for another kind of server.
        """
        try:
            await self.driver.write(connection.redis, packed([("INFO", "server")]))
            [reply], _ = await self.driver.read(connection.redis, 1, None)
        except broken() as error:
            raise connect_error(error=error, pool=self.pool) from error
        facts = read_facts(reply) if isinstance(reply, bytes) else {}
        ServerVersion.check(facts)
        mode = facts.get("redis_mode", facts.get("server_mode"))  # Valkey uses `server_mode`
        if mode == "cluster" and not self.server:
            raise WrongKindError(
                f"{self._place} is a node of a Redis Cluster; write redis+cluster://HOST:PORT, with one node or several "
                "(rediss+cluster:// for TLS), instead of redis://"
            )
        if self.server and mode == "standalone":
            raise WrongKindError.single(place=self._place)
        self._checked.add(self.server)


def packed(commands: Sequence[Sequence[Arg]]) -> list[bytes]:
    """Encode `commands` in the protocol of Redis. Ids may contain any bytes, see `commands.id_text`."""
    pack: Callable[[Any], bytes] = pack_command  # the type stub of hiredis allows only tuples with one argument
    try:
        return [b"".join(map(pack, map(tuple, commands)))]
    except UnicodeEncodeError:
        raw = [
            tuple(arg.encode("utf-8", "surrogateescape") if isinstance(arg, str) else arg for arg in command)
            for command in commands
        ]
        return [b"".join(map(pack, raw))]
