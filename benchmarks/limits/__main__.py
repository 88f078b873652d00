"""
A rate, and one message of a key at a time: reliq beside the limiters of other queues, on the same work.

`python -m benchmarks.limits` starts a private Redis on loopback, makes the environments of `python -m benchmarks` where
they are missing, has four processes of each queue do each work, and prints two tables.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median

import psutil

from benchmarks.environments import InstallError
from benchmarks.limits.catalogue import LACKS, ONE_OF_A_KEY, RATES, Limiter
from benchmarks.limits.course import Course
from benchmarks.server import CountedRedis, private_server
from benchmarks.steps import StepError

COSTS = {"refused": "refused a message", "commands": "commands", "reads": "calls", "worker": "worker", "redis": "Redis"}
RATE_HEADS = {
    "started": "started of permitted, %",
    "most in 1 s": "most in 1 s",
    "most in 0.1 s": "most in 0.1 s",
    "p99 late": "p99 late, ms",
} | COSTS
KEY_HEADS = {"drained": "messages/s", "overlaps": "overlaps", "out of order": "out of order"} | COSTS
Figures = dict[str, float]


def main() -> int:
    """Measure, and print what was found."""
    given = _options()
    with private_server() as server, tempfile.TemporaryDirectory() as folder:
        client = CountedRedis(port=int(server.url.rpartition(":")[2].partition("/")[0]))

        def measured(limiters: Iterable[Limiter], measure: Callable[[Course], Figures]) -> dict[str, list[Figures]]:
            wanted = [one for one in limiters if given.only in one.name]
            found: dict[str, list[Figures]] = {one.name: [] for one in wanted}
            for _ in range(given.rounds):
                for one in wanted:
                    course = Course(one, client, server.url, given.processes, Path(folder))
                    try:
                        found[one.name].append(measure(course))
                    except (StepError, InstallError, psutil.Error) as error:
                        print(f"{one.name}: {error}", file=sys.stderr, flush=True)
                    else:
                        print(f"{one.name}: {found[one.name][-1]}", file=sys.stderr, flush=True)
            return found

        rates = measured(RATES, lambda course: course.rate(given.rate, given.seconds))
        keys = measured(ONE_OF_A_KEY, lambda course: course.one_of_a_key(given.share))
    about = f"{given.processes} processes, {os.cpu_count()} cores; calls, commands and CPU in µs a message"
    print(f"{given.rate}/s for {given.seconds:g} s, {about}:\n\n{table(RATES, rates, RATE_HEADS)}\n")
    print(f"One at a time of 100 keys, 5 ms each, {about}:\n\n{table(ONE_OF_A_KEY, keys, KEY_HEADS)}\n")
    print("\n".join(f"- {name}: {why}." for name, why in LACKS.items()))
    return 0


def table(limiters: Iterable[Limiter], found: dict[str, list[Figures]], heads: dict[str, str]) -> str:
    """Return the medians, a row for each limiter."""
    lines = ["| | " + " | ".join(heads.values()) + " | set |", "| --- " * (len(heads) + 2) + "|"]
    for one in limiters:
        if rounds := found.get(one.name):
            cells = [f"{median(figures[name] for figures in rounds):,.4g}" for name in heads]
            lines.append(f"| {one.name} | " + " | ".join(cells) + f" | {one.setting} |")
    return "\n".join(lines)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.limits", description="Limiters on the same work.")
    parser.add_argument("--rate", type=int, default=500, help="starts a second that are permitted to all processes")
    parser.add_argument("--seconds", type=float, default=10.0, help="how long each rate is measured")
    parser.add_argument("--share", type=float, default=1.0, help="of the messages that are drained, for a short look")
    parser.add_argument("--processes", type=int, default=4, help="how many work")
    parser.add_argument("--rounds", type=int, default=1, help="times to go over all; the tables have medians")
    parser.add_argument("--only", default="", help="measure those alone whose names contain this")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
