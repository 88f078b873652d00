"""
Commands to the nodes of a Cluster: which node has which slot, and one round trip to several nodes.

The slots are read in a thread of their own. A node that does not answer in time fails at once until it does, so that
commands for the other nodes do not wait for it.
"""

import logging
import random
import threading
import time
from collections.abc import Callable, Collection, Hashable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from reliq.keys import CLUSTER_SLOTS, slot_of
from reliq.redis.commands import Arg, raise_first, read_facts
from reliq.redis.connection import (
    Driver,
    NotSentError,
    PooledConnection,
    ServerConnections,
    WrongKindError,
    broken,
    error_code,
)
from reliq.redis.redis_py import redis

logger = logging.getLogger(__name__)

#: A server's first reply is awaited for this long, and for what its commands themselves wait; then it counts as away.
SERVER_SECONDS = 0.9
#: The first wait before a node is tried again, in seconds; each further one is twice as long.
FIRST_PAUSE_SECONDS = 0.1
#: The longest wait.
LONGEST_PAUSE_SECONDS = 0.5
#: Two readings of the slots are so far apart, in seconds: one reading serves all requests that come meanwhile.
READ_PAUSE_SECONDS = 0.05
#: The first reading of the slots is awaited for this long.
FIRST_READ_SECONDS = 2.0

#: Commands whose first argument is no key: any server can run them.
_KEYLESS = {"ACL", "CLUSTER", "CONFIG", "INFO", "PING", "SCAN", "SCRIPT", "SLOWLOG", "TIME"}
_WAITS = ("WAIT", "WAITAOF")
#: Refusals that a node of a Cluster gives while another one takes, or has taken, its place.
_CHANGING = {"CLUSTERDOWN", "LOADING", "MASTERDOWN", "READONLY"}
#: An application that seeds `random` keeps its numbers: this generator shares no state with it.
_random = random.SystemRandom()

#: First and last slot, the node that has them, and its replicas, each as HOST:PORT.
Ranges = list[tuple[int, int, str, list[str]]]
Connect = Callable[[str, Sequence[Sequence[str]]], list[Any]]


class CircuitBreakers:
    """
    The nodes that did not answer in time: what is sent to them fails at once.

    A thread for each of them connects to it and pings it, with a back-off, and ends when it is answered.

    Args:
        probe: connects to a node and pings it; raises what redis-py does.
        meanwhile: called after each try that failed.
    """

    def __init__(self, probe: Callable[[str], object], meanwhile: Callable[[], None]) -> None:
        self._probe = probe
        self._meanwhile = meanwhile
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
        threading.Thread(target=self._ping, args=(node,), name=f"reliq-ping-{node}", daemon=True).start()

    def keep(self, nodes: Collection[str]) -> None:
        """Forget all nodes but `nodes`."""
        with self._lock:
            for node in self._open.keys() - set(nodes):
                del self._open[node]

    def _ping(self, node: str) -> None:
        pause = FIRST_PAUSE_SECONDS
        while node in self._open:
            time.sleep(pause * _random.uniform(0.5, 1.0))
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
            try:
                self._probe(node)
            except broken():
                self._meanwhile()
                continue
            except Exception as error:  # it answers, if only to refuse
                logger.debug("%s answers again: %s", node, error)
            with self._lock:
                self._open.pop(node, None)


