"""A pseudo-terminal for commands: tests type into it and read the screen."""

import fcntl
import os
import re
import struct
import subprocess
import sys
import termios
import threading
import time

import pyte
import pytest

PATIENCE_SECONDS = 100.0
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[()][A-Z0-9]|\r")


class Terminal:
    """`reliq WORDS…`, or another program, on a pseudo-terminal of the given size."""

    def __init__(
        self, *words, columns=120, lines=24, url="", program=(sys.executable, "-m", "reliq"), folder=None, **environment
    ):
        # COLUMNS and LINES, which test runners set, override the terminal's size.
        inherited = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        self.raw = b""
        self._screen = pyte.Screen(columns, lines)
        self._stream = pyte.ByteStream(self._screen)
        self._came = threading.Condition()
        self._master, theirs = os.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.process = subprocess.Popen(
            [*program, *words],
            env={**inherited, "RELIQ_URL": url, "TERM": "xterm-256color", **environment},
            cwd=folder,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(theirs)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def text(self):
        """Return the whole output so far, without styles."""
        return _ESCAPES.sub("", self.raw.decode("utf-8", "replace"))

    def wait_for(self, *patterns):
        """Wait until all `patterns` are on the screen at the same moment; return their lines."""
        return self._wait(
            lambda: [row.rstrip() for row in self._screen.display],
            lambda rows: all(any(re.search(pattern, row) for row in rows) for pattern in patterns),
        )

    def wait_for_text(self, pattern):
        """Wait until `pattern` was printed, even if it has been overwritten."""
        self._wait(lambda: self.text, lambda text: re.search(pattern, text))

    def _wait(self, look, is_there):
        deadline = time.monotonic() + PATIENCE_SECONDS
        with self._came:
            while not is_there(shown := look()):
                if not self._came.wait(deadline - time.monotonic()):
                    pytest.fail(f"this did not come:\n{self.text}")
            return shown

    def type(self, text):
        os.write(self._master, text.encode())

    def end(self, number=None):
        """Send a signal, if any; return the exit code after the last output has been read."""
        if number is not None:
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
            except OSError:  # the program has closed the terminal
                return
            if not piece:
                return
            with self._came:
                self.raw += piece
                self._stream.feed(piece)
                self._came.notify_all()
