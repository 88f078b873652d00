"""What is measured of one limiter: a rate that four processes share, or one message of a key at a time."""

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from benchmarks.drains import cpu_seconds
from benchmarks.environments import ROOT, command, folder_of
from benchmarks.limits.catalogue import Limiter
from benchmarks.server import CountedRedis
from benchmarks.steps import StepError, end, environment_with, last_line

LOOK_SECONDS = 0.05
#: A worker may take so long to end in peace, and its connections to be gone.
END_SECONDS = 3.0
START_SECONDS = 60.0
#: From the first start until all processes are at work and the first burst is over.
WARM_UP_SECONDS = 3.0
#: Shares of a drain before which the clock does not run.
HEAD_SHARE = 0.15
FILL_SECONDS = DRAIN_SECONDS = 60.0


class Start(NamedTuple):
    """One message that a handler started: of which key, the how manieth of it, when it began and ended."""

    key: int
    number: int
    began: float
    ended: float


class Spent(NamedTuple):
    """What has been spent so far: commands, those of scripts included; reads of Redis from clients; CPU seconds."""

    commands: int
    reads: int
    worker: float
    redis: float


class Course:
    """The work of one limiter on one Redis; each method returns figures by name, or raises StepError."""

    def __init__(self, limiter: Limiter, client: CountedRedis, url: str, processes: int, folder: Path) -> None:
        self._limiter, self._client, self._processes = limiter, client, processes
        self._said, self._log = folder / "worker.log", folder / "starts.txt"
        self._environment = {"BENCH_URL": url, "BENCH_LOG": str(self._log)}

    def rate(self, rate: int, seconds: float) -> dict[str, float]:
        """Work a full queue at a rate for some seconds; count what started, and what it cost."""
        self._environment["BENCH_RATE"] = str(rate)
        self._fill(round(rate * (seconds + WARM_UP_SECONDS + 8)))
        with self._worker() as process:
            self._wait_for(process, 1, START_SECONDS)
            time.sleep(WARM_UP_SECONDS)
            began, before = time.time(), self._spent(process)
            time.sleep(seconds)
            ended, after = time.time(), self._spent(process)
        starts, refusals = self._noted()
        times = sorted(one.began for one in starts if began <= one.began < ended)
        late = _late(times, rate)
        return {
            "started": 100 * len(times) / (rate * (ended - began)),
            "most in 1 s": _most(times, 1.0),
            "most in 0.1 s": _most(times, 0.1),
            "p99 late": late[round(0.99 * (len(late) - 1))] * 1000,
            "refused": refusals / len(starts),
            **_costs(before, after, len(times)),
        }

    def one_of_a_key(self, share: float) -> dict[str, float]:
        """Drain a share of its messages of 100 keys, one at a time of each; count what ran beside another of its key."""
        count = round(self._limiter.messages * share)
        self._fill(count)
        with self._worker() as process:
            at = self._wait_for(process, 1, START_SECONDS)
            before = self._spent(process)
            self._wait_for(process, count, DRAIN_SECONDS)
            after = self._spent(process)
        starts, refusals = self._noted()
        starts.sort(key=lambda one: one.began)
        ends = sorted(one.ended for one in starts)
        head = round(count * HEAD_SHARE)
        return {
            "drained": (count - head) / (ends[-1] - ends[head]),
            "overlaps": _overlaps(starts),
            "out of order": _out_of_order(starts),
            "refused": refusals / count,
            **_costs(before, after, count - at),
        }

    def _fill(self, count: int) -> None:
        until = time.monotonic() + END_SECONDS
        while self._client.info("clients")["connected_clients"] > 1 and time.monotonic() < until:
            time.sleep(LOOK_SECONDS)
        self._client.flushall()
        self._log.write_text("")
        words = [*self._words(), self._limiter.fill, str(count)]
        try:
            done = subprocess.run(
                words, **self._around(), capture_output=True, text=True, timeout=FILL_SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            raise StepError(f"{self._limiter.fill}: took longer than {FILL_SECONDS:g} s") from None
        if done.returncode:
            raise StepError(f"{self._limiter.fill}: {last_line(done.stderr)}")

    @contextmanager
    def _worker(self) -> Iterator[subprocess.Popen[bytes]]:
        words = [*self._words(), self._limiter.worker, str(self._processes)]
        with self._said.open("wb") as said:
            process = subprocess.Popen(
                words, **self._around(), stdin=subprocess.DEVNULL, stdout=said, stderr=said, start_new_session=True
            )
        try:
            yield process
        finally:
            end(process, END_SECONDS)

    def _words(self) -> list[str]:
        interpreter = command(self._limiter.peer)[0]
        if self._limiter.peer.is_node:
            return [interpreter, str(ROOT / "benchmarks" / "peers" / "limits" / self._limiter.module)]
        return [interpreter, "-m", "benchmarks.peers", f"limits.{self._limiter.module}"]

    def _around(self) -> dict[str, Any]:
        return {"cwd": folder_of(self._limiter.peer), "env": environment_with(self._environment)}

    def _wait_for(self, process: subprocess.Popen[bytes], count: int, seconds: float) -> int:
        """Wait until so many messages have started; return how many have by then."""
        until, found = time.monotonic() + seconds, 0
        while (found := self._started()) < count:
            if process.poll() is not None or time.monotonic() > until:
                raise StepError(f"{found} of {count} messages started: {last_line(self._said.read_text())}")
            time.sleep(LOOK_SECONDS)
        return found

    def _started(self) -> int:
        lines = self._log.read_bytes()
        return lines.count(b"\n") - lines.count(b"refused\n")

    def _noted(self) -> tuple[list[Start], int]:
        """Return what started, and how many times something was taken and not started."""
        lines = self._log.read_text().splitlines()
        starts = [line.split() for line in lines if line != "refused"]
        return [Start(int(key), int(at), float(began), float(done)) for key, at, began, done in starts], len(
            lines
        ) - len(starts)

    def _spent(self, process: subprocess.Popen[bytes]) -> Spent:
        parent = psutil.Process(process.pid)
        whole = self._client.info("all")
        commands = sum(row["calls"] for name, row in whole.items() if name.startswith("cmdstat_"))
        own = self._client.own
        server = psutil.Process(whole["process_id"])
        workers = sum(map(cpu_seconds, (parent, *parent.children(recursive=True))))
        return Spent(commands - own, whole["total_reads_processed"] - own, workers, cpu_seconds(server))


def _costs(before: Spent, after: Spent, messages: int) -> dict[str, float]:
    spent = [(late - early) / messages for early, late in zip(before, after, strict=True)]
    return {
        "commands": spent[0],
        "reads": spent[1],
        "worker": spent[2] * 1e6,
        "redis": spent[3] * 1e6,
    }


def _late(times: list[float], rate: float) -> list[float]:
    """Return how far each start is behind an even rate that goes through the most punctual of them, in order."""
    behind = [at - number / rate for number, at in enumerate(times)]
    return sorted(one - min(behind) for one in behind)


def _most(times: list[float], seconds: float) -> int:
    """Return the most starts in any such stretch of time."""
    first = most = 0
    for last, at in enumerate(times):
        while at - times[first] >= seconds:
            first += 1
        most = max(most, last - first + 1)
    return most


def _overlaps(starts: list[Start]) -> int:
    """Return how many started while an earlier one of their key was at work."""
    return sum(
        late.began < done
        for of_key in _by_key(starts)
        for late, done in zip(of_key[1:], accumulate((one.ended for one in of_key), max), strict=False)
    )


def _out_of_order(starts: list[Start]) -> int:
    """Return how many started after one of their key that was published later."""
    return sum(
        late.number < most
        for of_key in _by_key(starts)
        for late, most in zip(of_key[1:], accumulate((one.number for one in of_key), max), strict=False)
    )


def _by_key(starts: list[Start]) -> list[list[Start]]:
    found: dict[int, list[Start]] = {}
    for one in starts:
        found.setdefault(one.key, []).append(one)
    return list(found.values())
