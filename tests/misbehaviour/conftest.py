"""Fixtures for real worker processes whose handlers misbehave."""

from contextlib import ExitStack
from pathlib import Path

import pytest
from worker_process import Worker, environment_for

HERE = Path(__file__).parent


@pytest.fixture
def deeds(url, monkeypatch):
    """The module of the handlers, with its queues on the server under test."""
    monkeypatch.setenv("RELIQ_URL", url)
    monkeypatch.syspath_prepend(str(HERE))
    import deeds

    yield deeds
    for queue in deeds.QUEUES:
        queue.close()


@pytest.fixture
def environment(url, tmp_path):
    """Return the environment of the workers; their folder for temporary files is the test's."""
    return {**environment_for(HERE, url), "TMPDIR": str(tmp_path)}


@pytest.fixture
def worker(environment):
    """Start workers that end with the test."""
    with ExitStack() as stack:

        def start(*options):
            one = Worker("deeds:consumer", HERE, environment, *options)
            stack.callback(lambda: print("".join(one.lines)))
            stack.callback(one.close)
            return one

        yield start
