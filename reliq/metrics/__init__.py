"""Metrics for Prometheus: of queues, read from Redis at each scrape, and of processes, counted from events."""

from typing import TYPE_CHECKING

from reliq.distribution import lazy_names

if TYPE_CHECKING:
    from reliq.metrics.process import PublishMetrics as PublishMetrics

if not TYPE_CHECKING:  # `Admin` needs snapshots alone, and not the Prometheus client
    __getattr__, __dir__, __all__ = lazy_names(__name__, {"reliq.metrics.process": "PublishMetrics"})
