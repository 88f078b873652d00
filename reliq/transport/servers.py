"""Which of many servers has a key: those of a Cluster by its topology, independent ones by the shard of the key."""

import re
from collections.abc import Callable, Collection, Hashable, Sequence
from contextlib import suppress
from typing import Any, Protocol

import redis

from reliq.call import Arg, raise_first
from reliq.transport.breakers import Breakers
from reliq.transport.error_replies import code
from reliq.transport.failures import BROKEN, NotSentError
from reliq.transport.topology import Topology, key_slot

#: Commands whose first argument is no key: whichever server is asked, it speaks for itself.
_KEYLESS = {"ACL", "CLUSTER", "CONFIG", "INFO", "PING", "SCAN", "SCRIPT", "SLOWLOG", "TIME"}
#: Refusals that a node of a Cluster gives while another one takes, or has taken, its place.
_CHANGING = {"CLUSTERDOWN", "LOADING", "MASTERDOWN", "READONLY"}
_SHARD = re.compile(r"\{[^{}#]*#([0-9]+)")

Connect = Callable[[str, Sequence[Sequence[str]]], list[Any]]


class Servers(Protocol):
    """Servers behind one wire, each by a name."""

    @property
    def is_ready(self) -> bool:
        """Whether `server_of` answers without waiting."""

    def server_of(self, command: Sequence[Arg]) -> str:
        """Return the server that has a command's first key; raise NotSentError when nobody has, or it does not answer."""

    def check(self, server: str) -> str:
        """Return `server`; raise NotSentError when it is known not to answer."""

    def place(self, key: str) -> Hashable:
        """Return what keys have in common that may stand in one command."""

    def names(self) -> Collection[str]:
        """Return all that are in use."""

    def look(self) -> Collection[str]:
        """Find out who is there now; return the replicas."""

    def note(self, server: str, error: Exception) -> str:
        """Note that `server` failed, or refused with `error`; return the server that it refers to, empty for none."""

    def close(self) -> None:
        """Try none any more that does not answer."""


class ClusterServers:
    """
    The nodes of a Cluster.

    Args:
        seeds: those to ask first, as HOST:PORT.
        ask: connects to one and returns its replies to commands.
    """

    def __init__(self, seeds: Sequence[str], ask: Connect) -> None:
        self._ask, self._favourite = ask, ""
        self.topology = Topology(seeds, self._asked, self._take)
        self._breakers = Breakers(lambda node: raise_first(ask(node, [("PING",)])), self.topology.read_again)

    @property
    def is_ready(self) -> bool:
        """Whether the topology is known."""
        return self.topology.is_known

    def server_of(self, command: Sequence[Arg]) -> str:
        """Return the node that has the slot of a command's first key, any for a command without one."""
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
        """Return the slot of `key`."""
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
        """Learn where a slot has moved; have a node that does not answer fail at once; read the topology again."""
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


class ShardServers:
    """
    Independent servers, each with every so many-th shard of a queue; all else lies on the first.

    Args:
        names: of the servers, in their order.
        ask: connects to one and returns its replies to commands.
    """

    is_ready = True

    def __init__(self, names: Sequence[str], ask: Connect) -> None:
        self._names = names
        self._breakers = Breakers(lambda server: raise_first(ask(server, [("PING",)])), lambda: None)

    def server_of(self, command: Sequence[Arg]) -> str:
        """Return the server that has the shard of a command's first key."""
        key = _key(command)
        return self._breakers.check(self._names[0] if key is None else self._names[self._at(key)])

    def check(self, server: str) -> str:
        """Return `server`; raise NotSentError when it is known not to answer."""
        return self._breakers.check(server)

    def close(self) -> None:
        """Try none any more that does not answer."""
        self._breakers.close()

    def place(self, key: str) -> Hashable:
        """Return the number of the server that has `key`."""
        return self._at(key)

    def names(self) -> Collection[str]:
        """Return all of them."""
        return self._names

    def look(self) -> Collection[str]:
        """Return none: they do not change, and their replicas are not known."""
        return ()

    def note(self, server: str, error: Exception) -> str:
        """Have a server that does not answer fail at once."""
        if _is_silent(error):
            self._breakers.trip(server, error)
        return ""

    def _at(self, key: str) -> int:
        found = _SHARD.match(key)
        return int(found[1]) % len(self._names) if found else 0


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
