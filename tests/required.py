"""What a test needs of its machine."""

import os

import pytest


def must_run_in_ci(reason: str) -> None:
    """Skip the test with `reason` on a bare machine; in CI, where everything is installed, fail it."""
    if os.environ.get("CI"):
        pytest.fail(f"this test must run in CI, but {reason}")
    pytest.skip(reason)
