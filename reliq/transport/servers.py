"""The nodes of a Cluster, and which of them has a key."""

from collections.abc import Callable, Collection, Hashable, Sequence
from contextlib import suppress
from typing import Any

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
        self._breakers = Breakers(lambda node: raise_first(ask(node, [("PING",)])), self.topology.read_again)

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
