"""
Commands to the nodes of a Redis Cluster: the slots of each node, and one round trip to several nodes.

A separate thread reads the slots. Commands to a node that timed out fail immediately until the node answers again, so
commands to the other nodes do not wait for it.
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

#: Wait this many seconds for a server's replies, plus the timeouts of blocking commands. Then the server counts as
#: unavailable.
SERVER_SECONDS = 0.9
#: The pause before the first retry of a node, in seconds; each further pause is twice as long.
FIRST_PAUSE_SECONDS = 0.1
#: The longest pause between two retries, in seconds.
LONGEST_PAUSE_SECONDS = 0.5
#: The shortest time between two reads of the slots, in seconds. If several callers request a read, one read is enough.
READ_PAUSE_SECONDS = 0.05
#: The longest wait for the first read of the slots, in seconds.
FIRST_READ_SECONDS = 2.0

#: Commands whose first argument is not a key: any server can run them.
_KEYLESS = {"ACL", "CLUSTER", "CONFIG", "INFO", "PING", "SCAN", "SCRIPT", "SLOWLOG", "TIME"}
_WAITS = ("WAIT", "WAITAOF")
#: Error codes of a Cluster node during or after its failover.
_CHANGING = {"CLUSTERDOWN", "LOADING", "MASTERDOWN", "READONLY"}
#: Not the module `random`: if an application seeds `random`, its random numbers must not depend on reliq.
_random = random.SystemRandom()

#: For each range of slots: first and last slot, the primary of these slots, and its replicas. Nodes are HOST:PORT.
Ranges = list[tuple[int, int, str, list[str]]]
Connect = Callable[[str, Sequence[Sequence[str]]], list[Any]]


class CircuitBreakers:
    """
    The nodes that timed out. Commands to these nodes fail immediately.

    For each of these nodes, a thread connects and sends PING, with a backoff, until the node answers.

    Args:
        probe: connects to a node and pings it; raises the exceptions of redis-py.
        meanwhile: a function that is called after each failed ping.
    """

    def __init__(self, probe: Callable[[str], object], meanwhile: Callable[[], None]) -> None:
        self._probe = probe
        self._meanwhile = meanwhile
        self._lock = threading.Lock()
        #: For each node that timed out, the exception of its failure.
        self._open: dict[str, Exception] = {}

    def check(self, node: str) -> str:
        """Return `node`; raise NotSentError while the node does not answer."""
        if self._open and (why := self._open.get(node)):
            raise NotSentError(f"{node} does not answer and is tried again in the background ({why})")
        return node

    def trip(self, node: str, why: Exception) -> None:
        """Make all commands to `node` fail until it answers again."""
        with self._lock:
            if node in self._open:
                return
            self._open[node] = why
        threading.Thread(target=self._ping, args=(node,), name=f"reliq-ping-{node}", daemon=True).start()

    def keep(self, nodes: Collection[str]) -> None:
        """Forget the failures of all nodes except `nodes`."""
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
            except Exception as error:  # an error reply shows that the node answers
                logger.debug("%s answers again: %s", node, error)
            with self._lock:
                self._open.pop(node, None)


class Servers:
    """
    The nodes of a Cluster: the slots of each node, and which nodes do not answer.

    Args:
        seeds: the nodes to ask first, as HOST:PORT.
        ask: connects to a node and returns its replies to commands; raises the exceptions of redis-py.
    """

    def __init__(self, seeds: Sequence[str], ask: Connect) -> None:
        self._seeds = seeds
        self._ask = ask
        #: The primary of each slot, None for a slot without a primary. The list itself is None before the first read.
        self._slots: list[str | None] | None = None
        #: The replicas of each primary, as of the last read of the slots.
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
        """Whether the slots have been read, so that `server_of` returns without waiting."""
        return self._slots is not None

    def server_of(self, command: Sequence[Arg]) -> str:
        """
        Return the node with the slot of a command's first key, or any node for a command without a key.

        Raises:
            NotSentError: no node has the slot, or the node does not answer.
            ConfigurationError: the server is not a Cluster.
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

    def check(self, server: str) -> None:
        """Raise NotSentError while `server` does not answer."""
        self._breakers.check(server)

    def close(self) -> None:
        """Stop the pings, and allow commands to all nodes again, also to nodes that timed out."""
        self._breakers.keep(())

    def names(self) -> Collection[str]:
        """Return the primaries as of the last read of the slots."""
        return self._nodes

    def replicas(self) -> Collection[str]:
        """Return the known replicas, after an attempt to read the Cluster's slot map again."""
        with suppress(*broken()):
            self._take(self._ask_around())
        return {replica for replicas in self._nodes.values() for replica in replicas}

    def note(self, server: str, error: Exception) -> str:
        """
        Process an error of `server`. If the error is a redirection, return the new node, otherwise an empty text.

        If the server did not answer, read the slots again, and let further commands to the server fail immediately
        until it answers.
        """
        if isinstance(error, redis.exceptions.AskError):  # this includes MovedError, its subclass
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
        """Request another read of the slots and return immediately."""
        with self._lock:
            if self._is_reading:
                self._is_read_wanted = True
                return
            self._is_reading = True
            self._read.clear()
        threading.Thread(target=self._read_while_wanted, name="reliq-topology", daemon=True).start()

    def _any(self) -> str:
        """Return a node that has not timed out; return the same node as long as possible."""
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
        """Return the slots from the first node with `cluster_state:ok`, or else from any node that answers."""
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
                    raise WrongKindError.single(place=node) from error
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
    """Return the Cluster slot of a key, from its hash tag if it has one."""
    tag, closed, _ = key.partition("{")[2].partition("}")
    return slot_of(tag if closed and tag else key)


