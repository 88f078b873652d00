"""Circuit breakers: a node that does not answer fails at once, until it does."""

import asyncio
import logging
import random
import threading
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Generic, NamedTuple, TypeVar

import redis

from reliq.keys import CLUSTER_SLOTS, slot_of
from reliq.redis.commands import Arg, raise_first, read_facts
from reliq.redis.connection import AsyncPooledConnection, PooledConnection, Reply
from reliq.redis.pool import BROKEN, NotSentError, WrongKindError, code

#: An application that seeds `random` keeps its numbers: this one has none of its state.
_chance = random.SystemRandom()
logger = logging.getLogger(__name__)

#: The first wait before a node is tried again, in seconds; each further one is twice as long.
FIRST_PAUSE_SECONDS = 0.1
#: The longest wait.
LONGEST_PAUSE_SECONDS = 0.5


class CircuitBreakers:
    """
    The nodes that did not answer in time. What is sent to them fails at once, so that nobody waits for them.

    A thread for each of them connects to it and pings it, with a back-off, and ends when it is answered.

    Args:
        probe: connects to a node and pings it; raises what redis-py does.
        meanwhile: called after each try that failed.
    """

    def __init__(self, probe: Callable[[str], object], meanwhile: Callable[[], None]) -> None:
        self._probe, self._meanwhile = probe, meanwhile
        self._lock = threading.Lock()
        #: Node -> why it failed.
        self._open: dict[str, Exception] = {}

    def check(self, node: str) -> str:
        """Return `node`; raise NotSentError when it is known not to answer."""
        if self._open and (why := self._open.get(node)):
            raise NotSentError(f"{node} does not answer and is tried again in the background ({why})")
        return node

    def trip(self, node: str, why: Exception) -> None:
        """Have everything for `node` fail until it answers again."""
        with self._lock:
            if node in self._open:
                return
            self._open[node] = why
        threading.Thread(target=self._try, args=(node,), name=f"reliq-ping-{node}", daemon=True).start()

    def keep(self, nodes: Collection[str]) -> None:
        """Forget the nodes that are none of `nodes`."""
        with self._lock:
            for gone in self._open.keys() - set(nodes):
                del self._open[gone]

    def close(self) -> None:
        """Try no node any more; what is sent to one goes there again."""
        self.keep(())

    def _try(self, node: str) -> None:
        pause = FIRST_PAUSE_SECONDS
        while node in self._open:
            time.sleep(pause * _chance.uniform(0.5, 1.0))
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
            try:
                self._probe(node)
            except BROKEN:
                self._meanwhile()
                continue
            except Exception as error:  # it answers, if only to refuse
                logger.debug("%s answers again: %s", node, error)
            with self._lock:
                self._open.pop(node, None)


#: An application that seeds `random` keeps its numbers: this one has none of its state.
_chance = random.SystemRandom()
#: Two readings are so far apart, in seconds: one answers whoever has asked meanwhile.
PAUSE_SECONDS = 0.05
#: The first reading is awaited for this long.
FIRST_SECONDS = 2.0

#: First and last slot, the node that has them, and its replicas, each as HOST:PORT.
Ranges = list[tuple[int, int, str, list[str]]]


