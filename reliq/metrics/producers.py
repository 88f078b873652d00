"""The figures of publishes, in the registry of the application that makes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram

from reliq import events
from reliq.metrics import names

if TYPE_CHECKING:
    from reliq.events import Event


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
