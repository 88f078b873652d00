"""A primary of a Cluster is killed while its replica lags: messages without confirmation may be lost, others not."""

import pytest
from waiting import eventually

from reliq import Admin, Durability, PublishFailed, Queue, RedisUnavailableError
from reliq.redis.shards import ShardMap

pytestmark = pytest.mark.slow

CONFIRMED, LOST = 100, 50
#: More than the socket buffers between two servers hold, so that later writes stay on the primary.
BLOCKAGE_BYTES = 32_000_000


def delivered(queue):
    """Return the ids of all messages that a queue delivers."""
    ids = set()
    while True:
        with queue.receive(limit=500) as jobs:
            if not jobs:
                return ids
            ids |= {job.id for job in jobs}


def test_only_messages_that_a_replica_confirmed_survive_their_primary(cluster):
    queue = Queue("sturdy", bytes, url=cluster.url)
    primary, replica = cluster.primary_of(queue.keys.ready), cluster.replica_of(queue.keys.ready)
    confirmed = [queue.publish(b"", durability=Durability.replicas(1, timeout=20)) for _ in range(CONFIRMED)]

    cluster.pause(replica)
    for _ in range(BLOCKAGE_BYTES // 10**6):
        cluster.client(primary).append(queue.keys.msg("blockage"), b"x" * 10**6)
    careless = [queue.publish(b"") for _ in range(LOST)]
    told = queue.publish(b"", durability=Durability.replicas(1, timeout=0.1))
    primary.kill()
    cluster.resume(replica)
    eventually(lambda: published_again(queue), "the replica has taken its primary's place")

    there = delivered(queue)
    assert [one.durable for one in confirmed] == [True] * CONFIRMED
    assert {one.id for one in confirmed} <= there
    assert told.durable is False
    assert there & {one.id for one in (*careless, told)} == set()
    assert (queue.counts().alive, queue.counts().missing) == (0, 0)
    queue.close()


def test_resize_that_no_replica_confirms_is_refused(cluster):
    queue = Queue("sturdy", bytes, url=cluster.url)
    queue.publish(b"")
    replica, admin = cluster.replica_of(queue.keys.map), Admin(cluster.url)

    cluster.pause(replica)
    with pytest.raises(RedisUnavailableError, match="no replica of .* confirms the change of the shards"):
        admin.resize("sturdy", 8)
    assert not cluster.client(cluster.primary_of(queue.keys.map)).exists(queue.keys.epoch), "the map is confirmed first"
    cluster.resume(replica)
    cluster.wait_until_ok()
    # The next change waits for its confirmation for only half a second, and the replica may still lag.
    eventually(lambda: queue.publish(b"", durability=Durability.replicas(1, timeout=20)).durable, "a replica confirms")
    admin.resize("sturdy", 8)

    assert admin.shards("sturdy").map == ShardMap(1, 8, 1, "growing")
    admin.close()
    queue.close()


def published_again(queue):
    try:
        return queue.publish(b"after")
    except PublishFailed:
        return False
