"""What is measured of one peer in one round."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from benchmarks.catalogue import Peer
from benchmarks.server import CountedRedis
from benchmarks.steps import StepError, last_line, step, worker

LOOK_SECONDS = 0.02
LEAD_SECONDS = 1.0
#: Messages a second that every peer surely publishes with a delay.
SLOWEST_PUBLISH = 700
START_SECONDS = 20.0
#: A worker at work that makes no headway for so long has failed.
STALL_SECONDS = 8.0
#: What is worked before the clock starts: by then every process is at work.
HEAD_SHARE = 0.15
ALONE_SECONDS = 10.0
RATES = (100, 1000)
#: Messages that a worker handles before the clock counts.
WARM_UP = 5

Check = Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How much is measured: messages, seconds, and the longest that a drain is watched."""

    one: int = 2500
    bulk: int = 20_000
    late_seconds: float = 2.0
    slow: int = 50
    stored: int = 3000
    drain_seconds: float = 4.0
    drain_share: float = 1.0


FULL = Scale()
QUICK = Scale(one=800, bulk=10_000, late_seconds=1.0, slow=25, stored=1500, drain_seconds=2.0, drain_share=0.4)


class Spent(NamedTuple):
    """How many messages are left, and the CPU seconds spent by then: of the worker's processes, and of Redis."""

    left: int
    worker: float
    redis: float


