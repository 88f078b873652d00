"""Fixtures of the durability tests: a primary with a replica, and a server with WAITAOF."""

from contextlib import ExitStack

import pytest
import redis
from ports import free_port
from waiting import eventually

from reliq import Queue
from reliq.testing.server import EmbeddedRedis


@pytest.fixture(scope="module")
def start():
    """Start servers that end with the tests of a file."""
    with ExitStack() as stack:

        def start(server, **options):
            names = {name.replace("_", "-"): value for name, value in options.items()}
            return stack.enter_context(EmbeddedRedis(server=server, port=free_port(), options=names))

        yield start


@pytest.fixture(scope="module")
def replicated(start):
    """Start a primary and a replica that follows it."""

    def pair(server, **options):
        options = {"repl_diskless_sync_delay": "0", "repl_ping_replica_period": "1", **options}
        primary, replica = start(server, **options), start(server, **options)
        with redis.Redis.from_url(replica.url) as client, redis.Redis.from_url(primary.url) as leader:
            client.replicaof("127.0.0.1", str(primary.port))
            eventually(lambda: leader.set("a", "b") and leader.wait(1, 100) == 1, "the replica follows")
            leader.flushall()
        return primary, replica

    return pair


@pytest.fixture
def make_queue():
    """Make queues that are closed with the test."""
    made = []

    def make(server, body=dict, **options):
        made.append(Queue("q", body, url=server if isinstance(server, str) else server.url, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()
