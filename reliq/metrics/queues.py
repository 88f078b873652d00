"""
The collectors of queues and of Redis itself, and those of a worker's processes as the system sees them.

Redis is asked once per scrape, and no scrape waits for it longer than SCRAPE_SECONDS.
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


#: A scrape waits this long for Redis: it answers within 2 s, with Redis or without.
SCRAPE_SECONDS = 1.5
#: A connection of a scrape waits this long for one reply.
SCRAPE_REPLY_SECONDS = 0.7
#: The reasons for which a process is replaced.
REASONS = ("crashed", "killed", "hung", "overran", "memory", "jobs")


class QueueCollector(Collector):
    """
    The metrics of a snapshot of Redis; `reliq_redis_up 0` alone when Redis does not answer.

    A thread of its own takes the snapshot: a server that hangs, or a name that does not resolve, holds up no scrape
    for longer than SCRAPE_SECONDS. Scrapes at the same time share one snapshot.

    Args:
        with_queues: false leaves the figures of queues out, for another process serves them.
    """

    def __init__(self, look: Callable[[], Snapshot], *, with_queues: bool = True) -> None:
        self._look = look
        self._with_queues = with_queues
        self._lock = threading.Lock()
        self._under_way: Future[Snapshot] | None = None
        self._begun_at = 0.0

    def families(self) -> Iterator[Family]:
        """Yield every metric that Redis has."""
        snapshot = self._look_in_time()
        yield single(names.REDIS_UP, snapshot is not None)
        if snapshot is None:
            return
        yield single(names.SCRAPE, snapshot.seconds)
        yield from _of_redis(snapshot.facts)
        if self._with_queues:
            # Without the shards that are away the totals would go back.
            whole = {keys: queue for keys, queue in snapshot.queues.items() if not queue.away}
            yield from _of_queues(whole, snapshot.lost)
            unreadable = len(snapshot.unreadable) + len(snapshot.queues) - len(whole)
            yield Family(names.LEFT_OUT, {("unreadable",): unreadable, ("many",): snapshot.left_out})

    def redis_answers(self) -> bool:
        """Say whether Redis answers now."""
        return self._look_in_time() is not None

    def complaint(self) -> str:
        """Return why this process should be restarted: a look at Redis that never ends; empty when it should not."""
        with self._lock:
            hangs = self._under_way is not None and not self._under_way.done()
            age = time.monotonic() - self._begun_at if hangs else 0.0
        return f"a look at Redis has not ended for {age:.0f} s" if age > PATIENT_SECONDS else ""

    def _look_in_time(self) -> Snapshot | None:
        """Return a snapshot, None when Redis does not answer in time."""
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
    """Yield the metrics of INFO; nothing where this user may not read it."""
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
    """Yield the metrics of queues; a queue's label names its layout too where queues in two layouts share a name."""
    called = Counter(keys.name for keys in snapshots)
    labels = {
        keys: keys.name if called[keys.name] == 1 or not keys.bare else f"{keys.name} ({keys.layout})"
        for keys in snapshots
    }
    rows = {labels[keys]: queue for keys, queue in snapshots.items()}
    yield _by_label(
        names.MESSAGES,
        rows,
        lambda queue: {
            state: getattr(queue, state) for state in (*names.STATES, *([names.WAITING] if queue.keyed else []))
        },
    )
    yield _by_label(names.UNACK, rows, lambda queue: {"leased": queue.unack - queue.backoff, "backoff": queue.backoff})
    yield _by_label(names.OLDEST, rows, lambda queue: queue.oldest)
    yield _by_queue(names.DEAD_LETTERS, rows, lambda queue: queue.dead)
    yield _by_queue(names.BACKLOG, rows, lambda queue: queue.backlog)
    yield _by_queue(
        names.PAUSED, rows, lambda queue: int(queue.paused or bool(queue.lines and queue.lines.asleep_until))
    )
    yield Family(names.MAP_LOST, {(labels[keys],): int(keys.entry in lost) for keys in snapshots})
    yield Family(names.SHARED, {(labels[keys],): int(keys.bare) for keys in snapshots})
    yield Family(names.MISSING, {(labels[keys],): queue.missing for keys, queue in snapshots.items() if not keys.bare})
    for kind, spec in names.COUNTED.items():
        yield Family(spec, {(label,): queue.totals.get(kind, 0) for label, queue in rows.items()})
    yield _by_label(
        names.RETRIED,
        rows,
        lambda queue: {cause: queue.totals.get(f"retried_{cause}", 0) for cause in names.CAUSES},
    )
    keyed = {label: queue for label, queue in rows.items() if queue.lines}
    yield _by_label(
        names.KEYS,
        keyed,
        lambda queue: {"in_turn": queue.lines.in_turn, "asleep": queue.lines.asleep} if queue.lines else {},
    )
    yield _by_queue(names.KEY_HELD_UP, keyed, lambda queue: queue.held_up or 0.0)
    yield _by_queue(names.LIMITED_CLAIMS, keyed, lambda queue: queue.totals.get(names.LIMITED, 0))
    yield _by_label(names.KEY_WAITING, keyed, _largest_keys)
    crons = {(label, printable(cron.name)): cron for label, queue in rows.items() for cron in queue.crons}
    yield Family(names.CRON_LAST, {labels: cron.ticked for labels, cron in crons.items() if cron.ticked is not None})
    yield Family(names.CRON_NEXT, {labels: cron.next for labels, cron in crons.items() if cron.next is not None})
    yield Family(names.CRON_MISSED, {labels: cron.missed for labels, cron in crons.items()})
    yield Family(
        names.CRON_SKIPPED,
        {(*labels, why): number for labels, cron in crons.items() for why, number in cron.skipped.items()},
    )


