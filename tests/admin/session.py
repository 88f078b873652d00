"""The real command in a pseudo-terminal: what a person types, and what goes by."""

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
import time

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[()][A-Z0-9]|\r")
PATIENCE_SECONDS = 100.0


class Session:
    """`reliq WORDS…`, or another program, on a terminal of 24 lines of 120 characters."""

    def __init__(self, *words, environment, program=(sys.executable, "-m", "reliq"), folder=None):
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
        environment = {**environment, "TERM": "xterm-256color"}
        self.process = subprocess.Popen(
            [*program, *words],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=environment,
            cwd=folder,
            start_new_session=True,
        )
        os.close(theirs)
        self.raw = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def text(self):
        """What was shown so far, without its colours."""
        return _ESCAPES.sub("", self.raw)

    def wait_for(self, pattern):
        """Wait until something is shown; return the match."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not (found := re.search(pattern, self.text)):
            assert time.monotonic() < deadline, f"{pattern!r} was not shown, but:\n{self.text}"
            assert self._reader.is_alive() or re.search(pattern, self.text), f"it ended with:\n{self.text}"
            self._reader.join(0.02)
        return found

    def type(self, text):
        """Type `text`, as a person does."""
        os.write(self._ours, text.encode())

    def interrupt(self):
        """Press Ctrl-C."""
        self.process.send_signal(signal.SIGINT)

    def end(self):
        """Wait for the end; return the exit code and what was shown."""
        code = self.process.wait(PATIENCE_SECONDS)
        self._reader.join(PATIENCE_SECONDS)
        return code, self.text

    def close(self):
        """End it if it still runs."""
        self.process.kill()
        self.process.wait()
        self._reader.join(PATIENCE_SECONDS)
        os.close(self._ours)

    def _read(self):
        while True:
            try:
                data = os.read(self._ours, 65_536)
            except OSError:  # Linux says so when nobody has the terminal open any more
                return
            if not data:
                return
            self.raw += data.decode("utf-8", "replace")
