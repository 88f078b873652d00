"""
Connections to one server: send commands and read replies, in one round trip and without retries.

The server is a single server, the primary of a Sentinel setup, or one node of a Cluster. `reliq.redis.cluster` sends to
several servers. Other modules need not know the kind of server.

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

    #: Returns the socket of a connection, None while it is closed. (`is_connected` exists only since redis-py 7.)
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
        Read `count` replies and return them as a list, and also return whether any of them is an error reply.

        In the list, an error reply is an exception.

        Raises:
            redis.TimeoutError: no reply came within `within_seconds`, by default the connection's timeout.
        """
        if within_seconds is not None and not _poll_of(connection._sock)(1000 * within_seconds):  # noqa: SLF001
            raise redis.TimeoutError("no reply came in time")
        replies: list[Any] = []
        is_refused = False
        for _ in range(count):
            if within_seconds is not None and within_seconds > connection.socket_timeout:
                connection.can_read(within_seconds)  # wait longer than the socket's timeout, for example for a WAIT
            try:
                replies.append(connection.read_response())
            except redis.ConnectionError:
                raise
            except redis.ResponseError as error:
                replies.append(error)
                is_refused = True
        return replies, is_refused

    def complete(self, call: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, T]:
        """Return `call` unchanged, because a blocking call cannot be cancelled."""
        return call

    async def sleep(self, seconds: float) -> None:
        """Sleep for `seconds`."""
        time.sleep(seconds)  # noqa: ASYNC251  not run by an event loop

    async def in_thread(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function that may block."""
        return function(*args)


def _poll_of(socket: Any) -> Callable[[float], Any]:
    """Return a function `wait(ms)` that waits at most `ms` for input on `socket` and returns whether input came."""
    if not hasattr(select, "poll"):  # Windows and eventlet have no `poll`
        return lambda ms: select.select([socket], [], [], ms / 1000)[0]
    poll = select.poll()
    poll.register(socket, select.POLLIN)
    return poll.poll


class Asyncio:
    """The operations of `Blocking` for an event loop, on the connections and pools of `redis.asyncio`."""

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
        Read `count` replies and return them as a list, and also return whether any of them is an error reply.

        In the list, an error reply is an exception.

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

    async def complete(self, call: Coroutine[Any, Any, T]) -> T:
        """Await `call`; even if the caller is cancelled, run it to its end, so that no connection has unread replies."""
        task = asyncio.ensure_future(call)
        # If the call fails after a cancellation, asyncio must not log the failure.
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        return await asyncio.shield(task)

    async def sleep(self, seconds: float) -> None:
        """Sleep for `seconds`."""
        await asyncio.sleep(seconds)

    async def in_thread(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function that may block, in a thread."""
        return await asyncio.to_thread(function, *args)


Driver = Blocking | Asyncio
BLOCKING = Blocking()
ASYNCIO = Asyncio()


#: Error codes of a server that cannot serve now, for example after a failover. Another connection to the same address
#: may reach another server.
ELSEWHERE = {"READONLY", "LOADING", "MASTERDOWN", "NOREPLICAS", "UNBLOCKED"}
#: Error codes for which a later retry may succeed.
NOT_NOW = ELSEWHERE | {"BUSY", "CLUSTERDOWN", "TRYAGAIN", "MISCONF", "MOVED", "ASK"}
#: The oldest server version that has all commands which the scripts use.
OLDEST_SERVER = (6, 2)

#: redis-py removes the error code from some error texts. For these errors, the exception class identifies the code.
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
#: In a script's error text, this mark stands before the Redis key whose value has the wrong type.
_KEY_MARK = " RELIQ_KEY "


#: Exceptions that redis-py and `poll` raise if another thread closes the connection during the call, for example
#: after a failover by Sentinel.
_CLOSED_IN_USE = (AttributeError, TypeError, ValueError)


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
    if isinstance(error, redis.ResponseError):  # Redis refused SELECT or AUTH
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
    if not is_secure and "connecting to" not in text:  # the server accepted and then closed the connection
        return NotSentError(f"{text}; if the port uses TLS, begin the URL with rediss://")
    return NotSentError(text)


def error_code(error: Exception) -> str:
    """Return the code of an error reply, its first word; a proxy may write ERR before the code."""
    if known := _CODES.get(type(error).__name__):
        return known
    text = str(error)
    wrapped = _IN_SCRIPT.match(text)
    return wrapped[1] if wrapped else text.removeprefix("ERR ").partition(" ")[0]


def is_elsewhere(replies: Iterable[Any]) -> bool:
    """Return whether one of `replies` has an error code of `ELSEWHERE`, so that another server must be used."""
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
            f"Redis refused this user, password or database: {text}; set them in RELIQ_URL, as "
            "redis://:PASSWORD@host or redis://USER:PASSWORD@host:6379/0"
        )
    if isinstance(request, Call) and isinstance(error, redis.exceptions.NoPermissionError) and "'eval'" in text:
        return RedisRefusedError(f"{name}: this user may not EVAL, and Redis lacks the script: run `reliq acl --load`")
    if (code := error_code(error)) in NOT_NOW:
        answer = text if code in text else f"{code} {text}"  # redis-py removes the code of some errors
        return RedisUnavailableError(f"{name}: Redis answered: {answer}", maybe_ran=False, refusal=code)
    if isinstance(error, NotSentError):
        return RedisUnavailableError(text, maybe_ran=False)
    if isinstance(error, broken()):
        return RedisUnavailableError(f"{name}: {text}", maybe_ran=True)
    return RedisRefusedError(f"{name}: Redis answered: {text}")


