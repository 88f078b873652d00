"""
The measurements of `reliq bench`: each figure comes from real worker processes on a queue of its own.

Run as a module, this file is one such worker process. It ends when its standard input ends, which also happens when the
benchmark is killed.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reliq.admin import calls
from reliq.consumer import Consumer, handle_signal
from reliq.distribution import command_of
from reliq.errors import ConfigurationError, ReliqError
from reliq.keys import Keys, new_id, pattern
from reliq.message import Outgoing
from reliq.queue import Queue
from reliq.redis import commands
from reliq.redis.commands import Worker
from reliq.redis.connection import ServerVersion
from reliq.redis.server import URL_VARIABLE, Connection, default_url
from reliq.redis.session import Session
from reliq.redis.url import check_url, masked
from reliq.settings import WorkerSettings
from reliq.supervisor.status import spare_the_collector
from reliq.text import pluralize

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import FrameType

    from reliq.handlers.handler import Job

PARTS = ("drain", "publish", "lateness", "pickup", "idle")
#: About 100 bytes as JSON.
BODY: dict[str, Any] = {"sent": 0, "text": "x" * 80}
#: Messages of a drain; a tenth of them is published one by one, a twentieth comes due for the lateness.
FULL = 100_000
QUICK = 20_000
PICKUPS = 100
IDLE_SECONDS = 5.0
#: One message with its body in Redis.
BYTES_PER_MESSAGE = 700
#: The clock of a drain starts when this share is done: by then every process handles messages.
HEAD_SHARE = 0.1
LATENESS_RATE = 1000
#: The first message comes due this many seconds after the first is published, when all have been published.
LEAD_SECONDS = 5.0
PICKUP_PAUSE_SECONDS = 0.03
#: Messages of a pickup that are not counted: connections are made meanwhile.
WARM_UP = 5
SETTLE_SECONDS = 1.5
LOOK_SECONDS = 0.02
PART_SECONDS = 180.0
STOP_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured number, and the part of the benchmark that it belongs to."""

    part: str
    name: str
    value: float
    unit: str


