"""
The faults of a Cluster: each injects its fault, waits until the Cluster is whole, and records possible losses.

When a replica is promoted, writes of the old primary that it had not received are lost: from the last write that a
replica confirmed until the old primary died or became a replica. This span is recorded as a `rewind` of the primary's
queues. The checker excuses losses by it only for calls that no replica confirmed.
"""

import time
from contextlib import suppress

import redis

from reliq import Admin
from reliq.errors import RedisUnavailableError
from tests import cluster_moves as moves
from tests.harness.chaos.arena import Arena
from tests.harness.chaos.schedule import PRODUCERS, Fault
from tests.harness.chaos.workload import GROWING, place_keys
from tests.waiting import eventually

#: In a run this long, a primary is paused for 20 s and a slot is left half moved for 3 s; in shorter runs for less.
LONG_RUN_SECONDS = 120.0
#: Longest isolation of a primary: if no replica was promoted by then, the other nodes can reach it again.
CUT_OFF_SECONDS = 60.0
#: How long a write waits for its replica before a fault.
CONFIRM_MS = 1000
#: If the replica confirmed no write before a fault, assume that the writes of this many seconds may be lost.
LONG_AGO_SECONDS = 5.0
#: More than fits into the socket buffers between a primary and its replica, so that later writes do not arrive.
BLOCKAGE_BYTES = 32_000_000


class Victim:
    """A primary that will lose its role, and its replica."""

    def __init__(self, arena: Arena, fault: Fault) -> None:
        self._arena, self._cluster = arena, arena.ground.cluster
        self._key = _key(arena, fault)
        self._mark = self._key.partition("}")[0] + "}:mark"
        self.server, self.replica = self._cluster.primary_of(self._key), self._cluster.replica_of(self._key)
        self.queues = arena.ground.queues_at(self.server)
        self.confirmed = time.monotonic() - LONG_AGO_SECONDS
        self.confirm()

    def confirm(self, ms: int = CONFIRM_MS) -> bool:
        """Write a key and wait for the replica; return whether it confirmed this write and all earlier writes."""
        began, client = time.monotonic(), self._cluster.client(self.server)
        with suppress(redis.RedisError), client.client() as one:  # WAIT covers the writes of its own connection only
            one.set(self._mark, "", px=10_000)
            if one.wait(1, ms):
                self.confirmed = began
                return True
        return False

    def hold_up_the_replica(self) -> None:
        """Pause the replica, so that it receives no further writes; its connection stays open."""
        self._cluster.pause(self.replica)
        with suppress(redis.RedisError):  # on a busy machine the Cluster may be down for a moment
            self._cluster.client(self.server).set(self._mark, b"x" * BLOCKAGE_BYTES, px=10_000)

    def note(self, since: float, until: float) -> None:
        """Record that a failover may lose the writes of the primary between `since` and `until`."""
        self._arena.journal.write("rewind", queues=self.queues, since=since, until=until)

    def has_lost_its_place(self) -> bool:
        """Return whether the replica is now the primary."""
        return self._cluster.client(self.replica).info("replication")["role"] == "master"

    def wait_for_its_successor(self) -> None:
        """Wait until the replica has been promoted."""
        eventually(self.has_lost_its_place, "the replica takes the primary's place")

    def wait_until_it_knows(self, since: float) -> None:
        """Wait until the old primary has become a replica. Record that its writes until then may be lost."""
        client = self._cluster.client(self.server)
        eventually(lambda: client.info("replication")["role"] == "slave", "the old primary hears of it")
        self.note(since, time.monotonic())


def primary_killed(arena: Arena, fault: Fault) -> None:
    _kill(arena, Victim(arena, fault))


def primary_killed_ahead(arena: Arena, fault: Fault) -> None:
    """Kill a primary before its replica has received the last writes."""
    victim = Victim(arena, fault)
    victim.hold_up_the_replica()
    time.sleep(fault.seconds / 2)
    _kill(arena, victim)


