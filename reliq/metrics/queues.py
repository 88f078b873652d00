"""The figures of queues and of Redis itself, asked once per scrape and never waited for longer than a moment."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import Future
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from reliq.errors import ReliqError
from reliq.metrics import names

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from prometheus_client.core import Metric

    from reliq.metrics.names import Spec
    from reliq.snapshot.queue_look import QueueSnapshot
    from reliq.snapshot.snapshot import Snapshot

#: A scrape waits this long for Redis: it answers within 2 s, with Redis or without.
SCRAPE_SECONDS = 1.5
#: A connection of a scrape waits this long for one reply.
SCRAPE_REPLY_SECONDS = 0.7


class QueueCollector:
    """
    The metrics of a snapshot of Redis; `reliq_redis_up 0` alone when Redis does not answer.

    A thread of its own takes the snapshot: a server that hangs, or a name that does not resolve, holds up no scrape
    for longer than SCRAPE_SECONDS. Scrapes at the same time share one snapshot.
    """

    def __init__(self, look: Callable[[], Snapshot]) -> None:
        self._look = look
        self._lock = threading.Lock()
        self._under_way: Future[Snapshot] | None = None

    def describe(self) -> list[Metric]:
        """Return no descriptions: registering must not ask Redis."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield every metric that Redis can tell."""
        try:
            look = self._begun().result(SCRAPE_SECONDS)
        except (ReliqError, TimeoutError):
            yield gauge(names.REDIS_UP, 0)
            return
        yield gauge(names.REDIS_UP, 1)
        yield gauge(names.SCRAPE, look.seconds)
        yield from _of_redis(look.facts)
        yield from _of_queues(look.queues)
        missing: dict[str, float] = {"unreadable": len(look.unreadable), "many": look.left_out}
        family = GaugeMetricFamily(names.LEFT_OUT.name, names.LEFT_OUT.help, labels=names.LEFT_OUT.labels)
        for reason, number in missing.items():
            family.add_metric((reason,), number)
        yield family

    def _begun(self) -> Future[Snapshot]:
        with self._lock:
            if self._under_way is None or self._under_way.done():
                self._under_way = Future()
                threading.Thread(target=self._run, args=(self._under_way,), name="reliq-look", daemon=True).start()
            return self._under_way

    def _run(self, future: Future[Snapshot]) -> None:
        try:
            future.set_result(self._look())
        except BaseException as error:
            future.set_exception(error)


def gauge(spec: Spec, value: float) -> GaugeMetricFamily:
    """Return a gauge without labels."""
    return GaugeMetricFamily(spec.name, spec.help, value=value)


def counter(spec: Spec, rows: Mapping[tuple[str, ...], float]) -> CounterMetricFamily:
    """Return a counter with a value for each row of labels."""
    family = CounterMetricFamily(spec.name, spec.help, labels=spec.labels)
    for labels, value in rows.items():
        family.add_metric(labels, value)
    return family


def _of_redis(facts: Mapping[str, str]) -> Iterator[Metric]:
    """Yield the metrics of INFO; nothing where this user may not read it."""
    for spec, field in (
        (names.REDIS_MEMORY, "used_memory"),
        (names.REDIS_MEMORY_LIMIT, "maxmemory"),
        (names.REDIS_CLIENTS, "connected_clients"),
        (names.REDIS_AOF, "aof_enabled"),
    ):
        if facts.get(field, "").isdigit():
            yield gauge(spec, int(facts[field]))
    if "maxmemory_policy" in facts:
        yield gauge(names.REDIS_EVICTION, facts["maxmemory_policy"] != "noeviction")
    if facts.get("evicted_keys", "").isdigit():
        yield counter(names.REDIS_EVICTED, {(): int(facts["evicted_keys"])})


def _of_queues(snapshots: Sequence[QueueSnapshot]) -> Iterator[Metric]:
    rows = _labelled(snapshots)
    yield _family(names.MESSAGES, rows, lambda one: {state: getattr(one.counts, state) for state in names.STATES})
    yield _family(names.UNACK, rows, lambda one: {"leased": one.counts.unack - one.backoff, "backoff": one.backoff})
    yield _family(names.OLDEST, rows, lambda one: one.oldest)
    paused, shared = (GaugeMetricFamily(one.name, one.help, labels=one.labels) for one in (names.PAUSED, names.SHARED))
    for queue, one in rows.items():
        paused.add_metric((queue,), one.counts.paused)
        shared.add_metric((queue,), one.keys.bare)
    yield paused
    yield shared
    for kind, spec in names.COUNTED.items():
        yield counter(spec, {(queue,): one.counts.totals.get(kind, 0) for queue, one in rows.items()})
    retried = {(queue, cause): f"retried_{cause}" for queue in rows for cause in names.CAUSES}
    yield counter(names.RETRIED, {row: rows[row[0]].counts.totals.get(kind, 0) for row, kind in retried.items()})


def _labelled(snapshots: Sequence[QueueSnapshot]) -> dict[str, QueueSnapshot]:
    """Return snapshots by the queue's name; where queues in two layouts share one, by name and layout."""
    called = Counter(one.queue for one in snapshots)
    return {
        one.queue if called[one.queue] == 1 or not one.keys.bare else f"{one.queue} ({one.keys.layout})": one
        for one in snapshots
    }


def _family(
    spec: Spec, rows: Mapping[str, QueueSnapshot], values: Callable[[QueueSnapshot], Mapping[str, float]]
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(spec.name, spec.help, labels=spec.labels)
    for queue, one in rows.items():
        for label, value in values(one).items():
            family.add_metric((queue, label), value)
    return family
