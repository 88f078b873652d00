"""
The guard, a process of its own that ends what a killed supervisor leaves behind: `python guard_main.py`.

A child stops by itself when its supervisor is gone, unless a handler holds its interpreter; and a program that a
handler has started knows of no supervisor. No handler can hold up the guard. It reads `+PID` and `-PID` from its
standard input for each process that begins and ends, and does its work when that input ends.
"""

import os
import signal
import sys
import time
from contextlib import suppress

#: Children have 8 s to stop in peace.
PEACE_SECONDS = 8.0
#: The guard looks ten times a second whether they have.
CHECK_SECONDS = 0.1


def main() -> None:
    """Note which processes run until the supervisor is gone, and kill those that still run 8 s later."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the end of a session comes to the guard too, which must be the last
    running: set[int] = set()
    for line in sys.stdin:
        pid = int(line[1:])
        running = running | {pid} if line[0] == "+" else running - {pid}
    until = time.monotonic() + PEACE_SECONDS
    while any(map(_is_there, running)) and time.monotonic() < until:
        time.sleep(CHECK_SECONDS)
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
    if os.fork() == 0:  # without a parent: the supervisor's children are its workers alone
        main()
