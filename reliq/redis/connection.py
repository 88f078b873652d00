"""
Connections to one server: commands out, replies back, in one round trip and without a retry.

The server is a single one, on a Unix socket or not, whatever Sentinel calls the primary, or one node of a Cluster;
`reliq.redis.cluster` sends to many. Nothing above knows the difference.
"""

from __future__ import annotations

import re
import select
import threading
import weakref
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import redis
import redis.asyncio
from hiredis import pack_command
from redis import exceptions

from reliq.errors import (
    ConfigurationError,
    LoginError,
    RedisRefusedError,
    RedisUnavailableError,
    ReliqError,
    WrongKeyTypeError,
)
from reliq.lua import text_of
from reliq.redis.commands import Arg, Call, Command, Request, read_facts

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

#: Errors after which a connection is of no more use.
BROKEN = (redis.ConnectionError, redis.TimeoutError, OSError)
#: This server refuses, and another one behind the same address may not.
ELSEWHERE = {"READONLY", "LOADING", "MASTERDOWN", "NOREPLICAS", "UNBLOCKED"}
#: The server refuses now, and may not in a moment.
NOT_NOW = ELSEWHERE | {"BUSY", "CLUSTERDOWN", "TRYAGAIN", "MISCONF", "MOVED", "ASK"}
#: The oldest server whose commands the scripts can do with.
OLDEST_SERVER = (6, 2)

#: redis-py cuts the first word off some replies; their class stands for it.
_CODES: dict[type[Exception], str] = {
    exceptions.ReadOnlyError: "READONLY",
    exceptions.BusyLoadingError: "LOADING",
    exceptions.MasterDownError: "MASTERDOWN",
    exceptions.ClusterDownError: "CLUSTERDOWN",
    exceptions.TryAgainError: "TRYAGAIN",
    exceptions.AskError: "ASK",
    exceptions.MovedError: "MOVED",
}
#: Redis before 7.0 wraps the refusal of a command inside a script in a text like this.
_IN_SCRIPT = re.compile(r"^(?:ERR )?Error running script .*: -([A-Z]+) ")
#: The scripts put this before the name of a key of the wrong type.
_KEY_MARK = " RELIQ_KEY "


class NotSentError(redis.ConnectionError):
    """
    No connection could be had, so the command cannot have run.

    Attributes:
        is_crowded: whether all connections that there may be are in use: that says nothing of the server.
    """

    is_crowded = False


def is_failure(reply: Any) -> bool:
    """Say whether a reply is none: its server did not answer, or could not be reached."""
    return isinstance(reply, BROKEN) and not isinstance(reply, redis.AuthenticationError)


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
    kind = getattr(pool, "beneath", pool).connection_class
    is_secure = issubclass(kind, redis.SSLConnection | redis.asyncio.SSLConnection)
    if is_secure and ("Timeout connecting" in text or "WRONG_VERSION_NUMBER" in text):
        return NotSentError(f"{text}; if that port speaks no TLS, the URL begins with redis://")
    if not is_secure and "connecting to" not in text:  # it was closed at the greeting
        return NotSentError(f"{text}; if that port speaks TLS, the URL begins with rediss://")
    return NotSentError(text)


def error_code(error: Exception) -> str:
    """Return the first word of an error reply, its code; a proxy may write ERR before it."""
    if known := _CODES.get(type(error)):
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


def is_denied_eval(reply: Any) -> bool:
    """Say whether the user may run no scripts but by their digests."""
    return isinstance(reply, redis.exceptions.NoPermissionError) and "'eval'" in str(reply)


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
    if is_denied_eval(error) and isinstance(request, Call):
        return RedisRefusedError(
            f"{name}: this user may not EVAL, and Redis lacks the script: run `reliq scripts load`"
        )
    if (code := error_code(error)) in NOT_NOW:
        answer = text if code in text else f"{code} {text}"  # redis-py cuts some codes off
        return RedisUnavailableError(f"{name}: Redis answered: {answer}", maybe_ran=False, refusal=code)
    if isinstance(error, NotSentError):
        return RedisUnavailableError(text, maybe_ran=False)
    if isinstance(error, redis.ConnectionError | redis.TimeoutError | OSError):
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


