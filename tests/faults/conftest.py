"""Fixtures for real workers and servers, and for disturbing them."""

from contextlib import ExitStack
from pathlib import Path

import pytest
import redis
from cluster_work import Work
from forked import end_forked, forked
from worker_process import Worker, environment_for

from reliq import Queue
from reliq.testing.server import EmbeddedRedis

HERE = Path(__file__).parent


@pytest.fixture
def own_server(server_path):
    """Start servers that a test may break; they write everything to disk immediately."""
    with ExitStack() as stack:

        def start(at_port=0, **options):
            names = {"appendonly": "yes", "appendfsync": "always", **options}
            names = {name.replace("_", "-"): str(value) for name, value in names.items()}
            return stack.enter_context(EmbeddedRedis(server=server_path, options=names, port=at_port))

        yield start


@pytest.fixture
def server(own_server):
    return own_server()


@pytest.fixture
def admin(server):
    """A client of the test's own server that survives its outages."""
    with redis.Redis(unix_socket_path=str(server.socket)) as client:
        yield client


@pytest.fixture
def faulty(server, monkeypatch):
    """The module faulty.py, with the handlers and queues of the workers, on the test's own server."""
    monkeypatch.setenv("RELIQ_URL", server.url)
    monkeypatch.setattr("reliq.redis.server.epoch", object())  # the queues of `jobs` have read an earlier epoch
    monkeypatch.syspath_prepend(str(HERE))
    import faulty

    yield faulty
    for queue in (faulty.DEEDS, faulty.COUNTED, faulty.STEADY, faulty.PAUSED, faulty.LONG):
        queue.close()


@pytest.fixture
def worker(server):
    """Start `reliq worker` processes that end with the test."""
    with ExitStack() as stack:

        def start(*options):
            worker = Worker("faulty:consumer", HERE, environment_for(HERE, server.url), *options)
            stack.callback(worker.close)
            return worker

        yield start


@pytest.fixture
def fork(faulty):
    """Start functions in processes that end with the test."""
    yield forked
    end_forked()


@pytest.fixture
def at_work():
    """Start producers and a worker on a Cluster; stop them at the end of the test."""
    with ExitStack() as stack:

        def start(cluster):
            return stack.enter_context(Work(cluster))

        yield start


@pytest.fixture
def queue_at():
    """Make a queue of texts on a server; close it at the end of the test."""
    with ExitStack() as stack:

        def make(url):
            queue = Queue("q", str, url=url)
            stack.callback(queue.close)
            return queue

        yield make
