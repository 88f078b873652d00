"""
What shards cost on one machine, where they bring nothing: CPU a message, calls and connections, beside one Redis.

`python -m benchmarks.shards` starts a Redis and a Cluster of three primaries and three replicas on loopback, measures
each course in turn, and prints a table of medians. `--beside TREE` compares one shard on one Redis with an older tree. It needs no network, and what else the machine does is in the figures.
"""

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from statistics import median

from benchmarks.shards.beside import beside
from benchmarks.shards.course import Course, Figures, Size, idle
from benchmarks.shards.ground import Ground
from reliq.testing.server import EmbeddedRedis, find_server
from tests.cluster_servers import LiveCluster
from tests.ports import free_port

FULL = Size(messages=60_000, low_messages=60, idle_seconds=10.0)
QUICK = Size(messages=10_000, low_messages=20, idle_seconds=3.0)
SHARDS = (1, 4, 16, 64)
WORKERS, IDLE_SHARDS = 16, 16
HEADS = {
    "producer": "producer",
    "publish": "Redis, publish",
    "worker": "worker",
    "primaries": "primaries, drain",
    "replicas": "replicas",
    "scripts": "scripts for 1,000",
    "drained": "drained, 1/s",
    "connections": "connections of a worker",
    "low_calls": "calls a message at 10/s",
    "pickup_p50": "pickup p50, ms",
    "pickup_p99": "pickup p99, ms",
}


def main() -> int:
    """Measure, and print what was found."""
    given = _options()
    size, server = (QUICK if given.quick else FULL), given.server or find_server()
    if given.beside:
        beside(given.beside, server, given.rounds)
        return 0
    with ExitStack() as stack:
        one = stack.enter_context(EmbeddedRedis(server=server, port=free_port()))
        cluster = stack.enter_context(LiveCluster(server))
        primaries = cluster.primaries()
        replicas = [node for node in cluster.nodes if node not in primaries]
        single = Ground("one Redis", one.url, [one])
        many = Ground("Cluster", cluster.url, primaries, replicas)
        courses = [Course(single, shards, size) for shards in SHARDS if shards in (1, 16)]
        courses += [Course(many, shards, size) for shards in SHARDS]
        found: list[list[Figures]] = [[] for _ in courses]
        for _ in range(given.rounds):
            for course, figures in zip(courses, found, strict=True):
                figures.append(course.run())
                print(f"{course.ground.name}, {course.shards} shards: {figures[-1]}", file=sys.stderr, flush=True)
        print(table(courses, found))
        for ground, shards in ((single, 1), (single, IDLE_SHARDS), (many, IDLE_SHARDS)):
            calls, scripts, share = idle(ground, shards, WORKERS, size)
            print(
                f"{WORKERS} idle workers, {ground.name}, {shards} shards: {calls:.0f} calls a second in all, "
                f"{scripts:.0f} of them scripts, {share:.1f} % of a core in all primaries"
            )
    return 0


def table(courses: Sequence[Course], found: Sequence[Sequence[Figures]]) -> str:
    """Return the medians, a row for each course; CPU in microseconds a message."""
    lines = ["| ground | shards | " + " | ".join(HEADS.values()) + " |", "| --- " * (len(HEADS) + 2) + "|"]
    for course, rounds in zip(courses, found, strict=True):
        cells = [f"{median(getattr(one, name.name) for one in rounds):,.1f}" for name in fields(Figures)]
        lines.append(f"| {course.ground.name} | {course.shards} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.shards", description="What a Cluster and shards cost.")
    parser.add_argument("--quick", action="store_true", help="a short look, in two minutes")
    parser.add_argument("--rounds", type=int, default=1, help="times to go over all courses; the table has medians")
    parser.add_argument("--server", type=Path, help="the redis-server to run")
    parser.add_argument(
        "--beside", type=Path, metavar="TREE", help="an unsharded queue alone, beside another tree of reliq"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
