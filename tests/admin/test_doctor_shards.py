"""The doctor sees a producer of a version that knows nothing of shards, by what it leaves in the first."""

import pytest

from reliq import Queue, transitions
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


def test_doctor_reports_a_producer_that_knows_no_shards(admin, queue, client):
    def found():
        return [(one.verdict, one.what) for one in admin.doctor() if one.name == "producers"]

    assert found() == []
    call = transitions.publish(
        queue.keys, [(AWAY, b"x")], transitions.CallNumber("old", 1), ttl_ms=60_000, retries=3
    )  # into the first shard, whatever the map says
    call.read(client.execute_command(*call.command_in_full))

    assert found() == [("bad", f"1 message of other shards of q in shard 0, such as {AWAY!r}")]

    client.set(queue.keys.map, ShardMap(3, 2 * SHARDS, SHARDS, "growing").text)
    assert found() == [], "during a resize a message may be where it was"