class Servers:
    """
    The nodes of a Cluster: the slots of each, and which of them do not answer.

    Args:
        seeds: the nodes to ask first, as HOST:PORT.
        ask: connects to a node and returns its replies to commands; raises what redis-py does.
    """

    def __init__(self, seeds: Sequence[str], ask: Connect) -> None:
        self._seeds = seeds
        self._ask = ask
        #: For each slot the node that has it, None where none has; None before the first reading.
        self._slots: list[str | None] | None = None
        #: The nodes that had slots at the last reading, and the replicas of each.
        self._nodes: dict[str, list[str]] = {}
        self._favourite = ""
        self._failure: Exception | None = None
        self._lock = threading.Lock()
        self._is_reading = False
        self._is_read_wanted = False
        self._read = threading.Event()
        self._breakers = CircuitBreakers(lambda node: raise_first(ask(node, [("PING",)])), self.read_again)

    @property
    def is_ready(self) -> bool:
        """Whether the slots are known, so that `server_of` answers without waiting."""
        return self._slots is not None

    def server_of(self, command: Sequence[Arg]) -> str:
        """
        Return the node that has the slot of a command's first key, any node for a command without a key.

        Raises:
            NotSentError: no node has the slot, or it does not answer.
            ConfigurationError: it is no Cluster.
        """
        if self._slots is None:
            self._await_first_read()
        key = _key(command)
        if key is None:
            return self._any()
        slot = key_slot(key)
        node = self._slots[slot] if self._slots else None
        if node is None:
            self.read_again()
            raise NotSentError(f"no node of the Cluster has slot {slot}")
        return self._breakers.check(node)

    def check(self, server: str) -> str:
        """Return `server`; raise NotSentError when it is known not to answer."""
        return self._breakers.check(server)

    def close(self) -> None:
        """Ping no node any more; what is sent to one that did not answer goes there again."""
        self._breakers.keep(())

    def names(self) -> Collection[str]:
        """Return the nodes that have slots."""
        return self._nodes

    def replicas(self) -> Collection[str]:
        """Read the slots, if some node answers; return the replicas."""
        with suppress(*broken()):
            self._take(self._ask_around())
        return {replica for replicas in self._nodes.values() for replica in replicas}

    def note(self, server: str, error: Exception) -> str:
        """
        Note that `server` failed, or refused with `error`; return the node to which it redirects, empty for none.

        A node that does not answer fails at once from then on, and the slots are read again.
        """
        if isinstance(error, redis.exceptions.AskError):  # MovedError is one too
            node = f"{error.host or server.rpartition(':')[0]}:{error.port}"
            if isinstance(error, redis.exceptions.MovedError):
                if self._slots is not None:
                    self._slots[error.slot_id] = node
                self.read_again()
            return node
        is_silent = not error.is_crowded if isinstance(error, NotSentError) else isinstance(error, redis.TimeoutError)
        if is_silent:
            self._breakers.trip(server, error)
        if not isinstance(error, redis.ResponseError) or error_code(error) in _CHANGING:
            self.read_again()
        return ""

    def read_again(self) -> None:
        """Have the slots read again; return at once."""
        with self._lock:
            if self._is_reading:
                self._is_read_wanted = True
                return
            self._is_reading = True
            self._read.clear()
        threading.Thread(target=self._read_while_wanted, name="reliq-topology", daemon=True).start()

    def _any(self) -> str:
        """Return a node that answers, as far as is known: always the same one while it does."""
        for node in [self._favourite, *_random.sample(sorted(self._nodes), len(self._nodes))]:
            with suppress(NotSentError):
                if node in self._nodes:
                    self._favourite = self._breakers.check(node)
                    return node
        raise NotSentError("no node of the Cluster answers")

    def _await_first_read(self) -> None:
        self.read_again()
        self._read.wait(FIRST_READ_SECONDS)
        if self._slots is None:
            raise self._failure or NotSentError(f"no node of the Cluster answers: {', '.join(self._seeds)}")

    def _read_while_wanted(self) -> None:
        while True:
            try:
                self._take(self._ask_around())
            except Exception as error:
                self._failure = error
            self._read.set()
            time.sleep(READ_PAUSE_SECONDS)
            with self._lock:
                if not self._is_read_wanted:
                    self._is_reading = False
                    return
                self._is_read_wanted = False

    def _take(self, ranges: Ranges) -> None:
        slots: list[str | None] = [None] * CLUSTER_SLOTS
        for first, last, node, _ in ranges:
            slots[first : last + 1] = [node] * (last + 1 - first)
        self._nodes = {node: replicas for _, _, node, replicas in ranges}
        self._slots = slots
        self._failure = None
        self._breakers.keep(self._nodes)

    def _ask_around(self) -> Ranges:
        """Return the slots as the first node has them that is in touch with most of the Cluster, else as any node has."""
        ranges: Ranges | None = None
        why: Exception | None = None
        for node in dict.fromkeys([*_random.sample(sorted(self._nodes), len(self._nodes)), *self._seeds]):
            try:
                self._breakers.check(node)
                state, rows = self._ask(node, [("CLUSTER", "INFO"), ("CLUSTER", "SLOTS")])
                if isinstance(rows, Exception):
                    raise rows
            except broken() as error:
                why = error if not isinstance(why, redis.AuthenticationError) else why
                continue
            except redis.ResponseError as error:
                if "cluster support disabled" in str(error):
                    raise WrongKindError.single(node) from error
                raise
            ranges = ranges_of(rows, node)
            if not isinstance(state, bytes) or read_facts(state).get("cluster_state") == "ok":
                return ranges
        if ranges is not None:
            return ranges
        if isinstance(why, redis.AuthenticationError):
            raise why
        raise NotSentError(f"no node of the Cluster answers ({why})")


