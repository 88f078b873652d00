"""Serve the web pages with uvicorn until SIGTERM or Ctrl-C."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from reliq import distribution
from reliq.consumer import STOPS, handle_signal, ignore_stops
from reliq.errors import ConfigurationError
from reliq.logs import limiter
from reliq.settings import check_int

try:
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(distribution.missing("reliq web", "uvicorn", "web")) from missing

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from reliq.web.application import Application

#: The backlog of the listening socket: the number of connections that may wait until the server accepts them.
WAITING_CONNECTIONS = 128
#: The maximum number of connections that are open at the same time.
CONNECTIONS_LIMIT = 256
#: A client must send the head of a request within this many seconds, and may not stop reading a response for longer.
HEADER_SECONDS = 10.0
#: After SIGTERM, requests that are being processed may finish within this many seconds.
LAST_ANSWERS_SECONDS = 3


class LimitedConnection(H11Protocol):
    """
    A connection to a client. It is closed if the client sends a request or reads a response too slowly.

    If a new connection exceeds CONNECTIONS_LIMIT, the oldest connection without a running request is closed. If all
    other connections have running requests, the new connection is closed.

    Attributes:
        opened_at: when the client connected, in monotonic seconds.
    """

    opened_at = 0.0

    @property
    def is_answering(self) -> bool:
        """Whether the server is processing a request of this connection, or sending the response."""
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timer for the head of the first request. If there are too many connections, close a connection."""
        self.opened_at = time.monotonic()
        self._timers: dict[str, asyncio.TimerHandle] = {}
        super().connection_made(transport)
        self._limit("head", on=True)
        if len(self.connections) > CONNECTIONS_LIMIT:
            idle = [
                other for other in self.connections if isinstance(other, LimitedConnection) and not other.is_answering
            ]
            min(idle, key=lambda other: other.opened_at, default=self).transport.abort()

    def data_received(self, data: bytes) -> None:
        """Process data from the client. The timer runs until the head of the next request is complete."""
        super().data_received(data)
        self._limit("head", on=not self.is_answering)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers of a closed connection."""
        for name in list(self._timers):
            self._limit(name, on=False)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Stop writing and start a timer, because the client does not read."""
        super().pause_writing()
        self._limit("answer", on=True)

    def resume_writing(self) -> None:
        """Continue writing and stop the timer, because the client reads again."""
        super().resume_writing()
        self._limit("answer", on=False)

    def _limit(self, name: str, *, on: bool) -> None:
        """
        Start or stop the timer `name`, which closes the connection after HEADER_SECONDS.

        A timer that already runs keeps its deadline.
        """
        if not on and name in self._timers:
            self._timers.pop(name).cancel()
        elif on and name not in self._timers:
            self._timers[name] = self.loop.call_later(HEADER_SECONDS, self._cut_off, name)

    def _cut_off(self, name: str) -> None:
        del self._timers[name]
        if name == "answer" or not self.is_answering:
            self.transport.abort()


class PageServer(uvicorn.Server):
    """
    A uvicorn server for the web pages.

    Args:
        proxy: comma-separated addresses of proxies whose headers X-Forwarded-For and X-Forwarded-Proto are trusted; None
            trusts no such header.
    """

    def __init__(self, app: Application, *, proxy: str | None = None) -> None:
        for name in ("asyncio", "uvicorn.error"):
            logging.getLogger(name).addFilter(limiter)
        super().__init__(
            uvicorn.Config(
                app,
                http=LimitedConnection,
                ws="none",
                proxy_headers=proxy is not None,
                forwarded_allow_ips=proxy or "",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                lifespan="off",
                timeout_graceful_shutdown=LAST_ANSWERS_SECONDS,
            )
        )

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop the server at SIGTERM or SIGINT. Unlike uvicorn's method, do not send the signal again afterwards."""
        for number in STOPS:
            handle_signal(number, self._stop)
        yield

    def _stop(self, _number: int, _frame: FrameType | None) -> None:
        self.should_exit = True


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; raise ConfigurationError if the address cannot be used."""
    check_int("port", port, most=65535)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Because of IPPROTO_TCP, asyncio sets TCP_NODELAY. Otherwise, each small response would be delayed by 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(WAITING_CONNECTIONS)
    except (OSError, UnicodeError) as error:
        listener.close()
        raise ConfigurationError(
            f"cannot listen on {host}:{port}: {getattr(error, 'strerror', None) or error}; choose another --port or --host"
        ) from None
    return listener


def serve(app: Application, listener: socket.socket, proxy: str | None = None) -> None:
    """Serve the web pages on a listening socket until SIGTERM or Ctrl-C; see `PageServer` for `proxy`."""
    asyncio.run(PageServer(app, proxy=proxy).serve([listener]))
    ignore_stops()