def ranges_of(rows: Sequence[Sequence[Any]], asked: str) -> Ranges:
    """
    Parse the reply of the node `asked` to CLUSTER SLOTS.

    A node without a host name in the reply gets the host of `asked`.
    """

    def node(row: Sequence[Any]) -> str:
        host = row[0].decode() if row[0] else asked.rpartition(":")[0]
        return f"{host}:{row[1]}"

    return [(first, last, node(primary), list(map(node, replicas))) for first, last, primary, *replicas in rows]


def _key(command: Sequence[Arg]) -> str | None:
    """Return the first key of a command, None for a command without keys."""
    if command[0] in _KEYLESS:
        return None
    at = 1
    if command[0] in ("EVALSHA", "EVAL"):
        if not command[2]:  # the script has no keys
            return None
        at = 3
    key = command[at] if len(command) > at else None
    if isinstance(key, bytes):
        return key.decode("utf-8", "surrogateescape")
    return None if key is None else str(key)


class Sent(NamedTuple):
    """A command, and the index at which its reply is stored; the index is None if the reply is not needed."""

    at: int | None
    command: Sequence[Arg]


#: The commands that are sent together to each server.
Shares = dict[str, list[Sent]]


class Exchange:
    """
    One round trip: the commands for each server, and the replies in the order of the commands.

    If a server fails, the reply to each of its commands is the exception. A WAIT is sent to the same server as the
    command before it.
    """

    def __init__(self, servers: Servers, commands: Sequence[Sequence[Arg]]) -> None:
        self._servers = servers
        self._commands = commands
        self.replies: list[Any] = [None] * len(commands)
        self._server_of: list[str] = [""] * len(commands)
        self.shares: Shares = {}
        server: str | NotSentError = ""
        for at, command in enumerate(commands):
            if at == 0 or command[0] not in _WAITS:
                try:
                    server = servers.server_of(command)
                except NotSentError as error:
                    server = error
            if isinstance(server, NotSentError):
                self.replies[at] = server
            else:
                self._server_of[at] = server
                self.shares.setdefault(server, []).append(Sent(at, command))

    def put(self, share: Sequence[Sent], replies: Sequence[Any]) -> None:
        """Store the replies to the commands of one server."""
        for (at, _), reply in zip(share, replies, strict=True):
            if at is not None:
                self.replies[at] = reply

    def fail(self, server: str, share: Sequence[Sent], error: Exception) -> None:
        """Store the failure of a server as the reply to each of its commands."""
        self._servers.note(server, error)
        self.put(share, [error] * len(share))

    def redirected(self) -> Shares:
        """Pass all errors to `Servers.note`; return the redirected commands, grouped by their new server."""
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
    Sends commands to the nodes of a Cluster, each to the node with its keys.

    Connections to a node are opened at the first use and closed after the node has left the Cluster.

    Args:
        connect: creates the connections to a node.
    """

    def __init__(self, driver: Driver, servers: Servers, connect: Callable[[str], ServerConnections]) -> None:
        self.driver = driver
        self._servers = servers
        self._connect = connect
        self._lock = threading.Lock()
        self._nodes: dict[str, ServerConnections] = {}

    async def exchange(self, commands: Sequence[Sequence[Arg]]) -> list[Any]:
        """Send `commands` at the same time and return the replies; a failed command has the exception as reply."""
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

    async def close(self) -> None:
        """Close every connection; a connection is opened again at its next use."""
        for node in list(self._nodes.values()):
            await node.close()

    def place(self, key: str) -> Hashable:
        """Return the slot of `key`; one command may use several keys of the same slot."""
        return key_slot(key)

    def node_for(self, key: str) -> ServerConnections:
        """Return the connections to the node with `key`; raise NotSentError if no such node is available."""
        return self._node(self._servers.server_of(("GET", key)))

    def nodes(self) -> dict[str, ServerConnections]:
        """Return the connections to all known primaries; wait for the first read of the slots."""
        if not self._servers.is_ready:
            self._servers.server_of(("PING",))
        return {server: self._node(server) for server in self._servers.names()}

    def each(self, *, replicas: bool = False) -> dict[str, ServerConnections]:
        """Read the slots; return the connections to all primaries and, if `replicas` is true, to all replicas."""
        others = self._servers.replicas()
        names = [*self._servers.names(), *(others if replicas else ())]
        return {server: self._node(server) for server in names}

    def check(self, node: ServerConnections) -> None:
        """Raise NotSentError while the server of `node` does not answer."""
        self._servers.check(node.server)

    def note(self, node: ServerConnections, error: Exception) -> None:
        """Process a failure or an error reply that occurred outside of `exchange`, see `Servers.note`."""
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
            # All callers send in the same order of servers, so two callers never wait for each other's connections.
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
    """Return for how many seconds to wait for the replies of one server."""
    seconds = SERVER_SECONDS
    for _, command in share:
        if command[0] == "BLPOP":
            seconds += float(command[-1])
        elif command[0] in _WAITS:
            seconds += float(command[-1]) / 1000
    return seconds


Transport = ServerConnections | ClusterTransport
