"""The guard as its supervisor sees it: a process that ends the children of a supervisor that was killed."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress

from reliq.process import guard_main


class Guard:
    """Starts the guard, and names to it each process that begins and ends; its input ends with this process."""

    def __init__(self) -> None:
        # Isolated and without site, it imports nothing of the user's, and is small.
        self._process = subprocess.Popen(  # noqa: S603  ours
            [sys.executable, "-I", "-S", guard_main.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        self._process.wait()  # the guard is its child, which nobody waits for

    def began(self, pid: int) -> None:
        """Have the guard watch a process."""
        self._tell(f"+{pid}\n")

    def ended(self, pid: int) -> None:
        """Have the guard watch a process no more."""
        self._tell(f"-{pid}\n")

    def close(self) -> None:
        """End the guard's input: the supervisor itself has ended its children."""
        if self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()

    def _tell(self, line: str) -> None:
        if self._process.stdin is not None:
            with suppress(OSError):  # somebody has killed it
                self._process.stdin.write(line)
                self._process.stdin.flush()
