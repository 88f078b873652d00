"""
Connections to one server: commands out, replies back, in one round trip and without a retry.

The server is a single one, on a Unix socket or not, whatever Sentinel calls the primary, or one node of a Cluster;
`reliq.redis.cluster` sends to many. Nothing above knows the difference.

Code that talks to Redis is written once for blocking and async callers: as coroutines whose every wait is an operation of a
driver. The operations of `BLOCKING` have ended when they return, so `run_blocking` runs a coroutine of them in one step,
without an event loop.
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
    """Run a coroutine whose operations are those of `BLOCKING`, and return its result."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    coroutine.close()
    raise RuntimeError("a blocking call waited for an event loop")


class Blocking:
    """Operations that block their thread, on the connections and pools of `redis`."""

    #: Returns the socket of a connection, None while it is closed; `is_connected` came with redis-py 7.
    stream = staticmethod(attrgetter("_sock"))

    async def get_connection(self, pool: Any) -> Any:
        """Return a connection of a pool, open and with nothing to read."""
        return pool.get_connection()

    async def release(self, pool: Any, connection: Any) -> None:
        """Give a connection back to its pool."""
        pool.release(connection)

    async def connect(self, connection: Any) -> None:
        """Open a connection."""
        connection.connect()

    async def disconnect(self, connection: Any, *, is_broken: bool = True) -> None:  # noqa: ARG002  it makes no difference
        """Close a connection; it is opened again when it is used."""
        connection.disconnect()

    async def disconnect_pool(self, pool: Any) -> None:
        """Close every connection of a pool, and those by which it asks Sentinel."""
        pool.disconnect()
        if hasattr(pool, "sentinel_manager"):
            for sentinel in pool.sentinel_manager.sentinels:
                sentinel.close()

    def input_check(self, stream: Any) -> Callable[[], Any]:
        """Return a function whose answer is true when a stream has input or is closed; `can_read` of redis-py is slow."""
        return partial(_poll_of(stream), 0)

    async def write(self, connection: Any, packed: list[bytes]) -> None:
        """Send packed commands."""
        connection.send_packed_command(packed)

    async def read(self, connection: Any, count: int, within_seconds: float | None) -> tuple[list[Any], bool]:
        """
        Read `count` replies; return them, each refusal as an exception in its place, and whether there is one.

        Raises:
            redis.TimeoutError: none came within so many seconds, by default those of the connection.
        """
        if within_seconds is not None and not _poll_of(connection._sock)(1000 * within_seconds):  # noqa: SLF001
            raise redis.TimeoutError("no reply came in time")
        replies: list[Any] = []
        is_refused = False
        for _ in range(count):
            if within_seconds is not None and within_seconds > connection.socket_timeout:
                connection.can_read(within_seconds)  # the reply to a WAIT comes later than those before it
            try:
                replies.append(connection.read_response())
            except redis.ConnectionError:
                raise
            except redis.ResponseError as error:
                replies.append(error)
                is_refused = True
        return replies, is_refused

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)  # noqa: ASYNC251  no event loop runs this

    async def in_thread(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function that may block."""
        return function(*args)


def _poll_of(socket: Any) -> Callable[[float], Any]:
    """Return a function whose answer is true when there is something to read from `socket` within so many ms."""
    if not hasattr(select, "poll"):  # eventlet takes it away; Windows has none
        return lambda ms: select.select([socket], [], [], ms / 1000)[0]
    poll = select.poll()
    poll.register(socket, select.POLLIN)
    return poll.poll


class Asyncio:
    """The same operations on an event loop, on the connections and pools of `redis.asyncio`."""

    #: Returns the stream of a connection, None while it is closed.
    stream = staticmethod(attrgetter("_reader"))

    async def get_connection(self, pool: Any) -> Any:
        """Return a connection of a pool, open and with nothing to read."""
        return await pool.get_connection()

    async def release(self, pool: Any, connection: Any) -> None:
        """Give a connection back to its pool."""
        await pool.release(connection)

    async def connect(self, connection: Any) -> None:
        """Open a connection."""
        await connection.connect()

    async def disconnect(self, connection: Any, *, is_broken: bool = True) -> None:
        """Close a connection, and wait for its end unless it is broken; it is opened again when it is used."""
        await connection.disconnect(nowait=is_broken)

    async def disconnect_pool(self, pool: Any) -> None:
        """Close every connection of a pool, and those by which it asks Sentinel."""
        await pool.disconnect()
        if hasattr(pool, "sentinel_manager"):
            for sentinel in pool.sentinel_manager.sentinels:
                await sentinel.aclose()

    def input_check(self, stream: Any) -> Callable[[], Any]:
        """Return a function whose answer is true when a stream has input or is closed."""
        return lambda: stream._buffer or stream._eof or stream.exception()  # noqa: SLF001  a look takes no turn of the loop

    async def write(self, connection: Any, packed: list[bytes]) -> None:
        """Send packed commands."""
        await connection.send_packed_command(packed)

    async def read(self, connection: Any, count: int, within_seconds: float | None) -> tuple[list[Any], bool]:
        """
        Read `count` replies; return them, each refusal as an exception in its place, and whether there is one.

        Raises:
            redis.TimeoutError: one did not come within so many seconds, by default those of the connection.
        """
        replies: list[Any] = []
        is_refused = False
        for _ in range(count):
            late_at = None if within_seconds is None else time.monotonic() + within_seconds
            try:
                reply = await connection.read_response(timeout=within_seconds)
                if reply is None and late_at is not None and time.monotonic() >= late_at:
                    raise redis.TimeoutError("no reply came in time")  # redis-py returns None then
                replies.append(reply)
            except redis.ConnectionError:
                raise
            except redis.ResponseError as error:
                replies.append(error)
                is_refused = True
        return replies, is_refused

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        await asyncio.sleep(seconds)

    async def in_thread(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function that may block, in a thread."""
        return await asyncio.to_thread(function, *args)


Driver = Blocking | Asyncio
BLOCKING = Blocking()
ASYNCIO = Asyncio()


#: This server refuses, and another one behind the same address may not.
ELSEWHERE = {"READONLY", "LOADING", "MASTERDOWN", "NOREPLICAS", "UNBLOCKED"}
#: The server refuses now, and may not in a moment.
NOT_NOW = ELSEWHERE | {"BUSY", "CLUSTERDOWN", "TRYAGAIN", "MISCONF", "MOVED", "ASK"}
#: The oldest server whose commands the scripts can do with.
OLDEST_SERVER = (6, 2)

#: redis-py cuts the first word off some replies; their class stands for it.
_CODES = {
    "ReadOnlyError": "READONLY",
    "BusyLoadingError": "LOADING",
    "MasterDownError": "MASTERDOWN",
    "ClusterDownError": "CLUSTERDOWN",
    "TryAgainError": "TRYAGAIN",
    "AskError": "ASK",
    "MovedError": "MOVED",
}
#: Redis before 7.0 wraps the refusal of a command inside a script in a text like this.
_IN_SCRIPT = re.compile(r"^(?:ERR )?Error running script .*: -([A-Z]+) ")
#: The scripts put this before the name of a key of the wrong type.
_KEY_MARK = " RELIQ_KEY "


class NotSentError(ConnectionError):
    """
    No connection could be had, so the command cannot have run.

    Attributes:
        is_crowded: whether all connections that there may be are in use: that says nothing of the server.
    """

    is_crowded = False


def broken() -> tuple[type[Exception], ...]:
    """Return the kinds of errors after which a connection cannot be used any more."""
    return redis.ConnectionError, redis.TimeoutError, OSError


def is_failure(reply: Any) -> bool:
    """Say whether a reply is none: its server did not answer, or could not be reached."""
    return (
        isinstance(reply, Exception)
        and isinstance(reply, broken())
        and not isinstance(reply, redis.AuthenticationError)
    )


def connect_error(error: Exception, pool: Any) -> Exception:
    """Return what to raise when a connection could not be made; a refused login stays what it is."""
    if isinstance(error, redis.AuthenticationError):
        return error
    if isinstance(error, redis.ResponseError):  # to SELECT or AUTH
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
    if not is_secure and "connecting to" not in text:  # it was closed at the greeting
        return NotSentError(f"{text}; if that port speaks TLS, the URL begins with rediss://")
    return NotSentError(text)


def error_code(error: Exception) -> str:
    """Return the first word of an error reply, its code; a proxy may write ERR before it."""
    if known := _CODES.get(type(error).__name__):
        return known
    text = str(error)
    wrapped = _IN_SCRIPT.match(text)
    return wrapped[1] if wrapped else text.removeprefix("ERR ").partition(" ")[0]


def is_elsewhere(replies: Iterable[Any]) -> bool:
    """Say whether one of `replies` sends us to another server."""
    return any(isinstance(reply, redis.ResponseError) and error_code(reply) in ELSEWHERE for reply in replies)


def is_unknown_script(reply: Any) -> bool:
    """Say whether Redis does not know a script by its digest."""
    return isinstance(reply, redis.ResponseError) and (
        isinstance(reply, redis.exceptions.NoScriptError) or str(reply).startswith("NOSCRIPT")
    )


def translated(request: Request[Any], error: Exception) -> ReliqError:
    """Return `error` of redis-py as an error of ours."""
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
        answer = text if code in text else f"{code} {text}"  # redis-py cuts some codes off
        return RedisUnavailableError(f"{name}: Redis answered: {answer}", maybe_ran=False, refusal=code)
    if isinstance(error, NotSentError):
        return RedisUnavailableError(text, maybe_ran=False)
    if isinstance(error, broken()):
        return RedisUnavailableError(f"{name}: {text}", maybe_ran=True)
    return RedisRefusedError(f"{name}: Redis answered: {text}")


@dataclass(frozen=True, slots=True)
class ServerVersion:
    """
    Which release a server says it is, in its INFO; the numbers are empty when it hides that.

    Valkey says two: the release of Redis whose commands it has, and its own.
    """

    text: str
    numbers: tuple[int, ...]

    @classmethod
    def read(cls, facts: Mapping[str, str], product: str = "redis") -> ServerVersion:
        """Return what the section `server` of INFO says of `product`, `redis` or `valkey`."""
        text = facts.get(f"{product}_version", "")
        return cls(text, tuple(int(part) for part in text.split(".") if part.isdigit()))

    def is_before(self, release: tuple[int, ...]) -> bool:
        """Say whether the server is older than `release`; one that hides its version is not."""
        return bool(self.numbers) and self.numbers < release

    def check(self) -> None:
        """Raise ConfigurationError when the server is too old for reliq."""
        if self.is_before(OLDEST_SERVER):
            raise ConfigurationError(f"Redis must be 6.2 or newer, not {self.text}")


class WrongKindError(ConfigurationError):
    """A node of a Cluster was named as a single server, or a single server as a node of a Cluster."""

    @classmethod
    def single(cls, place: str) -> WrongKindError:
        """Return the error for a single server that was named as a node of a Cluster."""
        return cls(
            f"{place} is a single server and no node of a Redis Cluster; write redis://HOST:PORT/0 "
            "(rediss:// for TLS) instead of redis+cluster://"
        )


@dataclass(slots=True)
class ServerFacts:
    """
    What the replies of a server have shown to any of this process' connections.

    Attributes:
        is_checked: its version and kind are right.
    """

    is_checked: bool = False


class PooledConnection:
    """
    A connection of redis-py as long as it is open.

    Attributes:
        stream: its socket or stream: another one means that the server may be another too.
        has_input: returns whether there is something to read from it, or it is closed.
        failures: how many failures of its server there had been when it last worked.
    """

    __slots__ = ("failures", "has_input", "redis", "stream")

    def __init__(self, connection: Any, stream: Any, has_input: Callable[[], Any], failures: int) -> None:
        self.redis = connection
        self.stream = stream
        self.has_input = has_input
        self.failures = failures


class ServerConnections:
    """
    Commands to one server, over connections from a pool of redis-py.

    Idle connections are kept here: the bookkeeping of redis-py for each use takes as long as sending a command. They
    count as in use there, so the limit of that pool holds; while a caller waits for a connection, those given back go to
    that pool.

    A balancer or a firewall drops idle connections silently, and a failover leaves every connection at the old server.
    When one fails, those that have not worked since are stale: each is opened anew before it is used.

    Args:
        place: where the server is, for error messages.
        in_cluster: whether it was named as a node of a Cluster.
        facts: of the server, shared by all connections of this process to it.

    Attributes:
        server: what the server is called among several.
        pool: of redis-py.
    """

    def __init__(self, driver: Driver, pool: Any, place: str, *, in_cluster: bool, facts: ServerFacts) -> None:
        self.driver = driver
        self.pool = pool
        self.server = place if in_cluster else ""
        self._place = place
        self._facts = facts
        self._lock = threading.Lock()
        self._idle: list[PooledConnection] = []
        #: A pool that asks Sentinel gets every connection back: it closes those that are idle when the primary changes.
        self._waiting = 1 if hasattr(pool, "sentinel_manager") else 0
        #: Connection of redis-py -> what is known of it.
        self._known: dict[Any, PooledConnection] = {}
        self._failures = 0

    async def exchange(self, commands: Sequence[Sequence[Arg]]) -> list[Any]:
        """Send `commands` at once and return the replies; one that Redis refused is an exception in its place."""
        return await self.receive(await self.send(commands), len(commands))

    async def send(self, commands: Sequence[Sequence[Arg]]) -> PooledConnection:
        """Send `commands` at once; return the connection, which `receive` or `drop` takes back."""
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
        Return the replies to `count` commands that were sent over `connection`; it is free then.

        Raises:
            redis.TimeoutError: one did not come within so many seconds, by default those of the pool.
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
        """Close a connection whose replies were not read, so that the next command does not get them; it is free then."""
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
        """Close every connection; they are opened again when they are used."""
        await self.close_idle()
        await self.driver.disconnect_pool(self.pool)

    def place(self, _key: str) -> Hashable:
        """Return what keys have in common that may stand in one command: here all may."""
        return self.server

    def node_for(self, _key: str) -> ServerConnections:
        """Return the connections to the server that has a key: these."""
        return self

    async def everywhere(self, commands: Sequence[Sequence[Arg]]) -> dict[str, list[Any]]:
        """Send `commands` to every server at once; return the replies of each, by its name."""
        return {self.server: await self.exchange(commands)}

    def each(self, *, replicas: bool = False) -> dict[str, ServerConnections]:  # noqa: ARG002  none is known
        """Return the connections to all servers."""
        return {self.server: self}

    def note(self, node: ServerConnections, error: Exception) -> None:
        """Take notice of a failure outside of an exchange: nothing follows from it where there is one server."""

    def lone_connection(self) -> Any:
        """Return a connection to the server, not made yet, that is not one of the pool's and does not count as one."""
        return self.pool.connection_class(**self.pool.connection_kwargs)

    async def _replacement(self, unusable: PooledConnection | None) -> PooledConnection:
        """Close a connection that is stale, or that the server has closed; return another one that is ready to send."""
        while True:
            if unusable:
                await self._close(unusable)
            with self._lock:  # one hold: a connection that is given back between look and wait would be missed
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
        """Close a connection, and give it back to its pool."""
        try:
            await self.driver.disconnect(connection.redis)
        finally:
            await self.driver.release(self.pool, connection.redis)

    async def _check_server(self, connection: PooledConnection) -> None:
        """
        Let no command through before the server is known to be new enough and of the kind that was named.

        A server that hides what it is passes.

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
        mode = facts.get("redis_mode", facts.get("server_mode"))  # Valkey's word
        if mode == "cluster" and not self.server:
            raise WrongKindError(
                f"{self._place} is a node of a Redis Cluster; write redis+cluster://HOST:PORT, with one node or several "
                "(rediss+cluster:// for TLS), instead of redis://"
            )
        if self.server and mode == "standalone":
            raise WrongKindError.single(self._place)
        self._facts.is_checked = True


def packed(commands: Sequence[Sequence[Arg]]) -> list[bytes]:
    """Return `commands` as they are sent; ids of foreign publishers may be any bytes (see `commands.id_text`)."""
    pack: Callable[[Any], bytes] = pack_command  # its stub knows tuples of one argument only
    try:
        return [b"".join(map(pack, map(tuple, commands)))]
    except UnicodeEncodeError:
        raw = [
            tuple(arg.encode("utf-8", "surrogateescape") if isinstance(arg, str) else arg for arg in command)
            for command in commands
        ]
        return [b"".join(map(pack, raw))]
