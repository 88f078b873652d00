"""
One round of `benchmarks.guard`, with whatever reliq this process finds: figures as JSON on standard output.

It uses public names alone, and a worker in its own process: other trees have to run it too.
"""

import json
import sys
import threading
import time
from datetime import UTC, datetime

import redis

from reliq import Consumer, OutgoingMessage, Queue, WorkerSettings

SINGLES = 3000
MANY = 30_000
PICKUPS = 100
PICKUP_PAUSE_SECONDS = 0.02
LATE = 1000
LATE_RATE = 500
LEAD_SECONDS = 1.0
SETTLE_SECONDS = 1.0
SAMPLE_SECONDS = 0.02


def main(url: str) -> None:
    """Publish one by one and in bulk, drain, pick up, and let messages come due."""
    redis.Redis.from_url(url).flushall()
    queue = Queue("guard", float, url=url)
    consumer = Consumer(url=url)
    late: list[float] = []
    drained = threading.Event()
    left = iter(range(SINGLES + MANY - 1, -1, -1))

    @consumer.handler(queue)
    def note(due: float) -> None:
        """Note how late a message is; a message of the full queue has no due time, and the last one ends the drain."""
        if due:
            late.append(1000 * (time.time() - due))
        elif not next(left):
            drained.set()

    def wait(count: int) -> list[float]:
        while len(late) < count:
            time.sleep(SAMPLE_SECONDS)
        times = sorted(late)
        late.clear()
        return times

    queue.pause(reason="benchmark")
    began = time.perf_counter()
    for _ in range(SINGLES):
        queue.publish(0.0)
    singles = time.perf_counter()
    queue.publish_many([0.0] * MANY)
    many = time.perf_counter()
    consumer.start(WorkerSettings(concurrency=16))
    time.sleep(SETTLE_SECONDS)
    resumed = time.perf_counter()
    cpu = time.process_time()
    queue.resume()
    drained.wait()
    ended = time.perf_counter()
    cpu = time.process_time() - cpu
    time.sleep(SETTLE_SECONDS)
    for _ in range(PICKUPS):
        time.sleep(PICKUP_PAUSE_SECONDS)
        queue.publish(time.time())
    pickups = wait(PICKUPS)
    first = time.time() + LEAD_SECONDS
    dues = [first + number / LATE_RATE for number in range(LATE)]
    queue.publish_many(OutgoingMessage(body=due, at=datetime.fromtimestamp(due, UTC)) for due in dues)
    lateness = wait(LATE)
    consumer.stop(grace=1)
    figures = {
        "publish, messages/s": SINGLES / (singles - began),
        "publish_many, messages/s": MANY / (many - singles),
        "drain, messages/s": (SINGLES + MANY) / (ended - resumed),
        "drain, CPU us a message": 1e6 * cpu / (SINGLES + MANY),
        "pickup p50, ms": pickups[PICKUPS // 2],
        "pickup p99, ms": pickups[PICKUPS * 99 // 100 - 1],
        "lateness p50, ms": lateness[LATE // 2],
        "lateness p99, ms": lateness[LATE * 99 // 100 - 1],
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main(sys.argv[1])
