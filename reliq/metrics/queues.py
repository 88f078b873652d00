"""
Collectors for the metrics of queues, Redis servers and processes (count, CPU, memory, open files).

A scrape reads each Redis server and the queues once, and waits at most SCRAPE_SECONDS for the replies of Redis.
"""

from __future__ import annotations

import platform
import threading
import time
from collections import Counter
from concurrent.futures import Future, wait
from contextlib import suppress
from importlib.metadata import version
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import psutil

from reliq import events
from reliq.distribution import VERSION
from reliq.errors import RedisUnavailableError, ReliqError
from reliq.metrics import names
from reliq.metrics.exposition import Collector, Family, Labels
from reliq.metrics.snapshot import SERVER_FACTS, QueueSnapshot, Snapshot, facts_in
from reliq.text import printable
from reliq.worker.health import PATIENT_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from reliq.events import Event
    from reliq.keys import Keys
    from reliq.metrics.names import Spec
    from reliq.redis.client import Client, Timed

T = TypeVar("T")

#: A scrape waits at most this long for Redis, so that it ends within 2 s even if Redis is unavailable.
SCRAPE_SECONDS = 1.5
#: If a server of a Cluster does not answer within this time, the snapshot leaves out the queues of this server.
SLOW_SECONDS = 0.25
#: The connection that a scrape uses waits at most this many seconds for a reply of Redis.
SCRAPE_REPLY_SECONDS = 0.7
#: The reasons for which the supervisor replaces a process; label values of the metric RESTARTS.
REASONS = ("crashed", "killed", "hung", "overran", "memory", "jobs")


class _Look(NamedTuple):
    servers: Future[dict[str, Future[Timed]]]
    snapshot: Future[Snapshot | None]
    begun_at: float


class QueueCollector(Collector):
    """
    Collect the metrics of the Redis servers, and the metrics of queues from a snapshot.

    Background threads send the requests, one thread for each server. So a server that hangs, or a host name that does
    not resolve, delays a scrape by at most SCRAPE_SECONDS. Concurrent scrapes share the same replies.

    Args:
        look: a function that returns a snapshot of the queues; None if another process serves the metrics of queues.
        servers: the labels of the Redis servers. For a Cluster, these are its configured addresses until its nodes are
            known.
        queues: the expected queues. Until the first snapshot, the metrics report them as unreadable.
    """

    def __init__(
        self, client: Client, look: Callable[[], Snapshot] | None, servers: Sequence[str], queues: Sequence[Keys] = ()
    ) -> None:
        self._client = client
        self._look = look
        self._servers = servers
        self._queues: Sequence[str] = [*_labels(queues).values()]
        self._lock = threading.Lock()
        self._under_way: _Look | None = None

    def families(self) -> Iterator[Family]:
        """Yield all metrics that are read from Redis."""
        servers, snapshot = self._look_in_time()
        yield from _of_servers(servers)
        if self._look is None:
            return
        unreadable = dict.fromkeys(self._queues, 1)
        if snapshot:
            # Leave out queues with unavailable shards: their totals would be too small, and counters must not decrease.
            whole = {keys: queue for keys, queue in snapshot.queues.items() if not queue.away}
            labels = _labels([*snapshot.queues, *snapshot.unreadable])
            unreadable = {label: int(keys not in whole) for keys, label in labels.items()}
            self._queues = [*unreadable]
            yield from _of_queues(whole, labels, snapshot.lost)
            yield single(names.LEFT_OUT, snapshot.left_out)
        yield Family(names.UNREADABLE, {(label,): number for label, number in unreadable.items()})

    def redis_answers(self) -> bool:
        """Return whether at least one Redis server answers now."""
        return any(self._look_in_time()[0].values())

    def complaint(self) -> str:
        """Return the reason to restart this process, if a read of Redis hangs; empty if no restart is needed."""
        with self._lock:
            look = self._under_way
        age = time.monotonic() - look.begun_at if look and not look.snapshot.done() else 0.0
        return f"a read of Redis has not ended for {age:.0f} s" if age > PATIENT_SECONDS else ""

    def _look_in_time(self) -> tuple[dict[str, Timed | None], Snapshot | None]:
        """
        Return the reply of each Redis server to INFO, and the snapshot of the queues.

        A reply or a snapshot is None if it came too late.

        If no queue is known, because no snapshot was ever read, return None for each server. Then the metrics report
        the servers as unavailable, because no other metric would show that the queues cannot be read.
        """
        until = time.monotonic() + SCRAPE_SECONDS
        with self._lock:
            look = self._under_way
            if look is None or look.snapshot.done():
                look = self._under_way = _Look(Future(), Future(), time.monotonic())
                threading.Thread(target=self._run, args=(look,), name="reliq-look", daemon=True).start()
        asked = _in_time(look.servers, until) or {}
        answers = [_in_time(answer, until) for answer in asked.values()]
        snapshot = _in_time(look.snapshot, until)
        if asked and self._client.has_many:
            self._servers = [*asked]
        if not asked or (self._look and snapshot is None and not self._queues):
            answers = [None] * len(self._servers)
        return dict(zip(self._servers, map(_if_available, answers), strict=True)), snapshot

    def _run(self, look: _Look) -> None:
        try:
            asked = self._client.start_everywhere(SERVER_FACTS)
            look.servers.set_result(asked)
            if self._look and self._client.has_many:
                slow = wait(asked.values(), SLOW_SECONDS).not_done
                self._client.avoid([server for server, answer in asked.items() if answer in slow])
            look.snapshot.set_result(self._look() if self._look else None)
        except BaseException as error:
            if not look.servers.done():
                look.servers.set_exception(error)
            look.snapshot.set_exception(error)


