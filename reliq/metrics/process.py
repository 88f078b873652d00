"""The figures that one worker process knows and Redis cannot: times, lost leases, running handlers."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from reliq import events
from reliq.metrics import names

if TYPE_CHECKING:
    from collections.abc import Iterable

    from reliq.events import Event
    from reliq.health import EngineStats
    from reliq.metrics.names import Spec


class ProcessMetrics:
    """
    An observer of events that keeps the figures of this process, in a registry of its own.

    Args:
        queues: names of the queues that have series from the start.
    """

    kinds = (events.Handled, events.Started, events.Lost, events.RenewalLate)

    def __init__(self, queues: Iterable[str] = ()) -> None:
        self.registry = registry = CollectorRegistry()
        self._handler = Histogram(*_of(names.HANDLER), buckets=names.HANDLER_BUCKETS, registry=registry)
        self._lag = Histogram(*_of(names.LAG), buckets=names.LAG_BUCKETS, registry=registry)
        self._lost = Counter(*_of(names.LOST), registry=registry)
        self._late = Counter(*_of(names.LATE), registry=registry)
        self._inflight = self._gauge(names.INFLIGHT, "livesum")
        self._longest = self._gauge(names.LONGEST, "livemax")
        self._slots = self._gauge(names.SLOTS, "livesum")
        self._hung = self._gauge(names.SLOTS_HUNG, "livesum")
        self._last_claim = self._gauge(names.LAST_CLAIM, "livemin")
        for queue in queues:
            # A series that begins with 0 shows its first event as a rate.
            self._lost.labels(queue)
            self._lag.labels(queue)
            self._handler.labels(queue, "ack")
            self._handler.labels(queue, "nack")
        # `labels()` costs more than the observation, so its answers are kept.
        self._handler_of: dict[tuple[str, str], Any] = {}
        self._lag_of: dict[str, Any] = {}

    def __call__(self, event: Event, /) -> None:
        """Count `event`."""
        match event:
            case events.Handled(queue, _, _, outcome, seconds):
                key = (queue, outcome)
                if key not in self._handler_of:
                    self._handler_of[key] = self._handler.labels(queue, outcome)
                self._handler_of[key].observe(seconds)
            case events.Started(queue, _, _, lag) if lag is not None:
                if queue not in self._lag_of:
                    self._lag_of[queue] = self._lag.labels(queue)
                self._lag_of[queue].observe(lag)
            case events.Lost(queue, ids):
                self._lost.labels(queue).inc(len(ids))
            case events.RenewalLate():
                self._late.inc()

    def sample(self, stats: EngineStats | None) -> None:
        """Set the gauges to what the process does at this moment; None when nothing runs."""
        self._inflight.labels("running").set(stats.running if stats else 0)
        self._inflight.labels("held").set(stats.held if stats else 0)
        self._longest.set(stats.longest_seconds if stats else 0.0)
        self._slots.set(stats.slots if stats else 0)
        self._hung.set(stats.hung_slots if stats else 0)
        if stats:
            self._last_claim.set(time.time() - (time.monotonic() - stats.last_claim_at))

    def _gauge(self, spec: Spec, mode: Any) -> Gauge:
        return Gauge(*_of(spec), multiprocess_mode=mode, registry=self.registry)


def _of(spec: Spec) -> tuple[str, str, tuple[str, ...]]:
    return spec.name, spec.help, spec.labels
