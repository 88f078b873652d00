"""
Send commands to the nodes of a Redis Cluster: find the node of each key, and use one round trip for several nodes.

A separate thread reads from the Cluster which node has which slots. Commands to a node that timed out fail immediately
until the node answers again, so commands to other nodes do not wait for it.
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

#: A server that has not replied after this many seconds counts as unavailable. For blocking commands, their own
#: timeouts are added.
SERVER_SECONDS = 0.9
#: After a node has timed out, pause this many seconds before the first PING. Each later pause is twice as long.
FIRST_PAUSE_SECONDS = 0.1
#: The longest pause between two PINGs to a node that has timed out, in seconds.
LONGEST_PAUSE_SECONDS = 0.5
#: The shortest time between two reads of the slots, in seconds. All reads that are requested during this time are
#: done by one read.
READ_PAUSE_SECONDS = 0.05
#: The longest wait for the first read of the slots, in seconds.
FIRST_READ_SECONDS = 2.0

#: Commands whose first argument is not a Redis key. Any server can run them.
_KEYLESS = {"ACL", "CLUSTER", "CONFIG", "INFO", "PING", "SCAN", "SCRIPT", "SLOWLOG", "TIME"}
_WAITS = ("WAIT", "WAITAOF")
#: Error codes with which a Cluster node replies during or after its failover.
_CHANGING = {"CLUSTERDOWN", "LOADING", "MASTERDOWN", "READONLY"}
#: Do not use the functions of `random`: if an application seeds them, its random numbers must not depend on reliq.
_random = random.SystemRandom()

#: The ranges of slots: for each range its first and last slot, its primary, and the replicas of this primary. Nodes
#: are written as HOST:PORT.
Ranges = list[tuple[int, int, str, list[str]]]
Connect = Callable[[str, Sequence[Sequence[str]]], list[Any]]


class CircuitBreakers:
    """
    Stores the nodes that timed out or refused a connection, and lets commands to these nodes fail immediately.

    For each stored node, a thread sends PING with a backoff until the node answers. Then the node is removed.

    Args:
        probe: a function that connects to a node and sends PING; raises the exceptions of redis-py.
        meanwhile: a function that is called after each failed PING.
    """

    def __init__(self, probe: Callable[[str], object], meanwhile: Callable[[], None]) -> None:
        self._probe = probe
        self._meanwhile = meanwhile
        self._lock = threading.Lock()
        #: For each node that did not answer, the exception with which it failed.
        self._open: dict[str, Exception] = {}

    def check(self, node: str) -> str:
        """Return `node`; raise NotSentError if the node did not answer and has not answered a PING since."""
        if self._open and (why := self._open.get(node)):
            raise NotSentError(f"{node} does not answer and is tried again in the background ({why})")
        return node

    def trip(self, node: str, why: Exception) -> None:
        """Store that `node` did not answer, so that all commands to it fail until it answers a PING."""
        with self._lock:
            if node in self._open:
                return
            self._open[node] = why
        threading.Thread(target=self._ping, args=(node,), name=f"reliq-ping-{node}", daemon=True).start()

    def keep(self, nodes: Collection[str]) -> None:
        """Forget that nodes did not answer, except the nodes in `nodes`."""
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
            except Exception as error:  # the node sent an error reply, so it answers again
                logger.debug("%s answers again: %s", node, error)
            with self._lock:
                self._open.pop(node, None)


class Servers:
    """
    The nodes of a Cluster: which node has which slots, and which nodes do not answer.

    Args:
        seeds: the nodes to connect to before the slots are known, as HOST:PORT.
        ask: a function that connects to a node and returns its replies to commands; raises the exceptions of redis-py.
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
        """Whether the slots have been read. If not, `server_of` waits for the first read."""
        return self._slots is not None

    def server_of(self, command: Sequence[Arg]) -> str:
        """
        Return the node that has the first key of `command`. For a command without a key, return any node.

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
        """Raise NotSentError if `server` did not answer and has not answered a PING since."""
        self._breakers.check(server)

    def close(self) -> None:
        """Stop sending PINGs to the nodes that timed out, and allow commands to all nodes again."""
        self._breakers.keep(())

    def names(self) -> Collection[str]:
        """Return the primaries that the last read of the slots found."""
        return self._nodes

    def replicas(self) -> Collection[str]:
        """Read the slots again and return all replicas. If the read fails, return the replicas of the last read."""
        with suppress(*broken()):
            self._take(self._ask_around())
        return {replica for replicas in self._nodes.values() for replica in replicas}

    def note(self, server: str, error: Exception) -> str:
        """
        Process an error of `server`. If it is a redirection (MOVED or ASK), return the node that it names.

        For any other error, return an empty text. If the server did not answer, read the slots again, and let further
        commands to the server fail immediately until it answers a PING.
        """
        if isinstance(error, redis.exceptions.AskError):  # MovedError is a subclass of AskError
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
        """Start a read of the slots in a thread. If a read is running already, another read follows it."""
        with self._lock:
            if self._is_reading:
                self._is_read_wanted = True
                return
            self._is_reading = True
            self._read.clear()
        threading.Thread(target=self._read_while_wanted, name="reliq-topology", daemon=True).start()

    def _any(self) -> str:
        """Return a node that answers. Later calls return the same node until it fails or leaves the Cluster."""
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
        """Read the slots from the first node with `cluster_state:ok`; without such a node, from any that answers."""
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
    """Return the Cluster slot of a Redis key. If the key has a hash tag, only the tag determines the slot."""
    tag, closed, _ = key.partition("{")[2].partition("}")
    return slot_of(tag if closed and tag else key)


def ranges_of(rows: Sequence[Sequence[Any]], asked: str) -> Ranges:
    """
    Parse a reply to CLUSTER SLOTS.

    Args:
        rows: the reply.
        asked: the node that sent the reply, as HOST:PORT. Nodes without a host in the reply get the host of this node.
    """

    def node(row: Sequence[Any]) -> str:
        host = row[0].decode() if row[0] else asked.rpartition(":")[0]
        return f"{host}:{row[1]}"

    return [(first, last, node(primary), list(map(node, replicas))) for first, last, primary, *replicas in rows]


def _key(command: Sequence[Arg]) -> str | None:
    """Return the first Redis key of a command; None if the command has no keys."""
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
    """A command that is sent, and the index of its reply in `Exchange.replies`; None if the reply is not needed."""

    at: int | None
    command: Sequence[Arg]


#: For each server, the commands that are sent to it in one round trip.
Shares = dict[str, list[Sent]]


class Exchange:
    """
    One round trip to several servers.

    Groups the commands by server, and stores the replies in the order of the commands. If a server fails, the exception
    is stored as the reply to each of its commands. WAIT and WAITAOF are sent to the same server as the command before.
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
        """Store the replies of one server. `share` has the commands that were sent to it."""
        for (at, _), reply in zip(share, replies, strict=True):
            if at is not None:
                self.replies[at] = reply

    def fail(self, server: str, share: Sequence[Sent], error: Exception) -> None:
        """Store `error`, the failure of a server, as the reply to each command in `share`."""
        self._servers.note(server, error)
        self.put(share, [error] * len(share))

    def redirected(self) -> Shares:
        """Pass all error replies to `Servers.note`. Return the redirected commands, grouped by their new server."""
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
    Sends commands to the nodes of a Cluster: each command to the node that has its keys.

    Connections to a node are opened at the first use. They are closed after the node has left the Cluster.

    Args:
        connect: a function that creates the `ServerConnections` of a node.
    """

    def __init__(self, driver: Driver, servers: Servers, connect: Callable[[str], ServerConnections]) -> None:
        self.driver = driver
        self._servers = servers
        self._connect = connect
        self._lock = threading.Lock()
        self._nodes: dict[str, ServerConnections] = {}

    async def exchange(self, commands: Sequence[Sequence[Arg]]) -> list[Any]:
        """Send `commands` to their nodes and return the replies. The reply to a failed command is an exception."""
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
        """Close all connections. A connection is opened again at its next use."""
        for node in list(self._nodes.values()):
            await node.close()

    def place(self, key: str) -> Hashable:
        """Return the slot of `key`. One command may use several keys only if they have the same slot."""
        return key_slot(key)

    def node_for(self, key: str) -> ServerConnections:
        """Return the connections to the node with `key`; raise NotSentError if the node is unknown or unavailable."""
        return self._node(self._servers.server_of(("GET", key)))

    def nodes(self) -> dict[str, ServerConnections]:
        """Return the connections to all known primaries. If the slots have not been read, wait for the first read."""
        if not self._servers.is_ready:
            self._servers.server_of(("PING",))
        return {server: self._node(server) for server in self._servers.names()}

    def each(self, *, replicas: bool = False) -> dict[str, ServerConnections]:
        """Read the slots and return the connections to all primaries. If `replicas` is true, add all replicas."""
        others = self._servers.replicas()
        names = [*self._servers.names(), *(others if replicas else ())]
        return {server: self._node(server) for server in names}

    def check(self, node: ServerConnections) -> None:
        """Raise NotSentError if the server of `node` did not answer and has not answered a PING since."""
        self._servers.check(node.server)

    def note(self, node: ServerConnections, error: Exception) -> None:
        """Process an error of a node that occurred outside of `exchange`, see `Servers.note`."""
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
            # Every round trip uses the servers in the same order. So two round trips cannot wait for each other's
            # connections.
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
    """Return for how many seconds to wait for the replies to the commands in `share`, sent to one server."""
    seconds = SERVER_SECONDS
    for _, command in share:
        if command[0] == "BLPOP":
            seconds += float(command[-1])
        elif command[0] in _WAITS:
            seconds += float(command[-1]) / 1000
    return seconds


Transport = ServerConnections | ClusterTransport
