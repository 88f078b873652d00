"""The datagrams by which a worker or a relay tells the service manager, such as systemd, how it is: sd_notify(3)."""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from reliq import health

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reliq.health import Pulse

#: A start that goes on as it should asks every 5 s for 30 s more: Redis may be away for long.
EXTEND_EVERY_SECONDS, EXTEND_SECONDS = 5.0, 30.0
#: Two signs of life are sent within the time after which the manager restarts a service.
SIGNS = 2
#: A worker that has stopped needs a few seconds more, to end what atexit has and to remove its files.
EXIT_SECONDS = 5.0


class ServiceManager:
    """
    Tells the service manager, if there is one, that the process is ready, alive or stopping.

    Its variables leave the environment: a program that a handler starts must not speak for the worker.
    """

    def __init__(self) -> None:
        self._address = _address(os.environ.pop("NOTIFY_SOCKET", ""))
        self._every = _watchdog_seconds(os.environ.pop("WATCHDOG_USEC", ""), os.environ.pop("WATCHDOG_PID", "")) / SIGNS
        self._is_ready = False
        self._extended_at = self._alive_at = float("-inf")

    def look(self, pulses: Sequence[Pulse]) -> None:
        """Tell what is due: once that every process has started, until then that a healthy start takes longer."""
        if not self._address:
            return
        now = time.monotonic()
        if not self._is_ready:
            self._tell_start(pulses, now)
        if self._every and now - self._alive_at >= self._every and self._send("WATCHDOG=1"):
            self._alive_at = now

    def stop(self, seconds: float) -> None:
        """Tell that the worker stops, and that this may take `seconds`: the manager then kills it no earlier."""
        if self._address:
            self._send("STOPPING=1", _extension(seconds + EXIT_SECONDS), "STATUS=stopping")

    def _tell_start(self, pulses: Sequence[Pulse], now: float) -> None:
        waits_for = health.ready(pulses, lambda: True)
        if not waits_for:
            self._is_ready = self._send("READY=1", f"STATUS=processes: {len(pulses)}")
        elif now - self._extended_at >= EXTEND_EVERY_SECONDS and not health.live(pulses):
            self._extended_at = now
            self._send(_extension(EXTEND_SECONDS), f"STATUS={waits_for}")

    def _send(self, *lines: str) -> bool:
        """Send one datagram and say whether it was taken; a manager that takes none does not hold the worker up."""
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as spoken:
            spoken.setblocking(False)
            spoken.sendto("\n".join(lines).encode(), self._address)
            return True
        return False


def _address(text: str) -> str:
    """Return the address of a socket: a path, or a name in Linux's own namespace, which begins with @; else nothing."""
    return "\0" + text[1:] if text.startswith("@") else text if text.startswith("/") else ""


def _watchdog_seconds(microseconds: str, pid: str) -> float:
    """Return after how long without a sign of life this process is restarted, 0.0 for never."""
    is_meant = not pid or pid == str(os.getpid())
    return int(microseconds) / 1e6 if is_meant and microseconds.isdecimal() else 0.0


def _extension(seconds: float) -> str:
    return f"EXTEND_TIMEOUT_USEC={seconds * 1e6:.0f}"
