"""What a test needs of its machine."""

import os

import pytest


def must_run_in_ci(reason: str) -> None:
    """Skip the test with `reason` on a bare machine; in CI, where everything is installed, fail it."""
    fail_in_ci(reason)
    pytest.skip(reason)


def fail_in_ci(reason: str) -> None:
    """In CI, fail the test, which proves less on a machine without what `reason` names."""
    if os.environ.get("CI"):
        pytest.fail(f"this test must run in CI, but {reason}")