def _largest_keys(queue: QueueSnapshot) -> Mapping[str, float]:
    """Return how many messages of the largest keys wait, and of all others together; users choose keys, so labels are short."""
    waiting = Counter[str]()
    if queue.lines:
        for key in queue.lines.largest[: names.KEYS_LIMIT]:
            if key.waiting:
                waiting[printable(key.key)[: names.KEY_LENGTH]] += key.waiting
        waiting[names.REST] += max(0, queue.waiting - waiting.total())
    return waiting


def _by_queue(spec: Spec, rows: Mapping[str, QueueSnapshot], value: Callable[[QueueSnapshot], float]) -> Family:
    return Family(spec, {(label,): value(queue) for label, queue in rows.items()})


def _by_label(
    spec: Spec, rows: Mapping[str, QueueSnapshot], values: Callable[[QueueSnapshot], Mapping[str, float]]
) -> Family:
    return Family(spec, {(label, key): value for label, queue in rows.items() for key, value in values(queue).items()})


class Build(Collector):
    """The versions of reliq, Python and redis-py, as the labels of a metric."""

    def families(self) -> Iterator[Family]:
        """Yield the metric."""
        yield Family(names.BUILD, {(VERSION, platform.python_version(), version("redis")): 1})


class Processes(Collector):
    """
    An observer in the parent: how many processes run, and how many ended and were replaced, by reason.

    Args:
        bury: keeps the figures of a process that has ended, by its number.
    """

    def __init__(self, living: Callable[[], int], *bury: Callable[[int], None]) -> None:
        self._living = living
        self._bury = bury
        self._lock = threading.Lock()
        self._restarts: Counter[str] = Counter(dict.fromkeys(REASONS, 0))

    def __call__(self, event: Event, /) -> None:
        """Count a restart, and keep the figures of the dead."""
        if isinstance(event, events.ProcessEnded):
            for keep in self._bury:
                keep(event.pid)
            if event.reason:
                with self._lock:
                    self._restarts[event.reason] += 1

    def families(self) -> Iterator[Family]:
        """Yield the figures."""
        yield single(names.WORKERS, self._living())
        with self._lock:
            rows: dict[Labels, float] = {(reason,): count for reason, count in self._restarts.items()}
        yield Family(names.RESTARTS, rows)


class Usage(Collector):
    """
    The use that each process makes of the machine.

    Args:
        pids: returns the processes by the label that tells them apart.
    """

    def __init__(self, pids: Callable[[], Mapping[str, int]]) -> None:
        self._pids = pids

    def families(self) -> Iterator[Family]:
        """Yield the figures of the processes that run."""
        used: dict[Spec, dict[Labels, float]] = {
            spec: {} for spec in (names.CPU, names.MEMORY, names.OPEN_FDS, names.STARTED)
        }
        for label, pid in self._pids().items():
            with suppress(psutil.Error):  # it has ended meanwhile
                process = psutil.Process(pid)
                with process.oneshot():
                    times = process.cpu_times()
                    memory = process.memory_info().rss
                    open_fds = process.num_fds()
                    started = process.create_time()
                used[names.CPU][label,] = times.user + times.system
                used[names.MEMORY][label,] = memory
                used[names.OPEN_FDS][label,] = open_fds
                used[names.STARTED][label,] = started
        for spec, rows in used.items():
            yield Family(spec, rows)
