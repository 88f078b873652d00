"""The supervisor's hold on its guard, which ends what runs when the supervisor itself has been killed."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress

from reliq.process import guard_main as guard


class Guard:
    """Starts the guard and tells it who begins and who ends; it goes with this process, however that ends."""

    def __init__(self) -> None:
        # Isolated and without site: it imports nothing of the user's, and is small.
        self._process = subprocess.Popen(  # noqa: S603  ours
            [sys.executable, "-I", "-S", guard.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        self._process.wait()  # it has left a process of nobody behind

    def began(self, pid: int) -> None:
        """Have a process watched."""
        self._tell(f"+{pid}\n")

    def ended(self, pid: int) -> None:
        """Have it watched no more."""
        self._tell(f"-{pid}\n")

    def close(self) -> None:
        """Let the guard go: we end ourselves."""
        if self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()

    def _tell(self, line: str) -> None:
        if self._process.stdin is not None:
            with suppress(OSError):  # somebody has killed it
                self._process.stdin.write(line)
                self._process.stdin.flush()
