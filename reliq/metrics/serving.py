"""The port on which /metrics, /live and /ready are served: by a process alone, a supervisor, a relay or an exporter."""

from __future__ import annotations

import errno
import gzip
import logging
import os
import re
import socket
import socketserver
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, contextmanager, suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Self

from prometheus_client import CollectorRegistry

from reliq.admin.screens import port_refusal
from reliq.consumer import STOPS, SignalNotes, handle_signal, ignore_stops
from reliq.errors import ConfigurationError
from reliq.keys import Keys
from reliq.metrics.exposition import Page
from reliq.metrics.process import ProcessMetrics
from reliq.metrics.queues import SCRAPE_REPLY_SECONDS, Build, Processes, QueueCollector, Usage
from reliq.metrics.snapshot import BlockedKeys, SnapshotReader
from reliq.metrics.store import Children, Files
from reliq.redis.client import Client
from reliq.redis.server import Connection
from reliq.settings import check_int
from reliq.worker import health
from reliq.worker.health import DEFAULT_HOST, Pulse, sampler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from reliq.events import Observer
    from reliq.keys import Keys
    from reliq.metrics.exposition import Collector
    from reliq.redis.url import Target
    from reliq.worker.health import EngineStats


logger = logging.getLogger(__name__)

#: A connection is cut off after this long, however slowly its client sends or reads.
REQUEST_SECONDS = 10.0
#: Connections served at once. One more cuts the oldest off, which a client that dawdles holds.
CONNECTION_LIMIT = 32
#: Pause before the next accept when this process has no descriptor left for a connection.
EXHAUSTED_SECONDS = 0.1
#: A page of more than 1,400 bytes, which is a packet, is compressed for a client that takes gzip; a higher level would
#: cost several times the time and save a fifth.
GZIP_BYTES = 1400
GZIP_LEVEL = 1
_EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_PLAIN = "text/plain; charset=utf-8"
#: An Accept-Encoding header that allows gzip: named, and not with the quality 0.
_GZIP = re.compile(r"(?:^|,)\s*gzip\s*(?:$|,|;(?!\s*q\s*=\s*0(?:\.0*)?\s*(?:$|,)))", re.IGNORECASE)
#: A registry that a user hands in, for our metrics beside theirs.
Registry = CollectorRegistry