def _in_time(result: Future[T], until: float) -> T | None:
    """Wait for a result until the monotonic time `until`; return None if it came too late or the request failed."""
    with suppress(ReliqError, TimeoutError):
        return result.result(max(0.0, until - time.monotonic()))
    return None


def _if_available(timed: Timed | None) -> Timed | None:
    """Return the replies of a Redis server; None if the server is unavailable or still loads its data."""
    away = timed and any(isinstance(answer, RedisUnavailableError) for answer in timed.answers)
    return None if away else timed


def single(spec: Spec, value: float) -> Family:
    """Return a metric with one series and no labels."""
    return Family(spec, {(): int(value) if isinstance(value, bool) else value})


def _of_servers(servers: Mapping[str, Timed | None]) -> Iterator[Family]:
    """Yield the metrics of Redis servers; skip the sections of INFO that the Redis user may not read."""
    yield Family(names.REDIS_UP, {(server,): int(timed is not None) for server, timed in servers.items()})
    answered = {server: timed for server, timed in servers.items() if timed}
    yield Family(names.SCRAPE, {(server,): timed.seconds for server, timed in answered.items()})
    facts = {server: facts_in(timed.answers) for server, timed in answered.items()}
    for spec, field in (
        (names.REDIS_MEMORY, "used_memory"),
        (names.REDIS_MEMORY_LIMIT, "maxmemory"),
        (names.REDIS_CLIENTS, "connected_clients"),
        (names.REDIS_AOF, "aof_enabled"),
        (names.REDIS_EVICTED, "evicted_keys"),
    ):
        yield Family(spec, {(of,): int(info[field]) for of, info in facts.items() if info.get(field, "").isdigit()})
    policies = {server: info["maxmemory_policy"] for server, info in facts.items() if "maxmemory_policy" in info}
    yield Family(names.REDIS_EVICTION, {(server,): int(policy != "noeviction") for server, policy in policies.items()})
    versions = {server: info["redis_version"] for server, info in facts.items() if "redis_version" in info}
    yield Family(names.REDIS_INFO, dict.fromkeys(versions.items(), 1))


def _labels(queues: Collection[Keys]) -> dict[Keys, str]:
    """Return the label of each queue: its name, and also its layout if another queue has the same name."""
    called = Counter(keys.name for keys in queues)
    return {
        keys: keys.name if called[keys.name] == 1 or not keys.bare else f"{keys.name} ({keys.layout})"
        for keys in queues
    }


def _of_queues(
    snapshots: Mapping[Keys, QueueSnapshot], labels: Mapping[Keys, str], lost: Collection[str]
) -> Iterator[Family]:
    rows: dict[Spec, dict[Labels, float]] = {spec: {} for spec in names.QUEUES}
    for keys, queue in snapshots.items():
        label = labels[keys]
        rows[names.MAP_LOST][label,] = int(keys.entry in lost)
        rows[names.SHARED][label,] = int(keys.bare)
        if not keys.bare:
            rows[names.MISSING][label,] = queue.missing
        _add_queue(rows, label, queue)
    for spec, values in rows.items():
        yield Family(spec, values)


def _add_queue(rows: dict[Spec, dict[Labels, float]], label: str, queue: QueueSnapshot) -> None:
    for state in (*names.STATES, *([names.WAITING] if queue.keyed else [])):
        rows[names.MESSAGES][label, state] = getattr(queue, state)
    for state, seconds in queue.oldest.items():
        rows[names.OLDEST][label, state] = seconds
    rows[names.UNACK][label, "running"] = queue.unack - queue.backoff
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
            if key.waiting:  # cut the key to KEY_LENGTH: users choose keys, and a long label costs memory
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
    """A metric whose labels are the versions of reliq, Python and redis-py."""

    def families(self) -> Iterator[Family]:
        """Yield the metric with the versions as labels; its value is always 1."""
        yield Family(names.BUILD, {(VERSION, platform.python_version(), version("redis")): 1})


class Processes(Collector):
    """
    An observer in the supervisor that counts running processes, and replaced processes by reason.

    Args:
        living: a function that returns how many worker processes run.
        bury: functions that are called with the pid of a dead process. They add the counts of this process to the
            totals of all dead processes.
    """

    def __init__(self, living: Callable[[], int], *bury: Callable[[int], None]) -> None:
        self._living = living
        self._bury = bury
        self._restarts = dict.fromkeys(REASONS, 0)

    def __call__(self, event: Event, /) -> None:
        """Count a process that was replaced, and add the counts that it stored to the totals of dead processes."""
        if isinstance(event, events.ProcessEnded):
            for keep in self._bury:
                keep(event.pid)
            if event.reason:
                self._restarts[event.reason] += 1

    def families(self) -> Iterator[Family]:
        """Yield the number of running processes, and the number of replaced processes by reason."""
        yield single(names.WORKERS, self._living())
        yield Family(names.RESTARTS, {(reason,): count for reason, count in self._restarts.items()})


class Usage(Collector):
    """
    The CPU time, memory and open files of each process.

    Args:
        pids: a function that returns the pid of each process, by the label of the process, such as `0`.
    """

    def __init__(self, pids: Callable[[], Mapping[str, int]]) -> None:
        self._pids = pids

    def families(self) -> Iterator[Family]:
        """Yield the CPU time, memory, open files and start time of each running process."""
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
