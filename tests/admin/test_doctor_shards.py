"""The doctor sees a producer of a version that knows nothing of shards, by what it leaves in the first."""

import pytest

from reliq import Admin, Queue, transitions
from reliq.ids import home
from reliq.shardmap import ShardMap

SHARDS = 4
#: An id that belongs in another shard than the first.
AWAY = next(id for id in (f"order-{number}" for number in range(100)) if home(id, SHARDS))


@pytest.fixture
def queue(url, client):
    queue = Queue("q", str, url=url)
    client.set(queue.keys.map, ShardMap(2, SHARDS, SHARDS).text)
    queue.publish_many(["x"] * 20)
    for number in range(20):
        queue.publish("x", id=f"chosen-{number}")
    return queue


@pytest.fixture
def old_producer(queue, client):
    """Publish as a version without shards does: into the first, whatever the map says."""

    def publish(id):
        number = transitions.CallNumber("old", 1)
        call = transitions.publish(queue.keys, [(id, b"x")], number, ttl_ms=60_000, retries=3)
        return call.read(client.execute_command(*call.command_in_full))

    return publish


def told(url):
    return [one for one in Admin(url).doctor() if one.name == "producers"]


def test_producers_that_know_the_shards_are_nothing_to_tell_of(url, queue):
    assert told(url) == []


def test_a_producer_that_publishes_a_chosen_id_past_the_fence_is_told(url, queue, old_producer):
    old_producer(AWAY)

    [finding] = told(url)

    assert (finding.verdict, finding.what) == (
        "bad",
        f"1 message of other shards of q in shard 0, such as {AWAY!r}",
    )


def test_while_the_number_of_shards_changes_they_are_where_they_were(url, queue, old_producer, client):
    old_producer(AWAY)
    client.set(queue.keys.map, ShardMap(3, 2 * SHARDS, SHARDS, "growing").text)

    assert told(url) == []
