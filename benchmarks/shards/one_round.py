"""
What an unsharded queue costs on one Redis, by whatever reliq this process finds: JSON on standard output.

It names what every version has, for `beside` runs it in older trees too.
"""

import json
import sys
import threading
import time
from typing import Any

import redis

from reliq import Consumer, Queue, WorkerSettings

SINGLES, MANY, CHUNK = 3000, 30_000, 500
SETTLE_SECONDS, LOOK_SECONDS = 1.0, 0.02


class Spent:
    """What this process and the server have spent by now: CPU seconds, and commands, those within scripts included."""

    def __init__(self, server: Any) -> None:
        cpu, stats = server.info("cpu"), server.info("commandstats")
        self.all = (
            time.process_time(),
            cpu["used_cpu_user"] + cpu["used_cpu_sys"],
            sum(row["calls"] for name, row in stats.items() if name != "cmdstat_info"),
        )

    def since(self, before: "Spent", messages: int) -> list[float]:
        """Return microseconds of this process and of the server, and commands, for a message."""
        own, its, commands = (after - was for after, was in zip(self.all, before.all, strict=True))
        return [1e6 * own / messages, 1e6 * its / messages, commands / messages]


def main(url: str) -> None:
    """Publish one by one and in bulk, then drain."""
    server = redis.Redis.from_url(url)
    server.flushall()
    queue, done, total = Queue("orders", float, url=url), threading.Event(), SINGLES + MANY
    queue.publish_many([0.0] * CHUNK)  # what only the first ones cost is not asked for
    queue.pause(reason="benchmark")
    left = iter(range(total + CHUNK - 1, -1, -1))
    consumer = Consumer(url=url)

    @consumer.handler(queue)
    def work(_: float) -> None:
        """Do nothing, and say when all is done."""
        if not next(left):
            done.set()

    marks = [Spent(server)]
    for _ in range(SINGLES):
        queue.publish(0.0)
    marks.append(Spent(server))
    queue.publish_many([0.0] * MANY, chunk=CHUNK)
    marks.append(Spent(server))
    consumer.start(WorkerSettings(concurrency=16))
    time.sleep(SETTLE_SECONDS)
    begun = Spent(server)
    queue.resume()
    done.wait()
    while queue.counts().alive:
        time.sleep(LOOK_SECONDS)
    drained = Spent(server)
    consumer.stop(grace=1)
    told = [now.since(was, count) for was, now, count in zip(marks, marks[1:], (SINGLES, MANY), strict=False)]
    print(json.dumps([*told, drained.since(begun, total + CHUNK)]))


if __name__ == "__main__":
    main(sys.argv[1])
