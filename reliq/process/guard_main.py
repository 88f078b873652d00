"""
A small process of its own that ends what a killed supervisor leaves behind: `python guard.py`, started by it.

A child stops by itself when its supervisor is gone, unless a handler holds its interpreter; and what a handler has
started knows of no supervisor. Nothing in a worker can hold up another process. It reads from its standard input
`+PID` and `-PID` for each process that begins and ends, and goes when that input ends.
"""

import os
import signal
import sys
import time
from contextlib import suppress

#: How long children have to stop in peace.
LINGER_SECONDS = 8.0
LOOK_SECONDS = 0.1


def main() -> None:
    """Remember who runs until the supervisor is gone, and end who still runs a while after that."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the end of a whole session comes to us too, and we are the last
    running: set[int] = set()
    for line in sys.stdin:
        pid = int(line[1:])
        running = running | {pid} if line[0] == "+" else running - {pid}
    until = time.monotonic() + LINGER_SECONDS
    while any(map(_is_there, running)) and time.monotonic() < until:
        time.sleep(LOOK_SECONDS)
    for pid in running:
        with suppress(OSError):
            os.killpg(pid, signal.SIGKILL)


def _is_there(pid: int) -> bool:
    try:
        os.killpg(pid, 0)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    if os.fork() == 0:  # a process of nobody: who looks at the supervisor's children sees workers alone
        main()