@dataclass(frozen=True, slots=True)
class ServerVersion:
    """
    The version of a server, from its INFO. `numbers` is empty if the server hides its version.

    Valkey reports two versions: its own, and the Redis version with which it is compatible.
    """

    text: str
    numbers: tuple[int, ...]

    @classmethod
    def read(cls, facts: Mapping[str, str], product: str = "redis") -> ServerVersion:
        """Return the version of `product` (`redis` or `valkey`); `facts` is the section `server` of INFO."""
        text = facts.get(f"{product}_version", "")
        return cls(text, tuple(int(part) for part in text.split(".") if part.isdigit()))

    def is_before(self, release: tuple[int, ...]) -> bool:
        """Return whether the server is older than `release`; False if the server hides its version."""
        return bool(self.numbers) and self.numbers < release

    @classmethod
    def check(cls, facts: Mapping[str, str]) -> None:
        """Raise ConfigurationError if `facts`, the section `server` of INFO, shows Dragonfly or a too old server."""
        # Dragonfly runs Lua 5.4. It also refuses scripts that compute names of Redis keys; message keys need this.
        if dragonfly := facts.get("dragonfly_version"):
            raise ConfigurationError(f"Dragonfly ({dragonfly}) is not supported; use Redis 6.2 or newer, or Valkey")
        version = cls.read(facts)
        if version.is_before(OLDEST_SERVER):
            raise ConfigurationError(f"Redis must be 6.2 or newer, not {version.text}")


class WrongKindError(ConfigurationError):
    """A URL names a Cluster node as a single server, or a single server as a Cluster node."""

    @classmethod
    def single(cls, place: str) -> WrongKindError:
        """Return the error for a single server that a URL names as a Cluster node."""
        return cls(
            f"{place} is a single server and no node of a Redis Cluster; write redis://HOST:PORT/0 "
            "(rediss:// for TLS) instead of redis+cluster://"
        )


