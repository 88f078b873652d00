"""The HTTP server for /metrics, /live and /ready in a single worker process, a supervisor, a relay or an exporter."""

from __future__ import annotations

import gzip
import logging
import os
import re
import socket
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import TYPE_CHECKING, Any, Self

from prometheus_client import CollectorRegistry

from reliq.consumer import STOPS, SignalNotes, handle_signal, ignore_stops
from reliq.errors import ConfigurationError
from reliq.metrics.exposition import Collector, Page
from reliq.metrics.process import ProcessMetrics
from reliq.metrics.queues import SCRAPE_REPLY_SECONDS, Build, Processes, QueueCollector, Usage
from reliq.metrics.snapshot import BlockedKeys, SnapshotReader
from reliq.metrics.store import Children, Files
from reliq.redis.client import Client
from reliq.redis.server import Connection
from reliq.settings import check_int
from reliq.worker import health
from reliq.worker.health import DEFAULT_HOST, EngineStats, Pulse, sampler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from reliq.events import Observer
    from reliq.handlers.handler import Handler
    from reliq.keys import Keys
    from reliq.redis.url import Target


logger = logging.getLogger(__name__)

#: The server closes a connection after this many seconds, even if its client has not sent or read everything.
REQUEST_SECONDS = 10.0
#: The server keeps at most this many connections open at once.
#: If another client connects, the server closes the oldest connection, because its client is slow.
CONNECTION_LIMIT = 32
#: If this process has no free file descriptor, the server waits this many seconds before it accepts a connection again.
EXHAUSTED_SECONDS = 0.1
#: A response that is larger than a network packet is compressed if the client accepts gzip.
#: A higher level of compression would make the response 20 % smaller, but take several times the CPU time.
GZIP_BYTES = 1400
GZIP_LEVEL = 1
#: Matches an Accept-Encoding header that contains `gzip`, but not with `q=0`, which forbids it.
_GZIP = re.compile(r"(?:^|,)\s*gzip\s*(?:$|,|;(?!\s*q\s*=\s*0(?:\.0*)?\s*(?:$|,)))", re.IGNORECASE)
#: The type of `registry`: the prometheus_client registry of an application, to which reliq adds its metrics.
Registry = CollectorRegistry


