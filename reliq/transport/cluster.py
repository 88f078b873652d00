"""Wires to a Cluster: each command goes to the node that has its keys."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import redis

from reliq.call import Arg
from reliq.transport.wire import AsyncPooledWire, NotSentError, PooledWire, Reply

W = TypeVar("W", PooledWire, AsyncPooledWire)


class Nodes(Generic[W]):
    """The nodes of a Cluster, each with a wire; redis-py's own client knows which node has a key."""

    def __init__(self, client: redis.RedisCluster, make_wire: Callable[[str, int], W]) -> None:
        self._client = client
        self._make_wire: Callable[[str, int], W] = make_wire
        self._wires: dict[tuple[str, int], W] = {}
        self._lock = threading.Lock()

    def wire_for(self, command: Sequence[Arg]) -> W:
        """Return the wire to the node that has the command's first key."""
        at = 3 if command[0] in ("EVALSHA", "EVAL") else 1
        key = command[at] if command[0] != "INFO" and len(command) > at else None
        try:
            node: Any = self._client.get_node_from_key(key) if key else self._client.get_default_node()  # type: ignore[no-untyped-call]
        except (redis.RedisError, redis.exceptions.RedisClusterException, IndexError) as error:
            raise NotSentError(f"no node of the Cluster has the key's slot ({error})") from error
        return self.wire_at(node.host, node.port)

    def wire_at(self, host: str, port: int) -> W:
        """Return the wire to the node at an address."""
        with self._lock:
            if (host, port) not in self._wires:
                self._wires[host, port] = self._make_wire(host, port)
            return self._wires[host, port]

    def pools(self) -> list[Any]:
        """Return every pool there is."""
        return [pool for wire in self._wires.values() for pool in wire.pools()]

    def look_again(self) -> None:
        """Ask the Cluster who has which slot."""
        try:
            self._client.nodes_manager.initialize()
        except (redis.RedisError, redis.exceptions.RedisClusterException, OSError) as error:
            raise NotSentError(f"no node of the Cluster answers ({error})") from error


class ClusterWire:
    """Commands to a Cluster, each to the node that has its keys."""

    def __init__(self, nodes: Nodes[PooledWire]) -> None:
        self._nodes = nodes
        self.pools = nodes.pools

    def exchange(self, commands: Sequence[Sequence[Arg]]) -> list[Reply]:
        """Send `commands` one after another, a WAIT with the one before it, and return the replies."""
        return [reply for group in _groups(commands) for reply in self._together(group)]

    def _together(self, group: Sequence[Sequence[Arg]]) -> list[Reply]:
        try:
            replies = self._nodes.wire_for(group[0]).exchange(group)
        except NotSentError:
            self._nodes.look_again()
            raise
        if isinstance(replies[0], redis.exceptions.MovedError):
            self._nodes.look_again()
            return self._nodes.wire_for(group[0]).exchange(group)
        if isinstance(replies[0], redis.exceptions.AskError):
            asked = self._nodes.wire_at(replies[0].host, replies[0].port)
            return asked.exchange([("ASKING",), *group])[1:]
        return replies


class AsyncClusterWire:
    """As `ClusterWire`, for asyncio."""

    def __init__(self, nodes: Nodes[AsyncPooledWire]) -> None:
        self._nodes = nodes
        self.pools = nodes.pools

    async def exchange(self, commands: Sequence[Sequence[Arg]]) -> list[Reply]:
        """Send `commands` one after another, a WAIT with the one before it, and return the replies."""
        return [reply for group in _groups(commands) for reply in await self._together(group)]

    async def _together(self, group: Sequence[Sequence[Arg]]) -> list[Reply]:
        try:
            replies = await self._nodes.wire_for(group[0]).exchange(group)
        except NotSentError:
            await asyncio.to_thread(self._nodes.look_again)
            raise
        if isinstance(replies[0], redis.exceptions.MovedError):
            await asyncio.to_thread(self._nodes.look_again)
            return await self._nodes.wire_for(group[0]).exchange(group)
        if isinstance(replies[0], redis.exceptions.AskError):
            asked = self._nodes.wire_at(replies[0].host, replies[0].port)
            return (await asked.exchange([("ASKING",), *group]))[1:]
        return replies


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
