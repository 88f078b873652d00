"""One run from its start to its full drain; what happened is in the folder afterwards."""

import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import redis

from tests.chaos import nemesis, scan
from tests.chaos.arena import Arena
from tests.chaos.schedule import schedule
from tests.chaos.workload import QUEUES

#: Before the clock starts, every consumer is to be at work.
WARM_UP_SECONDS = 150.0
LOOK_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be run; the same plan gives the same schedule and the same choices."""

    seed: int
    seconds: float
    rate: float
    drain_seconds: float = 120.0
    server: Path | None = None


def run(plan: Plan, folder: Path) -> None:
    """Run `plan`; every process writes its history into `folder`."""
    with Arena(folder, plan.seed, server=plan.server) as arena, _client(arena) as client:
        arena.start_consumers()
        _wait_for_consumers(arena)
        start = time.monotonic()
        arena.journal.write("begun", start=start, seconds=plan.seconds)
        arena.start_producers(plan.rate, start + plan.seconds)
        threads = nemesis.unleash(arena, schedule(plan.seed, plan.seconds), start)
        while time.monotonic() < start + plan.seconds or any(thread.is_alive() for thread in threads):
            _look(arena, client)
        for producer in arena.producers:
            producer.wait()
        _drain(arena, client, plan.drain_seconds)
        arena.stop(arena.consumers)
        _sum_up(arena, client)


def _client(arena: Arena) -> redis.Redis:
    return redis.Redis(unix_socket_path=str(arena.server.socket), socket_timeout=5)


def _wait_for_consumers(arena: Arena) -> None:
    """Wait until each has written something: it has entered its lifespan and is about to claim."""
    until = time.monotonic() + WARM_UP_SECONDS
    while not all(one.has_written() for one in arena.consumers):
        if time.monotonic() > until:
            raise TimeoutError(f"the consumers do not start within {WARM_UP_SECONDS:.0f} s")
        time.sleep(0.05)


def _look(arena: Arena, client: redis.Redis) -> bool:
    """Look at every queue, once a second; return whether nothing is alive any more."""
    time.sleep(LOOK_SECONDS)
    arena.revive()
    arena.journal.write("clock", ahead=time.time() - time.monotonic())
    alive: dict[str, int] = {}
    for name, queue in QUEUES.items():
        with suppress(redis.RedisError):
            look = scan.take(client, queue.keys)
            alive[name] = len(look.alive)
            arena.journal.write("look", queue=name, alive=alive[name], totals=look.totals, broken=scan.broken(look))
    return list(alive.values()) == [0] * len(QUEUES)


def _drain(arena: Arena, client: redis.Redis, seconds: float) -> None:
    """Have the consumers work off what is left."""
    since = time.monotonic()
    while not _look(arena, client):
        if time.monotonic() > since + seconds:
            return
    arena.journal.write("drained", seconds=time.monotonic() - since)


def _sum_up(arena: Arena, client: redis.Redis) -> None:
    """Write down what is left: the totals, the dead, and what should not be there."""
    for name, queue in QUEUES.items():
        look = scan.take(client, queue.keys)
        letters = [fields[b"id"].decode() for _, fields in client.xrange(queue.keys.dead)]
        arena.journal.write(
            "final",
            queue=name,
            totals=look.totals,
            alive=look.alive,
            dead=letters,
            left=scan.leftovers(client, queue.keys),
        )
