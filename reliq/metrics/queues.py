"""
The collectors of queues and of Redis, and of a worker's processes as the operating system sees them.

A scrape asks Redis once, and never waits longer than SCRAPE_SECONDS for the reply.
"""

from __future__ import annotations

import platform
import threading
import time
from collections import Counter
from concurrent.futures import Future
from contextlib import suppress
from importlib.metadata import version
from typing import TYPE_CHECKING

import psutil

from reliq import events
from reliq.distribution import VERSION
from reliq.errors import ReliqError
from reliq.metrics import names
from reliq.metrics.exposition import Collector, Family
from reliq.text import printable
from reliq.worker.health import PATIENT_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from reliq.events import Event
    from reliq.keys import Keys
    from reliq.metrics.exposition import Labels
    from reliq.metrics.names import Spec
    from reliq.metrics.snapshot import QueueSnapshot, Snapshot


#: A scrape waits this long for Redis. It answers within 2 s, with Redis or without.
SCRAPE_SECONDS = 1.5
#: A connection of a scrape waits this long for one reply.
SCRAPE_REPLY_SECONDS = 0.7
#: The reasons for which a process is replaced.
REASONS = ("crashed", "killed", "hung", "overran", "memory", "jobs")


class QueueCollector(Collector):
    """
    The metrics of a snapshot of Redis; only `reliq_redis_up 0` when Redis does not answer.

    A separate thread takes the snapshot, so a server that hangs, or a name that does not resolve, delays no scrape for
    longer than SCRAPE_SECONDS. Scrapes at the same time share one snapshot.

    Args:
        with_queues: false leaves out the metrics of queues, because another process serves them.
    """

    def __init__(self, look: Callable[[], Snapshot], *, with_queues: bool = True) -> None:
        self._look = look
        self._with_queues = with_queues
        self._lock = threading.Lock()
        self._under_way: Future[Snapshot] | None = None
        self._begun_at = 0.0

    def families(self) -> Iterator[Family]:
        """Yield all metrics that are read from Redis."""
        snapshot = self._look_in_time()
        yield single(names.REDIS_UP, snapshot is not None)
        if snapshot is None:
            return
        yield single(names.SCRAPE, snapshot.seconds)
        yield from _of_redis(snapshot.facts)
        if self._with_queues:
            # Without the shards that are away the totals would decrease.
            whole = {keys: queue for keys, queue in snapshot.queues.items() if not queue.away}
            yield from _of_queues(whole, snapshot.lost)
            unreadable = len(snapshot.unreadable) + len(snapshot.queues) - len(whole)
            yield Family(names.LEFT_OUT, {("unreadable",): unreadable, ("many",): snapshot.left_out})

    def redis_answers(self) -> bool:
        """Return whether Redis answers now."""
        return self._look_in_time() is not None

    def complaint(self) -> str:
        """Return why this process should be restarted: a snapshot that never ends; empty when it should not."""
        with self._lock:
            hangs = self._under_way is not None and not self._under_way.done()
            age = time.monotonic() - self._begun_at if hangs else 0.0
        return f"a look at Redis has not ended for {age:.0f} s" if age > PATIENT_SECONDS else ""

    def _look_in_time(self) -> Snapshot | None:
        """Return a snapshot, or None when Redis does not answer in time."""
        with self._lock:
            look = self._under_way
            if look is None or look.done():
                look = self._under_way = Future()
                self._begun_at = time.monotonic()
                threading.Thread(target=self._run, args=(look,), name="reliq-look", daemon=True).start()
        try:
            return look.result(SCRAPE_SECONDS)
        except (ReliqError, TimeoutError):
            return None

    def _run(self, look: Future[Snapshot]) -> None:
        try:
            look.set_result(self._look())
        except BaseException as error:
            look.set_exception(error)


def single(spec: Spec, value: float) -> Family:
    """Return a metric without labels."""
    return Family(spec, {(): int(value) if isinstance(value, bool) else value})


def _of_redis(facts: Mapping[str, str]) -> Iterator[Family]:
    """Yield the metrics of INFO, or nothing where this user may not read it."""
    for spec, field in (
        (names.REDIS_MEMORY, "used_memory"),
        (names.REDIS_MEMORY_LIMIT, "maxmemory"),
        (names.REDIS_CLIENTS, "connected_clients"),
        (names.REDIS_AOF, "aof_enabled"),
        (names.REDIS_EVICTED, "evicted_keys"),
    ):
        if facts.get(field, "").isdigit():
            yield single(spec, int(facts[field]))
    if "maxmemory_policy" in facts:
        yield single(names.REDIS_EVICTION, facts["maxmemory_policy"] != "noeviction")
    if "redis_version" in facts:
        yield Family(names.REDIS_INFO, {(facts["redis_version"],): 1})


