"""Which node of a Cluster has which slot: read in a thread of its own, never on the path of work."""

import random
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import redis

from reliq.hashtags import CLUSTER_SLOTS, slot_of
from reliq.replies import read_facts
from reliq.transport.failures import BROKEN, NotSentError
from reliq.transport.gate import WrongKindError

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
