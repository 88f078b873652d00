"""Real worker processes on a real Redis, and ways to wait for them."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from worker_process import Worker, environment_for

HERE = Path(__file__).parent


@pytest.fixture
def environment(url: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment of a person whose jobs are here and whose Redis is the test's."""
    monkeypatch.setenv("RELIQ_URL", url)
    monkeypatch.syspath_prepend(str(HERE))
    return environment_for(HERE, url)


@pytest.fixture
def worker(environment: dict[str, str]) -> Iterator[Callable[..., Worker]]:
    """Start workers that end with the test."""
    started: list[Worker] = []

    def start(*options: str, change: str = "") -> Worker:
        started.append(Worker("jobs:consumer", HERE, environment, *options, change=change))
        return started[-1]

    yield start
    for one in started:
        one.close()


@pytest.fixture
def jobs(environment: dict[str, str]):
    """The module whose handlers the workers run."""
    import jobs

    return jobs