class Bench:
    """
    A benchmark of reliq on the Redis at `url`.

    Args:
        url: None for RELIQ_URL.
        only: some of PARTS; none means all.
        messages: how many are drained: FULL takes a minute, QUICK half of that and has rougher figures.

    Attributes:
        mebibytes: about how much memory its messages take in Redis at most.
        place: the Redis' URL without the password.

    Raises:
        ConfigurationError: there is no such part, or no Redis is named.
    """

    def __init__(self, url: str | None = None, *, only: Sequence[str] = (), messages: int = FULL) -> None:
        if unknown := [part for part in only if part not in PARTS]:
            raise ConfigurationError(f"the benchmark's parts are {', '.join(PARTS)}, not {unknown[0]!r}")
        self.url = default_url() if url is None else url
        check_url(self.url)
        self.place = masked(self.url)
        self._messages = messages
        self.mebibytes = messages * BYTES_PER_MESSAGE >> 20
        self._parts = [part for part in PARTS if part in (only or PARTS)]
        self._queue: Queue[dict[str, Any]] = Queue(f"bench-{new_id()}", url=self.url)
        self._wire = Connection.to(self.url).wire()
        self._session = Session(self._wire)

    def in_use(self) -> str:
        """
        Return what else is in this Redis, empty when it holds nothing.

        Raises:
            ConfigurationError: its `maxmemory` leaves no room for the benchmark.
        """
        memory = self._facts("memory")
        limit = int(memory.get("maxmemory", 0))
        used = int(memory.get("used_memory", 0))
        left = max(0, limit - used) >> 20
        if limit and self.mebibytes > left:
            raise ConfigurationError(
                f"the benchmark needs about {self.mebibytes} MiB, and this Redis has {left} MiB left "
                "below its maxmemory; use --quick, or another Redis"
            )
        databases = self._facts("keyspace").values()
        keys = sum(int(facts.partition("keys=")[2].partition(",")[0]) for facts in databases if "keys=" in facts)
        return pluralize(keys, "key") if keys else ""

    def redis_version(self) -> str:
        """Return the version of the server."""
        return ServerVersion.read(self._facts("server")).text

    def run(self, progress: Callable[[str, int, int], object] = lambda _part, _done, _of: None) -> list[Figure]:
        """
        Measure, then remove every key of the benchmark, also after an error.

        Args:
            progress: called with the part that begins, how many are done, and how many there are.

        Raises:
            ReliqError: a part did not end, or Redis is away.
        """
        figures: list[Figure] = []
        measures: dict[str, Callable[[], list[Figure]]] = {
            "drain": self._drain,
            "publish": self._publish,
            "lateness": self._lateness,
            "pickup": self._pickup,
            "idle": self._idle,
        }
        try:
            for number, part in enumerate(self._parts):
                progress(part, number, len(self._parts))
                figures.extend(measures[part]())
            progress("removing its keys", len(self._parts), len(self._parts))
        finally:
            remove_queue(self.url, self._queue.name)
        return figures

    def _drain(self) -> list[Figure]:
        """Handle a full queue, with one process and with two; the clock runs from HEAD_SHARE until all are acked."""
        figures = []
        for kind, processes in (("plain", 1), ("async", 1), ("plain", 2)):
            self._queue.pause(reason="benchmark")
            self._queue.publish_many(BODY for _ in range(self._messages))
            with self._workers(kind, processes) as workers:
                self._queue.resume()
                deadline = time.monotonic() + PART_SECONDS
                began = time.monotonic()
                counted = alive = self._messages
                while alive:
                    time.sleep(LOOK_SECONDS)
                    alive = self._queue.counts().alive
                    if alive >= self._messages * (1 - HEAD_SHARE):
                        began = time.monotonic()
                        counted = alive
                    workers.check()
                    if time.monotonic() > deadline:
                        raise ReliqError(
                            f"messages were left after {PART_SECONDS:g} s; is this Redis very slow, or the queue paused?"
                        )
                rate = counted / (time.monotonic() - began)
            name = f"{kind} handler, {pluralize(processes, 'process', 'processes')}"
            figures.append(Figure("drain", name, rate, "messages/s"))
        return figures

    def _publish(self) -> list[Figure]:
        """Publish in a loop that waits for each receipt, then many at once."""
        began = time.perf_counter()
        singles = self._messages // 10
        for _ in range(singles):
            self._queue.publish(BODY)
        single = singles / (time.perf_counter() - began)
        began = time.perf_counter()
        self._queue.publish_many(BODY for _ in range(self._messages))
        many = self._messages / (time.perf_counter() - began)
        remove_queue(self.url, self._queue.name)
        return [
            Figure("publish", "one by one", single, "messages/s"),
            Figure("publish", "publish_many", many, "messages/s"),
        ]

    def _lateness(self) -> list[Figure]:
        """Let messages come due at LATENESS_RATE while an idle worker waits."""
        before = time.time()
        server = self._session.run(calls.server_seconds())
        offset = server - (before + time.time()) / 2
        count = self._messages // 20
        with self._workers("late", 1) as workers:
            first = time.time() + offset + LEAD_SECONDS
            self._queue.publish_many(
                Outgoing(body=BODY, at=datetime.fromtimestamp(first + number / LATENESS_RATE, UTC))
                for number in range(count)
            )
            seconds = workers.times(count)
        return _percentiles("lateness", f"at {LATENESS_RATE}/s", [late + offset for late in seconds])

    def _pickup(self) -> list[Figure]:
        """Publish to an idle worker, one message at a time: from before the publish to the start of the handler."""
        with self._workers("sent", 1) as workers:
            for _ in range(WARM_UP + PICKUPS):
                time.sleep(PICKUP_PAUSE_SECONDS)
                self._queue.publish({**BODY, "sent": time.time()})
            seconds = workers.times(WARM_UP + PICKUPS)
        return _percentiles("pickup", "by an idle worker", seconds[WARM_UP:])

    def _idle(self) -> list[Figure]:
        """Count what Redis reads while one worker process waits, less what it reads without the worker."""
        others = self._reads()
        with self._workers("plain", 1) as workers:
            time.sleep(SETTLE_SECONDS)
            reads = self._reads()
            workers.check()
        rate = max(0.0, reads - others) / IDLE_SECONDS
        return [Figure("idle", "one worker", rate, "round trips/s")]

    def _reads(self) -> int:
        """Return how often Redis read from its clients within the idle seconds."""
        before = int(self._facts("stats").get("total_reads_processed", 0))
        time.sleep(IDLE_SECONDS)
        return int(self._facts("stats").get("total_reads_processed", 0)) - before

    def _facts(self, section: str) -> dict[str, str]:
        """Return a section of the INFO of the server that has the queue."""
        self._session.run(commands.server_ms())  # in a Cluster, the nodes are known then
        return Session(self._wire.node_for(self._queue.keys.ready)).run(commands.server_facts(section))

    @contextmanager
    def _workers(self, kind: str, number: int) -> Iterator[Workers]:
        """Run worker processes within the block, once all are ready; see `main` for the kinds of handlers."""
        command, environment = command_of("reliq.admin.bench")
        with tempfile.TemporaryDirectory(prefix="reliq-") as folder:
            workers = Workers(Path(folder))
            try:
                for _ in range(number):
                    workers.start([*command, self._queue.name, kind], {**environment, URL_VARIABLE: self.url})
                workers.times(number)
                yield workers
            finally:
                workers.stop()


