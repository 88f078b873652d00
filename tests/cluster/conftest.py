"""What the tests of a Cluster share: queues on each of its nodes, and both ways to call them."""

import asyncio

import pytest

from reliq import Queue
from reliq.transport.connection import Connection


@pytest.fixture(params=["blocking", "asyncio"])
def exchange(request, cluster):
    """Make commands over a wire to the Cluster, blocking or async."""
    if request.param == "blocking":
        return Connection.to(cluster.url).wire().exchange

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
def queues(cluster):
    """A queue on each primary, by the primary's port."""
    found = {}
    numbers = iter(range(1000))
    while len(found) < 3:
        queue = Queue(f"q{next(numbers)}", int, url=cluster.url)
        found.setdefault(cluster.primary_of(queue.keys.ready).port, queue)
    yield found
    Connection.to(cluster.url).close()
