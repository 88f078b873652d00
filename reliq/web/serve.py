"""The web pages served by uvicorn until SIGTERM or Ctrl-C."""

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

#: Connections that wait to be accepted.
WAITING_CONNECTIONS = 128
#: Connections that are open at once.
CONNECTIONS_LIMIT = 256
#: The head of a request must arrive within this many seconds, and a client must read on within as many.
HEADER_SECONDS = 10.0
#: Answers under way have this many seconds to end after SIGTERM.
LAST_ANSWERS_SECONDS = 3


class LimitedConnection(H11Protocol):
    """
    A connection that is closed when the head of a request, or the client's reading of an answer, takes too long.

    Above the limit of connections, the oldest connection without a request under way is closed; without such a connection,
    the new connection.

    Attributes:
        opened_at: when the client connected, in monotonic seconds.
    """

    opened_at = 0.0

    @property
    def is_answering(self) -> bool:
        """Whether a request is under way."""
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn declares it
        """Start a connection."""
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
        """Read a piece of a request."""
        super().data_received(data)
        self._limit("head", on=not self.is_answering)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the connection."""
        for name in list(self._timers):
            self._limit(name, on=False)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Stop writing, because the client does not read."""
        super().pause_writing()
        self._limit("answer", on=True)

    def resume_writing(self) -> None:
        """Continue writing."""
        super().resume_writing()
        self._limit("answer", on=False)

    def _limit(self, name: str, *, on: bool) -> None:
        """Start or stop a timer that closes the connection; a running timer is not started again."""
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
    Serves the pages.

    Args:
        proxy: the addresses of trusted proxies, with commas between: their X-Forwarded-For and X-Forwarded-Proto count; None
            without a proxy.
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
        """Stop at SIGTERM and SIGINT, and return: uvicorn itself would raise the signal again."""
        for number in STOPS:
            handle_signal(number, self._stop)
        yield

    def _stop(self, _number: int, _frame: FrameType | None) -> None:
        self.should_exit = True


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens; raise ConfigurationError when it cannot."""
    check_int("port", port, most=65535)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sends small answers at once only where a socket names its protocol: else each waits 40 ms.
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
    """Serve the pages on a socket until SIGTERM or Ctrl-C; `proxy` as in PageServer."""
    asyncio.run(PageServer(app, proxy=proxy).serve([listener]))
    ignore_stops()
