"""Metrics put together: for a process alone, for a parent of many, and for the exporter."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from reliq import health
from reliq.client.client import Client
from reliq.health import Pulse, Sampler
from reliq.metrics.endpoint import Endpoint
from reliq.metrics.exposition import Page
from reliq.metrics.files import Files
from reliq.metrics.process import ProcessMetrics
from reliq.metrics.queues import SCRAPE_REPLY_SECONDS, QueueCollector
from reliq.metrics.sums import Children
from reliq.metrics.workers import Build, Processes, Usage
from reliq.snapshot.held_up import HeldUp
from reliq.snapshot.snapshot import SnapshotReader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from reliq.events import Observer
    from reliq.health import EngineStats
    from reliq.keys import Keys
    from reliq.metrics.exposition import Collector
    from reliq.transport.connection import Connection

#: A registry that a user hands in, for our metrics beside theirs.
Registry = CollectorRegistry


def queue_collector(connection: Connection, queues: Sequence[Keys] = (), *, with_queues: bool = True) -> QueueCollector:
    """
    Return what asks `connection` for the figures of `queues`, of all that the registry has when none is named.

    Args:
        with_queues: false asks for the figures of Redis itself alone.
    """
    client = Client.to(connection, SCRAPE_REPLY_SECONDS)
    chosen = (lambda: queues if with_queues else ()) if queues or not with_queues else None
    return QueueCollector(SnapshotReader(client, chosen, held_up=HeldUp()).look, with_queues=with_queues)


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
    metrics, pulse = ProcessMetrics([keys.name for keys in queues], look=look), Pulse()
    asked = queue_collector(connection, queues)
    collectors: list[Collector] = [metrics, Build(), Processes(lambda: 1), asked]
    page = Page([*collectors, Usage(lambda: {"0": os.getpid()})]) if registry is None else Page(foreign=registry)
    into = CollectorRegistry() if registry is None else registry  # which has process metrics of its own
    observers += [metrics, pulse]
    try:
        with _registered(into, collectors), _sampling(Sampler(look, pulse.note)):
            if port is None:
                yield None
                return
            live, ready = (lambda: health.live([pulse])), (lambda: health.ready([pulse], asked.redis_answers))
            with Endpoint(port, host, page=page, live=live, ready=ready) as endpoint:
                yield endpoint
    finally:
        observers[:] = [one for one in observers if one not in (metrics, pulse)]


@contextmanager
def _registered(registry: Registry, collectors: Sequence[Collector]) -> Iterator[None]:
    """Have `collectors` in `registry` for a while."""
    for collector in collectors:
        registry.register(collector)
    try:
        yield
    finally:
        for collector in collectors:
            registry.unregister(collector)


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
    folder: Callable[[], Path],
    pulses: Callable[[], Sequence[Pulse]],
    pids: Callable[[], Mapping[str, int]],
    with_queues: bool = True,
) -> tuple[Endpoint, Processes]:
    """
    Return the parent's endpoint, over the files its children keep in `folder()`, and the observer that feeds it.

    Args:
        pids: returns the processes that run, by label; this one is among them.
        with_queues: false leaves the figures of queues to an exporter.
    """
    children, files = Children(folder), Files(folder)
    processes = Processes(lambda: len(pids()) - 1, children.bury, files.sweep)
    asked = queue_collector(connection, queues, with_queues=with_queues)
    foreign = CollectorRegistry()
    foreign.register(files)
    endpoint = Endpoint(
        port,
        host,
        page=Page([children, processes, Build(), Usage(pids), asked], foreign),
        live=lambda: health.live(pulses()),
        ready=lambda: health.ready(pulses(), asked.redis_answers),
    )
    return endpoint, processes


def of_queues(port: int, host: str | None, *, connection: Connection, queues: Sequence[Keys]) -> Endpoint:
    """Return the exporter's endpoint: the figures of queues, with no worker alive."""
    asked = queue_collector(connection, queues)
    return Endpoint(
        port,
        host,
        page=Page([Build(), asked]),
        live=asked.complaint,
        ready=lambda: "" if asked.redis_answers() else "Redis does not answer",
    )


@contextmanager
def of_relay(
    port: int,
    host: str,
    observers: list[Observer],
    *,
    pulse: Pulse,
    connection: Connection,
    complaint: Callable[[], str],
) -> Iterator[Endpoint]:
    """
    Serve the figures of a relay that runs in this process; they are among `observers` while they are served.

    Args:
        complaint: returns why the relay is not ready although its rounds end, empty when it is.
    """
    metrics, asked = ProcessMetrics(), queue_collector(connection, with_queues=False)
    page = Page([metrics, Build(), Usage(lambda: {"0": os.getpid()})])
    observers.append(metrics)
    try:
        live, ready = (
            (lambda: health.live([pulse])),
            (lambda: health.ready([pulse], asked.redis_answers) or complaint()),
        )
        with Endpoint(port, host, page=page, live=live, ready=ready) as endpoint:
            yield endpoint
    finally:
        observers.remove(metrics)