class ServerCheck:
    """
    Lets no command through before a server is known to be new enough and of the kind that was named.

    A server that hides what it is passes.

    Args:
        in_cluster: whether it was named as a node of a Cluster.
        place: where it is, for error messages.
    """

    #: Sent over a new connection; it is part of the connection's beginning, as redis-py's own HELLO is.
    command = ("INFO", "server")

    def __init__(self, *, in_cluster: bool = False, place: str = "") -> None:
        self.has_passed = False
        self._in_cluster = in_cluster
        self._place = place

    def read(self, reply: Any) -> None:
        """Read the reply to `command`; raise ConfigurationError when the server is too old, or of the other kind."""
        facts = read_facts(reply) if isinstance(reply, bytes) else {}
        ServerVersion.read(facts).check()
        mode = facts.get("redis_mode", facts.get("server_mode"))  # Valkey's word
        if mode == "cluster" and not self._in_cluster:
            raise WrongKindError(
                f"{self._place} is a node of a Redis Cluster; write redis+cluster://HOST:PORT, with one node or several "
                "(rediss+cluster:// for TLS), instead of redis://"
            )
        if self._in_cluster and mode == "standalone":
            raise WrongKindError.single(self._place)
        self.has_passed = True


class KeptPool:
    """
    A pool over redis-py's blocking pool that keeps idle connections itself.

    redis-py's bookkeeping for each use takes as long as sending a command. An idle connection counts as in use there,
    so the limit of that pool holds; while a thread waits for a connection, those given back go to that pool.
    """

    def __init__(self, pool: redis.BlockingConnectionPool) -> None:
        self.beneath: Any = pool
        self._lock = threading.Lock()
        self._idle: list[Any] = []
        self._waiting = 0
        #: Connection -> its socket, and the function that says whether there is something to read from it.
        self._polls: dict[Any, tuple[Any, Callable[[], Any]]] = {}

    def get_connection(self) -> Any:
        """Return a connection that is ready to send; raise as redis-py does when there is none."""
        while True:
            with self._lock:
                if not self._idle:
                    self._waiting += 1
                    break
                connection = self._idle.pop()
            if self._is_ready(connection):
                return connection
            connection.disconnect()
            self.beneath.release(connection)
        try:
            return self.beneath.get_connection()
        finally:
            with self._lock:
                self._waiting -= 1

    def release(self, connection: Any) -> None:
        """Take a connection back, with every reply read; one that is disconnected goes to the pool, to be made anew."""
        with self._lock:
            if connection._sock and not self._waiting:  # noqa: SLF001  `is_connected` came with redis-py 7
                self._idle.append(connection)
                return
        self.beneath.release(connection)

    def disconnect(self) -> None:
        """Close every connection; they are opened again when they are used."""
        self.close_idle()
        self.beneath.disconnect()

    def close_idle(self) -> None:
        """Close the connections that are not in use."""
        with self._lock:
            idle = self._idle
            self._idle = []
        for connection in idle:
            connection.disconnect()
            self.beneath.release(connection)

    def _is_ready(self, connection: Any) -> bool:
        """Say whether a connection is open with nothing to read: the server closes those that are idle for long."""
        socket = connection._sock  # noqa: SLF001  redis-py's own `can_read` makes and fills a poll object at each call
        if socket is None:
            return False
        known, poll = self._polls.get(connection, (None, None))
        if poll is None or known is not socket:
            poll = partial(_poll_of(socket), 0)
            self._polls[connection] = socket, poll
        return not poll()


def _poll_of(socket: Any) -> Callable[[float], Any]:
    """Return a function whose answer is true when there is something to read from `socket` within so many ms."""
    if not hasattr(select, "poll"):  # eventlet takes it away; Windows has none
        return lambda ms: select.select([socket], [], [], ms / 1000)[0]
    poll = select.poll()
    poll.register(socket, select.POLLIN)
    return poll.poll


def await_reply(connection: Any, within_seconds: float) -> None:
    """Wait until there is something to read from a connection; raise redis.TimeoutError when it does not come."""
    if not _poll_of(connection._sock)(1000 * within_seconds):  # noqa: SLF001  it has no public name
        raise redis.TimeoutError("no reply came in time")


