"""Wires: commands out, replies back, in one round trip and without a retry.

For a single server, a Unix socket, whatever Sentinel calls the primary, and one node of a Cluster; `many.py` has the wires
to several. Nothing above a wire knows the difference.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import redis
import redis.asyncio
from hiredis import pack_command

from reliq.errors import LoginError, RedisRefusedError, RedisUnavailableError, ReliqError, WrongKeyTypeError
from reliq.redis import pool as replies
from reliq.redis.commands import Arg, Call, Command, Request
from reliq.redis.pool import (
    BROKEN,
    KnownScripts,
    NotSentError,
    ServerCheck,
    await_reply,
    is_denied_eval,
    is_elsewhere,
    not_sent,
)

Reply = Any


class StaleCheck:
    """
    Which kept connections of a pool may be used as they are.

    A balancer or a firewall drops idle connections silently, and a failover leaves every connection at the old server.
    When one fails, those that have not worked since are in doubt: a new connection is made in the place of each.

    Attributes:
        failures: how many connections have failed; before the first there is no doubt.
        worked: connection -> the number of failures when it last worked.
    """

    def __init__(self) -> None:
        self.failures = 0
        self.worked: dict[Any, int] = {}

    def fails(self, connection: Any) -> None:
        """Note that a connection has failed."""
        self.failures += 1
        self.worked.pop(connection, None)

    def doubts(self, connection: Any) -> bool:
        """Say whether a connection that the pool handed out has been idle since before the last failure."""
        return self.worked.get(connection, self.failures) < self.failures


class PooledConnection:
    """
    Commands to one server, over connections from a pool.

    Attributes:
        server: what the server is called among several.
    """

    def __init__(self, pool: Any, gate: ServerCheck, scripts: KnownScripts, server: str = "") -> None:
        self._pool, self._gate, self._scripts, self.server = pool, gate, scripts, server
        self._trust = StaleCheck()

    def exchange(self, commands: Sequence[Sequence[Arg]]) -> list[Reply]:
        """Send `commands` at once and return the replies; one that Redis refused is an exception in its place."""
        return self.receive(self.send(commands), len(commands))

    def send(self, commands: Sequence[Sequence[Arg]]) -> Any:
        """Send `commands` at once; return the connection, which `receive` or `drop` takes back."""
        connection = self._connected()
        try:
            if not self._gate.is_open:
                self._pass_gate(connection)
            if len(commands) > 1:
                commands = self._scripts.spelled(commands, connection, connection._sock)  # noqa: SLF001
            connection.send_packed_command(packed(commands))
        except BaseException as error:
            self.drop(connection, error)
            raise
        return connection

    def receive(self, connection: Any, count: int, within_seconds: float | None = None) -> list[Reply]:
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
            self._scripts.answered(connection, replies if is_refused else ())
        if is_refused and is_elsewhere(replies):
            self._trust.fails(connection)
            connection.disconnect()
        else:
            self._trust.worked[connection] = self._trust.failures
        self._pool.release(connection)
        return replies

    def drop(self, connection: Any, error: BaseException | None = None) -> None:
        """Close a connection whose replies were not read, that they do not meet the next command; it is free then."""
        if isinstance(error, BROKEN):
            self._trust.fails(connection)
        self._scripts.forget()
        connection.disconnect()
        self._pool.release(connection)

    def place(self, _key: str) -> Hashable:
        """Return what keys have in common that may stand in one command: here all may."""
        return self.server

    def node_for(self, _key: str) -> "PooledConnection":
        """Return the wire to the server that has a key: this one."""
        return self

    def everywhere(self, commands: Sequence[Sequence[Arg]]) -> dict[str, list[Reply]]:
        """Send `commands` to every server at once; return the replies of each, by its name."""
        return {self.server: self.exchange(commands)}

    def each(self, *, replicas: bool = False) -> dict[str, "PooledConnection"]:  # noqa: ARG002  none is known
        """Return the wires to all servers."""
        return {self.server: self}

    def note(self, node: "PooledConnection", error: Exception) -> None:
        """Take notice of a failure outside of an exchange: nothing follows from it where there is one server."""

    def lone_connection(self) -> Any:
        """Return a connection to the server, not made yet, that is not one of the pool's and does not count as one."""
        pool = getattr(self._pool, "beneath", self._pool)
        return pool.connection_class(**pool.connection_kwargs)

    def pools(self) -> list[Any]:
        """Return the pools of its connections."""
        return [self._pool]

    def _connected(self) -> Any:
        try:
            connection = self._pool.get_connection()
            if self._trust.failures and self._trust.doubts(connection):
                self._renew(connection)
        except (*BROKEN, redis.ResponseError) as error:
            raise not_sent(error, self._pool) from error
        return connection

    def _renew(self, connection: Any) -> None:
        try:
            connection.disconnect()
            connection.connect()
        except BaseException:
            self._pool.release(connection)
            raise

    def _pass_gate(self, connection: Any) -> None:
        try:
            connection.send_packed_command(packed([self._gate.question]))
            self._gate.judge(read_replies(connection, 1)[0][0])
        except BROKEN as error:
            raise not_sent(error, self._pool) from error


