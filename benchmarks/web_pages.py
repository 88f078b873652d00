"""
How long the web pages take of a server with a million messages: `python -m benchmarks.web_pages [--messages N] [--server PATH]`.

For each page it prints the median and the longest time until its answer was whole, the processor time of the page's own
process, and the slowest call that Redis made for it.
"""

from __future__ import annotations

import argparse
import logging
import resource
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redis import Redis

from reliq import Consumer, Outgoing, Queue, WorkerSettings
from reliq.embedded import EmbeddedRedis
from tests.ports import free_port
from tests.waiting import eventually
from tests.web.site_page import site_of

if TYPE_CHECKING:
    import httpx

TIMES, QUEUES, LETTERS = 9, 40, 20_000
#: Redis notes calls that take longer, in µs.
SLOW_US = 1000
FILL = """
for i = tonumber(ARGV[1]), tonumber(ARGV[2]) do
  local id = string.format('order-%07d', i)
  redis.call('SET', KEYS[1] .. id, ARGV[3], 'PX', 86400000)
  redis.call('HSET', KEYS[2], id, 3)
  redis.call('LPUSH', KEYS[3], id)
end
redis.call('HINCRBY', KEYS[4], 'published', ARGV[2] - ARGV[1] + 1)
"""
PAGES = {
    "queues": "/",
    "queue": "/queues/orders",
    "ready": "/queues/orders/messages/ready",
    "ready, bodies": "/queues/orders/messages/ready?bodies=1",
    "pending": "/queues/orders/messages/pending",
    "unack": "/queues/orders/messages/unack",
    "message, first": "/queues/orders/message?id=order-0000001",
    "message, middle": "/queues/orders/message?id=order-{middle:07}",
    "message, pending": "/queues/orders/message?id=later-7",
    "dead": "/queues/orders/dead",
    "dead, further": "/queues/orders/dead?further=1",
    "workers": "/workers",
    "account": "/account",
    "doctor": "/doctor",
    "search": "/queues/orders/messages/ready?text=no-such-text",
}


def fill(client: Redis, queue: Queue[dict[str, Any]], messages: int) -> None:
    """Write messages as a publisher would, by a script: a million takes seconds."""
    queue.publish({"number": 0, "customer": "somebody"}, id="one", delay=3600)
    value, keys = client.get(queue.keys.msg("one")) or "", queue.keys
    for first in range(1, messages + 1, 10_000):
        last = min(messages, first + 9_999)
        client.eval(FILL, 4, keys.msg(""), keys.retries_left, keys.ready, keys.totals, first, last, value)
    for start in range(0, 50_000, 500):
        queue.publish_many(Outgoing(body={"number": start}, delay=7200) for _ in range(500))
    for at in range(20):
        queue.publish({"at": at}, id=f"later-{at}", delay=60 + at)


def scene(url: str, client: Redis, messages: int) -> None:
    """Fill a queue with a million messages, write dead letters, and fill forty small queues."""
    queue = Queue("orders", dict, url=url, retries=0)
    consumer = Consumer(url)

    @consumer.handler(queue)
    def fail(body: dict[str, Any]) -> None:
        raise ValueError(f"card {body['number'] % 50} refused")

    queue.publish_many([{"number": at} for at in range(LETTERS)])
    consumer.start(WorkerSettings(concurrency=16))
    eventually(lambda: client.xlen(queue.keys.dead) == LETTERS, "they have died", 120)
    consumer.stop()
    fill(client, queue, messages)
    for at in range(QUEUES):
        Queue(f"small-{at}", dict, url=url).publish_many([{"at": at}] * 20)


def measure(
    program: httpx.Client, client: Redis, path: str
) -> tuple[int, list[float], list[float], list[tuple[float, str]]]:
    """Ask for a page some times; return its status, wall and processor times in ms, and the slow calls in ms."""
    client.slowlog_reset()
    walls, busy = [], []
    for _ in range(TIMES):
        began, used = time.perf_counter(), processor()
        answer = program.get(path)
        walls.append(1000 * (time.perf_counter() - began))
        busy.append(1000 * (processor() - used))
    slow = [
        (one["duration"] / 1000, bytes(one["command"])[:40].decode("utf-8", "replace"))
        for one in client.slowlog_get(50)
    ]
    return answer.status_code, walls, busy, sorted(slow, reverse=True)


def processor() -> float:
    """Return the processor seconds of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Fill a server, and measure each page."""
    options = argparse.ArgumentParser()
    options.add_argument("--messages", type=int, default=1_000_000)
    options.add_argument("--server", type=Path)
    given = options.parse_args()
    logging.disable(logging.ERROR)
    with EmbeddedRedis(server=given.server, port=free_port()) as server, Redis.from_url(server.url) as client:
        scene(server.url, client, given.messages)
        client.config_set("slowlog-log-slower-than", SLOW_US)
        with site_of(server.url) as site:
            program = site.program()
            program.get("/")
            print(f"{'page':18} {'':4} {'median':>8} {'longest':>8} {'CPU':>8}   slow calls of Redis, ms")
            for name, path in PAGES.items():
                status, walls, busy, slow = measure(program, client, path.format(middle=given.messages // 2))
                told = ", ".join(f"{ms:.1f} {what}" for ms, what in slow[:2])
                print(
                    f"{name:18} {status:4} {statistics.median(walls):8.1f} {max(walls):8.1f} "
                    f"{statistics.median(busy):8.1f}   {told}"
                )


if __name__ == "__main__":
    main()
