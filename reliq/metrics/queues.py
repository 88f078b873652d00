"""The figures of queues and of Redis itself, asked once per scrape and never waited for longer than a moment."""

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
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from reliq.events import Event
    from reliq.lua.transitions import KeyQueues
    from reliq.metrics.exposition import Labels
    from reliq.metrics.names import Spec
    from reliq.metrics.snapshot import QueueSnapshot, Snapshot
    from reliq.schedule import CronState


#: A scrape waits this long for Redis: it answers within 2 s, with Redis or without.
SCRAPE_SECONDS = 1.5
#: A connection of a scrape waits this long for one reply.
SCRAPE_REPLY_SECONDS = 0.7


class QueueCollector(Collector):
    """
    The metrics of a snapshot of Redis; `reliq_redis_up 0` alone when Redis does not answer.

    A thread of its own takes the snapshot: a server that hangs, or a name that does not resolve, holds up no scrape
    for longer than SCRAPE_SECONDS. Scrapes at the same time share one snapshot.

    Args:
        with_queues: false leaves the figures of queues out, for another process serves them.
    """

    def __init__(self, look: Callable[[], Snapshot], *, with_queues: bool = True) -> None:
        self._look, self._with_queues = look, with_queues
        self._lock = threading.Lock()
        self._under_way: Future[Snapshot] | None = None
        self._begun_at = 0.0

    def families(self) -> Iterator[Family]:
        """Yield every metric that Redis can tell."""
        look = self._looked()
        yield single(names.REDIS_UP, look is not None)
        if look is None:
            return
        yield single(names.SCRAPE, look.seconds)
        yield from _of_redis(look.facts)
        if self._with_queues:
            # Without the shards that are away the totals would go back.
            whole = [one for one in look.queues if not one.counts.away]
            yield from _of_queues(whole, look.lost)
            unreadable = len(look.unreadable) + len(look.queues) - len(whole)
            yield Family(names.LEFT_OUT, {("unreadable",): unreadable, ("many",): look.left_out})

    def redis_answers(self) -> bool:
        """Say whether Redis answers now."""
        return self._looked() is not None

    def complaint(self) -> str:
        """Return why this process should be restarted: a look at Redis that never ends; empty when it should not."""
        with self._lock:
            hangs = self._under_way is not None and not self._under_way.done()
            age = time.monotonic() - self._begun_at if hangs else 0.0
        return f"a look at Redis has not ended for {age:.0f} s" if age > PATIENT_SECONDS else ""

    def _looked(self) -> Snapshot | None:
        """Return a snapshot, None when Redis does not answer in time."""
        try:
            return self._begun().result(SCRAPE_SECONDS)
        except (ReliqError, TimeoutError):
            return None

    def _begun(self) -> Future[Snapshot]:
        with self._lock:
            if self._under_way is None or self._under_way.done():
                self._under_way, self._begun_at = Future(), time.monotonic()
                threading.Thread(target=self._run, args=(self._under_way,), name="reliq-look", daemon=True).start()
            return self._under_way

    def _run(self, future: Future[Snapshot]) -> None:
        try:
            future.set_result(self._look())
        except BaseException as error:
            future.set_exception(error)


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


def _of_queues(snapshots: Sequence[QueueSnapshot], lost: Collection[str]) -> Iterator[Family]:
    rows = _labelled(snapshots)
    yield _by_label(names.MESSAGES, rows, lambda one: {state: getattr(one.counts, state) for state in _states(one)})
    yield _by_label(names.UNACK, rows, lambda one: {"leased": one.counts.unack - one.backoff, "backoff": one.backoff})
    yield _by_label(names.OLDEST, rows, lambda one: one.oldest)
    yield _by_queue(names.DEAD_LETTERS, rows, lambda one: one.counts.dead)
    yield _by_queue(names.BACKLOG, rows, lambda one: one.backlog)
    yield _by_queue(
        names.PAUSED, rows, lambda one: int(one.counts.paused or bool(one.lines and one.lines.asleep_until))
    )
    yield _by_queue(names.MAP_LOST, rows, lambda one: int(one.keys.entry in lost))
    yield _by_queue(names.SHARED, rows, lambda one: int(one.keys.bare))
    alone = {queue: one for queue, one in rows.items() if not one.keys.bare}
    yield _by_queue(names.MISSING, alone, lambda one: one.counts.missing)
    for kind, spec in names.COUNTED.items():
        yield Family(spec, {(queue,): one.counts.totals.get(kind, 0) for queue, one in rows.items()})
    yield _by_label(
        names.RETRIED,
        rows,
        lambda one: {cause: one.counts.totals.get(f"retried_{cause}", 0) for cause in names.CAUSES},
    )
    yield from _of_keys({queue: one for queue, one in rows.items() if one.lines})
    yield from _of_periodic_entries(rows)


