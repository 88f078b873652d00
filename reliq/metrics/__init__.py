"""Figures for Prometheus: of queues, asked of Redis at each scrape, and of processes, fed by events."""

from reliq.metrics.process import PublishMetrics

__all__ = ["PublishMetrics"]
