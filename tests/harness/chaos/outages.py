"""
The faults of a Cluster: each does its harm, waits until the Cluster is whole again, and notes what may be forgotten.

When a replica takes its primary's place, what the primary wrote and the replica had not got is gone: from the last write
that a replica confirmed until the old primary was dead, or knew that it is none any more. That span is noted as a
`rewind` of the primary's queues; the checker excuses by it what no replica had confirmed, and nothing else.
"""

import time
from collections.abc import Callable
from contextlib import suppress

import redis

from reliq.errors import RedisUnavailableError
from tests import cluster_moves as moves
from tests.harness.chaos.arena import Arena
from tests.harness.chaos.grounds import ManyServers
from tests.harness.chaos.growth import shards_added
from tests.harness.chaos.schedule import Fault
from tests.harness.chaos.workload import place_keys
from tests.waiting import eventually

#: In a run this long a primary stands still for 20 s and a slot is held open for 3, in a shorter one for a part of it.
LONG_RUN_SECONDS = 120.0
#: A primary is cut off for so long at most: without a new one by then, the others still hear of it.
CUT_OFF_SECONDS = 60.0
#: So long does a write wait for its replica before a fault.
CONFIRM_MS = 1000
#: When no write was confirmed: what may be forgotten began so long ago.
LONG_AGO_SECONDS = 5.0
#: More than the sockets between a primary and its replica hold: what is written after it does not get through.
BLOCKAGE_BYTES = 32_000_000


class Victim:
    """
    A primary that is about to lose its place, and its replica.

    Args:
        number: which of the places to take: the primary of that is the victim.
    """

    def __init__(self, arena: Arena, number: int) -> None:
        self._arena, self._cluster = arena, many(arena).cluster
        places = many(arena).places()
        self._key = place_keys(places[number % len(places)]).ready
        self.server, self.replica = self._cluster.primary_of(self._key), self._cluster.replica_of(self._key)
        self.queues = many(arena).queues_at(self.server)
        self.confirmed = time.monotonic() - LONG_AGO_SECONDS
        self.confirm()

    def confirm(self, ms: int = CONFIRM_MS) -> bool:
        """Write something and wait for the replica; say whether it has it, and so everything before."""
        began, client = time.monotonic(), self._cluster.client(self.server)
        with suppress(redis.RedisError), client.client() as one:  # WAIT is for what its own connection wrote
            one.set(self._mark, "", px=10_000)
            if one.wait(1, ms):
                self.confirmed = began
                return True
        return False

    def hold_up_the_replica(self) -> None:
        """Have the replica get nothing any more, though its connection stands."""
        self._cluster.pause(self.replica)
        with suppress(redis.RedisError):  # a busy machine's Cluster may be down for a moment
            self._cluster.client(self.server).set(self._mark, b"x" * BLOCKAGE_BYTES, px=10_000)

    def note(self, since: float, until: float) -> None:
        """Note that what the primary wrote then may be forgotten."""
        self._arena.journal.write("rewind", queues=self.queues, since=since, until=until)

    def has_lost_its_place(self) -> bool:
        """Say whether the replica is the primary now."""
        return self._cluster.client(self.replica).info("replication")["role"] == "master"

    def knows_it(self) -> bool:
        """Say whether it has taken notice."""
        return self._cluster.client(self.server).info("replication")["role"] == "slave"

    @property
    def _mark(self) -> str:
        return self._key.partition("}")[0] + "}:mark"


def primary_killed(arena: Arena, fault: Fault) -> None:
    victim = Victim(arena, fault.victim)
    _kill(arena, victim)


def primary_killed_ahead(arena: Arena, fault: Fault) -> None:
    """Kill a primary whose replica has not got what it wrote last."""
    victim = Victim(arena, fault.victim)
    victim.hold_up_the_replica()
    time.sleep(fault.seconds / 2)
    _kill(arena, victim)


def _kill(arena: Arena, victim: Victim) -> None:
    victim.server.kill()
    victim.note(victim.confirmed, time.monotonic())
    many(arena).cluster.resume(victim.replica)
    eventually(victim.has_lost_its_place, "the replica takes the primary's place")
    with suppress(RedisUnavailableError):
        victim.server.start()
    many(arena).bus.announce(victim.server)
    many(arena).cluster.wait_until_ok()


