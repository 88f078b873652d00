"""
One worker process of a benchmark: `python -m reliq.bench.child`, started with its plan on standard input.

It works as a process of `reliq worker` does, with all that its supervisor would read.

Each further line asks for what was noted since the last one; the end of the input ends the process.
"""

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from reliq.bench import bench
from reliq.bench.bench import Diary, register
from reliq.consumer import Consumer
from reliq.handlers.handler import Handler
from reliq.queue import Queue
from reliq.redis.server import Connection, TransportFactory
from reliq.redis.url import Target
from reliq.settings import WorkerSettings
from reliq.supervisor.status import ProcessStatusView, spare_the_collector, watch

WORKER_STOP_SECONDS = 1.0


class CountedPool:
    """A pool that counts how often a connection is taken: each time is one round trip."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._counting = threading.Lock()
        self.round_trips = 0

    def get_connection(self) -> Any:
        """Return a connection of the pool."""
        with self._counting:
            self.round_trips += 1
        return self._pool.get_connection()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)


class CountedFactory(TransportFactory):
    """Makes wires whose round trips are counted."""

    def __init__(self, target: Callable[[], Target]) -> None:
        super().__init__(target)
        self.pools: list[CountedPool] = []

    def pool(self, name: str, timeout_seconds: float, *, asynchronous: bool) -> Any:
        """Return a pool that counts."""
        self.pools.append(CountedPool(super().pool(name, timeout_seconds, asynchronous=asynchronous)))
        return self.pools[-1]


class CountedConnection(Connection):
    """A connection that knows how many round trips were made over it."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._factory = self._counted = CountedFactory(self._target)

    @property
    def round_trips(self) -> int:
        """How many there were."""
        return sum(pool.round_trips for pool in self._counted.pools)


class CountedConsumer(Consumer):
    """A consumer whose round trips are counted."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.counted = CountedConnection(url)

    def connection(self, _handlers: Sequence[Handler]) -> Connection:
        """Return the connection that counts."""
        return self.counted


def main() -> None:
    """Do what the plan says until the input ends: work a queue, or only wait at a list."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent speaks for the terminal
    plan, diary = json.loads(sys.stdin.readline()), Diary()
    queue: Queue[dict[str, Any]] = Queue(plan["queue"], url=plan["url"])
    if plan["kind"] == "bare":
        _wait(plan["url"], queue, diary)
    else:
        _work(plan["url"], queue, plan["kind"], diary)


def _wait(url: str, queue: Queue[dict[str, Any]], diary: Diary) -> None:
    waiting = threading.Thread(target=bench.take_over, args=(url, queue, diary.note_sent), daemon=True)
    waiting.start()
    _answer_looks(diary, lambda: 0)


def _work(url: str, queue: Queue[dict[str, Any]], kind: str, diary: Diary) -> None:
    consumer = CountedConsumer(url)
    register(consumer, queue, kind, diary)
    # The parent has seen that there is room, so nothing is evicted for a benchmark.
    settings = WorkerSettings(allow_eviction=True)
    spare_the_collector()
    with TemporaryDirectory() as folder:  # what a supervisor would read is written; nobody reads it, nor finds it later
        board = Path(folder) / "board"
        ProcessStatusView(board, [queue.name], settings.concurrency)
        watch(consumer, settings.concurrency, board)
    consumer.start(settings)
    _answer_looks(diary, lambda: consumer.counted.round_trips)
    consumer.stop(WORKER_STOP_SECONDS)


def _answer_looks(diary: Diary, round_trips: Callable[[], int]) -> None:
    """Say that all is ready, and for each further line what was noted, until the input ends."""
    _say({"ready": os.getpid()})
    for _ in sys.stdin:
        _say({"rows": diary.take(), "round_trips": round_trips()})


def _say(what: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
