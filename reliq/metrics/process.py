"""The observers that measure events: publishes of an application, and the work of one worker process or relay."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram

from reliq import events
from reliq.metrics import names
from reliq.metrics.exposition import Collector
from reliq.metrics.store import Figures, FiguresReader, Sums

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from reliq.events import Event
    from reliq.metrics.exposition import Family
    from reliq.metrics.names import Spec
    from reliq.worker.health import EngineStats


class PublishMetrics:
    """
    An observer of queues that measures their publishes: `Queue("orders", Order, observers=[PublishMetrics()])`.

    One serves any number of queues; a registry takes one alone.

    Args:
        registry: of prometheus_client; the application serves it.

    Raises:
        ValueError: the registry has one already.
    """

    kinds = (events.PublishEnded,)

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._seconds = Histogram(
            names.PUBLISH.name,
            names.PUBLISH.help,
            names.PUBLISH.labels,
            buckets=names.PUBLISH.buckets,
            registry=registry,
        )
        self._messages = Counter(names.PUBLISHED.name, names.PUBLISHED.help, names.PUBLISHED.labels, registry=registry)
        # `labels()` costs more than an observation, so its answers are kept.
        self._seconds_of: dict[str, Any] = {}

    def __call__(self, event: Event, /) -> None:
        """Measure a publish."""
        if isinstance(event, events.PublishEnded):
            seconds = self._seconds_of.get(event.queue)
            if seconds is None:
                seconds = self._seconds_of[event.queue] = self._seconds.labels(event.queue)
            seconds.observe(event.seconds)
            for outcome, count in event.outcomes.items():
                self._messages.labels(event.queue, outcome).inc(count)


class ProcessMetrics(Collector):
    """
    An observer of events that keeps the figures of this process.

    Args:
        queues: names of the queues that have series from the start.
        path: a file that the supervisor reads, None when this process serves the figures itself.
        look: returns what the process does at this moment, for a scrape of this process.
    """

    kinds = (
        *(events.Handled, events.Started, events.Lost, events.RenewalLate),
        *(events.RedisAway, events.RedisBack, events.RedisRefused, events.OutboxSeen, events.DatabaseAway),
    )

    def __init__(
        self,
        queues: Iterable[str] = (),
        path: Path | None = None,
        look: Callable[[], EngineStats | None] | None = None,
    ) -> None:
        self._figures = Figures(path)
        self._reader = FiguresReader()
        self._look = look
        self._lock = threading.Lock()
        self._away: set[tuple[str, str]] = set()  # for which queues (empty: all) and parts Redis is away
        self._places: dict[tuple[str, ...], int] = {}
        self._classes: dict[str, set[str]] = {}
        for queue in queues:
            # A series that begins with 0 shows its first event as a rate.
            self._place(names.LOST, queue)
            self._place(names.LAG, queue)
            self._place(names.HANDLER, queue, "ack")
        for reason in ("away", "refused"):
            self._place(names.REDIS_ERRORS, reason)
        for spec in (names.LATE, names.RECONNECTS):
            self._place(spec)

    def __call__(self, event: Event, /) -> None:
        """Count `event`; those of every message come first, and without a pattern, which takes twice as long."""
        if isinstance(event, events.Handled):
            place = self._place(names.HANDLER, event.queue, event.outcome)
            self._figures.observe(place, names.HANDLER.buckets, event.seconds)
            if event.raised or event.failed:
                self._figures.add(self._place(names.HANDLER_FAILURES, event.queue, self._class(event)))
        elif isinstance(event, events.Started):
            if event.lag is not None:
                self._figures.observe(self._place(names.LAG, event.queue), names.LAG.buckets, event.lag)
        else:
            self._count_rare(event)

    def _count_rare(self, event: Event) -> None:
        match event:
            case events.Lost(queue, ids):
                self._figures.add(self._place(names.LOST, queue), len(ids))
            case events.RenewalLate():
                self._figures.add(self._place(names.LATE))
            case events.RedisAway(queue, part):
                with self._lock:
                    self._away.add((queue, part))
                self._figures.add(self._place(names.REDIS_ERRORS, "away"))
            case events.OutboxSeen(_, waiting, oldest_seconds):
                self._set(names.OUTBOX_ROWS, (), waiting)
                self._set(names.OUTBOX_OLDEST, (), oldest_seconds)
            case events.DatabaseAway():
                self._figures.add(self._place(names.OUTBOX_ERRORS))
            case events.RedisRefused():
                self._figures.add(self._place(names.REDIS_ERRORS, "refused"))
            case events.RedisBack(queue, part):
                with self._lock:
                    is_last = self._away == {(queue, part)}
                    self._away.discard((queue, part))
                if is_last:
                    self._figures.add(self._place(names.RECONNECTS))

    def sample(self, stats: EngineStats | None) -> None:
        """Set the gauges to what the process does at this moment; None when nothing runs."""
        for spec, labels, number in (
            (names.INFLIGHT, ("running",), stats.running if stats else 0),
            (names.INFLIGHT, ("held",), stats.held if stats else 0),
            (names.LONGEST, (), stats.longest_seconds if stats else 0.0),
            (names.SLOTS, (), stats.slots if stats else 0),
            (names.SLOTS_BUSY, (), stats.busy_slots if stats else 0),
            (names.SLOTS_HUNG, (), stats.hung_slots if stats else 0),
        ):
            self._set(spec, labels, number)
        if stats:
            self._set(names.LAST_CLAIM, (), time.time() - (time.monotonic() - stats.last_claim_at))

    def families(self) -> Iterable[Family]:
        """Return the figures of this process as they are now."""
        if self._look is not None:
            self.sample(self._look())
        sums = Sums()
        with self._lock:  # two scrapes at a time would note a new series twice
            sums.add(self._reader.series(self._figures.raw()))
        return sums.families()

    def _class(self, event: events.Handled) -> str:
        """Return the class of the exception that a handler raised, `other` when its queue has had many classes."""
        name = event.raised.partition(" ")[0] or "Nack"
        with self._lock:
            known = self._classes.setdefault(event.queue, set())
            if name not in known and len(known) >= names.CLASSES_LIMIT:
                return names.OTHER
            known.add(name)
        return name

    def _set(self, spec: Spec, labels: tuple[str, ...], number: float) -> None:
        """Set a gauge, which begins with this value: a reader must not take 0 for it."""
        place = self._places.get((spec.name, *labels))
        if place is None:
            self._places[(spec.name, *labels)] = self._figures.place((spec.name, *labels), number)
        else:
            self._figures.set(place, number)

    def _place(self, spec: Spec, *labels: str) -> int:
        """Return where a series is; a new one begins with zeros."""
        key = (spec.name, *labels)
        place = self._places.get(key)
        if place is None:
            place = self._places[key] = self._figures.place(key, *(0.0,) * spec.size)
        return place