class Measures:
    """One peer on one Redis; each method returns figures by name, or raises StepError."""

    def __init__(self, peer: Peer, client: CountedRedis, url: str, scale: Scale, folder: Path) -> None:
        self._peer, self._client, self._scale = peer, client, scale
        self._log, self._times = folder / "worker.log", folder / "times.txt"
        self._process: Any = None  # the worker that was started last
        self._environment = {"BENCH_URL": url, "BENCH_LOG": str(self._times)}

    def all(self) -> Iterator[tuple[str, Callable[[], dict[str, float]]]]:
        """Yield every measure with its name; those that the peer lacks are left out."""
        measures: dict[str, Callable[[], dict[str, float]]] = {
            "one": self.one,
            "bulk": self.bulk,
            "drain 1": lambda: self.drain(1),
            "drain 2": lambda: self.drain(2),
            "memory": self.memory,
            "late": self.late,
            "slow": self.slow,
        }
        only = ("drain 1", "drain 2") if self._peer.of else tuple(measures)
        for name in only:
            if name not in self._peer.lacks and not (self._peer.module == "bare" and name == "drain 2"):
                yield name, measures[name]

    def one(self) -> dict[str, float]:
        """Publish one by one."""
        self._empty()
        return {"one": self._scale.one / self._step("one", self._scale.one)}

    def bulk(self) -> dict[str, float]:
        """Publish many at once."""
        self._empty()
        return {"bulk": self._scale.bulk / self._step("bulk", self._scale.bulk)}

    def drain(self, processes: int) -> dict[str, float]:
        """Work a full queue: messages a second from when a part is done; Redis commands and CPU time for each."""
        count = round(self._peer.drained * self._scale.drain_share)
        if self._peer.module == "bare":
            return {"drain 1": count / self._step("drain", count)}
        self._empty()
        self._fill(count)
        whole = self._peer.backlog(self._client)
        self._client.start_counting()
        looks: list[tuple[float, int]] = []
        with self._worker(processes) as check:
            for look in self._looks(whole, check):
                looks.append(look)
                if look[1] == whole:
                    begun = self._spent(look[1])
            ended, commands = self._spent(look[1]), self._client.commands_of_others()
        ahead = [look for look in looks if look[1] >= whole * (1 - HEAD_SHARE)]
        (first, before), (last, after) = ahead[-1], looks[-1]
        return {
            f"drain {processes}": (before - after) / (last - first),
            f"commands {processes}": commands / (whole - after),
            f"worker cpu {processes}": (ended.worker - begun.worker) / (begun.left - ended.left) * 1e6,
            f"redis cpu {processes}": (ended.redis - begun.redis) / (begun.left - ended.left) * 1e6,
        }

    def memory(self) -> dict[str, float]:
        """Weigh messages that wait."""
        count = self._scale.stored
        figures = {"ready bytes": self._weighed(lambda: self._fill(count)) / count}
        if "delayed" not in self._peer.lacks:
            figures["delayed bytes"] = self._weighed(lambda: self._step("delayed", count)) / count
        return figures

    def late(self) -> dict[str, float]:
        """Have messages come due while a worker is idle."""
        figures: dict[str, float] = {}
        self._empty()
        with self._worker(1) as check:
            self._warm_up(check)
            for rate in RATES:
                count = round(rate * self._scale.late_seconds)
                lead = LEAD_SECONDS + count / SLOWEST_PUBLISH
                self._times.write_text("")
                self._step("late", rate, self._scale.late_seconds, lead)
                figures |= _percentiles(f"late {rate}", self._noted(count, check))
        return figures

    def slow(self) -> dict[str, float]:
        """Publish to an idle worker, one after another."""
        self._empty()
        with self._worker(1) as check:
            self._warm_up(check)
            self._times.write_text("")
            self._step("slow", self._scale.slow)
            return _percentiles("pickup", self._noted(self._scale.slow, check))

    def _warm_up(self, check: Check) -> None:
        """Wait until the worker works."""
        self._times.write_text("")
        self._step("slow", WARM_UP)
        self._noted(WARM_UP, check)

    @contextmanager
    def _worker(self, processes: int) -> Iterator[Check]:
        """Run the worker; what is given raises StepError when it has ended."""
        with worker(self._peer, processes, environment=self._environment, log=self._log) as process:
            self._process = process

            def check() -> None:
                if process.poll() is not None:
                    raise StepError(f"worker ended with {process.returncode}: {last_line(self._log.read_text())}")

            yield check

    def _spent(self, left: int) -> Spent:
        """Return what the worker's processes and Redis have spent so far."""
        parent = psutil.Process(self._process.pid if self._process else None)
        server = psutil.Process(self._client.info("server")["process_id"])
        return Spent(left, sum(map(_cpu_seconds, (parent, *parent.children(recursive=True)))), _cpu_seconds(server))

    def _looks(self, whole: int, check: Check) -> Iterator[tuple[float, int]]:
        """Yield monotonic seconds and how many messages are left, until none is or it was watched long enough."""
        began, busy_since, moved_at, before = time.monotonic(), None, time.monotonic(), whole
        yield began, whole
        while before:
            time.sleep(LOOK_SECONDS)
            now, left = time.monotonic(), self._peer.backlog(self._client)
            check()
            yield now, left
            if busy_since is None and left < whole * (1 - HEAD_SHARE):
                busy_since = now
            moved_at = now if left != before else moved_at
            before = left
            if now - moved_at > (START_SECONDS if left >= whole else STALL_SECONDS):
                raise StepError(f"drain: {left} of {whole} messages stayed where they were: {self._worker_says()}")
            if busy_since and now - busy_since > self._scale.drain_seconds:
                return

    def _noted(self, count: int, check: Check) -> list[float]:
        """Return what the timed handler wrote, in ms, once it has run so often."""
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until:
            lines = self._times.read_text().split() if self._times.exists() else []
            if len(lines) >= count:
                return [float(line) * 1000 for line in lines]
            check()
            time.sleep(LOOK_SECONDS)
        raise StepError(f"only {len(lines)} of {count} messages were handled: {self._worker_says()}")

    def _worker_says(self) -> str:
        return last_line(self._log.read_text(errors="replace"))

    def _fill(self, count: int) -> None:
        """Publish messages by the fastest way there is."""
        self._step("one" if "bulk" in self._peer.lacks else "bulk", count)

    def _weighed(self, publish: Callable[[], object]) -> int:
        """Return by how many bytes Redis' memory grows."""
        self._empty()
        before = self._used()
        publish()
        self._wait_until_alone()
        return self._used() - before

    def _used(self) -> int:
        return int(self._client.info("memory")["used_memory"])

    def _empty(self) -> None:
        self._wait_until_alone()
        self._client.flushall()

    def _wait_until_alone(self) -> None:
        """Wait until the connections of the last step are gone: they take memory, and may still take messages."""
        until = time.monotonic() + ALONE_SECONDS
        while int(self._client.info("clients")["connected_clients"]) > 1:
            if time.monotonic() > until:
                raise StepError("connections of an earlier step are still open")
            time.sleep(LOOK_SECONDS)

    def _step(self, name: str, *numbers: float) -> float:
        return step(self._peer, name, *numbers, environment=self._environment)


def _cpu_seconds(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0  # it ended while we looked
    return float(times.user + times.system)


def _percentiles(name: str, late: list[float]) -> dict[str, float]:
    ordered = sorted(late)
    ranks = {"least": 0, "p50": math.ceil(len(ordered) * 0.5) - 1, "p99": math.ceil(len(ordered) * 0.99) - 1}
    return {f"{name} {label}": ordered[rank] for label, rank in ranks.items()}
