"""The doctor's findings about queues: stuck keys, malformed limits, and producers that ignore the shard map."""

import pytest

from reliq import OutgoingMessage, Queue
from reliq.admin import Admin
from reliq.keys import home
from reliq.lua import transitions
from reliq.redis.shards import ShardMap


@pytest.fixture
def found(admin):
    """Return the doctor's findings about queues: verdict and text."""
    return lambda: [(one.verdict, one.what, one.mend) for one in admin.doctor() if one.name in ("keys", "queues")]


@pytest.fixture
def keyed(queue):
    """A queue with two messages of a key."""
    queue.publish_many([OutgoingMessage(body={}, id=id, key="a") for id in ("a1", "a2")])
    return queue


def test_doctor_finds_nothing_wrong_with_served_keys(url, keyed, found):
    Queue("plain", url=url).publish({})

    assert found() == [("ok", "2 queues: no stuck key, broken limit, lost shard map or stray message", "")]


def test_doctor_names_the_repair_of_a_stuck_key(keyed, found, client, command):
    client.zrem(keyed.keys.ring, "a")

    [(verdict, what, mend)] = found()

    assert (verdict, mend) == ("bad", "reliq check q --repair")
    assert what == "1 key of q is stuck, such as 'a' with 2 messages"
    command("check", "q", "--repair")
    assert [one[0] for one in found()] == ["ok"]


def test_doctor_reports_a_malformed_limit(keyed, found, client):
    client.hset(keyed.keys.limits, "per_key", "0")

    [(verdict, what, mend)] = found()

    assert (verdict, mend, "per_key" in what) == ("bad", "reliq limits q --clear NAME", True)


def test_doctor_reports_an_unreadable_registry_as_unknown(client, login):
    [finding] = [one for one in Admin(login("producer", "q")).doctor() if one.name == "queues"]

    assert finding.verdict == "unknown"
    assert "registry cannot be read" in finding.what


SHARDS = 4
#: An id that belongs to another shard than the first.
AWAY = next(id for id in (f"order-{number}" for number in range(100)) if home(id, SHARDS))


@pytest.fixture
def sharded(url, client):
    queue = Queue("q", str, url=url)
    client.set(queue.keys.map, ShardMap(2, SHARDS, SHARDS).text)
    queue.publish_many(["x"] * 20)
    for number in range(20):
        queue.publish("x", id=f"chosen-{number}")
    return queue


def test_doctor_reports_a_producer_that_reads_no_shard_map(admin, sharded, client):
    def found():
        return [(one.verdict, one.what) for one in admin.doctor() if one.name == "producers"]

    assert found() == []
    old = transitions.CallNumber("old", 1)
    call = transitions.publish(sharded.keys, [(AWAY, b"x")], old, ttl_ms=60_000, retries=3)  # to the first shard
    call.read(client.execute_command(*call.command_in_full))

    assert found() == [("bad", f"1 message of other shards of q in shard 0, such as {AWAY!r}")]

    client.set(sharded.keys.map, ShardMap(3, 2 * SHARDS, SHARDS, "growing").text)
    assert found() == [], "during a resize a message may be where it was"
