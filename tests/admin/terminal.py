"""A terminal of a given size in which a command runs, and what its screen shows."""

import fcntl
import os
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
import time

import pyte
import pytest

PATIENCE_SECONDS = 100.0


def _environment():
    """What is set here but a size: a program believes that more than its terminal, and test runners set one."""
    return {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}


class Terminal:
    """A `reliq` command in a pseudo-terminal."""

    def __init__(self, *words, columns, lines, url):
        self.raw = b""
        self._screen = pyte.Screen(columns, lines)
        self._stream = pyte.ByteStream(self._screen)
        self._came = threading.Condition()
        self._master, theirs = os.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "reliq", *words],
            env={**_environment(), "RELIQ_URL": url, "TERM": "xterm-256color"},
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(theirs)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_for(self, *patterns):
        """Wait until each of `patterns` is in a line of the screen at the same moment; return the lines."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        with self._came:
            while True:
                rows = [row.rstrip() for row in self._screen.display]
                if all(any(re.search(pattern, row) for row in rows) for pattern in patterns):
                    return rows
                if not self._came.wait(deadline - time.monotonic()):
                    pytest.fail(f"{patterns} did not come: " + "\n".join(rows))

    def end(self, number=signal.SIGINT):
        """Send a signal; return the exit code, once everything that was written is read."""
        self.process.send_signal(number)
        code = self.process.wait(PATIENCE_SECONDS)
        self._reader.join(PATIENCE_SECONDS)
        return code

    def close(self):
        self.process.kill()
        self.process.wait(PATIENCE_SECONDS)
        self._reader.join(PATIENCE_SECONDS)
        os.close(self._master)

    def _read(self):
        while True:
            try:
                piece = os.read(self._master, 65_536)
            except OSError:  # the other end is closed
                return
            if not piece:
                return
            with self._came:
                self.raw += piece
                self._stream.feed(piece)
                self._came.notify_all()
