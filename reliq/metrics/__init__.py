"""Metrics for Prometheus: queue metrics are read from Redis at each scrape; process metrics count events."""

from typing import TYPE_CHECKING

from reliq.distribution import lazy_names

if TYPE_CHECKING:
    from reliq.metrics.process import PublishMetrics as PublishMetrics

if not TYPE_CHECKING:  # import lazily: `Admin` uses reliq.metrics.snapshot without the Prometheus client
    __getattr__, __dir__, __all__ = lazy_names(__name__, {"reliq.metrics.process": "PublishMetrics"})
