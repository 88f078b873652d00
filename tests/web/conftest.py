"""Fixtures of the web tests: a site for each test, and queues with messages."""

import time

import pytest
from site_page import site_of
from waiting import eventually

from reliq import Admin, Consumer, Queue, WorkerSettings
from reliq.keys import Keys, worker_key
from reliq.redis import commands
from reliq.redis.commands import Worker
from reliq.web import Access


@pytest.fixture
def admin(url):
    return Admin(url)


@pytest.fixture(scope="module")
def served(redis_server):
    """
    Serve the pages that many tests request: to users with all rights, and to read-only users.

    The servers end with each test file: with a held clock in a later test, their loops would never wake up.
    """
    with site_of(redis_server.url) as site, site_of(redis_server.url, grants=Access.READ) as lookers:
        yield site, lookers


@pytest.fixture
def site(url, served):
    """A site with a token that gives all rights."""
    served[0].app.last.forget()
    return served[0]


@pytest.fixture
def lookers(url, served):
    """A site with a token that gives read access without message bodies."""
    served[1].app.last.forget()
    return served[1]


@pytest.fixture
def orders(url):
    queue = Queue("orders", dict, url=url)
    queue.publish({"n": 1}, id="x")
    return queue


@pytest.fixture
def alive(client):
    """Write the record of a worker process, which lasts longer than 15 seconds."""

    def write(id):
        now = time.time()
        for beat in commands.write_worker(Worker(id, "shop", 7, "1.2", ("orders",), 4, 0, now, now, now)):
            client.execute_command(*beat.command)
        client.persist(worker_key(id))

    return write


@pytest.fixture
def entry(client):
    """Write a periodic job of the queue `orders` as a worker does; return its key."""

    def write(name="daily", **fields):
        key, now = Keys("orders").cron, int(time.time())
        told = {"schedule": "0 6 * * * UTC", "seen": now, "last": now, "id": "", **fields}
        client.hset(key, mapping={f"{name} {field}": value for field, value in told.items()})
        return key

    return write


@pytest.fixture
def fail(url, admin):
    """Run a failing handler until all messages of a queue are dead letters or wait for redelivery."""

    def work(queue, error, *, dead=0, backoff=0):
        consumer = Consumer(url)

        @consumer.handler(queue)
        def handle(_body):
            raise error

        consumer.start(WorkerSettings(concurrency=4))
        try:
            eventually(
                lambda: (
                    (admin.count(queue.name, "dead"), admin.queues([queue.name]).queues[0].backoff) == (dead, backoff)
                ),
                f"{dead} die and {backoff} wait",
            )
        finally:
            consumer.stop()

    return work
