"""Operators see a queue whose shards are on several nodes as one queue."""

import asyncio

import pytest
from waiting import eventually

from reliq import Admin, Consumer, OutgoingMessage, Queue, Status
from reliq.keys import Keys, home
from reliq.redis.connection import run_blocking
from reliq.redis.server import Connection
from reliq.redis.shards import ShardMap

SHARDS, MESSAGES = 8, 64


@pytest.fixture
def sharded(cluster):
    """A queue on all nodes, with its messages."""
    run_blocking(
        Connection.to(cluster.url).wire().exchange([("SET", Keys("spread").map, ShardMap(1, SHARDS, SHARDS).text)])
    )
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
    [view] = admin.queues(["spread"]).queues
    first = admin.page("spread", "pending", limit=50)
    second = admin.page("spread", "pending", limit=50, after=first.after)
    pending = [*first.items, *second.items]

    assert len(nodes) == 3
    assert (view.pending, view.ready, view.shards) == (MESSAGES, MESSAGES, SHARDS)
    assert len({entry.id for entry in pending}) == MESSAGES
    assert set(admin.cancel("spread", [entry.id for entry in pending[:9]]).values()) == {"cancelled"}
    assert admin.purge("spread", "ready").found == MESSAGES
    assert admin.check("spread").is_sound
    assert admin.account("spread").missing == 0


def test_status_and_result_are_read_from_the_node_of_the_message(cluster, sharded):
    consumer = Consumer(url=cluster.url)

    @consumer.handler(sharded, keep=60)
    def handle(body: dict[str, int]) -> int:
        return body["at"]

    receipts = [sharded.publish({"at": at}, id=f"order-{at}") for at in range(8)]
    later = sharded.publish({"at": 8}, id="later", delay=3600)
    consumer.start()
    eventually(lambda: sharded.counts().totals.get("acked") == MESSAGES + 8, "all due messages are acked")
    consumer.stop()

    assert [sharded.status(receipt.id).result for receipt in receipts] == [*range(8)]
    assert [asyncio.run(receipt.astate()).result for receipt in receipts] == [*range(8)]
    assert later.state().state == "pending"
    assert sharded.status("never") == Status("gone")


def test_a_node_that_loses_the_map_loses_no_chosen_id_of_another_node(cluster, admin):
    queue, fresh = (Queue("spread", dict, url=cluster.url) for _ in range(2))
    queue.publish({})
    admin.resize("spread", SHARDS)
    messages = [OutgoingMessage(body={}, id=f"order-{n}") for n in range(40)]
    queue.publish_many(messages)
    node = cluster.primary_of(queue.keys.map)
    is_lost = [cluster.primary_of(Keys("spread", shard=home(one.id, SHARDS)).map) is node for one in messages]

    cluster.client(node).flushall()
    queue.connection().maps.clear()  # as in a new process

    assert 0 < sum(is_lost) < 40
    assert fresh.publish_many(messages).published == sum(is_lost)
    assert admin.shards("spread").map.is_lost
    assert admin.check("spread", repair=True).is_sound
    assert admin.shards("spread").map == ShardMap(1, SHARDS, 1, "growing")