def key_slot(key: str) -> int:
    """Return the slot that a key lies in: by its hash tag, if it has one."""
    tag, closed, _ = key.partition("{")[2].partition("}")
    return slot_of(tag if closed and tag else key)


def ranges_of(rows: Sequence[Sequence[Any]], asked: str) -> Ranges:
    """Read CLUSTER SLOTS; a node that does not know its own host is at that of the node `asked`."""

    def node(row: Sequence[Any]) -> str:
        host = row[0].decode() if row[0] else asked.rpartition(":")[0]
        return f"{host}:{row[1]}"

    return [(first, last, node(primary), list(map(node, replicas))) for first, last, primary, *replicas in rows]


def _key(command: Sequence[Arg]) -> str | None:
    """Return the first key of a command, None when it has none."""
    if command[0] in _KEYLESS:
        return None
    at = 1
    if command[0] in ("EVALSHA", "EVAL"):
        if not command[2]:  # the number of keys
            return None
        at = 3
    key = command[at] if len(command) > at else None
    if isinstance(key, bytes):
        return key.decode("utf-8", "surrogateescape")
    return None if key is None else str(key)


class Sent(NamedTuple):
    """A command and the place of its reply, None for a reply that is not wanted."""

    at: int | None
    command: Sequence[Arg]


#: Server -> what is sent to it in one piece.
Shares = dict[str, list[Sent]]


class Exchange:
    """
    One round trip: the commands for each server, and the replies in their places.

    A server's failure is an exception in the places of its own commands. A WAIT goes with the command before it.

    Args:
        to: the server of each command; by default the one that has its key.
    """

    def __init__(self, servers: Servers, commands: Sequence[Sequence[Arg]], to: Sequence[str] = ()) -> None:
        self._servers = servers
        self._commands = commands
        self.replies: list[Any] = [None] * len(commands)
        self._server_of: list[str] = [""] * len(commands)
        self.shares: Shares = {}
        server: str | NotSentError = ""
        for at, command in enumerate(commands):
            if at == 0 or command[0] not in _WAITS:
                try:
                    server = servers.check(to[at]) if to else servers.server_of(command)
                except NotSentError as error:
                    server = error
            if isinstance(server, NotSentError):
                self.replies[at] = server
            else:
                self._server_of[at] = server
                self.shares.setdefault(server, []).append(Sent(at, command))

    def put(self, share: Sequence[Sent], replies: Sequence[Any]) -> None:
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
        shares: Shares = {}
        share: list[Sent] | None = None
        for at, command in enumerate(self._commands):
            if at == 0 or command[0] not in _WAITS:
                share = None
                error = self.replies[at]
                server = self._server_of[at]
                if not server or not isinstance(error, redis.ResponseError):
                    continue
                if not (other := self._servers.note(server, error)):
                    continue
                share = shares.setdefault(other, [])
                if not isinstance(error, redis.exceptions.MovedError):
                    share.append(Sent(None, ("ASKING",)))
            if share is not None:
                share.append(Sent(at, command))
        return shares


