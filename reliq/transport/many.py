"""Wires to many servers: a round trip is packed for each, sent to all, then read from all."""

import asyncio
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import redis

from reliq.call import Arg
from reliq.transport.failures import BROKEN, NotSentError
from reliq.transport.servers import Servers
from reliq.transport.wire import AsyncPooledWire, PooledWire, Reply

W = TypeVar("W", PooledWire, AsyncPooledWire)

#: A server's first reply is awaited for this long, and for what its commands themselves wait; then it counts as away.
SERVER_SECONDS = 0.9
_WAITS = ("WAIT", "WAITAOF")


class Sent(NamedTuple):
    """A command and the place of its reply, None for one that nobody asks for."""

    at: int | None
    command: Sequence[Arg]


#: Server -> what is sent to it in one piece.
Shares = dict[str, list[Sent]]


class Exchange:
    """
    One round trip: who is sent what, and the replies in their places.

    A server's failure is an exception in the places of its own commands. A WAIT goes with the command before it.

    Args:
        to: the server of each command; by default the one that has its key.
    """

    def __init__(self, servers: Servers, commands: Sequence[Sequence[Arg]], to: Sequence[str] = ()) -> None:
        self._servers, self._commands, self._to = servers, commands, to
        self.replies: list[Reply] = [None] * len(commands)
        self._server_of: list[str] = [""] * len(commands)
        self.shares: Shares = {}
        server: str | NotSentError = ""
        for at, command in enumerate(commands):
            if at == 0 or command[0] not in _WAITS:
                server = self._find(at)
            if isinstance(server, NotSentError):
                self.replies[at] = server
            else:
                self._server_of[at] = server
                self.shares.setdefault(server, []).append(Sent(at, command))

    def _find(self, at: int) -> str | NotSentError:
        try:
            return self._servers.check(self._to[at]) if self._to else self._servers.server_of(self._commands[at])
        except NotSentError as error:
            return error

    def put(self, share: Sequence[Sent], replies: Sequence[Reply]) -> None:
        """Put the replies to a share into their places."""
        for (at, _), reply in zip(share, replies, strict=True):
            if at is not None:
                self.replies[at] = reply

    def fail(self, server: str, share: Sequence[Sent], error: Exception) -> None:
        """Put the failure of a server into the places of its share."""
        self._servers.note(server, error)
        self.put(share, [error] * len(share))

    def redirected(self) -> Shares:
        """Return what was refused because another server has it, by that server; learn from the other refusals."""
        found: Shares = {}
        for group in self._groups():
            error, server = self.replies[group[0]], self._server_of[group[0]]
            if not server or not isinstance(error, redis.ResponseError):
                continue
            if other := self._servers.note(server, error):
                is_asked = not isinstance(error, redis.exceptions.MovedError)
                share = found.setdefault(other, [])
                share += [Sent(None, ("ASKING",))] * is_asked
                share += [Sent(at, self._commands[at]) for at in group]
        return found

    def _groups(self) -> Iterator[list[int]]:
        """Yield the places of each command, with those of its WAITs."""
        group: list[int] = []
        for at, command in enumerate(self._commands):
            if group and command[0] not in _WAITS:
                yield group
                group = []
            group.append(at)
        if group:
            yield group


class _Wires(Generic[W]):
    """The wire to each server, made when it is first used, dropped when the server has left."""

    def __init__(self, servers: Servers, make: Callable[[str], W]) -> None:
        self._servers = servers
        self._make: Callable[[str], W] = make
        self._lock = threading.Lock()
        self._wires: dict[str, W] = {}

    def to(self, server: str) -> W:
        """Return the wire to `server`."""
        if known := self._wires.get(server):
            return known
        with self._lock:
            if server not in self._wires:
                self._wires[server] = self._make(server)
            return self._wires[server]

    def pools(self) -> list[Any]:
        """Return every pool there is."""
        return [pool for wire in list(self._wires.values()) for pool in wire.pools()]

    def take_gone(self) -> list[W]:
        """Take out the wires to servers that have left."""
        if len(self._wires) <= len(self._servers.names()):
            return []
        with self._lock:
            gone = self._wires.keys() - set(self._servers.names())
            return [self._wires.pop(server) for server in gone]


