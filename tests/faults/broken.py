"""Ways to break a process for a while."""

import os
import signal
import threading
from contextlib import contextmanager


@contextmanager
def stopped(*pids):
    """Hold processes where they are, as a paused machine does."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def hold(seconds, *pids):
    """Stop processes for so many seconds: that long the fault lasts, nothing waits for it."""
    with stopped(*pids):
        threading.Event().wait(seconds)
