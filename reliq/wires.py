"""
Wires: commands out, replies back, in one round trip and without a retry.

For a single server, a Unix socket, whatever Sentinel calls the primary, and the nodes of a Cluster.
Nothing above a wire knows the difference.
"""

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

import redis
import redis.asyncio
from hiredis import pack_command

from reliq import reads
from reliq.call import Arg
from reliq.errors import ConfigurationError

OLDEST_SERVER = (6, 2)

Reply = Any
MakePool = Callable[[str, int], Any]
Meanwhile = Callable[[], None]


class NotSentError(redis.ConnectionError):
    """No connection could be made, so the command cannot have run."""


class Gate:
    """Lets nothing through before the server is known to be new enough; one that hides its version is trusted."""

    question = reads.server_facts("server")

    def __init__(self) -> None:
        self.is_open = False

    def judge(self, reply: Reply) -> None:
        """Open, or raise ConfigurationError: the server is too old."""
        facts = self.question.read(reply) if isinstance(reply, bytes) else {}
        version = facts.get("redis_version", "")
        numbers = [int(part) for part in version.split(".")[:2] if part.isdigit()]
        if numbers and tuple(numbers) < OLDEST_SERVER:
            raise ConfigurationError(f"Redis must be 6.2 or newer, not {version}")
        self.is_open = True


class PooledWire:
    """Commands to one server, over connections from a pool."""

    def __init__(self, pool: redis.ConnectionPool, gate: Gate) -> None:
        self._pool: Any = pool
        self._gate = gate

    def exchange(self, commands: Sequence[Sequence[Arg]], meanwhile: Meanwhile | None = None) -> list[Reply]:
        """
        Send `commands` at once and return the replies; one that Redis refused is an exception in its place.

        `meanwhile` is called when they are sent, while Redis works on them.
        """
        connection = self._connected()
        try:
            if not self._gate.is_open:
                self._pass_gate(connection)
            connection.send_packed_command(packed(commands))
            if meanwhile is not None:
                meanwhile()
            return [_reply(connection) for _ in commands]
        except BaseException:
            connection.disconnect()  # a reply that was not read must not meet the next command
            raise
        finally:
            self._pool.release(connection)

    def _connected(self) -> Any:
        try:
            return self._pool.get_connection()
        except (redis.ConnectionError, redis.TimeoutError) as error:
            raise _not_sent(error) from error

    def _pass_gate(self, connection: Any) -> None:
        try:
            connection.send_packed_command(packed([self._gate.question.command]))
            self._gate.judge(_reply(connection))
        except (redis.ConnectionError, redis.TimeoutError) as error:
            raise _not_sent(error) from error


class AsyncPooledWire:
    """The same for asyncio."""

    def __init__(self, pool: redis.asyncio.ConnectionPool, gate: Gate) -> None:
        self._pool: Any = pool
        self._gate = gate

    async def exchange(self, commands: Sequence[Sequence[Arg]]) -> list[Reply]:
        """Send `commands` at once and return the replies; one that Redis refused is an exception in its place."""
        connection = await self._connected()
        try:
            if not self._gate.is_open:
                await self._pass_gate(connection)
            await connection.send_packed_command(packed(commands))
            return [await _async_reply(connection) for _ in commands]
        except BaseException:
            await connection.disconnect(nowait=True)
            raise
        finally:
            await self._pool.release(connection)

    async def _connected(self) -> Any:
        try:
            return await self._pool.get_connection()
        except (redis.ConnectionError, redis.TimeoutError) as error:
            raise _not_sent(error) from error

    async def _pass_gate(self, connection: Any) -> None:
        try:
            await connection.send_packed_command(packed([self._gate.question.command]))
            self._gate.judge(await _async_reply(connection))
        except (redis.ConnectionError, redis.TimeoutError) as error:
            raise _not_sent(error) from error


class Nodes:
    """Which node of a Cluster a command goes to, told by a client that knows the Cluster, and a pool for each."""

    def __init__(self, client: redis.RedisCluster, make_pool: MakePool) -> None:
        self._client, self._make_pool = client, make_pool
        self._pools: dict[tuple[str, int], Any] = {}
        self._lock = threading.Lock()

    def pool_for(self, command: Sequence[Arg]) -> Any:
        """Return the pool of the node that has the command's first key."""
        at = 3 if command[0] in ("EVALSHA", "EVAL") else 1
        key = command[at] if command[0] != "INFO" and len(command) > at else None
        try:
            node: Any = self._client.get_node_from_key(key) if key else self._client.get_default_node()  # type: ignore[no-untyped-call]
        except (redis.RedisError, redis.exceptions.RedisClusterException, IndexError) as error:
            raise NotSentError(f"no node of the Cluster has the key's slot ({error})") from error
        return self.pool_at(node.host, node.port)

    def pool_at(self, host: str, port: int) -> Any:
        """Return the pool of the node at an address."""
        with self._lock:
            if (host, port) not in self._pools:
                self._pools[host, port] = self._make_pool(host, port)
            return self._pools[host, port]

    def pools(self) -> list[Any]:
        """Return every pool there is."""
        return list(self._pools.values())

    def look_again(self) -> None:
        """Ask the Cluster who has which slot."""
        try:
            self._client.nodes_manager.initialize()
        except (redis.RedisError, redis.exceptions.RedisClusterException, OSError) as error:
            raise NotSentError(f"no node of the Cluster answers ({error})") from error


