"""One run from its start to its full drain; what happened is in the folder afterwards."""

import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import redis

from tests.harness.chaos import nemesis, scan
from tests.harness.chaos.arena import Arena
from tests.harness.chaos.grounds import Ground, Kind, ManyServers, OneServer
from tests.harness.chaos.schedule import schedule
from tests.harness.chaos.workload import PER_KEY, RETRIES, SHARES, place_keys

#: Before the clock starts, every consumer is to be at work.
WARM_UP_SECONDS = 150.0
LOOK_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Plan:
    """
    What is to be run; the same plan gives the same schedule and the same choices.

    Attributes:
        kind: what is broken: one server, one whose queues have keys, or a Cluster.
        shards: how many a queue of a Cluster gets, in two steps.
    """

    seed: int
    seconds: float
    rate: float
    drain_seconds: float = 120.0
    server: Path | None = None
    kind: Kind = "server"
    shards: int = 8


def run(plan: Plan, folder: Path) -> None:
    """Run `plan`; every process writes its history into `folder`."""
    with (
        _ground(plan, folder) as ground,
        Arena(folder, plan.seed, ground) as arena,
    ):
        arena.start_consumers()
        _wait_for_consumers(arena)
        start = time.monotonic()
        retries = {name: RETRIES[name] for name in SHARES[plan.kind]}
        arena.journal.write("begun", start=start, seconds=plan.seconds, retries=retries, per_key=PER_KEY)
        arena.start_producers(plan.rate, start + plan.seconds)
        tracks = nemesis.unleash(arena, schedule(plan.seed, plan.seconds, plan.kind), start)
        while time.monotonic() < start + plan.seconds or not all(track.done() for track in tracks):
            _look(arena)
        for track in tracks:
            track.result()  # a fault that failed: those after it were not made
        for producer in arena.producers:
            producer.wait()
        _drain(arena, plan.drain_seconds)
        arena.stop(arena.consumers)
        _sum_up(arena)


def _ground(plan: Plan, folder: Path) -> Ground:
    if plan.kind == "cluster":
        return ManyServers(plan.server, plan.shards)
    return OneServer(folder, plan.server, plan.kind)


def _wait_for_consumers(arena: Arena) -> None:
    """Wait until each has written something: it has entered its lifespan and is about to claim."""
    until = time.monotonic() + WARM_UP_SECONDS
    while not all(one.has_written() for one in arena.consumers):
        if time.monotonic() > until:
            raise TimeoutError(f"the consumers do not start within {WARM_UP_SECONDS:.0f} s")
        time.sleep(0.05)


def _look(arena: Arena) -> bool:
    """Look at every queue, once a second; return whether nothing is alive any more."""
    time.sleep(LOOK_SECONDS)
    arena.revive()
    arena.journal.write("clock", ahead=time.time() - time.monotonic())
    alive: dict[str, int] = {}
    with suppress(redis.RedisError, LookupError):
        alive = dict.fromkeys(arena.ground.places(), 1)
    for place in alive:
        keys = place_keys(place)
        with suppress(redis.RedisError, LookupError):
            look = scan.take(arena.ground.client(keys), keys)
            alive[place] = len(look.alive)
            arena.journal.write("look", queue=place, alive=alive[place], totals=look.totals, broken=scan.broken(look))
    return bool(alive) and not any(alive.values())


def _drain(arena: Arena, seconds: float) -> None:
    """Have the consumers work off what is left."""
    since = time.monotonic()
    while not _look(arena):
        if time.monotonic() > since + seconds:
            return
    arena.journal.write("drained", seconds=time.monotonic() - since)


def _sum_up(arena: Arena) -> None:
    """Write down what is left: the totals, the dead, and what should not be there."""
    places = arena.ground.places()
    for place in places:
        keys = place_keys(place)
        client = arena.ground.client(keys)
        look = scan.take(client, keys)
        letters = [fields[b"id"].decode() for _, fields in client.xrange(keys.dead)]
        arena.journal.write(
            "final",
            queue=place,
            totals=look.totals,
            alive=look.alive,
            dead=letters,
            left=scan.leftovers(client, keys),
        )
    arena.journal.write("ended", places=places)