class Workers:
    """Worker processes; they write to two files of `folder`: what their handlers measure, and their errors."""

    def __init__(self, folder: Path) -> None:
        self._times = folder / "times"
        self._times.touch()
        self._errors = folder / "errors"
        self._processes: list[subprocess.Popen[bytes]] = []
        self._read = 0

    def start(self, command: list[str], environment: dict[str, str]) -> None:
        """Start a process; a Ctrl-C does not reach it."""
        with self._errors.open("ab") as errors:
            command = [*command, str(self._times)]
            process = subprocess.Popen(  # noqa: S603  ours
                command, env=environment, stdin=subprocess.PIPE, stdout=errors, stderr=errors, process_group=0
            )
        self._processes.append(process)

    def times(self, count: int) -> list[float]:
        """Return the next `count` numbers that the processes write."""
        deadline = time.monotonic() + PART_SECONDS
        while time.monotonic() < deadline:
            rows = self._times.read_text().split()[self._read :]
            if len(rows) >= count:
                self._read += count
                return [float(row) for row in rows[:count]]
            self.check()
            time.sleep(LOOK_SECONDS)
        raise ReliqError(f"only {len(rows)} of {count} messages were handled; does another worker take them?")

    def check(self) -> None:
        """Raise ReliqError when a process has ended."""
        for process in self._processes:
            if process.poll() is not None:
                *_, last = ["it wrote no error", *self._errors.read_text(errors="replace").split("\n")[:-1]]
                raise ReliqError(f"a worker process of the benchmark ended with {process.returncode}: {last}")

    def stop(self) -> None:
        """Have the processes stop, and kill those that do not."""
        for process in self._processes:
            if process.stdin is not None:
                process.stdin.close()
        for process in self._processes:
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _percentiles(part: str, name: str, seconds: list[float]) -> list[Figure]:
    """Return the median and the 99th percentile (nearest rank) in milliseconds."""
    ordered = sorted(seconds)
    ranks = {percent: math.ceil(len(ordered) * percent / 100) - 1 for percent in (50, 99)}
    return [Figure(part, f"{name}, p{percent}", ordered[rank] * 1000, "ms") for percent, rank in ranks.items()]


def remove_queue(url: str, name: str) -> None:
    """Delete every key of a queue, its entry in the registry, and the records of its workers, which may have been killed."""
    keys = Keys(name)
    session = Session(Connection.to(url).wire())
    every_key = pattern(keys.ready.removesuffix("ready")) + "*"
    for server in session.each().values():
        for batch in server.scan(partial(calls.keys_scanned, every_key, count=1000)):
            if batch:
                server.run(calls.delete_keys(batch))
    ids = session.run(calls.worker_ids())
    for worker in session.run_all(calls.worker_records(ids)):
        if isinstance(worker, Worker) and name in worker.queues:
            session.run_all(commands.remove_worker(worker.id))
    session.run(calls.unregister(keys))


def exit_on_signals() -> None:
    """Have SIGINT, SIGTERM and SIGHUP end the benchmark, which removes its keys; further signals do not interrupt that."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def end(number: int, _frame: FrameType | None) -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)
        sys.exit(128 + number)

    for number in numbers:
        handle_signal(number, end)


def main() -> None:
    """Handle messages of the queue, in the way and with the file that the arguments name, until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    name, kind, path = sys.argv[1:]
    times = os.open(path, os.O_WRONLY | os.O_APPEND)

    def write(seconds: float) -> None:
        os.write(times, b"%.6f\n" % seconds)

    def do_nothing(_body: dict[str, Any]) -> None:
        pass

    async def do_nothing_async(_body: dict[str, Any]) -> None:
        pass

    def write_late(_body: dict[str, Any], job: Job[dict[str, Any]]) -> None:
        write(time.time() - (job.due or 0.0))

    def write_sent(body: dict[str, Any]) -> None:
        write(time.time() - body["sent"])

    handlers: dict[str, Callable[..., Any]] = {
        "plain": do_nothing,
        "async": do_nothing_async,
        "late": write_late,
        "sent": write_sent,
    }
    queue: Queue[dict[str, Any]] = Queue(name)
    consumer = Consumer()
    consumer.handler(queue)(handlers[kind])
    spare_the_collector()
    consumer.start(WorkerSettings(allow_eviction=True))  # the benchmark has seen that there is room
    write(0.0)
    sys.stdin.read()
    consumer.stop(1.0)


if __name__ == "__main__":
    main()