class ClusterTransport:
    """
    Commands to the nodes of a Cluster, each to the one that has its keys.

    Connections to a node are made when they are first used, and dropped when the node has left.

    Args:
        connect: makes the connections to a node.
    """

    def __init__(self, driver: Driver, servers: Servers, connect: Callable[[str], ServerConnections]) -> None:
        self.driver = driver
        self._servers = servers
        self._connect = connect
        self._lock = threading.Lock()
        self._nodes: dict[str, ServerConnections] = {}

    async def exchange(self, commands: Sequence[Sequence[Arg]]) -> list[Any]:
        """Send `commands` at once and return the replies; what was refused, or failed, is an exception in its place."""
        if self._servers.is_ready:
            exchange = Exchange(self._servers, commands)
        else:
            exchange = await self.driver.in_thread(Exchange, self._servers, commands)
        await self._make(exchange, exchange.shares)
        if again := exchange.redirected():
            await self._make(exchange, again)
        if len(self._nodes) > len(self._servers.names()):
            with self._lock:
                gone = [self._nodes.pop(server) for server in self._nodes.keys() - set(self._servers.names())]
            for node in gone:
                await node.close_idle()
        return exchange.replies

    async def everywhere(self, commands: Sequence[Sequence[Arg]]) -> dict[str, list[Any]]:
        """Send `commands` to every server at once; return the replies of each, by its name."""
        self._servers.server_of(("PING",))  # they are known then
        names = list(self._servers.names())
        exchange = Exchange(self._servers, [*commands] * len(names), [name for name in names for _ in commands])
        await self._make(exchange, exchange.shares)
        count = len(commands)
        return {name: exchange.replies[at * count : (at + 1) * count] for at, name in enumerate(names)}

    async def close(self) -> None:
        """Close every connection; they are opened again when they are used."""
        for node in list(self._nodes.values()):
            await node.close()

    def place(self, key: str) -> Hashable:
        """Return the slot of `key`: keys of one slot may stand in one command."""
        return key_slot(key)

    def node_for(self, key: str) -> ServerConnections:
        """Return the connections to the node that has `key`; raise NotSentError when none has, or it does not answer."""
        return self._node(self._servers.server_of(("GET", key)))

    def each(self, *, replicas: bool = False) -> dict[str, ServerConnections]:
        """Return the connections to all nodes that there are now, and with `replicas` to those too; for operators."""
        others = self._servers.replicas()
        names = [*self._servers.names(), *(others if replicas else ())]
        return {server: self._node(server) for server in names}

    def note(self, node: ServerConnections, error: Exception) -> None:
        """Note that a server failed, or refused, outside of an exchange."""
        self._servers.note(node.server, error)

    def _node(self, server: str) -> ServerConnections:
        if node := self._nodes.get(server):
            return node
        with self._lock:
            if server not in self._nodes:
                self._nodes[server] = self._connect(server)
            return self._nodes[server]

    async def _make(self, exchange: Exchange, shares: Shares) -> None:
        waiting: list[tuple[ServerConnections, PooledConnection, list[Sent]]] = []
        try:
            # In one order for all callers: no two wait for each other's connections.
            for server, share in sorted(shares.items()):
                node = self._node(server)
                try:
                    waiting.append((node, await node.send([command for _, command in share]), share))
                except broken() as error:
                    exchange.fail(server, share, error)
            sent_at = time.monotonic()
            while waiting:
                node, connection, share = waiting.pop()
                seconds = sent_at + patience(share) - time.monotonic()
                try:
                    exchange.put(share, await node.receive(connection, len(share), max(0.0, seconds)))
                except broken() as error:
                    exchange.fail(node.server, share, error)
        finally:
            for node, connection, _ in waiting:
                await node.drop(connection)


def patience(share: Sequence[Sent]) -> float:
    """Return for how many seconds the replies to a share are awaited."""
    seconds = SERVER_SECONDS
    for _, command in share:
        if command[0] == "BLPOP":
            seconds += float(command[-1])
        elif command[0] in _WAITS:
            seconds += float(command[-1]) / 1000
    return seconds


Transport = ServerConnections | ClusterTransport
