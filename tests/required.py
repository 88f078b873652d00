"""Skip tests on machines without a required program."""

import importlib
import os
from types import ModuleType

import pytest


def must_run_in_ci(reason: str) -> None:
    """Skip the test with `reason`; in CI, where everything is installed, fail it."""
    fail_in_ci(reason)
    pytest.skip(reason)


def fail_in_ci(reason: str) -> None:
    """In CI, fail the test if the machine lacks something; elsewhere the test continues with weaker checks."""
    if os.environ.get("CI"):
        pytest.fail(f"this test must run in CI, but {reason}")


def module_of_ci(name: str) -> ModuleType:
    """Import a module of the extra `ci`; without it skip the test or the file, in CI fail."""
    try:
        return importlib.import_module(name)
    except ImportError:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"{name} is not installed: pip install -e '.[ci]'", allow_module_level=True)
