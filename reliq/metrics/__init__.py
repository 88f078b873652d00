"""Figures for Prometheus: of queues, asked of Redis at each scrape, and of processes, fed by events."""

from reliq.metrics.producers import PublishMetrics

__all__ = ["PublishMetrics"]
