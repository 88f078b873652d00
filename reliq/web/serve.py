"""The page served by uvicorn, alone, until SIGTERM or Ctrl-C."""

from __future__ import annotations

import asyncio
import signal
import socket
from contextlib import contextmanager
from typing import TYPE_CHECKING

from reliq import distribution
from reliq.error_text import port_refusal
from reliq.errors import ConfigurationError
from reliq.settings import whole

try:
    import uvicorn
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(distribution.missing("reliq web", "uvicorn", "web")) from missing

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from reliq.web.application import Application

#: Connections that wait to be accepted.
WAITING_CONNECTIONS = 128
#: Answers under way have this many seconds to end once the server is to stop.
LAST_ANSWERS_SECONDS = 3


class PageServer(uvicorn.Server):
    """Serves the page; its streams end when it stops."""

    def __init__(self, app: Application) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                lifespan="off",
                timeout_graceful_shutdown=LAST_ANSWERS_SECONDS,
            )
        )
        self._live = app.desk.live

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the streams, which would go on for ever, and wait for all other answers."""
        self._live.close()
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop at SIGTERM and SIGINT, and return: uvicorn itself would raise the signal again."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        yield

    def _stop(self, _number: int, _frame: FrameType | None) -> None:
        self.should_exit = True


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens; raise ConfigurationError when it cannot."""
    whole("port", port, most=65535)
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


def serve(app: Application, listener: socket.socket) -> None:
    """Serve the page on a socket until SIGTERM or Ctrl-C."""
    asyncio.run(PageServer(app).serve([listener]))
