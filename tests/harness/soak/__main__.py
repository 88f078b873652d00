"""Load a real worker, at a steady rate or at full speed; every few seconds measure everything that could grow."""

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import redis

from reliq.errors import PublishFailed
from reliq.testing.server import EmbeddedRedis
from tests.harness.soak.gauges import ALLOWED, faults, fifth, look
from tests.harness.soak.jobs import SOAK
from tests.waiting import eventually

#: Seconds between two measurements.
LOOK_SECONDS = 5.0
#: Seconds between two publishes.
TICK_SECONDS = 0.05
DRAIN_SECONDS = 120.0
#: Backlog under full load: the worker never waits for messages.
FULL_BACKLOG = 5000


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.harness.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--rate", type=float, default=2000, help="messages a second; 0: as many as it takes")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, help="write the samples there, one JSON object a line")
    return parser.parse_args()


def main() -> int:
    given = options()
    with EmbeddedRedis(port=None) as server:
        os.environ["RELIQ_URL"] = server.url
        command = [sys.executable, "-m", "reliq", "worker", "tests.harness.soak.jobs:consumer", "--log-level", "error"]
        worker = subprocess.Popen([*command, "--processes", str(given.processes)])
        try:
            with redis.Redis.from_url(server.url) as client:
                return soak(given, psutil.Process(worker.pid), client)
        finally:
            worker.send_signal(signal.SIGTERM)
            worker.wait()


def soak(given: argparse.Namespace, supervisor: psutil.Process, client: redis.Redis) -> int:
    publish(given.rate, 5.0)
    drain()
    before = look(0.0, supervisor, client, SOAK)
    samples = []
    start = time.monotonic()
    while (past := time.monotonic() - start) < given.minutes * 60:
        publish(given.rate, LOOK_SECONDS)
        samples.append(look(past, supervisor, client, SOAK))
    drain()
    after = look(past, supervisor, client, SOAK)
    if given.out:
        given.out.write_text("".join(json.dumps(one) + "\n" for one in [before, *samples, after]))
    wrong = faults(samples)
    if after["redis_mib"] > before["redis_mib"] * 1.1 + 1:
        wrong.append(f"Redis holds {after['redis_mib']:.1f} MiB, {before['redis_mib']:.1f} before the run")
    if SOAK.counts().missing:
        wrong.append(f"the account is off by {SOAK.counts().missing}")
    print(table(before, samples, after))
    print("\n".join(wrong) or "Nothing grew.")
    return 1 if wrong else 0


def publish(rate: float, seconds: float) -> None:
    """Publish `rate` messages a second until the end. With `rate` 0, publish as many as the worker can handle."""
    start, done = time.monotonic(), 0
    if not rate:
        numbers = itertools.takewhile(lambda _: time.monotonic() - start < seconds, itertools.count())
        with suppress(PublishFailed):  # the machine is too busy for Redis to reply in time; the load continues
            SOAK.publish_many(numbers, max_backlog=FULL_BACKLOG)
    while rate and (past := time.monotonic() - start) < seconds:
        wanted = int(past * rate)
        SOAK.publish_many(range(done, wanted))
        done = max(done, wanted)
        time.sleep(TICK_SECONDS)


def drain() -> None:
    """Wait until no message is alive."""
    eventually(lambda: SOAK.counts().alive == 0, "the queue is drained", DRAIN_SECONDS)


def table(before: dict[str, float], samples: list[dict[str, float]], after: dict[str, float]) -> str:
    """Return the results as a Markdown table."""
    rows = ["| figure | empty, before | 2nd fifth | last fifth | empty, after |", "| --- " * 5 + "|"]
    for name in (*ALLOWED, "keys", "alive"):
        cells = [before[name], fifth(samples, 2, name), fifth(samples, 5, name), after[name]]
        rows.append(f"| {name} | " + " | ".join(f"{cell:.1f}" for cell in cells) + " |")
    done = after["acked"] - before["acked"]
    return "\n".join([f"{done} messages in {samples[-1]['at'] / 60:.1f} minutes.", "", *rows])


if __name__ == "__main__":
    sys.exit(main())