def _kill(arena: Arena, victim: Victim) -> None:
    ground = arena.ground
    victim.server.kill()
    victim.note(victim.confirmed, time.monotonic())
    ground.cluster.resume(victim.replica)
    victim.wait_for_its_successor()
    with suppress(RedisUnavailableError):
        victim.server.start()
    ground.bus.announce(victim.server)
    ground.cluster.wait_until_ok()


def primary_paused(arena: Arena, fault: Fault) -> None:
    cluster, victim = arena.ground.cluster, Victim(arena, fault)
    cluster.pause(victim.server)
    victim.note(victim.confirmed, time.monotonic())
    until = time.monotonic() + (20 if is_long(fault) else 2)
    victim.wait_for_its_successor()
    time.sleep(max(0.0, until - time.monotonic()))
    goes_on = time.monotonic()
    cluster.resume(victim.server)
    victim.wait_until_it_knows(goes_on)
    cluster.wait_until_ok()


def primary_cut_off(arena: Arena, fault: Fault) -> None:
    """Isolate a primary from the other nodes but not from clients: for a moment there are two primaries."""
    cluster, bus, victim = arena.ground.cluster, arena.ground.bus, Victim(arena, fault)
    bus.cut_off(victim.server)
    try:
        until = time.monotonic() + CUT_OFF_SECONDS
        while not victim.has_lost_its_place():
            victim.confirm(ms=20)
            assert time.monotonic() < until, "no replica takes the place of a primary that is cut off"
        time.sleep(fault.seconds)
    finally:
        bus.heal()
    victim.wait_until_it_knows(victim.confirmed)
    cluster.wait_until_ok()


def node_forgotten(arena: Arena, fault: Fault) -> None:
    """Let the other nodes forget a primary or a replica, and meet it again."""
    cluster, victim = arena.ground.cluster, Victim(arena, fault)
    server = victim.server if fault.count % 2 else victim.replica
    moves.forget(cluster, server)
    time.sleep(fault.seconds)
    moves.meet(cluster, server)
    cluster.wait_until_ok()


def slot_moved_by_hand(arena: Arena, fault: Fault) -> None:
    """Move a slot as `redis-cli --cluster reshard` does, with a pause while each of two nodes has half of the keys."""
    cluster = arena.ground.cluster
    move = moves.SlotMove(cluster, _key(arena, fault))
    move.begin()
    left = move.left()
    with suppress(redis.ResponseError):
        move.take(*left[: len(left) // 2])
    time.sleep(3 if is_long(fault) else fault.seconds)
    move.end()
    cluster.wait_until_ok()


def slot_moved_at_once(arena: Arena, fault: Fault) -> None:
    """Move a slot atomically if the Cluster can, otherwise stepwise without a pause."""
    cluster, key = arena.ground.cluster, _key(arena, fault)
    if moves.moves_at_once(cluster):
        moves.move_at_once(cluster, key)
    else:
        move = moves.SlotMove(cluster, key)
        move.begin()
        move.end()
    cluster.wait_until_ok()


def nodes_disturbed(arena: Arena, _fault: Fault) -> None:
    """Let every node forget its scripts and close its client connections."""
    cluster = arena.ground.cluster
    for one in cluster.nodes:
        cluster.ask(one, "SCRIPT", "FLUSH")
        cluster.ask(one, "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")


def shards_added(arena: Arena, fault: Fault) -> None:
    """Add shards to a queue, half or all of the final number, while a producer is paused."""
    admin = Admin(url=arena.ground.cluster.url)
    admin.finish_resize(GROWING)
    now = admin.shards(GROWING).map
    if now.was == now.n < arena.ground.shards:
        with arena.producers[fault.victim % PRODUCERS].paused():
            admin.resize(GROWING, max(arena.ground.shards // 2, 2 * now.n))
            time.sleep(fault.seconds)
    arena.journal.write("shards", map=admin.shards(GROWING).map.text.decode())


def is_long(fault: Fault) -> bool:
    """Return whether the run is so long that faults may last longer."""
    return fault.length >= LONG_RUN_SECONDS


def _key(arena: Arena, fault: Fault) -> str:
    """Return a Redis key of the queue or shard that the fault affects."""
    places = arena.ground.places()
    return place_keys(places[fault.victim % len(places)]).ready
