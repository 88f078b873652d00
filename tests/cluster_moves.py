"""Operators' changes to a Cluster: move slots stepwise or atomically, forget and meet a node, isolate a node."""

import time
from contextlib import suppress

import redis

from reliq.testing.server import EmbeddedRedis
from tests.cluster_servers import LiveCluster
from tests.waiting import eventually

#: Number of keys in one MIGRATE.
KEYS_AT_ONCE = 100
MIGRATE_MS = 5000
#: Nodes that spread `forget` to other nodes ignore a forgotten node for this long.
FORGOTTEN_SECONDS = 65.0


class SlotMove:
    """
    The move of a key's slot to another primary, step by step, as `redis-cli --cluster reshard` does it.

    Args:
        to: the target primary, None for the next primary.
    """

    def __init__(self, cluster: LiveCluster, key: str, to: EmbeddedRedis | None = None) -> None:
        self._cluster = cluster
        self.slot = redis.cluster.key_slot(key.encode())
        self.source = cluster.primary_of(key)
        self.target = to or neighbour(cluster, self.source)

    def begin(self) -> None:
        """Begin the move at both primaries: from now on, calls for missing keys get ASK redirects or TRYAGAIN errors."""
        self._cluster.ask(self.target, "CLUSTER", "SETSLOT", self.slot, "IMPORTING", my_id(self._cluster, self.source))
        self._cluster.ask(self.source, "CLUSTER", "SETSLOT", self.slot, "MIGRATING", my_id(self._cluster, self.target))

    def left(self, limit: int = 1000) -> list[bytes]:
        """Return keys of the slot that are not moved yet."""
        return self._cluster.ask(self.source, "CLUSTER", "GETKEYSINSLOT", self.slot, limit)

    def take(self, *keys: bytes) -> None:
        """Move some keys."""
        if keys:
            place = "127.0.0.1", self.target.port
            self._cluster.ask(self.source, "MIGRATE", *place, "", 0, MIGRATE_MS, "KEYS", *keys)

    def end(self) -> None:
        """Move the remaining keys, and announce the slot's new owner to every primary, to the new owner first."""
        while keys := self.left(KEYS_AT_ONCE):
            self.take(*keys)
        others = [one for one in self._cluster.primaries() if one not in (self.source, self.target)]
        for one in (self.target, self.source, *others):
            self._cluster.ask(one, "CLUSTER", "SETSLOT", self.slot, "NODE", my_id(self._cluster, self.target))


def moves_at_once(cluster: LiveCluster) -> bool:
    """Return whether the Cluster can move slots atomically, as Valkey can since version 9."""
    told = cluster.ask(cluster.nodes[0], "CLUSTER", "HELP")
    return any(b"MIGRATESLOTS" in line for line in told)


def move_at_once(cluster: LiveCluster, key: str) -> None:
    """Move a key's slot to the next primary with CLUSTER MIGRATESLOTS, and wait until it is there."""
    slot, source = redis.cluster.key_slot(key.encode()), cluster.primary_of(key)
    target = neighbour(cluster, source)
    cluster.ask(source, "CLUSTER", "MIGRATESLOTS", "SLOTSRANGE", slot, slot, "NODE", my_id(cluster, target))
    eventually(lambda: cluster.primary_of(key) is target, f"slot {slot} is at its new primary")


def forget(cluster: LiveCluster, server: EmbeddedRedis) -> None:
    """Let all nodes forget a node, except its own replicas, because a replica cannot forget its primary."""
    id = my_id(cluster, server)
    for one in cluster.nodes:
        with suppress(redis.ResponseError):  # Valkey has a setting for this time
            cluster.ask(one, "CONFIG", "SET", "cluster-blacklist-ttl", 1)
    for one in cluster.nodes:
        if one is not server and cluster.client(one).info("replication").get("master_port") != server.port:
            with suppress(redis.ResponseError):  # another node may have told it already
                cluster.ask(one, "CLUSTER", "FORGET", id)


def meet(cluster: LiveCluster, server: EmbeddedRedis) -> None:
    """Make every node meet a node again; since Redis 7.2 nodes refuse this for a minute after `forget`."""
    asked_at = -FORGOTTEN_SECONDS

    def is_known() -> bool:
        nonlocal asked_at
        without = [one for one in cluster.nodes if not _knows_all(cluster, one)]
        if time.monotonic() - asked_at > FORGOTTEN_SECONDS:  # an earlier call would restart the minute
            asked_at = time.monotonic()
            for one in without:
                if one is not server:
                    cluster.ask(one, "CLUSTER", "MEET", "127.0.0.1", server.port)
        return not without

    eventually(is_known, "every node knows every other", 3 * FORGOTTEN_SECONDS)


def _knows_all(cluster: LiveCluster, server: EmbeddedRedis) -> bool:
    rows = cluster.ask(server, "CLUSTER", "NODES").decode().splitlines()
    return sum("handshake" not in row for row in rows) == len(cluster.nodes)


def neighbour(cluster: LiveCluster, server: EmbeddedRedis) -> EmbeddedRedis:
    """Return the next primary after a primary."""
    primaries = cluster.primaries()
    return primaries[(primaries.index(server) + 1) % len(primaries)]


def my_id(cluster: LiveCluster, server: EmbeddedRedis) -> bytes:
    """Return the id of a node."""
    return cluster.ask(server, "CLUSTER", "MYID")
