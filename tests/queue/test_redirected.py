"""A process's connections go to another Redis with another clock for a while."""

import os

import pytest
import redis

from reliq import Admin, Queue
from reliq.keys import Keys, home
from reliq.redis.server import Connection, redirected
from reliq.redis.shards import ShardMap

#: September 2026, in unix microseconds.
THEN = 1_789_000_000_000_000


@pytest.fixture
def other(url):
    """Return the URL of another database of the server, and a client of it."""
    there = url.replace("/0", "/1")
    with redis.Redis.from_url(there) as client:
        yield there, client
    Connection.to(there).close()


def test_redirected_queues_use_the_other_redis_until_the_end(url, other, call):
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


def test_publish_to_another_redis_goes_by_the_map_of_that_redis(url, other, call):
    """The shards have no fence yet, so only the map determines the shard of a chosen id."""
    queue, there = Queue("q", url=url), Connection(other[0])
    call(queue, "publish", {})
    other[1].set(Keys("q").map, ShardMap(1, 8, 8).text)
    id = next(id for id in (f"order-{n}" for n in range(99)) if home(id, 8) == 5)

    with redirected(there):
        call(queue, "publish", {}, id=id)

    assert other[1].lrange(Keys("q", shard=5).ready, 0, -1) == [id.encode()]
    there.close()


def test_redirected_queue_is_registered_in_each_redis(url, other, call):
    queue = Queue("q", url=url)
    call(queue, "publish", {})

    for _ in range(2):  # emptied in between, as tests do
        other[1].flushdb()
        with redirected(Connection(other[0])):
            call(queue, "publish", {})
            assert [one.queue for one in Admin(url).queues().queues] == ["q"]


def test_forked_process_stays_redirected(url, other):
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


def test_scripts_use_the_clock_of_their_connection(url, call, receive):
    queue, now = Queue("q", url=url), [THEN]
    with redirected(Connection(url, clock=lambda: now[0])):
        receipt = call(queue, "publish", {}, delay=60)
        assert receipt.due == THEN / 1e6 + 60
        now[0] += 59_999_999
        assert receive(queue, list) == []
        now[0] += 1
        assert receive(queue, lambda jobs: [job.id for job in jobs]) == [receipt.id]
