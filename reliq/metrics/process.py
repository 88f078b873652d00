"""Observers that count events: the publishes of an application, or the work of one worker process or relay."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram

from reliq import events
from reliq.metrics import names
from reliq.metrics.exposition import Collector, Family
from reliq.metrics.store import Figures, FiguresReader, Sums, bounded_class

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from reliq.events import Event
    from reliq.worker.health import EngineStats

#: The error codes with which a Redis server refuses writes until an operator repairs the server or a failover ends.
_REFUSALS = {"READONLY", "NOREPLICAS", "MISCONF"}


class PublishMetrics:
    """
    An observer that counts and times the publishes of queues: `Queue("orders", Order, observers=[PublishMetrics()])`.

    Pass the same observer to all queues, because a registry accepts only one `PublishMetrics`.

    Args:
        registry: the registry of prometheus_client that the application serves.

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
        # Keep the results of `labels()`, because `labels()` takes longer than `observe()`.
        self._seconds_of: dict[str, Any] = {}

    def __call__(self, event: Event, /) -> None:
        """Record the duration of a publish call, and count its messages by outcome."""
        if isinstance(event, events.PublishEnded):
            seconds = self._seconds_of.get(event.queue)
            if seconds is None:
                seconds = self._seconds_of[event.queue] = self._seconds.labels(event.queue)
            seconds.observe(event.seconds)
            for outcome, count in event.outcomes.items():
                self._messages.labels(event.queue, outcome).inc(count)


class ProcessMetrics(Collector):
    """
    An observer that counts the events of this process, and serves the counts as metrics.

    Args:
        tasks: pairs of a queue name and a task name, whose metrics start at 0 before the first event. The task name is
            empty for a queue without tasks.
        path: the file in which this process stores its counts for the supervisor; None if this process serves its own
            metrics.
        look: a function that returns the current state of the engine, for the gauges; None if other code passes this
            state to `sample`.
    """

    kinds = (
        *(events.Handled, events.Started, events.LeaseLost, events.RenewalLate, events.RedisUnavailable),
        *(events.RedisRecovered, events.RedisRefused, events.OutboxSeen, events.DatabaseUnavailable),
    )

    def __init__(
        self,
        tasks: Iterable[tuple[str, str]] = (),
        path: Path | None = None,
        look: Callable[[], EngineStats | None] | None = None,
    ) -> None:
        self._figures = Figures(path)
        self._reader = FiguresReader()
        self._look = look
        self._lock = threading.Lock()
        # The parts of the worker that cannot reach Redis now: pairs of a queue name ("" for all queues) and a part.
        self._away: set[tuple[str, str]] = set()
        self._classes: dict[str, set[str]] = {}
        for queue, task in tasks:
            self._figures.begin(names.LOST, queue)
            self._figures.begin(names.LAG, queue)
            self._figures.begin(names.HANDLER, queue, task, "ack")
        for reason in ("away", "refused"):
            self._figures.begin(names.REDIS_ERRORS, reason)
        self._figures.begin(names.LATE)
        self._figures.begin(names.RECONNECTS)

    def __call__(self, event: Event, /) -> None:
        """Count `event`. Frequent events are checked with `isinstance`, which is twice as fast as `match`."""
        if isinstance(event, events.Handled):
            self._figures.observe(names.HANDLER, (event.queue, event.task, event.outcome), event.seconds)
            if event.raised or event.failed:
                with self._lock:
                    name = bounded_class(self._classes, event.queue, event.raised.partition(" ")[0] or "Nack")
                self._figures.add(names.HANDLER_FAILURES, (event.queue, event.task, name))
        elif isinstance(event, events.Started):
            if event.lag is not None:
                self._figures.observe(names.LAG, (event.queue,), event.lag)
        else:
            match event:
                case events.LeaseLost(queue, ids):
                    self._figures.add(names.LOST, (queue,), len(ids))
                case events.RenewalLate():
                    self._figures.add(names.LATE)
                case events.RedisUnavailable(queue, part, _, refusal):
                    with self._lock:
                        self._away.add((queue, part))
                    self._figures.add(names.REDIS_ERRORS, ("refused" if refusal in _REFUSALS else "away",))
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
        """Set the gauges to the engine's state `stats`, or to 0 if `stats` is None because no engine runs."""
        self._figures.set(names.INFLIGHT, ("running",), stats.running if stats else 0)
        self._figures.set(names.INFLIGHT, ("prefetched",), stats.held if stats else 0)
        self._figures.set(names.LONGEST, (), stats.longest_seconds if stats else 0.0)
        self._figures.set(names.SLOTS, (), stats.slots if stats else 0)
        self._figures.set(names.SLOTS_BUSY, (), stats.busy_slots if stats else 0)
        self._figures.set(names.SLOTS_HUNG, (), stats.hung_slots if stats else 0)
        if stats:
            self._figures.set(names.LAST_CLAIM, (), time.time() - (time.monotonic() - stats.last_claim_at))

    def families(self) -> Iterable[Family]:
        """Return the current metrics of this process."""
        if self._look is not None:
            self.sample(self._look())
        sums = Sums()
        with self._lock:  # without this lock, two concurrent scrapes could add a series twice
            sums.add(self._reader.series(self._figures.raw()))
        return sums.families()
