"""The port on which /metrics, /live and /ready are served."""

from __future__ import annotations

import errno
import logging
import socket
import socketserver
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Self

from prometheus_client.exposition import choose_encoder

from reliq.errors import ConfigurationError
from reliq.settings import whole

if TYPE_CHECKING:
    from collections.abc import Callable

    from prometheus_client import CollectorRegistry

logger = logging.getLogger(__name__)

DEFAULT_HOST = "127.0.0.1"
#: A client that sends nothing for so long is cut off.
IDLE_SECONDS = 10.0
_PLAIN = "text/plain; charset=utf-8"
_REFUSALS = {
    errno.EADDRINUSE: "something listens there already",
    errno.EACCES: "this user may not listen there",
    errno.EADDRNOTAVAIL: "this machine has no such address",
}


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
        registry: CollectorRegistry,
        live: Callable[[], str],
        ready: Callable[[], str],
    ) -> None:
        whole("metrics port", port, most=65535)
        chosen = host or DEFAULT_HOST
        try:
            self._server = _Server(chosen, port, registry, {"/live": live, "/ready": ready})
        except (OSError, UnicodeError) as error:
            why = _REFUSALS.get(getattr(error, "errno", None) or 0, str(error))
            raise ConfigurationError(
                f"cannot serve metrics on {chosen}:{port}: {why}; choose another port or host"
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
    daemon_threads = True
    block_on_close = False

    def __init__(self, host: str, port: int, registry: CollectorRegistry, checks: dict[str, Callable[[], str]]) -> None:
        self.registry, self.checks = registry, checks
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        """Bind, without asking the resolver for our own name: that may take long."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Let a client that went away be."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = IDLE_SECONDS
    server_version, sys_version = "reliq", ""

    def do_GET(self) -> None:
        """Answer one request."""
        path = self.path.partition("?")[0]
        if path == "/metrics":
            encode, kind = choose_encoder(self.headers.get("Accept", ""))
            self._answer(HTTPStatus.OK, encode(self.server.registry), kind)
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
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