def _states(snapshot: QueueSnapshot) -> tuple[str, ...]:
    return (*names.STATES, names.WAITING) if snapshot.counts.keyed else names.STATES


def _of_keys(rows: Mapping[str, QueueSnapshot]) -> Iterator[Family]:
    """Yield the metrics of queues with keys; names of keys are users', so few of them are told, and none at length."""
    yield _by_label(
        names.KEYS, rows, lambda one: {"in_turn": one.lines.in_turn, "asleep": one.lines.asleep} if one.lines else {}
    )
    yield _by_queue(names.KEY_HELD_UP, rows, lambda one: one.held_up or 0.0)
    yield _by_queue(names.LIMITED_CLAIMS, rows, lambda one: one.counts.totals.get(names.LIMITED, 0))
    yield _by_label(names.KEY_WAITING, rows, lambda one: _largest(one.lines, one.counts.waiting) if one.lines else {})


def _largest(lines: KeyQueues, waiting: int) -> dict[str, int]:
    """Return how many messages of the largest keys wait, and of all others together."""
    found = Counter[str]()
    for one in lines.largest[: names.KEYS_LIMIT]:
        if one.waiting:
            found[printable(one.key)[: names.KEY_LENGTH]] += one.waiting
    found[names.REST] += max(0, waiting - found.total())
    return found


def _of_periodic_entries(rows: Mapping[str, QueueSnapshot]) -> Iterator[Family]:
    entries: dict[Labels, CronState] = {
        (queue, printable(one.entry)): one for queue, row in rows.items() for one in row.crons
    }
    for spec, moment in ((names.CRON_LAST, "ticked"), (names.CRON_NEXT, "next")):
        moments = {labels: getattr(one, moment) for labels, one in entries.items()}
        yield Family(spec, {labels: at for labels, at in moments.items() if at is not None})
    yield Family(names.CRON_MISSED, {labels: one.missed for labels, one in entries.items()})
    skips = {labels: one.skipped.items() for labels, one in entries.items()}
    yield Family(names.CRON_SKIPPED, {(*labels, why): number for labels, some in skips.items() for why, number in some})


def _labelled(snapshots: Sequence[QueueSnapshot]) -> dict[str, QueueSnapshot]:
    """Return snapshots by the queue's name; where queues in two layouts share one, by name and layout."""
    called = Counter(one.queue for one in snapshots)
    return {
        one.queue if called[one.queue] == 1 or not one.keys.bare else f"{one.queue} ({one.keys.layout})": one
        for one in snapshots
    }


def _by_queue(spec: Spec, rows: Mapping[str, QueueSnapshot], value: Callable[[QueueSnapshot], float]) -> Family:
    return Family(spec, {(queue,): value(one) for queue, one in rows.items()})


def _by_label(
    spec: Spec, rows: Mapping[str, QueueSnapshot], values: Callable[[QueueSnapshot], Mapping[str, float]]
) -> Family:
    found: dict[Labels, float] = {}
    for queue, one in rows.items():
        for label, value in values(one).items():
            found[queue, label] = value
    return Family(spec, found)


#: The reasons for which a process is replaced.
REASONS = ("crashed", "killed", "hung", "overran", "memory", "jobs")


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
        self._living, self._bury = living, bury
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
                for spec, value in _usage_of(pid).items():
                    used[spec][label,] = value
        for spec, rows in used.items():
            yield Family(spec, rows)


def _usage_of(pid: int) -> dict[Spec, float]:
    process = psutil.Process(pid)
    with process.oneshot():
        times = process.cpu_times()
        return {
            names.CPU: times.user + times.system,
            names.MEMORY: process.memory_info().rss,
            names.OPEN_FDS: process.num_fds(),
            names.STARTED: process.create_time(),
        }