class KnownScripts:
    """
    The scripts that a server has, as far as this process has seen.

    Redis refuses a digest that it does not know and goes on with the commands behind it. The script would then be sent in
    full and run after those. A script that the server may lack goes in full at once when something comes behind it.

    Attributes:
        sent: connection -> the digests of the scripts that were sent over it in full and are not answered yet.
    """

    def __init__(self) -> None:
        self._known: set[Arg] = set()
        self._may_eval: bool | None = None  # not known yet
        #: Connection -> its socket or stream: another one means that the server may be another too.
        self._links: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()
        self.sent: dict[Any, set[Arg]] = {}

    def expand(self, commands: Sequence[Sequence[Arg]], connection: Any, link: Any) -> Sequence[Sequence[Arg]]:
        """Return several commands as they are to be sent together over a connection."""
        if self._may_eval is False:
            return commands
        known = self._links.get(connection)
        if link is None or known is None or known() is not link:
            if link is None or known is not None:
                self.forget()
            if link is not None:  # a closed connection is opened again as it is used
                self._links[connection] = weakref.ref(link)
        for command in commands[:-1]:
            if command[0] == "EVALSHA" and command[1] not in self._known:
                break
        else:
            return commands
        sent: set[Arg] = set()
        self.sent[connection] = sent
        expanded = [self._in_full(command, sent) for command in commands[:-1]]
        # While it is unknown whether the user may EVAL every script goes in full: all are refused, or none.
        return [*expanded, commands[-1] if self._may_eval else self._in_full(commands[-1], sent)]

    def note_replies(self, connection: Any, refusals: Sequence[Any]) -> None:
        """Learn from the replies over a connection; `refusals` are all replies when there is a refusal among them."""
        if (sent := self.sent.pop(connection, None)) and not refusals:
            self._known |= sent
            self._may_eval = True
        if any(map(is_denied_eval, refusals)):
            self._may_eval = False
        if any(map(is_unknown_script, refusals)):
            self.forget()

    def forget(self) -> None:
        """Note that the server may have lost its scripts, or be another one."""
        self._known = set()
        self.sent.clear()

    def _in_full(self, command: Sequence[Arg], sent: set[Arg]) -> Sequence[Arg]:
        """Return a command with the text of its script when the server may lack it and it is not in `sent`."""
        if command[0] != "EVALSHA" or command[1] in self._known or (self._may_eval and command[1] in sent):
            return command
        text = text_of(command[1])
        if text is None:
            return command
        sent.add(command[1])
        return ("EVAL", text, *command[2:])


class _ServerConnections:
    """
    What the blocking connections to a server have in common with those of asyncio.

    A balancer or a firewall drops idle connections silently, and a failover leaves every connection at the old server.
    When one fails, those that have not worked since are stale: each is opened anew before it is used.
    """

    def __init__(self, pool: Any, check: ServerCheck, scripts: KnownScripts, server: str = "") -> None:
        self._pool = pool
        self._check = check
        self._scripts = scripts
        self.server = server
        self._failures = 0
        #: Connection -> the number of failures when it last worked.
        self._worked: dict[Any, int] = {}

    def pools(self) -> list[Any]:
        """Return the pools of its connections."""
        return [self._pool]

    def _is_stale(self, connection: Any) -> bool:
        return self._worked.get(connection, self._failures) < self._failures

    def _note_failure(self, connection: Any) -> None:
        self._failures += 1
        self._worked.pop(connection, None)


class PooledConnection(_ServerConnections):
    """
    Commands to one server, over connections from a pool.

    Attributes:
        server: what the server is called among several.
    """

    def exchange(self, commands: Sequence[Sequence[Arg]]) -> list[Any]:
        """Send `commands` at once and return the replies; one that Redis refused is an exception in its place."""
        return self.receive(self.send(commands), len(commands))

    def send(self, commands: Sequence[Sequence[Arg]]) -> Any:
        """Send `commands` at once; return the connection, which `receive` or `drop` takes back."""
        connection = self._connected()
        try:
            if not self._check.has_passed:
                self._check_server(connection)
            if len(commands) > 1:
                commands = self._scripts.expand(commands, connection, connection._sock)  # noqa: SLF001
            connection.send_packed_command(packed(commands))
        except BaseException as error:
            self.drop(connection, error)
            raise
        return connection

    def receive(self, connection: Any, count: int, within_seconds: float | None = None) -> list[Any]:
        """
        Return the replies to `count` commands that were sent over `connection`; it is free then.

        Raises:
            redis.TimeoutError: one did not come within so many seconds, by default those of the pool.
        """
        try:
            if within_seconds is not None:
                await_reply(connection, within_seconds)
            replies, is_refused = read_replies(connection, count, within_seconds or 0.0)
        except BaseException as error:
            self.drop(connection, error)
            raise
        if is_refused or self._scripts.sent:
            self._scripts.note_replies(connection, replies if is_refused else ())
        if is_refused and is_elsewhere(replies):
            self._note_failure(connection)
            connection.disconnect()
        else:
            self._worked[connection] = self._failures
        self._pool.release(connection)
        return replies

    def drop(self, connection: Any, error: BaseException | None = None) -> None:
        """Close a connection whose replies were not read, so that the next command does not get them; it is free then."""
        if isinstance(error, BROKEN):
            self._note_failure(connection)
        self._scripts.forget()
        connection.disconnect()
        self._pool.release(connection)

    def place(self, _key: str) -> Hashable:
        """Return what keys have in common that may stand in one command: here all may."""
        return self.server

    def node_for(self, _key: str) -> PooledConnection:
        """Return the wire to the server that has a key: this one."""
        return self

    def everywhere(self, commands: Sequence[Sequence[Arg]]) -> dict[str, list[Any]]:
        """Send `commands` to every server at once; return the replies of each, by its name."""
        return {self.server: self.exchange(commands)}

    def each(self, *, replicas: bool = False) -> dict[str, PooledConnection]:  # noqa: ARG002  none is known
        """Return the wires to all servers."""
        return {self.server: self}

    def note(self, node: PooledConnection, error: Exception) -> None:
        """Take notice of a failure outside of an exchange: nothing follows from it where there is one server."""

    def lone_connection(self) -> Any:
        """Return a connection to the server, not made yet, that is not one of the pool's and does not count as one."""
        pool = getattr(self._pool, "beneath", self._pool)
        return pool.connection_class(**pool.connection_kwargs)

    def _connected(self) -> Any:
        try:
            connection = self._pool.get_connection()
            if self._failures and self._is_stale(connection):
                try:
                    connection.disconnect()
                    connection.connect()
                except BaseException:
                    self._pool.release(connection)
                    raise
        except (*BROKEN, redis.ResponseError) as error:
            raise connect_error(error, self._pool) from error
        return connection

    def _check_server(self, connection: Any) -> None:
        try:
            connection.send_packed_command(packed([self._check.command]))
            [reply], _ = read_replies(connection, 1)
        except BROKEN as error:
            raise connect_error(error, self._pool) from error
        self._check.read(reply)


