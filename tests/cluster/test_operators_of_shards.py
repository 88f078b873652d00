"""An operator sees a queue whose shards lie on several nodes as one; a node that is away hides its own queues alone."""

from contextlib import suppress

import pytest
from waiting import eventually

from reliq import Admin, Queue, RedisUnavailableError
from reliq.admin import session
from reliq.client.client import Client
from reliq.keys import Keys
from reliq.shardmap import ShardMap
from reliq.snapshot.snapshot import SnapshotReader
from reliq.transport.connection import Connection

SHARDS, MESSAGES = 8, 64


@pytest.fixture
def sharded(cluster):
    """A queue over all nodes, and its messages."""
    connection = Connection.to(cluster.url)
    connection.maps.clear()
    connection.wire().exchange([("SET", Keys("spread").map, ShardMap(1, SHARDS, SHARDS).text)])
    queue = Queue("spread", dict, url=cluster.url)
    queue.publish_many([{"at": at} for at in range(MESSAGES)])
    for at in range(MESSAGES):
        queue.publish({"at": at}, delay=3600 + at)
    return queue


@pytest.fixture
def admin(cluster):
    admin = Admin(cluster.url)
    yield admin
    admin.close()


def test_a_queue_over_all_nodes_is_one(cluster, sharded, admin):
    nodes = {cluster.primary_of(Keys("spread", shard=shard).ready).port for shard in range(SHARDS)}
    [view] = admin.queues(["spread"], interval=0).queues
    first = admin.page("spread", "pending", limit=50)
    second = admin.page("spread", "pending", limit=50, after=first.after)
    pending = [*first.items, *second.items]

    assert len(nodes) == 3
    assert (view.pending, view.ready, view.shards) == (MESSAGES, MESSAGES, SHARDS)
    assert [entry.when for entry in pending] == sorted(entry.when for entry in pending)
    assert len({entry.id for entry in pending}) == MESSAGES
    assert set(admin.cancel("spread", [entry.id for entry in pending[:9]]).values()) == {"cancelled"}
    assert admin.purge("spread", "ready").found == MESSAGES
    assert admin.check("spread").is_sound
    assert admin.account("spread").balanced


def patiently(look):
    """Look again until the node is known to be away: what has no key may have been asked of it."""
    found = []

    def tried():
        with suppress(RedisUnavailableError):
            found.append(look())
        return found

    eventually(tried, "another node is asked")
    return found[0]


def test_a_node_that_is_away_hides_its_own_queues_alone(cluster, sharded, admin, monkeypatch):
    monkeypatch.setattr(session, "PATIENCE_SECONDS", 0.1)
    home = cluster.primary_of(Keys("spread").ready)
    elsewhere = [shard for shard in range(SHARDS) if cluster.primary_of(Keys("spread", shard=shard).ready) != home]
    sick = cluster.primary_of(Keys("spread", shard=elsewhere[0]).ready)
    well = next(name for name in map(str, range(99)) if cluster.primary_of(Keys(name).ready) == home)
    Queue(well, dict, url=cluster.url).publish({})
    queues = [Keys("spread"), Keys(well)]
    reader = SnapshotReader(Client.to(Connection.to(cluster.url), 1.0), lambda: queues)
    reader.look()

    cluster.pause(sick)
    try:
        seen, look = patiently(lambda: admin.queues(["spread", well], interval=0)), patiently(reader.look)
        with pytest.raises(RedisUnavailableError):
            admin.account("spread")
    finally:
        cluster.resume(sick)

    assert ([view.queue for view in seen.queues], list(seen.unreadable)) == ([well], ["spread"])
    assert ([one.queue for one in look.queues], [keys.name for keys in look.unreadable]) == ([well], ["spread"])
