"""
The wire to many nodes beside one that asks them one after the other: `python -m benchmarks.round_trips`.

Each reply comes a round-trip time after its command was sent, as over a network. Both wires are measured in turns.
"""

import argparse
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import Any
from unittest.mock import patch

from reliq import Consumer, Queue
from reliq.redis.cluster import ClusterTransport
from reliq.redis.connection import PooledConnection
from reliq.redis.server import Connection
from reliq.settings import WorkerSettings
from reliq.testing.server import find_server
from tests.cluster_servers import LiveCluster

SLOTS = 16
PATIENCE_SECONDS = 300.0


@contextmanager
def network(seconds: float, *, one_by_one: bool) -> Iterator[None]:
    """Have each reply come `seconds` after its command was sent, and each command sent alone if so wanted."""
    sends, receives, exchanges = PooledConnection.send, PooledConnection.receive, ClusterTransport.exchange
    sent_at: dict[Any, float] = {}

    def send(wire: PooledConnection, commands: Any) -> Any:
        connection = sends(wire, commands)
        sent_at[connection] = time.perf_counter()
        return connection

    def receive(wire: PooledConnection, connection: Any, *args: Any) -> Any:
        rest = sent_at[connection] + seconds - time.perf_counter()
        if rest > 0:
            time.sleep(rest)
        return receives(wire, connection, *args)

    def alone(wire: ClusterTransport, commands: Any) -> Any:
        return [exchanges(wire, [one])[0] for one in commands]

    with ExitStack() as stack:
        stack.enter_context(patch.object(PooledConnection, "send", send))
        stack.enter_context(patch.object(PooledConnection, "receive", receive))
        if one_by_one:
            stack.enter_context(patch.object(ClusterTransport, "exchange", alone))
        yield


def exchanged(url: str, queues: int) -> float:
    """Return the milliseconds of a round trip to as many queues as said."""
    wire, took = Connection.to(url).wire(), []
    commands = [("LLEN", queue.keys.ready) for queue in _queues(url, queues)]
    for _ in range(50):
        began = time.perf_counter()
        wire.exchange(commands)
        took.append(time.perf_counter() - began)
    return 1000 * median(took)


def drained(url: str, queues: int, messages: int) -> float:
    """Return how many messages a second a worker of many queues drains, from the first on."""
    done, began, over, each = 0, 0.0, threading.Event(), messages // queues
    lock, consumer = threading.Lock(), Consumer(url)

    def handle(_number: int) -> None:
        nonlocal done, began
        with lock:
            began = began or time.perf_counter()
            done += 1
            if done == each * queues:
                over.set()

    for queue in _queues(url, queues):
        queue.publish_many(range(each))
        consumer.handler(queue)(handle)
    consumer.start(WorkerSettings(concurrency=SLOTS))
    if not over.wait(PATIENCE_SECONDS):
        raise SystemExit(f"{done} of {each * queues} messages were handled in {PATIENCE_SECONDS:g} s")
    seconds = time.perf_counter() - began
    consumer.stop(1.0)
    return each * queues / seconds


def _queues(url: str, count: int) -> list[Queue[int]]:
    return [Queue(f"q{number}", int, url=url) for number in range(count)]


def main() -> None:
    """Print a row for each round-trip time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ms", type=float, nargs="+", default=[0.0, 0.5, 2.0], help="round-trip times")
    parser.add_argument("--queues", type=int, default=16)
    parser.add_argument("--messages", type=int, default=32_000)
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    measures: dict[str, Callable[[str], float]] = {
        "one round trip, ms": lambda url: exchanged(url, chosen.queues),
        "drained, messages/s": lambda url: drained(url, chosen.queues, chosen.messages),
    }
    with LiveCluster(find_server(), replicas=0) as cluster:
        for ms in chosen.ms:
            for name, measure in measures.items():
                taken: dict[bool, list[float]] = {True: [], False: []}
                for _ in range(chosen.rounds):
                    for one_by_one, found in taken.items():
                        with network(ms / 1000, one_by_one=one_by_one):
                            found.append(measure(cluster.url))
                alone, together = median(taken[True]), median(taken[False])
                gain = together / alone if name.endswith("/s") else alone / together
                print(f"RTT {ms:g} ms, {chosen.queues} queues, {name}: {alone:,.1f} one by one, ", end="")
                print(f"{together:,.1f} together ({gain:.1f} times as fast)", flush=True)


if __name__ == "__main__":
    main()
