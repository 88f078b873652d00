"""
The guard: a separate process that kills the worker processes of a killed supervisor.

Worker processes stop when their supervisor has ended, unless a handler holds the GIL. Programs that handlers have
started do not stop by themselves.

The supervisor writes `+PID` to the guard's standard input when a worker process has started, and `-PID` when it has
ended. When this input ends, the guard gives the worker processes time to end, and then kills their process groups.
"""

import os
import signal
import sys
import time
from contextlib import suppress

#: After the supervisor has ended, the guard waits at most this many seconds until the worker processes have ended.
PEACE_SECONDS = 8.0
#: The interval in seconds at which the guard checks whether the worker processes have ended.
CHECK_SECONDS = 0.1


def main() -> None:
    """
    Record which worker processes run until the supervisor ends, and then kill these processes.

    Before the kill, the processes have PEACE_SECONDS to end by themselves.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the guard must outlive the supervisor and the worker processes
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
    if os.fork() == 0:  # detach, so that the guard is not a child of the supervisor
        main()