class ManyWire:
    """Commands to many servers, each to the one that has its keys."""

    def __init__(self, servers: Servers, make: Callable[[str], PooledWire]) -> None:
        self._servers = servers
        self._wires: _Wires[PooledWire] = _Wires(servers, make)
        self.pools = self._wires.pools
        self.place: Callable[[str], Hashable] = servers.place

    def exchange(self, commands: Sequence[Sequence[Arg]]) -> list[Reply]:
        """Send `commands` at once and return the replies; what was refused, or failed, is an exception in its place."""
        made = Exchange(self._servers, commands)
        self._make(made, made.shares)
        if again := made.redirected():
            self._make(made, again)
        for wire in self._wires.take_gone():
            for pool in wire.pools():
                pool.close_idle()
        return made.replies

    def everywhere(self, commands: Sequence[Sequence[Arg]]) -> dict[str, list[Reply]]:
        """Send `commands` to every server at once; return the replies of each, by its name."""
        self._servers.server_of(("PING",))  # they are known then
        names = list(self._servers.names())
        made = Exchange(self._servers, [*commands] * len(names), [name for name in names for _ in commands])
        self._make(made, made.shares)
        count = len(commands)
        return {name: made.replies[at * count : (at + 1) * count] for at, name in enumerate(names)}

    def node_for(self, key: str) -> PooledWire:
        """Return the wire to the server that has `key`; raise NotSentError when none has, or it does not answer."""
        return self._wires.to(self._servers.server_of(("GET", key)))

    def each(self, *, replicas: bool = False) -> dict[str, PooledWire]:
        """Return the wires to all servers that there are now, and with `replicas` to those too; for operators."""
        others = self._servers.look()
        names = [*self._servers.names(), *(others if replicas else ())]
        return {server: self._wires.to(server) for server in names}

    def note(self, node: PooledWire, error: Exception) -> None:
        """Note that a server failed, or refused, outside of an exchange."""
        self._servers.note(node.server, error)

    def _make(self, made: Exchange, shares: Shares) -> None:
        waiting: list[tuple[PooledWire, Any, list[Sent]]] = []
        try:
            # In one order for all threads: no two wait for each other's connections.
            for server, share in sorted(shares.items()):
                wire = self._wires.to(server)
                try:
                    waiting.append((wire, wire.send([command for _, command in share]), share))
                except BROKEN as error:
                    made.fail(server, share, error)
            sent_at = time.monotonic()
            while waiting:
                wire, connection, share = waiting.pop()
                seconds = sent_at + patience(share) - time.monotonic()
                try:
                    made.put(share, wire.receive(connection, len(share), max(0.0, seconds)))
                except BROKEN as error:
                    made.fail(wire.server, share, error)
        finally:
            for wire, connection, _ in waiting:
                wire.drop(connection)


class AsyncManyWire:
    """As `ManyWire`, for asyncio."""

    def __init__(self, servers: Servers, make: Callable[[str], AsyncPooledWire]) -> None:
        self._servers = servers
        self._wires: _Wires[AsyncPooledWire] = _Wires(servers, make)
        self.pools = self._wires.pools

    async def exchange(self, commands: Sequence[Sequence[Arg]]) -> list[Reply]:
        """Send `commands` at once and return the replies; what was refused, or failed, is an exception in its place."""
        if self._servers.is_ready:
            made = Exchange(self._servers, commands)
        else:
            made = await asyncio.to_thread(Exchange, self._servers, commands)
        await self._make(made, made.shares)
        if again := made.redirected():
            await self._make(made, again)
        for wire in self._wires.take_gone():
            for pool in wire.pools():
                await pool.disconnect(inuse_connections=False)
        return made.replies

    async def _make(self, made: Exchange, shares: Shares) -> None:
        if len(shares) == 1:
            for server, share in shares.items():
                await self._share(made, server, share)
        else:
            await asyncio.gather(*(self._share(made, server, share) for server, share in shares.items()))

    async def _share(self, made: Exchange, server: str, share: list[Sent]) -> None:
        wire = self._wires.to(server)
        try:
            connection = await wire.send([command for _, command in share])
            made.put(share, await wire.receive(connection, len(share), patience(share)))
        except BROKEN as error:
            made.fail(server, share, error)


Wire = PooledWire | ManyWire
AsyncWire = AsyncPooledWire | AsyncManyWire


def patience(share: Sequence[Sent]) -> float:
    """Return for how many seconds the replies to a share are awaited."""
    return SERVER_SECONDS + sum(_waits(command) for _, command in share)


def _waits(command: Sequence[Arg]) -> float:
    """Return for how many seconds a command may wait by itself."""
    if command[0] == "BLPOP":
        return float(command[-1])
    return float(command[-1]) / 1000 if command[0] in _WAITS else 0.0
