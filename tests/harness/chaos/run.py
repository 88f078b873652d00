"""A run of the chaos test, from its start until all messages are processed; the histories stay in the folder."""

import signal
import time
from argparse import Namespace
from contextlib import suppress
from pathlib import Path

import redis

from reliq.keys import pattern
from reliq.testing.server import find_server
from tests.harness.chaos import nemesis, scan
from tests.harness.chaos.arena import Arena
from tests.harness.chaos.grounds import Ground, ManyServers, OneServer
from tests.harness.chaos.schedule import CONSUMERS, PRODUCERS, Fault
from tests.harness.chaos.workload import COSTS, PER_KEY, RETRIES, SHARES, place_keys
from tests.waiting import eventually

LOOK_SECONDS = 1.0
#: Concurrent messages of a consumer.
SLOTS = 8


def run(plan: Namespace, faults: list[Fault], folder: Path) -> None:
    """Run `plan`, the options of the command; each process writes its history into `folder`."""
    with _ground(plan, folder) as ground, Arena(folder, ground) as arena:
        arena.consumers = arena.start("consumer", CONSUMERS, plan.seed, SLOTS)
        # A consumer writes its first event when it has entered its lifespan, just before it claims.
        eventually(lambda: all(one.has_written() for one in arena.consumers), "the consumers start", 150)
        start = time.monotonic()
        until = start + plan.seconds
        retries = {name: RETRIES[name] for name in SHARES[plan.kind]}
        limits = {"per_key": PER_KEY, "costs": COSTS}
        arena.journal.write("begun", seed=plan.seed, seconds=plan.seconds, retries=retries, **limits)
        arena.producers = arena.start("producer", PRODUCERS, plan.seed, plan.rate / PRODUCERS, until)
        tracks = nemesis.unleash(arena, faults, start)
        while time.monotonic() < until or not all(track.done() for track in tracks):
            _look(arena)
        for track in tracks:
            track.result()  # raises the error of a failed fault; later faults were skipped
        for producer in arena.producers:
            producer.wait()
        _drain(arena, plan.drain)
        for consumer in arena.consumers:
            consumer.send(signal.SIGTERM)
        for consumer in arena.consumers:
            consumer.wait()
        _sum_up(arena)


def _ground(plan: Namespace, folder: Path) -> Ground:
    server = plan.server or find_server()
    return ManyServers(server, plan.shards) if plan.kind == "cluster" else OneServer(folder, server, plan.kind)


def _look(arena: Arena) -> bool:
    """Record a snapshot of every queue, at most once a second; return whether no message is alive."""
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
    """Let the consumers process all remaining messages."""
    since = time.monotonic()
    while not _look(arena):
        if time.monotonic() > since + seconds:
            return
    arena.journal.write("drained", seconds=time.monotonic() - since)


def _sum_up(arena: Arena) -> None:
    """Record the final state: totals, dead letters, and leftovers."""
    places = arena.ground.places()
    for place in places:
        keys = place_keys(place)
        client = arena.ground.client(keys)
        look = scan.take(client, keys)
        dead = [fields[b"id"].decode() for _, fields in client.xrange(keys.dead)]
        left = scan.leftovers(client, keys)
        results = len({*client.scan_iter(f"{pattern(keys.result(''))}*", count=1000)})
        facts = {"totals": look.totals, "alive": look.alive, "dead": dead, "left": left, "results": results}
        arena.journal.write("final", queue=place, **facts)
    arena.journal.write("ended", places=places)
