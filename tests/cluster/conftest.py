"""Fixtures of the Cluster tests: a queue on each node, and calls in both styles, blocking and async."""

import asyncio

import pytest

from reliq import Queue
from reliq.redis.connection import run_blocking
from reliq.redis.server import Connection
from tests.cluster_servers import NODE_TIMEOUT_MS


@pytest.fixture(params=["blocking", "asyncio"])
def exchange(request, cluster):
    """Send commands over a connection to the Cluster, blocking or async."""
    if request.param == "blocking":
        wire = Connection.to(cluster.url).wire()
        return lambda commands: run_blocking(wire.exchange(commands))

    def make(commands):
        async def once():
            connection = Connection.to(cluster.url)
            try:
                return await connection.async_wire().exchange(commands)
            finally:
                await connection.aclose()

        return asyncio.run(once())

    return make


@pytest.fixture
def patient(patient, monkeypatch):
    """Let calls wait long for the reply of a node too."""
    for module in ("cluster", "server"):
        monkeypatch.setattr(f"reliq.redis.{module}.SERVER_SECONDS", 20.0)


@pytest.fixture
def stand_still(cluster):
    """Pause a server until the test ends, and prevent that a replica is promoted meanwhile."""
    stopped = []

    def allow(ms):
        for server in cluster.nodes:
            cluster.ask(server, "CONFIG", "SET", "cluster-node-timeout", ms)

    def stop(server):
        allow(60_000)
        cluster.pause(server)
        stopped.append(server)

    yield stop
    for server in stopped:
        cluster.resume(server)
    cluster.wait_until_ok()
    allow(NODE_TIMEOUT_MS)


@pytest.fixture
def queues(cluster):
    """A queue on each primary, by the primary's port."""
    found = {}
    for number in range(30):
        queue = Queue(f"q{number}", int, url=cluster.url)
        found.setdefault(cluster.primary_of(queue.keys.ready).port, queue)
    yield found
    Connection.to(cluster.url).close()