class AsyncPooledConnection(_ServerConnections):
    """As `PooledConnection`, for asyncio."""

    async def exchange(self, commands: Sequence[Sequence[Arg]]) -> list[Any]:
        """Send `commands` at once and return the replies; one that Redis refused is an exception in its place."""
        return await self.receive(await self.send(commands), len(commands))

    async def send(self, commands: Sequence[Sequence[Arg]]) -> Any:
        """Send `commands` at once; return the connection, which `receive` or `drop` takes back."""
        connection = await self._connected()
        try:
            if not self._check.has_passed:
                await self._check_server(connection)
            if len(commands) > 1:
                commands = self._scripts.expand(commands, connection, connection._writer)  # noqa: SLF001
            await connection.send_packed_command(packed(commands))
        except BaseException as error:
            await self.drop(connection, error)
            raise
        return connection

    async def receive(self, connection: Any, count: int, within_seconds: float | None = None) -> list[Any]:
        """
        Return the replies to `count` commands that were sent over `connection`; it is free then.

        Raises:
            redis.TimeoutError: one did not come within so many seconds, by default those of the pool.
        """
        try:
            replies, is_refused = await _async_replies(connection, count, within_seconds)
        except BaseException as error:
            await self.drop(connection, error)
            raise
        if is_refused or self._scripts.sent:
            self._scripts.note_replies(connection, replies if is_refused else ())
        if is_refused and is_elsewhere(replies):
            self._note_failure(connection)
            await connection.disconnect(nowait=True)
        else:
            self._worked[connection] = self._failures
        await self._pool.release(connection)
        return replies

    async def drop(self, connection: Any, error: BaseException | None = None) -> None:
        """Close a connection whose replies were not read, so that the next command does not get them; it is free then."""
        if isinstance(error, BROKEN):
            self._note_failure(connection)
        self._scripts.forget()
        await connection.disconnect(nowait=True)
        await self._pool.release(connection)

    async def _connected(self) -> Any:
        try:
            connection = await self._pool.get_connection()
            if self._failures and self._is_stale(connection):
                try:
                    await connection.disconnect(nowait=True)
                    await connection.connect()
                except BaseException:
                    await self._pool.release(connection)
                    raise
        except (*BROKEN, redis.ResponseError) as error:
            raise connect_error(error, self._pool) from error
        return connection

    async def _check_server(self, connection: Any) -> None:
        try:
            await connection.send_packed_command(packed([self._check.command]))
            [reply], _ = await _async_replies(connection, 1, None)
        except BROKEN as error:
            raise connect_error(error, self._pool) from error
        self._check.read(reply)


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


def read_replies(connection: Any, count: int, within_seconds: float = 0.0) -> tuple[list[Any], bool]:
    """Read `count` replies; return them, each refusal as an exception in its place, and whether there is one."""
    replies: list[Any] = []
    is_refused = False
    for _ in range(count):
        if within_seconds > connection.socket_timeout:  # the reply to a WAIT comes later than those before it
            connection.can_read(within_seconds)
        try:
            replies.append(connection.read_response())
        except redis.ConnectionError:
            raise
        except redis.ResponseError as error:
            replies.append(error)
            is_refused = True
    return replies, is_refused


async def _async_replies(connection: Any, count: int, seconds: float | None) -> tuple[list[Any], bool]:
    """As `read_replies`, in async code, each reply within so many seconds."""
    replies: list[Any] = []
    is_refused = False
    for _ in range(count):
        try:
            replies.append(await connection.read_response(timeout=seconds))
        except redis.ConnectionError:
            raise
        except redis.ResponseError as error:
            replies.append(error)
            is_refused = True
    return replies, is_refused
