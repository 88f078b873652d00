"""Publishing with a key or a priority: the position in the queue, the cost, and queues with several shards."""

import asyncio

import pytest

from reliq import ConfigurationError, Layout, Limit, OutgoingMessage, Queue
from reliq.events import PublishEnded
from reliq.redis.server import Connection
from reliq.redis.shards import ShardMap
from reliq.wire_format import open_envelope

#: A repeated call would count twice.
pytestmark = pytest.mark.usefixtures("patient")


def lines(client, queue):
    """Return each key queue with its ids, the oldest first."""
    start = queue.keys.line("")
    return {
        key.decode().removeprefix(start): [id.decode() for id in reversed(client.lrange(key, 0, -1))]
        for key in client.scan_iter(f"{start}*")
    }


def header(client, queue, id):
    return open_envelope(client.get(queue.keys.msg(id)))[0]


def test_message_with_a_key_or_priority_waits_in_its_key_queue(queue, call, client):
    first = call(queue, "publish", {"n": 1}, key="tenant-7")
    second = call(queue, "publish", {"n": 2}, key="tenant-7")
    high = call(queue, "publish", {"n": 3}, priority="high")
    plain = call(queue, "publish", {"n": 4})

    assert lines(client, queue) == {"tenant-7": [first.id, second.id], "\x01high": [high.id]}
    assert client.hget(queue.keys.retries_left, first.id) == b"12 tenant-7"
    assert header(client, queue, first.id).key == "tenant-7"
    assert (header(client, queue, high.id).key, header(client, queue, high.id).priority) == (None, "high")
    assert queue.counts().waiting == 3
    assert (header(client, queue, plain.id).key, client.lrange(queue.keys.ready, 0, -1)) == (None, [plain.id.encode()])


def test_key_is_stored_beside_chosen_id_delay_and_headers(queue, client):
    queue.publish({}, key="é a", id="order-1", delay=60, headers={"a": "b"}, retries=3)

    found = header(client, queue, "order-1")
    assert (found.key, found.headers, found.retries) == ("é a", {"a": "b"}, 3)
    assert client.zscore(queue.keys.pending, "order-1")
    assert client.hget(queue.keys.retries_left, "order-1") == "3 é a".encode()
    assert queue.publish({}, key="another", id="order-1").status == "duplicate"


def test_messages_of_different_keys_share_a_call(queue, call, client, commands):
    call(queue, "publish", {}, key="warm")
    before = commands()["evalsha"]

    result = call(
        queue, "publish_many", [OutgoingMessage(body={"n": n}, key=f"k{n % 3}" if n % 4 else None) for n in range(100)]
    )

    assert (result.published, commands()["evalsha"] - before) == (100, 1)
    found = {key: len(ids) for key, ids in lines(client, queue).items()}
    assert found == {"k0": 25, "k1": 25, "k2": 25, "warm": 1}
    assert client.llen(queue.keys.ready) == 25


def test_tasks_that_publish_with_different_keys_share_round_trips(queue, client):
    async def all_at_once():
        await queue.apublish({}, key="warm")
        client.config_resetstat()
        await asyncio.gather(*(queue.apublish({"n": n}, key=f"k{n}") for n in range(50)))
        await queue.aclose()

    asyncio.run(all_at_once())

    ran = client.info("commandstats")
    assert sum(ran[name]["calls"] for name in ("cmdstat_evalsha", "cmdstat_eval") if name in ran) == 50
    assert len(lines(client, queue)) == 51


def test_bad_key_or_priority_is_refused_before_anything_is_sent(queue, client):
    for options, wanted in (
        ({"key": ""}, "key must be 1 to 128 bytes"),
        ({"priority": "urgent"}, "priority must be one of high, normal, low, not 'urgent'"),
        ({"key": "a", "priority": "high"}, "give key or priority, not both"),
    ):
        with pytest.raises(ConfigurationError, match=wanted):
            queue.publish({}, **options)

    assert client.dbsize() == 0


def test_keys_priorities_and_limits_are_refused_in_the_go_layout():
    bare = Queue("q", bytes, layout=Layout.hdt3213())

    with pytest.raises(ConfigurationError, match="cannot be sent on a queue in the hdt3213 layout"):
        bare.publish(b"x", key="a")
    with pytest.raises(ConfigurationError, match="cannot be sent on a queue in the hdt3213 layout"):
        bare.publish(b"x", priority="low")
    with pytest.raises(ConfigurationError, match="ordered: a queue in the hdt3213 layout cannot have limits"):
        Queue("q", layout=Layout.hdt3213(), ordered=True)


def test_queue_has_the_limits_that_it_declares():
    with pytest.raises(ConfigurationError, match="key_weights: a queue of 4 shards cannot have limits"):
        Queue("q", shards=4, key_weights={"vip": 4})
    assert Queue("q", shards=1, rate="5/s").own_limits.fields()
    assert Queue("q").own_limits is None
    shared = Queue("q", limits=[Limit("api", rate="5/s")])
    assert (shared.own_limits, list(shared.limits)) == (None, [Limit("api", rate="5/s")])
    assert Queue("q", ordered=False, per_key=None).own_limits is None
    assert Queue("q", per_key=2, retries=3).own_limits.per_key == 2
    with pytest.raises(ConfigurationError, match="per_key must be 1 to"):
        Queue("q", per_key=0)


def test_sharded_queue_refuses_a_key_even_when_sharded_meanwhile(queue, make_queue, call, client):
    call(queue, "publish", {"n": 1})
    client.set(queue.keys.map, ShardMap(1, 2, 2).text)
    for shard in (0, 1):
        client.set(queue.keys.of_shard(shard).epoch, "1 2 2")
    Connection.to(queue.target).maps.clear()
    heard = []
    other = make_queue(shards=2, observers=[heard.append])

    with pytest.raises(ConfigurationError, match="queue 'q' has 2 shards: keys, priorities, costs and limits need"):
        call(other, "publish", {}, key="a")
    with pytest.raises(ConfigurationError, match="queue 'q' has 2 shards"):
        call(queue, "publish", {"n": 2}, key="a")

    assert lines(client, queue) == {}
    assert [one.outcomes for one in heard if isinstance(one, PublishEnded)] == [{"refused": 1}]


def test_message_without_a_key_writes_nothing_of_keys_or_limits(queue, client):
    queue.publish({})
    queue.publish({}, priority="normal")

    assert client.llen(queue.keys.ready) == 2
    assert client.exists(queue.keys.limits, queue.keys.ring, queue.keys.held) == 0


def test_follow_up_of_a_job_may_have_a_key_or_priority(queue, client):
    queue.publish({})
    with queue.receive() as [job]:
        receipt = job.publish(queue, {}, key="tenant-7")
        assert job.publish(queue, {}, name="again", priority="low")

    assert set(lines(client, queue)) == {"tenant-7", "\x01low"}
    assert header(client, queue, receipt.id).key == "tenant-7"
