"""What tests of several folders share: waiting for what has no event, and tests that CI may not skip."""

import os
import threading
import time
from collections.abc import Callable
from typing import NoReturn

import pytest

#: As long as a slow machine may need; a wait ends as soon as what it waits for is there.
PATIENCE_SECONDS = 30.0


def eventually(condition: Callable[[], object], what: str, seconds: float = PATIENCE_SECONDS) -> None:
    """Wait until `condition` holds; fail with `what` when it does not come."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"this did not come within {seconds:g} s: {what}")
        threading.Event().wait(0.01)


def must_run_in_ci(reason: str) -> NoReturn:
    """Skip the test with `reason` on a bare machine; in CI, where everything is installed, fail it."""
    if os.environ.get("CI"):
        pytest.fail(f"this test must run in CI, but {reason}")
    pytest.skip(reason)
