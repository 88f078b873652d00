"""Fixtures for real worker processes on a real Redis, and waits for them."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from worker_process import Worker, environment_for

HERE = Path(__file__).parent


@pytest.fixture
def environment(url: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Return a user's environment, with the jobs in this folder and the test's Redis."""
    monkeypatch.setenv("RELIQ_URL", url)
    monkeypatch.syspath_prepend(str(HERE))
    return environment_for(HERE, url)


@pytest.fixture
def worker(environment: dict[str, str]) -> Iterator[Callable[..., Worker]]:
    """Start workers of jobs.py, or of the consumer `place`, whose startup `how` describes; stop them at the end."""
    with ExitStack() as stack:

        def start(*options: str, place: str = "jobs:consumer", how: str = "", change: str = "") -> Worker:
            one = Worker(place, HERE, {**environment, "HOW": how}, *options, change=change)
            stack.callback(one.close)
            return one

        yield start


@pytest.fixture
def program(environment: dict[str, str]) -> Iterator[Callable[..., subprocess.Popen]]:
    """Start Python programs that end with the test; tests read their output and write to their input."""
    with ExitStack() as stack:

        def start(code: str, how: str = "", **options: object) -> subprocess.Popen:
            command, own = [sys.executable, "-c", code], {**environment, "HOW": how}
            options = {"stdin": -1, "stdout": -1, "text": True, **options}
            process = stack.enter_context(subprocess.Popen(command, cwd=HERE, env=own, **options))
            stack.callback(process.kill)
            return process

        yield start


@pytest.fixture
def jobs(environment: dict[str, str]):
    """Return the module with the workers' handlers."""
    import jobs

    return jobs
