"""
Metrics for Prometheus.

At each scrape, the metrics of queues are read from Redis. The metrics of a process count the events in this process.
"""

from typing import TYPE_CHECKING

from reliq.distribution import lazy_names

if TYPE_CHECKING:
    from reliq.metrics.process import PublishMetrics as PublishMetrics

if not TYPE_CHECKING:  # import lazily: `Admin` uses reliq.metrics.snapshot without prometheus_client
    __getattr__, __dir__, __all__ = lazy_names(__name__, {"reliq.metrics.process": "PublishMetrics"})
