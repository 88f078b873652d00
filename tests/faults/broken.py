"""Pause processes for a while."""

import os
import signal
import threading
from contextlib import contextmanager


@contextmanager
def stopped(*pids):
    """Stop processes with SIGSTOP, as on a paused machine."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def hold(seconds, *pids):
    """Stop processes for this many seconds, the duration of the fault."""
    with stopped(*pids):
        threading.Event().wait(seconds)