class Endpoint(ThreadingTCPServer):
    """
    An HTTP server for metrics and health checks. It runs in its own threads while its `with` block runs.

    Each connection uses a thread and a file descriptor of a process that also handles messages. So the number of
    connections and the duration of each connection are limited.

    Args:
        live, ready: functions that return why the process is not live or not ready; they return an empty text if the
            process is healthy.

    Raises:
        ConfigurationError: the port is out of range, or the server cannot listen on it.
    """

    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = CONNECTION_LIMIT

    def __init__(
        self, port: int, host: str | None, *, page: Page, live: Callable[[], str], ready: Callable[[], str]
    ) -> None:
        check_int("metrics port", port, most=65535)
        chosen = host or DEFAULT_HOST
        self.page = page
        self.checks = {"/live": live, "/ready": ready}
        self.address_family = socket.AF_INET6 if ":" in chosen else socket.AF_INET
        self._accepted: dict[socket.socket, float] = {}
        self._lock = threading.Lock()
        try:
            super().__init__((chosen, port), _Handler)
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigurationError(
                f"cannot serve metrics on {chosen}:{port}: {reason}; choose another port or host"
            ) from None
        self._thread = threading.Thread(target=self.serve_forever, name="reliq-metrics", daemon=True)

    @property
    def port(self) -> int:
        """The port; if port 0 was requested, the free port that the system chose."""
        return int(self.server_address[1])

    def __enter__(self) -> Self:
        self._thread.start()
        logger.info("metrics: serving /metrics, /live and /ready on %s:%d", self.server_address[0], self.port)
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join()

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a connection. If no file descriptor is free, wait a moment, because the caller retries at once."""
        try:
            connection, address = super().get_request()
        except OSError:
            time.sleep(EXHAUSTED_SECONDS)
            raise
        with self._lock:
            self._accepted[connection] = time.monotonic()
        return connection, address

    def service_actions(self) -> None:
        """Close connections that took too long or exceed the limit; the server calls this twice a second."""
        with self._lock:
            excess = len(self._accepted) - CONNECTION_LIMIT
            for at, (connection, accepted_at) in enumerate(self._accepted.items()):
                if at < excess or time.monotonic() - accepted_at > REQUEST_SECONDS:
                    # This makes the thread of the connection fail and close the connection.
                    # It raises OSError if the client has closed the connection already.
                    with suppress(OSError):
                        connection.shutdown(socket.SHUT_RDWR)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection, so that it no longer counts towards the limit."""
        with self._lock:
            self._accepted.pop(request, None)
            super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore the error, which means that the client has closed its connection."""


class _Handler(BaseHTTPRequestHandler):
    server: Endpoint
    server_version = "reliq"
    sys_version = ""

    def do_GET(self) -> None:
        """Answer a GET request for the metrics or a health check."""
        status, kind = HTTPStatus.OK, "text/plain; charset=utf-8"
        path = self.path.partition("?")[0]
        if path == "/metrics":
            body, kind = self.server.page.encode(self.headers.get("Accept", ""))
        elif path in self.server.checks:
            complaint = self.server.checks[path]()
            body = f"{complaint or 'ok'}\n".encode()
            status = HTTPStatus.SERVICE_UNAVAILABLE if complaint else HTTPStatus.OK
        else:
            status, body = HTTPStatus.NOT_FOUND, b"there are /metrics, /live and /ready\n"
        self.send_response(status)
        self.send_header("Content-Type", kind)
        if len(body) > GZIP_BYTES and _GZIP.search(self.headers.get("Accept-Encoding", "")):
            body = gzip.compress(body, GZIP_LEVEL)
            self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET  # noqa: N815  the name that the base class calls

    def log_message(self, format: str, *args: Any) -> None:
        """Do not log requests."""


def queue_collector(connection: Connection, queues: Sequence[Keys] = (), *, with_queues: bool = True) -> QueueCollector:
    """
    Return a collector that reads the metrics of queues and of the Redis servers from Redis.

    Args:
        queues: the queues to read; empty for all queues in the queue registry.
        with_queues: False to read only the metrics of the Redis servers.
    """
    address = connection.address
    # For a Cluster, use a separate client: the collector skips slow nodes, but other code of this process must not.
    client = Client.to(connection.anew() if address.is_cluster else connection, SCRAPE_REPLY_SECONDS)
    reader = SnapshotReader(client, (lambda: queues) if queues else None, held_up=BlockedKeys())
    return QueueCollector(client, reader.look if with_queues else None, address.servers, queues)


@contextmanager
def of_one_process(
    observers: list[Observer],
    look: Callable[[], EngineStats | None],
    connection: Connection,
    handlers: Sequence[Handler],
    *,
    port: int | None,
    host: str | None = None,
    registry: Registry | None = None,
) -> Iterator[Endpoint | None]:
    """
    Serve the metrics of a worker that runs in this process. If `port` is None, only add the metrics to `registry`.

    Args:
        observers: the observers of the worker; inside the `with` block, the list also contains the observers for
            metrics.
        look: a function that returns the state of the engine, or None if no engine runs.
    """
    tasks = [(each.queue.name, each.task) for handler in handlers for each in handler.each]
    metrics = ProcessMetrics(tasks, look=look)
    pulse = Pulse()
    redis = queue_collector(connection, [handler.queue.keys for handler in handlers])
    collectors: list[Collector] = [metrics, Build(), Processes(lambda: 1), redis]
    # Leave out `Usage` for an application's registry, which usually has its own metrics of CPU time and memory.
    page = Page([*collectors, Usage(lambda: {"0": os.getpid()})]) if registry is None else Page(foreign=registry)
    with ExitStack() as stack:
        if registry is not None:
            for collector in collectors:
                registry.register(collector)
                stack.callback(registry.unregister, collector)
        for observer in (metrics, pulse):
            observers.append(observer)
            stack.callback(observers.remove, observer)
        sampling = sampler(look, pulse.note)
        sampling.start()
        stack.callback(sampling.join)
        stack.callback(sampling.stop)
        if port is None:
            yield None
        else:
            live, ready = partial(health.live, [pulse]), partial(health.ready, [pulse], redis.redis_answers)
            yield stack.enter_context(Endpoint(port, host, page=page, live=live, ready=ready))


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
    Return the HTTP endpoint of the supervisor, and the observer that updates its metrics when a process has ended.

    Args:
        folder: a function that returns the folder in which the worker processes store their metrics.
        pulses: a function that returns the health data (pulses) of the worker processes.
        pids: a function that returns the pids of the supervisor and of its running processes, by their labels.
        with_queues: False if `reliq exporter` serves the metrics of queues.
    """
    children = Children(folder)
    files = Files(folder)
    processes = Processes(lambda: len(pids()) - 1, children.bury, files.sweep)
    redis = queue_collector(connection, queues, with_queues=with_queues)
    foreign = CollectorRegistry()
    foreign.register(files)
    endpoint = Endpoint(
        port,
        host,
        page=Page([children, processes, Build(), Usage(pids), redis], foreign),
        live=lambda: health.live(pulses()),
        ready=lambda: health.ready(pulses(), redis.redis_answers),
    )
    return endpoint, processes


def of_relay(
    port: int,
    host: str,
    observers: list[Observer],
    *,
    pulse: Pulse,
    connection: Connection,
    complaint: Callable[[], str],
) -> Endpoint:
    """
    Return the HTTP endpoint of a relay that runs in this process.

    Args:
        observers: the observers of the relay; this function adds the observer for metrics to this list.
        complaint: a function that returns why the relay itself is not ready; it returns an empty text if the relay is
            ready.
    """
    metrics = ProcessMetrics()
    redis = queue_collector(connection, with_queues=False)
    observers.append(metrics)
    return Endpoint(
        port,
        host,
        page=Page([metrics, Build(), Usage(lambda: {"0": os.getpid()})]),
        live=lambda: health.live([pulse]),
        ready=lambda: health.ready([pulse], redis.redis_answers) or complaint(),
    )


def export(redis: Target | None, queues: Sequence[Keys], port: int, host: str) -> None:
    """Serve the metrics of queues in a process without a worker, until SIGTERM or Ctrl-C."""
    signals = SignalNotes()
    for number in STOPS:
        handle_signal(number, signals.note)
    collector = queue_collector(Connection.to(redis), queues)
    with Endpoint(
        port,
        host,
        page=Page([Build(), collector]),
        live=collector.complaint,
        ready=lambda: "" if collector.redis_answers() else "Redis does not answer",
    ):
        signals.wait()
    ignore_stops()