class Topology:
    """
    The nodes of a Cluster that have slots.

    Args:
        seeds: the nodes to ask first, as HOST:PORT.
        ask: connects to a node and returns its replies to commands; raises what redis-py does.
        changed: called after each reading, with the nodes that have slots.
    """

    def __init__(
        self,
        seeds: Sequence[str],
        ask: Callable[[str, Sequence[Sequence[str]]], list[Any]],
        changed: Callable[[Collection[str]], None],
    ) -> None:
        self._seeds, self._ask, self._changed = seeds, ask, changed
        #: For each slot the node that has it; None where nobody has.
        self._slots: list[str | None] | None = None
        #: The nodes that had slots at the last reading, and the replicas of each.
        self.nodes: dict[str, list[str]] = {}
        self._why: Exception | None = None
        self._lock = threading.Lock()
        self._is_reading = self._is_wanted = False
        self._read = threading.Event()

    def node_of(self, slot: int) -> str:
        """Return the node that has a slot; raise NotSentError when none has, ConfigurationError for no Cluster."""
        if self._slots is None:
            self._await_first()
        node = self._slots[slot] if self._slots else None
        if node is None:
            self.read_again()
            raise NotSentError(f"no node of the Cluster has slot {slot}")
        return node

    def any_node(self) -> list[str]:
        """Return the nodes that have slots, in any order."""
        if self._slots is None:
            self._await_first()
        return _chance.sample(sorted(self.nodes), len(self.nodes))

    @property
    def is_known(self) -> bool:
        """Whether the Cluster was read before: nobody need wait."""
        return self._slots is not None

    def learn(self, slot: int, node: str) -> None:
        """Note that a slot has moved, as its former node says; the rest is read again."""
        if self._slots is not None:
            self._slots[slot] = node
        self.read_again()

    def read_again(self) -> None:
        """Have the Cluster read again; return at once."""
        with self._lock:
            if self._is_reading:
                self._is_wanted = True
                return
            self._is_reading = True
            self._read.clear()
        threading.Thread(target=self._run, name="reliq-topology", daemon=True).start()

    def read_now(self) -> None:
        """Read the Cluster in this thread; raise as `node_of` does."""
        self._take(self._ask_around())

    def _await_first(self) -> None:
        self.read_again()
        self._read.wait(FIRST_SECONDS)
        if self._slots is None:
            raise self._why or NotSentError(f"no node of the Cluster answers: {', '.join(self._seeds)}")

    def _run(self) -> None:
        while True:
            try:
                self._take(self._ask_around())
            except Exception as error:
                self._why = error
            self._read.set()
            time.sleep(PAUSE_SECONDS)
            with self._lock:
                if not self._is_wanted:
                    self._is_reading = False
                    return
                self._is_wanted = False

    def _take(self, ranges: Ranges) -> None:
        slots: list[str | None] = [None] * CLUSTER_SLOTS
        for first, last, node, _ in ranges:
            slots[first : last + 1] = [node] * (last + 1 - first)
        self.nodes = {node: replicas for _, _, node, replicas in ranges}
        self._slots, self._why = slots, None
        self._changed(self.nodes)

    def _ask_around(self) -> Ranges:
        """Return what the first node says that is in touch with most of the Cluster, else what any says."""
        found: Ranges | None = None
        why: Exception | None = None
        for node in self._to_ask():
            try:
                state, rows = self._ask(node, [("CLUSTER", "INFO"), ("CLUSTER", "SLOTS")])
                if isinstance(rows, Exception):
                    raise rows
            except BROKEN as error:
                why = error if not isinstance(why, redis.AuthenticationError) else why
                continue
            except redis.ResponseError as error:
                raise _refused(node, error) from error
            found = ranges_of(rows, node)
            if not isinstance(state, bytes) or read_facts(state).get("cluster_state") == "ok":
                return found
        if found is not None:
            return found
        if isinstance(why, redis.AuthenticationError):
            raise why
        raise NotSentError(f"no node of the Cluster answers ({why})")

    def _to_ask(self) -> Iterable[str]:
        known = sorted(self.nodes)
        return dict.fromkeys([*_chance.sample(known, len(known)), *self._seeds])


def key_slot(key: str) -> int:
    """Return the slot that a key lies in: by its hash tag, if it has one."""
    tag = key.partition("{")[2].partition("}")
    return slot_of(tag[0] if tag[1] and tag[0] else key)


def ranges_of(rows: Sequence[Sequence[Any]], asked: str) -> Ranges:
    """Read CLUSTER SLOTS; a node that does not know its own host is at that of the node `asked`."""

    def node(row: Sequence[Any]) -> str:
        host = row[0].decode() if row[0] else asked.rpartition(":")[0]
        return f"{host}:{row[1]}"

    return [(first, last, node(primary), list(map(node, replicas))) for first, last, primary, *replicas in rows]


def _refused(node: str, error: redis.ResponseError) -> Exception:
    if "cluster support disabled" in str(error):
        return WrongKindError(
            f"{node} is a single server and no node of a Redis Cluster; write redis://HOST:PORT/0 "
            "(rediss:// for TLS) instead of redis+cluster://"
        )
    return error


#: Commands whose first argument is no key: whichever server is asked, it speaks for itself.
_KEYLESS = {"ACL", "CLUSTER", "CONFIG", "INFO", "PING", "SCAN", "SCRIPT", "SLOWLOG", "TIME"}
#: Refusals that a node of a Cluster gives while another one takes, or has taken, its place.
_CHANGING = {"CLUSTERDOWN", "LOADING", "MASTERDOWN", "READONLY"}

Connect = Callable[[str, Sequence[Sequence[str]]], list[Any]]