class Endpoint:
    """
    Serves on `host` and `port` from `start` to `stop`.

    Args:
        live, ready: return why it is not so, empty when it is.

    Raises:
        ConfigurationError: the port is none, or it cannot be listened on.
    """

    def __init__(
        self,
        port: int,
        host: str | None,
        *,
        page: Page,
        live: Callable[[], str],
        ready: Callable[[], str],
    ) -> None:
        check_int("metrics port", port, most=65535)
        chosen = host or DEFAULT_HOST
        try:
            self._server = _Server(chosen, port, page, {"/live": live, "/ready": ready})
        except (OSError, UnicodeError) as error:
            raise ConfigurationError(
                f"cannot serve metrics on {chosen}:{port}: {port_refusal(error)}; choose another port or host"
            ) from None
        self._thread = threading.Thread(target=self._server.serve_forever, name="reliq-metrics", daemon=True)

    @property
    def port(self) -> int:
        """The port: the chosen one, or the one found when that was 0."""
        return int(self._server.server_address[1])

    def __enter__(self) -> Self:
        self._thread.start()
        logger.info("serving /metrics, /live and /ready on %s:%d", self._server.server_address[0], self.port)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    """
    Serves a bounded number of connections, each for a bounded time.

    Every connection costs a thread and a descriptor of a process that has work to do: a client that sends a byte now
    and then must not take them all.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = CONNECTION_LIMIT

    def __init__(self, host: str, port: int, page: Page, checks: dict[str, Callable[[], str]]) -> None:
        self.page = page
        self.checks = checks
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._accepted_at: dict[socket.socket, float] = {}  # the oldest first
        self._lock = threading.Lock()
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        """Bind, without asking the resolver for our own name: that may take long."""
        socketserver.TCPServer.server_bind(self)
        self.server_name = str(self.server_address[0])
        self.server_port = int(self.server_address[1])

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a connection; `serve_forever` would try again at once while no descriptor is free."""
        try:
            return super().get_request()
        except OSError as error:
            if error.errno in _EXHAUSTED:
                time.sleep(EXHAUSTED_SECONDS)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread of its own."""
        with self._lock:
            if len(self._accepted_at) >= CONNECTION_LIMIT:
                oldest = next(iter(self._accepted_at))
                del self._accepted_at[oldest]
                _cut_off(oldest)
            self._accepted_at[request] = time.monotonic()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection that was served."""
        with self._lock:
            self._accepted_at.pop(request, None)
            super().shutdown_request(request)

    def service_actions(self) -> None:
        """Cut off what takes too long; called twice a second, and after each connection."""
        oldest = time.monotonic() - REQUEST_SECONDS
        with self._lock:
            for request, accepted_at in self._accepted_at.items():
                if accepted_at <= oldest:
                    _cut_off(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Let a client that went away be."""


def _cut_off(request: socket.socket) -> None:
    """End both directions: the thread that reads or writes there gets an error and closes."""
    with suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version = "reliq"
    sys_version = ""

    def do_GET(self) -> None:
        """Answer one request."""
        path = self.path.partition("?")[0]
        if path == "/metrics":
            body, kind = self.server.page.encode(self.headers.get("Accept", ""))
            self._answer(HTTPStatus.OK, body, kind)
        elif path in self.server.checks:
            complaint = self.server.checks[path]()
            status = HTTPStatus.SERVICE_UNAVAILABLE if complaint else HTTPStatus.OK
            self._answer(status, f"{complaint or 'ok'}\n".encode(), _PLAIN)
        else:
            self._answer(HTTPStatus.NOT_FOUND, b"there are /metrics, /live and /ready\n", _PLAIN)

    def do_HEAD(self) -> None:
        """Answer the same without the body."""
        self.do_GET()

    def log_message(self, format: str, *args: Any) -> None:
        """Keep requests out of the log."""

    def _answer(self, status: HTTPStatus, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        if len(body) > GZIP_BYTES and _GZIP.search(self.headers.get("Accept-Encoding", "")):
            body = gzip.compress(body, GZIP_LEVEL)
            self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def queue_collector(connection: Connection, queues: Sequence[Keys] = (), *, with_queues: bool = True) -> QueueCollector:
    """
    Return the collector that asks `connection` for the figures of `queues`, or of all queues in the registry.

    Args:
        with_queues: false asks for the figures of Redis itself alone.
    """
    client = Client.to(connection, SCRAPE_REPLY_SECONDS)
    chosen = (lambda: queues if with_queues else ()) if queues or not with_queues else None
    return QueueCollector(SnapshotReader(client, chosen, held_up=BlockedKeys()).look, with_queues=with_queues)


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
    metrics = ProcessMetrics([keys.name for keys in queues], look=look)
    pulse = Pulse()
    sampling = sampler(look, pulse.note)
    redis = queue_collector(connection, queues)
    collectors: list[Collector] = [metrics, Build(), Processes(lambda: 1), redis]
    # The user's registry has process metrics of its own.
    page = Page([*collectors, Usage(lambda: {"0": os.getpid()})]) if registry is None else Page(foreign=registry)
    observers += [metrics, pulse]
    try:
        with ExitStack() as stack:
            if registry is not None:
                for collector in collectors:
                    registry.register(collector)
                    stack.callback(registry.unregister, collector)
            sampling.start()
            stack.callback(sampling.join)
            stack.callback(sampling.stop)
            if port is None:
                yield None
            else:
                yield stack.enter_context(
                    Endpoint(
                        port,
                        host,
                        page=page,
                        live=lambda: health.live([pulse]),
                        ready=lambda: health.ready([pulse], redis.redis_answers),
                    )
                )
    finally:
        observers[:] = [observer for observer in observers if observer not in (metrics, pulse)]


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
    metrics = ProcessMetrics()
    redis = queue_collector(connection, with_queues=False)
    observers.append(metrics)
    try:
        with Endpoint(
            port,
            host,
            page=Page([metrics, Build(), Usage(lambda: {"0": os.getpid()})]),
            live=lambda: health.live([pulse]),
            ready=lambda: health.ready([pulse], redis.redis_answers) or complaint(),
        ) as endpoint:
            yield endpoint
    finally:
        observers.remove(metrics)


def export(redis: Target | None, queues: Sequence[Keys], port: int, host: str) -> None:
    """Serve the figures of queues, with no worker alive, until a signal."""
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