class ClusterWire:
    """Commands to a Cluster, each to the node that has its keys."""

    def __init__(self, nodes: Nodes, gate: Gate) -> None:
        self._nodes, self._gate = nodes, gate

    def exchange(self, commands: Sequence[Sequence[Arg]], meanwhile: Meanwhile | None = None) -> list[Reply]:
        """
        Send `commands` one after another, a WAIT with the one before it, and return the replies.

        `meanwhile` is called before: each of them has to wait for the one before it.
        """
        if meanwhile is not None:
            meanwhile()
        return [reply for group in _groups(commands) for reply in self._together(group)]

    def _together(self, group: Sequence[Sequence[Arg]]) -> list[Reply]:
        try:
            replies = self._at(self._nodes.pool_for(group[0]), group)
        except NotSentError:
            self._nodes.look_again()
            raise
        if isinstance(replies[0], redis.exceptions.MovedError):
            self._nodes.look_again()
            return self._at(self._nodes.pool_for(group[0]), group)
        if isinstance(replies[0], redis.exceptions.AskError):
            asked = self._nodes.pool_at(replies[0].host, replies[0].port)
            return self._at(asked, [("ASKING",), *group])[1:]
        return replies

    def _at(self, pool: Any, commands: Sequence[Sequence[Arg]]) -> list[Reply]:
        return PooledWire(pool, self._gate).exchange(commands)


class AsyncClusterWire:
    """The same for asyncio."""

    def __init__(self, nodes: Nodes, gate: Gate) -> None:
        self._nodes, self._gate = nodes, gate

    async def exchange(self, commands: Sequence[Sequence[Arg]]) -> list[Reply]:
        """Send `commands` one after another, a WAIT with the one before it, and return the replies."""
        return [reply for group in _groups(commands) for reply in await self._together(group)]

    async def _together(self, group: Sequence[Sequence[Arg]]) -> list[Reply]:
        try:
            replies = await self._at(self._nodes.pool_for(group[0]), group)
        except NotSentError:
            await asyncio.to_thread(self._nodes.look_again)
            raise
        if isinstance(replies[0], redis.exceptions.MovedError):
            await asyncio.to_thread(self._nodes.look_again)
            return await self._at(self._nodes.pool_for(group[0]), group)
        if isinstance(replies[0], redis.exceptions.AskError):
            asked = self._nodes.pool_at(replies[0].host, replies[0].port)
            return (await self._at(asked, [("ASKING",), *group]))[1:]
        return replies

    async def _at(self, pool: Any, commands: Sequence[Sequence[Arg]]) -> list[Reply]:
        return await AsyncPooledWire(pool, self._gate).exchange(commands)


Wire = PooledWire | ClusterWire
AsyncWire = AsyncPooledWire | AsyncClusterWire


def _groups(commands: Sequence[Sequence[Arg]]) -> list[list[Sequence[Arg]]]:
    """Split `commands` into what must go to one node over one connection: a WAIT is for what went before it there."""
    groups: list[list[Sequence[Arg]]] = []
    for command in commands:
        if groups and command[0] in ("WAIT", "WAITAOF"):
            groups[-1].append(command)
        else:
            groups.append([command])
    return groups


def packed(commands: Sequence[Sequence[Arg]]) -> list[bytes]:
    """Return `commands` as they are sent; ids of foreign publishers may be any bytes (see `call.id_text`)."""
    pack: Callable[[Any], bytes] = pack_command  # its stub knows tuples of one argument only
    try:
        return [b"".join([pack(tuple(command)) for command in commands])]
    except UnicodeEncodeError:
        return [b"".join([pack(tuple(map(_raw, command))) for command in commands])]


def _raw(arg: Arg) -> Arg:
    return arg.encode("utf-8", "surrogateescape") if isinstance(arg, str) else arg


def _not_sent(error: Exception) -> Exception:
    """Return what to raise when a connection could not be made; a refused login stays what it is."""
    return error if isinstance(error, redis.AuthenticationError) else NotSentError(str(error))


def _reply(connection: Any) -> Reply:
    try:
        return connection.read_response()
    except redis.ConnectionError:
        raise
    except redis.ResponseError as error:
        return error


async def _async_reply(connection: Any) -> Reply:
    try:
        return await connection.read_response()
    except redis.ConnectionError:
        raise
    except redis.ResponseError as error:
        return error
