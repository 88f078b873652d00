"""
What workers, publishers and messages need of Redis: connections, and bytes.

    python -m benchmarks.needs          # a minute, which the processes mostly rest

It starts a private server without persistence. Other work on the machine hardly changes these figures.
"""

import argparse
import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import redis

from benchmarks.server import private_server
from reliq import Consumer, Outgoing, Queue
from reliq.keys import WORKERS_KEY

#: The body is of 100 bytes as JSON.
BODY, MESSAGES = {"text": "x" * 89}, 20_000
#: For how long connections are counted once every process is there.
COUNTED_SECONDS = 3.0
#: Processes, queues, messages that wait at the start.
WORKERS = ((1, 1, 0), (1, 1, MESSAGES), (1, 20, 0), (1, 20, MESSAGES), (4, 1, 0), (4, 1, MESSAGES))
ORDERS = [Queue(f"orders-{number}") for number in range(20)]


def _wait(_body: dict[str, Any]) -> None:
    time.sleep(0.005)


def _consumer(queues: int) -> Consumer:
    made = Consumer()
    for queue in ORDERS[:queues]:
        made.handler(queue)(_wait)
    return made


of_1, of_20 = _consumer(1), _consumer(20)


def main() -> None:
    """Print the tables."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    with private_server() as server, redis.Redis.from_url(server.url) as client:
        os.environ["RELIQ_URL"] = server.url
        print(f"Redis {client.info()['redis_version']}\nconnections, the most of {COUNTED_SECONDS:g} s")
        for processes, queues, messages in WORKERS:
            client.flushall()
            for queue in ORDERS[:queues]:
                queue.publish_many([BODY] * (messages // queues))
                queue.close()
            with _worker(f"benchmarks.needs:of_{queues}", processes):
                while client.zcard(WORKERS_KEY) < processes:
                    time.sleep(0.1)
                found = max(_connections(client))
            said = f"{messages:,} messages come" if messages else "idle"
            print(f"{found:>5}  worker of {processes} process(es) and {queues} queue(s), {said}")
        print(
            f"{_threads(client):>5}  100 threads that publish\n{asyncio.run(_tasks(client)):>5}  100 tasks that publish"
        )
        print(f"bytes a message, of {MESSAGES:,} with bodies of 100 bytes")
        for name, used in _bytes(client):
            print(f"{used:>5.0f}  {name}")


@contextmanager
def _worker(consumer: str, processes: int) -> Iterator[None]:
    words = [sys.executable, "-m", "reliq", "worker", consumer, "--processes", f"{processes}", "--log-level", "error"]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def _connections(client: redis.Redis) -> Iterator[int]:
    """Yield how many connections but this one there are, again and again."""
    until = time.monotonic() + COUNTED_SECONDS
    while time.monotonic() < until:
        yield client.info("clients")["connected_clients"] - 1
        time.sleep(0.02)


def _threads(client: redis.Redis) -> int:
    """Publish from 100 threads; return how many connections are left."""
    with ThreadPoolExecutor(100) as threads:
        list(threads.map(lambda _: ORDERS[0].publish(BODY), range(2000)))
    found = client.info("clients")["connected_clients"] - 1
    ORDERS[0].close()
    return int(found)


async def _tasks(client: redis.Redis) -> int:
    """Publish from 100 tasks; return how many connections are left."""
    async with asyncio.TaskGroup() as tasks:
        for _ in range(100):
            tasks.create_task(_publish_some())
    found = client.info("clients")["connected_clients"] - 1
    await ORDERS[0].aclose()
    return int(found)


async def _publish_some() -> None:
    for _ in range(20):
        await ORDERS[0].apublish(BODY)


def _bytes(client: redis.Redis) -> Iterator[tuple[str, float]]:
    """Yield what a message takes in each place, each kind beginning with an empty server."""
    yield "ready", _grown(client, _fill)
    yield "due later", _grown(client, lambda: _fill(delay=3600))
    yield "ready, by a chosen id", _grown(client, lambda: _fill(chosen=True))
    yield (
        "acked, by a chosen id: the id stays taken",
        _grown(client, lambda: _fill(chosen=True), lambda: _settle("ack")),
    )
    yield "dead letter", _grown(client, _fill, lambda: _settle("reject"), of_1.drain)


def _grown(client: redis.Redis, *steps: Callable[[], None]) -> float:
    """Return by how many bytes a message the memory of Redis grows by what the steps leave there."""
    client.flushall()
    before = client.info("memory")["used_memory"]
    for step in steps:
        step()
    return float(client.info("memory")["used_memory"] - before) / MESSAGES


def _fill(*, chosen: bool = False, delay: float = 0) -> None:
    ids = (f"order-{number:06}" if chosen else None for number in range(MESSAGES))
    ORDERS[0].publish_many(Outgoing(body=BODY, delay=delay, id=id) for id in ids)


def _settle(verb: str) -> None:
    """Answer every message so."""
    while True:
        with ORDERS[0].receive(limit=500) as jobs:
            for job in jobs:
                getattr(job, verb)()
        if not jobs:
            return


if __name__ == "__main__":
    main()