class PooledConnection:
    """
    A connection of redis-py while it is open.

    Attributes:
        stream: its socket or stream. A new object means a reconnect, possibly to another server.
        has_input: returns whether there is unread input or the connection is closed.
        failures: how many failures of the server had been counted when this connection last worked.
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

    Idle connections are kept here and not in the pool, because the bookkeeping of redis-py for each use takes as long
    as sending a command. The pool counts them as in use, so its limit still holds. While a caller waits for a
    connection, connections are returned to the pool after their use.

    A load balancer or firewall drops idle connections silently, and after a failover every connection leads to the old
    server. So after a failure, every connection that has not worked since then is reopened before its next use.

    Args:
        place: the server's address, for error messages.
        in_cluster: whether the URL names the server as a node of a Cluster.
        checked: the servers whose version and kind have been checked, shared by all connections of this process.

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
        # A pool with Sentinel closes its idle connections when the primary changes. So with Sentinel, keep no idle
        # connections here: while `_waiting` is above 0, every connection returns to the pool after its use.
        self._waiting = 1 if hasattr(pool, "sentinel_manager") else 0
        #: The `PooledConnection` of each connection of redis-py.
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
            if self.server not in self._checked:
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
        """Close every connection; a connection is opened again at its next use."""
        await self.close_idle()
        await self.driver.disconnect_pool(self.pool)

    def place(self, _key: str) -> Hashable:
        """Return the same value for all keys: with one server, one command may use any keys."""
        return self.server

    def node_for(self, _key: str) -> ServerConnections:
        """Return this object, because the only server has all keys."""
        return self

    def nodes(self) -> dict[str, ServerConnections]:
        """Return this object, which has the connections to the only server."""
        return {self.server: self}

    def each(self, *, replicas: bool = False) -> dict[str, ServerConnections]:  # noqa: ARG002  there are none here
        """Return the same as `nodes`: the replicas of a single server are not used."""
        return self.nodes()

    def check(self, node: ServerConnections) -> None:
        """Do nothing, because commands are always sent to the only server."""

    def note(self, node: ServerConnections, error: Exception) -> None:
        """Do nothing: only `ClusterTransport` processes failures that occurred outside of `exchange`."""

    def lone_connection(self) -> Any:
        """Return a new, unopened connection to the server that does not count towards the pool's limit."""
        return self.pool.connection_class(**self.pool.connection_kwargs)

    async def _replacement(self, unusable: PooledConnection | None) -> PooledConnection:
        """Close `unusable`, if given, and return another connection that is ready to send."""
        while True:
            if unusable:
                await self._close(unusable)
            with self._lock:  # no connection may become idle between the check and the increase of `_waiting`
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
        Check the server once, before the first command: its version, and whether it is a Cluster node as the URL says.

        If the server hides its version or kind, accept it.

        Raises:
            ConfigurationError: the server is too old, is Dragonfly, or the URL names the wrong kind of server.
        """
        try:
            await self.driver.write(connection.redis, packed([("INFO", "server")]))
            [reply], _ = await self.driver.read(connection.redis, 1, None)
        except broken() as error:
            raise connect_error(error=error, pool=self.pool) from error
        facts = read_facts(reply) if isinstance(reply, bytes) else {}
        ServerVersion.check(facts)
        mode = facts.get("redis_mode", facts.get("server_mode"))  # Valkey names this field server_mode
        if mode == "cluster" and not self.server:
            raise WrongKindError(
                f"{self._place} is a node of a Redis Cluster; write redis+cluster://HOST:PORT, with one node or several "
                "(rediss+cluster:// for TLS), instead of redis://"
            )
        if self.server and mode == "standalone":
            raise WrongKindError.single(place=self._place)
        self._checked.add(self.server)


def packed(commands: Sequence[Sequence[Arg]]) -> list[bytes]:
    """Return `commands` in the wire format. Ids of other programs may be any bytes, see `commands.id_text`."""
    pack: Callable[[Any], bytes] = pack_command  # hiredis' type stub wrongly allows only tuples of one argument
    try:
        return [b"".join(map(pack, map(tuple, commands)))]
    except UnicodeEncodeError:
        raw = [
            tuple(arg.encode("utf-8", "surrogateescape") if isinstance(arg, str) else arg for arg in command)
            for command in commands
        ]
        return [b"".join(map(pack, raw))]
