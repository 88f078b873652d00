"""The page served by uvicorn, alone, until SIGTERM or Ctrl-C."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from reliq import distribution
from reliq.admin.screens import port_refusal
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
#: Answers under way have this many seconds to end once the server is to stop.
LAST_ANSWERS_SECONDS = 3


class LimitedConnection(H11Protocol):
    """
    A connection that is closed when a request's head takes too long.

    Where there are too many, the oldest that has no request under way makes room; if there is none, the new one is closed.

    Attributes:
        opened_at: when the client connected, in monotonic seconds.
    """

    _head_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None
    opened_at = 0.0

    @property
    def is_answering(self) -> bool:
        """Whether a request is under way."""
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn declares it
        """Take a new connection."""
        self.opened_at = time.monotonic()
        super().connection_made(transport)
        self._expect_head()
        if len(self.connections) > CONNECTIONS_LIMIT:
            idle = [
                other for other in self.connections if isinstance(other, LimitedConnection) and not other.is_answering
            ]
            min(idle, key=lambda other: other.opened_at, default=self).transport.abort()

    def data_received(self, data: bytes) -> None:
        """Read a piece of a request."""
        super().data_received(data)
        if self.is_answering and self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        elif not self.is_answering:
            self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        for timer in (self._head_timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Give a client that reads nothing 10 s."""
        super().pause_writing()
        self._write_timer = self.loop.call_later(HEADER_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """Write on: the client has read."""
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()

    def _expect_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEADER_SECONDS, self._cut_off)

    def _cut_off(self) -> None:
        self._head_timer = None
        if not self.is_answering:
            self.transport.abort()


class PageServer(uvicorn.Server):
    """
    Serves the page.

    Args:
        proxy: the addresses of proxies whose X-Forwarded-For and X-Forwarded-Proto count, with commas between; None
            where no proxy is in front.
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
            f"cannot listen on {host}:{port}: {port_refusal(error)}; choose another --port or --host"
        ) from None
    return listener


def serve(app: Application, listener: socket.socket, proxy: str | None = None) -> None:
    """Serve the page on a socket until SIGTERM or Ctrl-C; `proxy` as in PageServer."""
    asyncio.run(PageServer(app, proxy=proxy).serve([listener]))
    ignore_stops()