class Servers:
    """
    The nodes of a Cluster.

    Args:
        seeds: those to ask first, as HOST:PORT.
        ask: connects to one and returns its replies to commands.
    """

    def __init__(self, seeds: Sequence[str], ask: Connect) -> None:
        self._ask, self._favourite = ask, ""
        self.topology = Topology(seeds, self._asked, self._take)
        self._breakers = CircuitBreakers(lambda node: raise_first(ask(node, [("PING",)])), self.topology.read_again)

    @property
    def is_ready(self) -> bool:
        """Whether the topology is known, so that `server_of` answers without waiting."""
        return self.topology.is_known

    def server_of(self, command: Sequence[Arg]) -> str:
        """Return the node that has the slot of a command's first key, any for a command without one; raise NotSentError if it is away."""
        key = _key(command)
        if key is None:
            return self._any()
        return self._breakers.check(self.topology.node_of(key_slot(key)))

    def check(self, server: str) -> str:
        """Return `server`; raise NotSentError when it is known not to answer."""
        return self._breakers.check(server)

    def close(self) -> None:
        """Try none any more that does not answer."""
        self._breakers.close()

    def place(self, key: str) -> Hashable:
        """Return the slot of `key`: keys of one slot may stand in one command."""
        return key_slot(key)

    def names(self) -> Collection[str]:
        """Return the nodes that have slots."""
        return self.topology.nodes

    def look(self) -> Collection[str]:
        """Read the topology, if some node answers; return the replicas."""
        with suppress(*BROKEN):
            self.topology.read_now()
        return {replica for replicas in self.topology.nodes.values() for replica in replicas}

    def note(self, server: str, error: Exception) -> str:
        """
        Note that `server` failed, or refused with `error`; return the node to which it redirects, empty for none.

        A node that does not answer fails at once from then on, and the topology is read again.
        """
        if isinstance(error, redis.exceptions.AskError):  # MovedError is one too
            node = f"{error.host or server.rpartition(':')[0]}:{error.port}"
            if isinstance(error, redis.exceptions.MovedError):
                self.topology.learn(error.slot_id, node)
            return node
        if _is_silent(error):
            self._breakers.trip(server, error)
        if not isinstance(error, redis.ResponseError) or code(error) in _CHANGING:
            self.topology.read_again()
        return ""

    def _any(self) -> str:
        """Return a node that answers, as far as is known: always the same one while it does."""
        for node in [self._favourite, *self.topology.any_node()]:
            with suppress(NotSentError):
                if node in self.topology.nodes:
                    self._favourite = self._breakers.check(node)
                    return node
        raise NotSentError("no node of the Cluster answers")

    def _asked(self, node: str, commands: Sequence[Sequence[str]]) -> list[Any]:
        self._breakers.check(node)
        return self._ask(node, commands)

    def _take(self, nodes: Collection[str]) -> None:
        self._breakers.keep(nodes)


def _key(command: Sequence[Arg]) -> str | None:
    """Return the first key of a command, None when it has none."""
    if command[0] in _KEYLESS:
        return None
    at = 3 if command[0] in ("EVALSHA", "EVAL") else 1
    if at == 3 and not command[2]:  # noqa: PLR2004  the number of keys
        return None
    key = command[at] if len(command) > at else None
    return key.decode("utf-8", "surrogateescape") if isinstance(key, bytes) else None if key is None else str(key)


def _is_silent(error: Exception) -> bool:
    """Say whether a server did not answer in time, or cannot be reached."""
    if isinstance(error, NotSentError):
        return not error.is_crowded
    return isinstance(error, redis.TimeoutError)


W = TypeVar("W", PooledConnection, AsyncPooledConnection)

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


class _NodeConnections(Generic[W]):
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


class ClusterTransport:
    """Commands to many servers, each to the one that has its keys."""

    def __init__(self, servers: Servers, make: Callable[[str], PooledConnection]) -> None:
        self._servers = servers
        self._wires: _NodeConnections[PooledConnection] = _NodeConnections(servers, make)
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

    def node_for(self, key: str) -> PooledConnection:
        """Return the wire to the server that has `key`; raise NotSentError when none has, or it does not answer."""
        return self._wires.to(self._servers.server_of(("GET", key)))

    def each(self, *, replicas: bool = False) -> dict[str, PooledConnection]:
        """Return the wires to all servers that there are now, and with `replicas` to those too; for operators."""
        others = self._servers.look()
        names = [*self._servers.names(), *(others if replicas else ())]
        return {server: self._wires.to(server) for server in names}

    def note(self, node: PooledConnection, error: Exception) -> None:
        """Note that a server failed, or refused, outside of an exchange."""
        self._servers.note(node.server, error)

    def _make(self, made: Exchange, shares: Shares) -> None:
        waiting: list[tuple[PooledConnection, Any, list[Sent]]] = []
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


class AsyncClusterTransport:
    """As `ClusterTransport`, for asyncio."""

    def __init__(self, servers: Servers, make: Callable[[str], AsyncPooledConnection]) -> None:
        self._servers = servers
        self._wires: _NodeConnections[AsyncPooledConnection] = _NodeConnections(servers, make)
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


Wire = PooledConnection | ClusterTransport
AsyncWire = AsyncPooledConnection | AsyncClusterTransport


def patience(share: Sequence[Sent]) -> float:
    """Return for how many seconds the replies to a share are awaited."""
    return SERVER_SECONDS + sum(_waits(command) for _, command in share)


def _waits(command: Sequence[Arg]) -> float:
    """Return for how many seconds a command may wait by itself."""
    if command[0] == "BLPOP":
        return float(command[-1])
    return float(command[-1]) / 1000 if command[0] in _WAITS else 0.0