class AsyncPooledConnection:
    """As `PooledConnection`, for asyncio."""

    def __init__(self, pool: Any, gate: ServerCheck, scripts: KnownScripts, server: str = "") -> None:
        self._pool, self._gate, self._scripts, self.server = pool, gate, scripts, server
        self._trust = StaleCheck()

    async def exchange(self, commands: Sequence[Sequence[Arg]]) -> list[Reply]:
        """Send `commands` at once and return the replies; one that Redis refused is an exception in its place."""
        return await self.receive(await self.send(commands), len(commands))

    async def send(self, commands: Sequence[Sequence[Arg]]) -> Any:
        """Send `commands` at once; return the connection, which `receive` or `drop` takes back."""
        connection = await self._connected()
        try:
            if not self._gate.is_open:
                await self._pass_gate(connection)
            if len(commands) > 1:
                commands = self._scripts.spelled(commands, connection, connection._writer)  # noqa: SLF001
            await connection.send_packed_command(packed(commands))
        except BaseException as error:
            await self.drop(connection, error)
            raise
        return connection

    async def receive(self, connection: Any, count: int, within_seconds: float | None = None) -> list[Reply]:
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
            self._scripts.answered(connection, replies if is_refused else ())
        if is_refused and is_elsewhere(replies):
            self._trust.fails(connection)
            await connection.disconnect(nowait=True)
        else:
            self._trust.worked[connection] = self._trust.failures
        await self._pool.release(connection)
        return replies

    async def drop(self, connection: Any, error: BaseException | None = None) -> None:
        """Close a connection whose replies were not read, that they do not meet the next command; it is free then."""
        if isinstance(error, BROKEN):
            self._trust.fails(connection)
        self._scripts.forget()
        await connection.disconnect(nowait=True)
        await self._pool.release(connection)

    def pools(self) -> list[Any]:
        """Return the pools of its connections."""
        return [self._pool]

    async def _connected(self) -> Any:
        try:
            connection = await self._pool.get_connection()
            if self._trust.failures and self._trust.doubts(connection):
                await self._renew(connection)
        except (*BROKEN, redis.ResponseError) as error:
            raise not_sent(error, self._pool) from error
        return connection

    async def _renew(self, connection: Any) -> None:
        try:
            await connection.disconnect(nowait=True)
            await connection.connect()
        except BaseException:
            await self._pool.release(connection)
            raise

    async def _pass_gate(self, connection: Any) -> None:
        try:
            await connection.send_packed_command(packed([self._gate.question]))
            self._gate.judge((await _async_replies(connection, 1, None))[0][0])
        except BROKEN as error:
            raise not_sent(error, self._pool) from error


def packed(commands: Sequence[Sequence[Arg]]) -> list[bytes]:
    """Return `commands` as they are sent; ids of foreign publishers may be any bytes (see `call.id_text`)."""
    pack: Callable[[Any], bytes] = pack_command  # its stub knows tuples of one argument only
    try:
        return [b"".join(map(pack, map(tuple, commands)))]
    except UnicodeEncodeError:
        return [b"".join([pack(tuple(map(_raw, command))) for command in commands])]


def _raw(arg: Arg) -> Arg:
    return arg.encode("utf-8", "surrogateescape") if isinstance(arg, str) else arg


def read_replies(connection: Any, count: int, within_seconds: float = 0.0) -> tuple[list[Reply], bool]:
    """Read `count` replies; return them, each refusal as an exception in its place, and whether there is one."""
    replies: list[Reply] = []
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


async def _async_replies(connection: Any, count: int, seconds: float | None) -> tuple[list[Reply], bool]:
    """As `read_replies`, in async code, each reply within so many seconds."""
    replies: list[Reply] = []
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


_KEY_MARK = " RELIQ_KEY "


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
    if (code := replies.code(error)) in replies.NOT_NOW:
        told = text if code in text else f"{code} {text}"  # redis-py cuts some codes off
        return RedisUnavailableError(f"{name}: Redis answered: {told}", maybe_ran=False, refusal=code)
    if isinstance(error, NotSentError):
        return RedisUnavailableError(text, maybe_ran=False)
    if isinstance(error, redis.ConnectionError | redis.TimeoutError | OSError):
        return RedisUnavailableError(f"{name}: {text}", maybe_ran=True)
    return RedisRefusedError(f"{name}: Redis answered: {text}")
