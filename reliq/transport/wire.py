"""
Wires: commands out, replies back, in one round trip and without a retry.

For a single server, a Unix socket, whatever Sentinel calls the primary, and one node of a Cluster.
Nothing above a wire knows the difference.
"""

from collections.abc import Callable, Sequence
from typing import Any

import redis
import redis.asyncio
from hiredis import pack_command

from reliq.call import Arg
from reliq.replies import read_facts
from reliq.transport.error_replies import is_elsewhere
from reliq.wireformat import ServerVersion

Reply = Any

#: Errors after which a connection is of no more use.
_BROKEN = (redis.ConnectionError, redis.TimeoutError, OSError)


class NotSentError(redis.ConnectionError):
    """No connection could be made, so the command cannot have run."""


class Gate:
    """Lets no command through before the server is known to be new enough; one that hides its version passes."""

    #: Asked on a new connection; it is part of the connection's beginning, as redis-py's own HELLO is.
    question = ("INFO", "server")

    def __init__(self) -> None:
        self.is_open = False

    def judge(self, reply: Reply) -> None:
        """Open, or raise ConfigurationError: the server is too old."""
        ServerVersion.read(read_facts(reply) if isinstance(reply, bytes) else {}).check()
        self.is_open = True


class Trust:
    """
    Which kept connections of a pool may be used as they are.

    A balancer or a firewall drops idle connections silently, and a failover leaves every connection at the old server.
    When one fails, those that have not worked since are in doubt: a new connection is made in the place of each.

    Attributes:
        failures: how many connections have failed; before the first there is no doubt.
    """

    def __init__(self) -> None:
        self.failures = 0
        #: Connection -> the number of failures when it last worked.
        self._worked: dict[Any, int] = {}

    def works(self, connection: Any) -> None:
        """Note that a connection has just worked."""
        self._worked[connection] = self.failures

    def fails(self, connection: Any) -> None:
        """Note that a connection has failed."""
        self.failures += 1
        self._worked.pop(connection, None)

    def doubts(self, connection: Any) -> bool:
        """Say whether a connection that the pool handed out has been idle since before the last failure."""
        return self._worked.get(connection, self.failures) < self.failures


class PooledWire:
    """Commands to one server, over connections from a pool."""

    def __init__(self, pool: Any, gate: Gate) -> None:
        self._pool = pool
        self._gate = gate
        self._trust = Trust()

    def exchange(self, commands: Sequence[Sequence[Arg]]) -> list[Reply]:
        """Send `commands` at once and return the replies; one that Redis refused is an exception in its place."""
        connection = self._connected()
        try:
            if not self._gate.is_open:
                self._pass_gate(connection)
            connection.send_packed_command(packed(commands))
            replies, is_refused = _replies(connection, len(commands))
            if is_refused and is_elsewhere(replies):
                self._trust.fails(connection)
                connection.disconnect()
            else:
                self._trust.works(connection)
        except BaseException as error:
            if isinstance(error, _BROKEN):
                self._trust.fails(connection)
            connection.disconnect()  # a reply that was not read must not meet the next command
            raise
        finally:
            self._pool.release(connection)
        return replies

    def pools(self) -> list[Any]:
        """Return the pools of its connections."""
        return [self._pool]

    def _connected(self) -> Any:
        try:
            connection = self._pool.get_connection()
            if self._trust.failures and self._trust.doubts(connection):
                self._renew(connection)
        except (*_BROKEN, redis.ResponseError) as error:
            raise _not_sent(error, self._pool) from error
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
            self._gate.judge(_replies(connection, 1)[0][0])
        except _BROKEN as error:
            raise _not_sent(error, self._pool) from error


class AsyncPooledWire:
    """As `PooledWire`, for asyncio."""

    def __init__(self, pool: Any, gate: Gate) -> None:
        self._pool = pool
        self._gate = gate
        self._trust = Trust()

    async def exchange(self, commands: Sequence[Sequence[Arg]]) -> list[Reply]:
        """Send `commands` at once and return the replies; one that Redis refused is an exception in its place."""
        connection = await self._connected()
        try:
            if not self._gate.is_open:
                await self._pass_gate(connection)
            await connection.send_packed_command(packed(commands))
            replies, is_refused = await _async_replies(connection, len(commands))
            if is_refused and is_elsewhere(replies):
                self._trust.fails(connection)
                await connection.disconnect(nowait=True)
            else:
                self._trust.works(connection)
        except BaseException as error:
            if isinstance(error, _BROKEN):
                self._trust.fails(connection)
            await connection.disconnect(nowait=True)
            raise
        finally:
            await self._pool.release(connection)
        return replies

    def pools(self) -> list[Any]:
        """Return the pools of its connections."""
        return [self._pool]

    async def _connected(self) -> Any:
        try:
            connection = await self._pool.get_connection()
            if self._trust.failures and self._trust.doubts(connection):
                await self._renew(connection)
        except (*_BROKEN, redis.ResponseError) as error:
            raise _not_sent(error, self._pool) from error
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
            self._gate.judge((await _async_replies(connection, 1))[0][0])
        except _BROKEN as error:
            raise _not_sent(error, self._pool) from error


def packed(commands: Sequence[Sequence[Arg]]) -> list[bytes]:
    """Return `commands` as they are sent; ids of foreign publishers may be any bytes (see `call.id_text`)."""
    pack: Callable[[Any], bytes] = pack_command  # its stub knows tuples of one argument only
    try:
        return [b"".join(map(pack, map(tuple, commands)))]
    except UnicodeEncodeError:
        return [b"".join([pack(tuple(map(_raw, command))) for command in commands])]


def _raw(arg: Arg) -> Arg:
    return arg.encode("utf-8", "surrogateescape") if isinstance(arg, str) else arg


def _not_sent(error: Exception, pool: Any) -> Exception:
    """Return what to raise when a connection could not be made; a refused login stays what it is."""
    if isinstance(error, redis.AuthenticationError):
        return error
    if isinstance(error, redis.ResponseError):  # to SELECT or AUTH
        return redis.AuthenticationError(str(error))
    kind = getattr(pool, "beneath", pool).connection_class
    is_secure = issubclass(kind, redis.SSLConnection | redis.asyncio.SSLConnection)
    text = str(error)
    if is_secure and ("Timeout connecting" in text or "WRONG_VERSION_NUMBER" in text):
        return NotSentError(f"{text}; if that port speaks no TLS, the URL begins with redis://")
    if not is_secure and "connecting to" not in text and "No connection" not in text:  # it was closed at the greeting
        return NotSentError(f"{text}; if that port speaks TLS, the URL begins with rediss://")
    return NotSentError(text)


def _replies(connection: Any, count: int) -> tuple[list[Reply], bool]:
    """Read `count` replies; return them, each refusal as an exception in its place, and whether there is one."""
    replies: list[Reply] = []
    is_refused = False
    for _ in range(count):
        try:
            replies.append(connection.read_response())
        except redis.ConnectionError:
            raise
        except redis.ResponseError as error:
            replies.append(error)
            is_refused = True
    return replies, is_refused


async def _async_replies(connection: Any, count: int) -> tuple[list[Reply], bool]:
    """As `_replies`, in async code."""
    replies: list[Reply] = []
    is_refused = False
    for _ in range(count):
        try:
            replies.append(await connection.read_response())
        except redis.ConnectionError:
            raise
        except redis.ResponseError as error:
            replies.append(error)
            is_refused = True
    return replies, is_refused
