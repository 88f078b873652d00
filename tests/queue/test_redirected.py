"""Connections of a process that mean another Redis for a while, by another clock."""

import asyncio
import os

import pytest
import redis

from reliq import Admin, Queue
from reliq.lua import script, script_names
from reliq.transport.connection import Connection, redirected

#: September 2026, in unix microseconds.
THEN = 1_789_000_000_000_000


@pytest.fixture
def other(url):
    """The URL of another database of the server, and a client of it."""
    there = url.replace("/0", "/1")
    with redis.Redis.from_url(there) as client:
        yield there, client
    Connection.to(there).close()


def test_what_was_used_before_means_the_other_redis_meanwhile_and_its_own_again_after_it(url, other, call):
    queue, given = Queue("q", url=url), redis.Redis.from_url(url)
    by_client = Queue("q", url=given)
    for one in (queue, by_client):
        call(one, "publish", {})
    mine = Connection(other[0])

    with redirected(mine):
        assert [call(one, "counts").ready for one in (queue, by_client, Queue("q"))] == [0, 0, 0]
        call(queue, "publish", {})
        assert (Connection.to(url), Connection.to(None)) == (mine, mine)

    assert [call(one, "counts").ready for one in (queue, by_client)] == [2, 2]
    assert Queue("q", url=other[0]).counts().ready == 1
    mine.close()


def test_a_queue_is_named_in_the_registry_of_each_redis_that_it_means(url, other, call):
    queue = Queue("q", url=url)
    call(queue, "publish", {})

    for _ in range(2):  # emptied between, as by tests
        other[1].flushdb()
        with redirected(Connection(other[0])):
            call(queue, "publish", {})
            assert [one.queue for one in Admin(url).queues(interval=0).queues] == ["q"]


def test_a_forked_process_means_the_other_redis_too(url, other):
    queue = Queue("q", url=url)
    with redirected(Connection(other[0])):
        queue.publish({})
        child = os.fork()
        if child == 0:
            queue.publish({})
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert queue.counts().ready == 2

    assert queue.counts().ready == 0


def test_every_script_can_be_told_the_time():
    assert {script(name).args[0] for name in script_names()} == {"clock"}


def test_scripts_go_by_the_clock_of_their_connection(url, call):
    queue, now = Queue("q", url=url), [THEN]
    with redirected(Connection(url, clock=lambda: now[0])):
        receipt = call(queue, "publish", {}, delay=60)
        assert receipt.due == THEN / 1e6 + 60
        now[0] += 59_999_999
        with queue.receive() as jobs:
            assert jobs == []
        now[0] += 1
        assert received(queue, call) == [receipt.id]


def received(queue, call):
    """The ids that a look takes, by either kind of code."""
    if call.__name__ == "<lambda>":
        with queue.receive() as jobs:
            return [job.id for job in jobs]

    async def take():
        async with queue.areceive() as jobs:
            return [job.id for job in jobs]

    return asyncio.run(take())