def _of_queues(snapshots: Mapping[Keys, QueueSnapshot], lost: Collection[str]) -> Iterator[Family]:
    """Yield the metrics of queues. The label `queue` includes the layout where queues in two layouts share a name."""
    rows: dict[Spec, dict[Labels, float]] = {spec: {} for spec in names.QUEUES}
    called = Counter(keys.name for keys in snapshots)
    for keys, queue in snapshots.items():
        label = keys.name if called[keys.name] == 1 or not keys.bare else f"{keys.name} ({keys.layout})"
        rows[names.MAP_LOST][label,] = int(keys.entry in lost)
        rows[names.SHARED][label,] = int(keys.bare)
        if not keys.bare:
            rows[names.MISSING][label,] = queue.missing
        _add_queue(rows, label, queue)
    for spec, values in rows.items():
        yield Family(spec, values)


def _add_queue(rows: dict[Spec, dict[Labels, float]], label: str, queue: QueueSnapshot) -> None:
    """Add the figures of one queue."""
    for state in (*names.STATES, *([names.WAITING] if queue.keyed else [])):
        rows[names.MESSAGES][label, state] = getattr(queue, state)
    for state, seconds in queue.oldest.items():
        rows[names.OLDEST][label, state] = seconds
    rows[names.UNACK][label, "leased"] = queue.unack - queue.backoff
    rows[names.UNACK][label, "backoff"] = queue.backoff
    rows[names.DEAD_LETTERS][label,] = queue.dead
    rows[names.BACKLOG][label,] = queue.backlog
    rows[names.PAUSED][label,] = int(queue.paused or bool(queue.lines and queue.lines.asleep_until))
    for kind, spec in names.COUNTED.items():
        rows[spec][label,] = queue.totals.get(kind, 0)
    for cause in names.CAUSES:
        rows[names.RETRIED][label, cause] = queue.totals.get(f"retried_{cause}", 0)
    if queue.lines:
        rows[names.KEYS][label, "in_turn"] = queue.lines.in_turn
        rows[names.KEYS][label, "asleep"] = queue.lines.asleep
        rows[names.KEY_HELD_UP][label,] = queue.held_up or 0.0
        rows[names.LIMITED_CLAIMS][label,] = queue.totals.get(names.LIMITED, 0)
        waiting = Counter[str]()
        for key in queue.lines.largest[: names.KEYS_LIMIT]:
            if key.waiting:  # users choose keys, so labels are short
                waiting[printable(key.key)[: names.KEY_LENGTH]] += key.waiting
        waiting[names.REST] += max(0, queue.waiting - waiting.total())
        for name, number in waiting.items():
            rows[names.KEY_WAITING][label, name] = number
    for cron in queue.crons:
        entry = printable(cron.name)
        if cron.ticked is not None:
            rows[names.CRON_LAST][label, entry] = cron.ticked
        if cron.next is not None:
            rows[names.CRON_NEXT][label, entry] = cron.next
        rows[names.CRON_MISSED][label, entry] = cron.missed
        for why, number in cron.skipped.items():
            rows[names.CRON_SKIPPED][label, entry, why] = number


class Build(Collector):
    """The versions of reliq, Python and redis-py, as the labels of a metric."""

    def families(self) -> Iterator[Family]:
        """Yield the metric."""
        yield Family(names.BUILD, {(VERSION, platform.python_version(), version("redis")): 1})


class Processes(Collector):
    """
    An observer in the supervisor that counts processes: those that run, and those that were replaced, by reason.

    Args:
        living: returns how many worker processes run.
        bury: functions that keep the figures of a dead process, by its pid.
    """

    def __init__(self, living: Callable[[], int], *bury: Callable[[int], None]) -> None:
        self._living = living
        self._bury = bury
        self._restarts = dict.fromkeys(REASONS, 0)

    def __call__(self, event: Event, /) -> None:
        """Count a restart, and keep the figures of the dead process."""
        if isinstance(event, events.ProcessEnded):
            for keep in self._bury:
                keep(event.pid)
            if event.reason:
                self._restarts[event.reason] += 1

    def families(self) -> Iterator[Family]:
        """Yield the figures."""
        yield single(names.WORKERS, self._living())
        yield Family(names.RESTARTS, {(reason,): count for reason, count in self._restarts.items()})


class Usage(Collector):
    """
    The CPU time, memory and open files of each process.

    Args:
        pids: returns the pids of the processes by the value of their label.
    """

    def __init__(self, pids: Callable[[], Mapping[str, int]]) -> None:
        self._pids = pids

    def families(self) -> Iterator[Family]:
        """Yield the figures of the processes that run."""
        rows: dict[Spec, dict[Labels, float]] = {
            spec: {} for spec in (names.CPU, names.MEMORY, names.OPEN_FDS, names.STARTED)
        }
        for label, pid in self._pids().items():
            with suppress(psutil.Error):  # the process has ended meanwhile
                process = psutil.Process(pid)
                with process.oneshot():
                    times = process.cpu_times()
                    memory = process.memory_info().rss
                    used = (times.user + times.system, memory, process.num_fds(), process.create_time())
                for values, number in zip(rows.values(), used, strict=True):
                    values[label,] = number
        for spec, values in rows.items():
            yield Family(spec, values)
