"""Observers that count events: publishes of an application, and the work of one worker process or relay."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram

from reliq import events
from reliq.metrics import names
from reliq.metrics.exposition import Collector
from reliq.metrics.store import Figures, FiguresReader, Sums, bounded_class

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from reliq.events import Event
    from reliq.metrics.exposition import Family
    from reliq.worker.health import EngineStats


class PublishMetrics:
    """
    An observer of queues that measures their publishes: `Queue("orders", Order, observers=[PublishMetrics()])`.

    One observer can measure any number of queues. A registry accepts one observer only.

    Args:
        registry: a registry of prometheus_client, which the application serves.

    Raises:
        ValueError: the registry has a `PublishMetrics` already.
    """

    kinds = (events.PublishEnded,)

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        seconds, messages = names.PUBLISH, names.PUBLISHED
        self._seconds = Histogram(
            seconds.name, seconds.help, seconds.labels, buckets=seconds.buckets, registry=registry
        )
        self._messages = Counter(messages.name, messages.help, messages.labels, registry=registry)
        # `labels()` costs more than an observation, so its results are kept.
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
        path: a file that the supervisor reads, or None when this process serves the figures itself.
        look: returns the engine's state at this moment, for a scrape of this process.
    """

    kinds = (
        *(events.Handled, events.Started, events.LeaseLost, events.RenewalLate),
        *(
            events.RedisUnavailable,
            events.RedisRecovered,
            events.RedisRefused,
            events.OutboxSeen,
            events.DatabaseUnavailable,
        ),
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
        self._classes: dict[str, set[str]] = {}
        for queue in queues:
            self._figures.begin(names.LOST, queue)
            self._figures.begin(names.LAG, queue)
            self._figures.begin(names.HANDLER, queue, "ack")
        for reason in ("away", "refused"):
            self._figures.begin(names.REDIS_ERRORS, reason)
        self._figures.begin(names.LATE)
        self._figures.begin(names.RECONNECTS)

    def __call__(self, event: Event, /) -> None:
        """Count `event`. Events of every message come first and without a pattern, which takes twice as long."""
        if isinstance(event, events.Handled):
            self._figures.observe(names.HANDLER, (event.queue, event.outcome), event.seconds)
            if event.raised or event.failed:
                with self._lock:
                    name = bounded_class(self._classes, event.queue, event.raised.partition(" ")[0] or "Nack")
                self._figures.add(names.HANDLER_FAILURES, (event.queue, name))
        elif isinstance(event, events.Started):
            if event.lag is not None:
                self._figures.observe(names.LAG, (event.queue,), event.lag)
        else:
            self._count_rare(event)

    def _count_rare(self, event: Event) -> None:
        match event:
            case events.LeaseLost(queue, ids):
                self._figures.add(names.LOST, (queue,), len(ids))
            case events.RenewalLate():
                self._figures.add(names.LATE)
            case events.RedisUnavailable(queue, part):
                with self._lock:
                    self._away.add((queue, part))
                self._figures.add(names.REDIS_ERRORS, ("away",))
            case events.OutboxSeen(_, waiting, oldest_seconds):
                self._figures.set(names.OUTBOX_ROWS, (), waiting)
                self._figures.set(names.OUTBOX_OLDEST, (), oldest_seconds)
            case events.DatabaseUnavailable():
                self._figures.add(names.OUTBOX_ERRORS)
            case events.RedisRefused():
                self._figures.add(names.REDIS_ERRORS, ("refused",))
            case events.RedisRecovered(queue, part):
                with self._lock:
                    is_last = self._away == {(queue, part)}
                    self._away.discard((queue, part))
                if is_last:
                    self._figures.add(names.RECONNECTS)

    def sample(self, stats: EngineStats | None) -> None:
        """Set the gauges to the engine's state; None when no engine runs."""
        self._figures.set(names.INFLIGHT, ("running",), stats.running if stats else 0)
        self._figures.set(names.INFLIGHT, ("prefetched",), stats.held if stats else 0)
        self._figures.set(names.LONGEST, (), stats.longest_seconds if stats else 0.0)
        self._figures.set(names.SLOTS, (), stats.slots if stats else 0)
        self._figures.set(names.SLOTS_BUSY, (), stats.busy_slots if stats else 0)
        self._figures.set(names.SLOTS_HUNG, (), stats.hung_slots if stats else 0)
        if stats:
            self._figures.set(names.LAST_CLAIM, (), time.time() - (time.monotonic() - stats.last_claim_at))

    def families(self) -> Iterable[Family]:
        """Return the current figures of this process."""
        if self._look is not None:
            self.sample(self._look())
        sums = Sums()
        with self._lock:  # two scrapes at a time would note a new series twice
            sums.add(self._reader.series(self._figures.raw()))
        return sums.families()
