"""Wait for other processes by polling."""

import contextlib
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import psutil
import pytest

T = TypeVar("T")


def eventually(condition: Callable[[], T], what: object, seconds: float = 100.0) -> T:
    """Wait until `condition` returns a true value, and return it; fail with `what` after the timeout."""
    deadline = time.monotonic() + seconds
    while not (answer := condition()):
        if time.monotonic() > deadline:
            pytest.fail(f"this did not come within {seconds:g} s: {what}")
        threading.Event().wait(0.02)
    return answer


def with_patience(process: psutil.Process) -> None:
    """Kill a process if it still runs, and wait until it has ended; its parent may still have to reap it."""
    with contextlib.suppress(psutil.Error):
        process.kill()
        eventually(lambda: process.status() == psutil.STATUS_ZOMBIE, f"process {process.pid} ends")
