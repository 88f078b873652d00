"""Metrics put together: for a process alone, for a parent of many, and for the exporter."""

from __future__ import annotations

import platform
import threading
from collections import Counter
from contextlib import contextmanager
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily

from reliq import events, health
from reliq.client.client import Client
from reliq.health import Pulse, Sampler
from reliq.metrics import names
from reliq.metrics.endpoint import Endpoint
from reliq.metrics.files import Files
from reliq.metrics.process import ProcessMetrics
from reliq.metrics.queues import SCRAPE_REPLY_SECONDS, QueueCollector, counter, gauge
from reliq.snapshot.snapshot import SnapshotReader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from prometheus_client.core import Metric

    from reliq.events import Event, Observer
    from reliq.health import EngineStats
    from reliq.keys import Keys
    from reliq.transport.connection import Connection

#: A registry that a user hands in, for our metrics beside theirs.
Registry = CollectorRegistry
#: The reasons for which a process is replaced.
REASONS = ("crashed", "killed", "hung", "overran", "memory", "jobs")


class Build:
    """The versions of reliq and Python, as the labels of a metric."""

    def collect(self) -> Iterator[Metric]:
        """Yield the metric."""
        family = GaugeMetricFamily(names.BUILD.name, names.BUILD.help, labels=names.BUILD.labels)
        family.add_metric((version("reliq"), platform.python_version()), 1)
        yield family


class Processes:
    """An observer in the parent: how many processes run, and how many ended and were replaced, by reason."""

    def __init__(self, living: Callable[[], int], files: Files | None = None) -> None:
        self._living, self._files = living, files
        self._lock = threading.Lock()
        self._restarts: Counter[str] = Counter(dict.fromkeys(REASONS, 0))

    def __call__(self, event: Event, /) -> None:
        """Count a restart, and keep the figures of the dead."""
        if isinstance(event, events.ProcessEnded):
            if self._files is not None:
                self._files.sweep()
            if event.reason:
                with self._lock:
                    self._restarts[event.reason] += 1

    def collect(self) -> Iterator[Metric]:
        """Yield the figures."""
        yield gauge(names.WORKERS, self._living())
        with self._lock:
            rows: dict[tuple[str, ...], float] = {(reason,): count for reason, count in self._restarts.items()}
        yield counter(names.RESTARTS, rows)


class _Sampled:
    """Has the process's gauges read at each scrape; it comes first in its registry and yields nothing itself."""

    def __init__(self, sample: Callable[[], None]) -> None:
        self._sample = sample

    def describe(self) -> list[Metric]:
        """Return no descriptions."""
        return []

    def collect(self) -> list[Metric]:
        """Sample."""
        self._sample()
        return []


def queue_collector(connection: Connection, queues: Sequence[Keys] = ()) -> QueueCollector:
    """Return what asks `connection` for the figures of `queues`, of all that the registry has when none is named."""
    client = Client(connection.wire(SCRAPE_REPLY_SECONDS))
    return QueueCollector(SnapshotReader(client, (lambda: queues) if queues else None).look)


def redis_answers(collector: QueueCollector) -> bool:
    """Say whether Redis answers now."""
    return next(iter(collector.collect())).samples[0].value == 1


@contextmanager
def of_one_process(
    observers: list[Observer],
    look: Callable[[], EngineStats | None],
    connection: Connection,
    queues: Sequence[Keys],
    *,
    port: int | None,
    host: str | None = None,
    registry: Registry | None = None,
) -> Iterator[Endpoint | None]:
    """
    Keep and serve the metrics of a worker that runs in this process; without a port, in `registry` only.

    Args:
        observers: of the worker; those of the metrics are among them while they are served.
        look: returns what the worker does at this moment, None when nothing runs.
    """
    into = registry if registry is not None else CollectorRegistry()
    metrics, pulse = ProcessMetrics([keys.name for keys in queues]), Pulse()
    asked = queue_collector(connection, queues)
    sampled = _Sampled(lambda: metrics.sample(look()))
    parts: list[Any] = [sampled, metrics.registry, Build(), Processes(lambda: 1), asked]
    observers += [metrics, pulse]
    try:
        with _registered(into, parts), _sampling(Sampler(look, pulse.note)):
            if port is None:
                yield None
                return
            live, ready = (lambda: health.live([pulse])), (lambda: health.ready([pulse], lambda: redis_answers(asked)))
            with Endpoint(port, host, registry=into, live=live, ready=ready) as endpoint:
                yield endpoint
    finally:
        observers[:] = [one for one in observers if one not in (metrics, pulse)]


@contextmanager
def _registered(registry: Registry, parts: Sequence[Any]) -> Iterator[None]:
    """Have `parts` in `registry` for a while."""
    for part in parts:
        registry.register(part)
    try:
        yield
    finally:
        for part in parts:
            registry.unregister(part)


@contextmanager
def _sampling(sampler: Sampler) -> Iterator[None]:
    """Have `sampler` run for a while."""
    try:
        sampler.start()
        yield
    finally:
        sampler.stop()


def of_children(
    port: int,
    host: str | None,
    *,
    connection: Connection,
    queues: Sequence[Keys],
    folder: Path,
    pulses: Callable[[], Sequence[Pulse]],
    living: Callable[[], int],
) -> tuple[Endpoint, Processes]:
    """Return the parent's endpoint, over the files its children keep in `folder`, and the observer that feeds it."""
    files = Files(folder)
    processes, asked = Processes(living, files), queue_collector(connection, queues)
    registry = CollectorRegistry()
    for part in (files, processes, Build(), asked):
        registry.register(part)
    endpoint = Endpoint(
        port,
        host,
        registry=registry,
        live=lambda: health.live(pulses()),
        ready=lambda: health.ready(pulses(), lambda: redis_answers(asked)),
    )
    return endpoint, processes


def of_queues(port: int, host: str | None, *, connection: Connection, queues: Sequence[Keys]) -> Endpoint:
    """Return the exporter's endpoint: the figures of queues, with no worker alive."""
    asked = queue_collector(connection, queues)
    registry = CollectorRegistry()
    for part in (Build(), asked):
        registry.register(part)
    return Endpoint(
        port,
        host,
        registry=registry,
        live=lambda: "",
        ready=lambda: "" if redis_answers(asked) else "Redis does not answer",
    )