def primary_paused(arena: Arena, fault: Fault) -> None:
    cluster, victim = many(arena).cluster, Victim(arena, fault.victim)
    cluster.pause(victim.server)
    victim.note(victim.confirmed, time.monotonic())
    until = time.monotonic() + (20 if is_long(fault) else 2)
    eventually(victim.has_lost_its_place, "the replica takes the primary's place")
    time.sleep(max(0.0, until - time.monotonic()))
    goes_on = time.monotonic()
    cluster.resume(victim.server)
    eventually(victim.knows_it, "the old primary hears of it")
    victim.note(goes_on, time.monotonic())
    cluster.wait_until_ok()


def primary_cut_off(arena: Arena, fault: Fault) -> None:
    """Have a primary, which clients reach, and the other nodes not hear of each other: two primaries for a moment."""
    cluster, bus, victim = many(arena).cluster, many(arena).bus, Victim(arena, fault.victim)
    bus.cut_off(victim.server)
    try:
        until = time.monotonic() + CUT_OFF_SECONDS
        while not victim.has_lost_its_place():
            victim.confirm(ms=20)
            assert time.monotonic() < until, (
                f"no replica takes the place of a primary that is cut off: {victim.server.port}"
            )
        time.sleep(fault.seconds)
    finally:
        bus.heal()
    eventually(victim.knows_it, "the old primary hears of it")
    victim.note(victim.confirmed, time.monotonic())
    cluster.wait_until_ok()


def node_forgotten(arena: Arena, fault: Fault) -> None:
    """Have the others forget a primary or a replica, and meet it again."""
    cluster, victim = many(arena).cluster, Victim(arena, fault.victim)
    server = victim.server if fault.count % 2 else victim.replica
    moves.forget(cluster, server)
    time.sleep(fault.seconds)
    moves.meet(cluster, server)
    cluster.wait_until_ok()


def slot_moved_by_hand(arena: Arena, fault: Fault) -> None:
    """Move a slot as `redis-cli --cluster reshard` does, and stop in the middle, where each of two nodes has a half."""
    cluster = many(arena).cluster
    move = moves.SlotMove(cluster, _key(arena, fault))
    move.begin()
    left = move.left()
    with suppress(redis.ResponseError):
        move.take(*left[: len(left) // 2])
    time.sleep(3 if is_long(fault) else fault.seconds)
    move.end()
    cluster.wait_until_ok()


def slot_moved_at_once(arena: Arena, fault: Fault) -> None:
    """Move a slot atomically where the Cluster can, elsewhere by hand and without a stop."""
    cluster, key = many(arena).cluster, _key(arena, fault)
    if moves.moves_at_once(cluster):
        moves.move_at_once(cluster, key)
    else:
        move = moves.SlotMove(cluster, key)
        move.begin()
        move.end()
    cluster.wait_until_ok()


def nodes_disturbed(arena: Arena, _fault: Fault) -> None:
    """Have every node forget its scripts and drop its clients."""
    cluster = many(arena).cluster
    for one in cluster.nodes:
        cluster.ask(one, "SCRIPT", "FLUSH")
        cluster.ask(one, "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")


FAULTS_OF_A_CLUSTER: dict[str, Callable[[Arena, Fault], None]] = {
    one.__name__: one
    for one in (
        primary_killed,
        primary_killed_ahead,
        primary_paused,
        primary_cut_off,
        node_forgotten,
        slot_moved_by_hand,
        slot_moved_at_once,
        shards_added,
        nodes_disturbed,
    )
}


def many(arena: Arena) -> ManyServers:
    """Return the ground of a run that breaks a Cluster."""
    assert isinstance(arena.ground, ManyServers)
    return arena.ground


def is_long(fault: Fault) -> bool:
    """Say whether the run is one in which a fault may last longer."""
    return fault.length >= LONG_RUN_SECONDS


def _key(arena: Arena, fault: Fault) -> str:
    """Return a key of the place that is meant."""
    places = many(arena).places()
    return place_keys(places[fault.victim % len(places)]).ready
