"""What is measured of one queue with so many shards on one ground."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import quantiles

import psutil

from benchmarks.shards.ground import QUEUE, Ground
from reliq import Queue

#: Messages in a call of `publish_many`.
CHUNK = 500
LOOK_SECONDS = 0.05
#: A worker has connected and made its first looks after so long.
SETTLE_SECONDS = 4.0
#: Workers know after so long how many they are, and look less often the more there are.
IDLE_SETTLE_SECONDS = 25.0
LOW_RATE = 10
MICRO = 1e6


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured."""

    messages: int
    low_messages: int
    idle_seconds: float


@dataclass(slots=True)
class Figures:
    """
    What was measured, in microseconds of CPU a message unless it says otherwise.

    Attributes:
        drained: messages a second.
        scripts: calls of scripts for 1,000 messages of a full queue.
        low_calls: calls for a message at 10 a second.
        pickup_p50, pickup_p99: ms from before a publish to the start of its handler.
    """

    producer: float = 0.0
    publish: float = 0.0
    worker: float = 0.0
    primaries: float = 0.0
    replicas: float = 0.0
    scripts: float = 0.0
    drained: float = 0.0
    connections: float = 0.0
    low_calls: float = 0.0
    pickup_p50: float = 0.0
    pickup_p99: float = 0.0


@dataclass(slots=True)
class Spent:
    """CPU seconds and calls of scripts by now."""

    ground: Ground
    primaries: float = field(init=False)
    replicas: float = field(init=False)
    scripts: int = field(init=False)
    at: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.primaries, self.replicas = self.ground.cpu()
        self.scripts = self.ground.scripts()


class Course:
    """One queue with so many shards on one ground."""

    def __init__(self, ground: Ground, shards: int, size: Size) -> None:
        self.ground, self.shards, self._size = ground, shards, size

    def run(self) -> Figures:
        """Measure it."""
        self.ground.prepare(self.shards)
        queue, figures = Queue(QUEUE, float, url=self.ground.url), Figures()
        try:
            self._publish(queue, figures)
            self._drain(queue, figures)
        finally:
            queue.close()
        return figures

    def _publish(self, queue: Queue[float], figures: Figures) -> None:
        queue.pause(reason="benchmark")
        before, own = Spent(self.ground), sum(os.times()[:2])
        queue.publish_many([0.0] * self._size.messages, chunk=CHUNK)
        after, count = Spent(self.ground), self._size.messages
        figures.producer = MICRO * (sum(os.times()[:2]) - own) / count
        figures.publish = MICRO * (after.primaries - before.primaries) / count

    def _drain(self, queue: Queue[float], figures: Figures) -> None:
        connected = self.ground.connections()
        with workers(self.ground.url, 1) as [worker]:
            figures.connections = self.ground.connections() - connected
            before, own = Spent(self.ground), worker.cpu()
            queue.resume()
            _wait(lambda: queue.counts().alive == 0)
            after, count = Spent(self.ground), self._size.messages
            figures.worker = MICRO * (worker.cpu() - own) / count
            figures.primaries = MICRO * (after.primaries - before.primaries) / count
            figures.replicas = MICRO * (after.replicas - before.replicas) / count
            figures.scripts = 1000 * (after.scripts - before.scripts) / count
            figures.drained = count / (after.at - before.at)
            self._low_load(queue, worker, figures)

    def _low_load(self, queue: Queue[float], worker: "Worker", figures: Figures) -> None:
        worker.picked_up()
        seconds: list[float] = []
        calls: list[int] = []
        with self.ground.counted(seconds, calls):
            for _ in range(self._size.low_messages):
                queue.publish(time.time())
                time.sleep(1 / LOW_RATE)
        late = worker.picked_up()
        figures.low_calls = calls[0] / self._size.low_messages
        cuts = quantiles(late, n=100, method="inclusive")
        figures.pickup_p50, figures.pickup_p99 = cuts[49], cuts[98]


def idle(ground: Ground, shards: int, number: int, size: Size) -> tuple[float, float, float]:
    """Return what so many idle workers of so many shards cost: calls and scripts a second, and % of a core of Redis."""
    ground.prepare(shards)
    queue = Queue(QUEUE, float, url=ground.url)
    queue.publish(time.time())  # a queue that nobody has published to is not there
    with workers(ground.url, number):
        _wait(lambda: queue.counts().alive == 0)
        time.sleep(IDLE_SETTLE_SECONDS)
        before = Spent(ground)
        time.sleep(size.idle_seconds)
        after = Spent(ground)
        seconds: list[float] = []
        calls: list[int] = []
        with ground.counted(seconds, calls):
            time.sleep(size.idle_seconds)
    queue.close()
    took = after.at - before.at
    share = 100 * (after.primaries - before.primaries) / took
    return calls[0] / seconds[0], (after.scripts - before.scripts) / took, share


class Worker:
    """A worker process."""

    def __init__(self, url: str) -> None:
        command = [sys.executable, "-m", "benchmarks.shards.worker", url]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def is_up(self) -> None:
        """Return when it is at work."""
        self._line()

    def cpu(self) -> float:
        """Return its CPU seconds."""
        times = psutil.Process(self._process.pid).cpu_times()
        return float(times.user + times.system)

    def picked_up(self) -> list[float]:
        """Return how late each message was picked up since the last time, in ms."""
        assert self._process.stdin
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        late: list[float] = json.loads(self._line())
        return late

    def end(self) -> None:
        """End it."""
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()

    def _line(self) -> str:
        assert self._process.stdout
        if not (line := self._process.stdout.readline()):
            raise RuntimeError(f"a worker ended with {self._process.wait()}")
        return line


@contextmanager
def workers(url: str, number: int) -> Iterator[list[Worker]]:
    """Start workers, and end them."""
    started = [Worker(url) for _ in range(number)]
    try:
        for one in started:
            one.is_up()
        time.sleep(SETTLE_SECONDS)
        yield started
    finally:
        for one in started:
            one.end()


def _wait(is_over: Callable[[], bool]) -> None:
    while not is_over():
        time.sleep(LOOK_SECONDS)
