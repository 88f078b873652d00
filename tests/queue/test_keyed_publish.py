"""Publishing with a key or a priority: where it stands, what it costs, and who is asked before the first."""

import asyncio
import os
import subprocess
import sys

import msgspec
import pytest

from reliq import ConfigurationError, Layout, Outgoing, Queue
from reliq.commands import write_worker
from reliq.events import PublishEnded
from reliq.ids import home
from reliq.roster import Worker
from reliq.shardmap import ShardMap
from reliq.transport.connection import Connection
from reliq.wireformat import open_envelope

OLD = Worker("w1", "web-1", 7, "0.1.0", ("q", "other"), 16, 0, 1.0, 1.0, 2e9)


@pytest.fixture
def worker(client):
    """Write the record of a live worker."""

    def write(record=OLD, **changes):
        for one in write_worker(msgspec.structs.replace(record, **changes) if changes else record):
            client.execute_command(*one.command)

    return write


def lines(client, queue):
    """Each line of the queue, its ids from the oldest on."""
    start = queue.keys.line("")
    return {
        key.decode().removeprefix(start): [id.decode() for id in reversed(client.lrange(key, 0, -1))]
        for key in client.scan_iter(f"{start}*")
    }


def header(client, queue, id):
    return open_envelope(client.get(queue.keys.msg(id)))[0]


def test_a_message_with_a_key_waits_in_the_line_of_its_key(queue, call, client):
    first = call(queue, "publish", {"n": 1}, key="tenant-7")
    second = call(queue, "publish", {"n": 2}, key="tenant-7")
    plain = call(queue, "publish", {"n": 3})

    assert lines(client, queue) == {"tenant-7": [first.id, second.id]}
    assert client.hget(queue.keys.retries_left, first.id) == b"12 tenant-7"
    assert header(client, queue, first.id).key == "tenant-7"
    assert queue.counts().waiting == 2
    assert (header(client, queue, plain.id).key, client.lrange(queue.keys.ready, 0, -1)) == (None, [plain.id.encode()])


@pytest.mark.parametrize("priority", ["high", "low"])
def test_a_priority_has_a_line_of_its_own_and_is_no_key(queue, call, client, priority):
    receipt = call(queue, "publish", {}, priority=priority)

    assert lines(client, queue) == {f"\x01{priority}": [receipt.id]}
    assert (header(client, queue, receipt.id).key, header(client, queue, receipt.id).priority) == (None, priority)


def test_a_normal_priority_is_none(queue, call, client):
    receipt = call(queue, "publish", {}, priority="normal")

    assert client.lrange(queue.keys.ready, 0, -1) == [receipt.id.encode()]
    assert client.exists(queue.keys.limits) == 0


def test_a_key_goes_with_a_chosen_id_a_delay_and_headers(queue, call, client):
    call(queue, "publish", {}, key="é a", id="order-1", delay=60, headers={"a": "b"}, retries=3)

    found = header(client, queue, "order-1")
    assert (found.key, found.headers, found.retries) == ("é a", {"a": "b"}, 3)
    assert client.zscore(queue.keys.pending, "order-1")
    assert client.hget(queue.keys.retries_left, "order-1") == "3 é a".encode()
    assert call(queue, "publish", {}, key="another", id="order-1").status == "duplicate"


def test_messages_of_different_keys_share_a_call(queue, call, client, commands):
    call(queue, "publish", {}, key="warm")
    before = commands()["evalsha"]

    result = call(
        queue, "publish_many", [Outgoing(body={"n": n}, key=f"k{n % 3}" if n % 4 else None) for n in range(100)]
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


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"key": ""}, "key must be 1 to 128 bytes"),
        ({"key": 7}, "key must be a str, not int"),
        ({"priority": "urgent"}, "priority must be one of high, normal, low, not 'urgent'"),
        ({"key": "a", "priority": "high"}, "give key or priority, not both: the messages of key 'a' take turns"),
    ],
)
def test_what_is_not_allowed_is_named_before_anything_is_sent(queue, call, client, options, wanted):
    with pytest.raises(ConfigurationError, match=wanted):
        call(queue, "publish", {}, **options)

    assert client.dbsize() == 0


@pytest.mark.parametrize("options", [{"key": "a"}, {"priority": "low"}])
def test_the_go_layout_has_no_place_for_a_key(url, call, options):
    bare = Queue("q", bytes, url=url, layout=Layout.hdt3213())

    with pytest.raises(
        ConfigurationError, match=f"{next(iter(options))} cannot be sent on a queue in the hdt3213 layout"
    ):
        call(bare, "publish", b"x", **options)
    bare.close()


@pytest.mark.parametrize("declared", [{"ordered": True}, {"rate": "5/s"}, {"key_weights": {"vip": 4}}])
def test_limits_are_refused_by_name_in_the_go_layout_and_with_several_shards(declared):
    with pytest.raises(
        ConfigurationError, match=f"{next(iter(declared))}: a queue in the hdt3213 layout has no limits"
    ):
        Queue("q", layout=Layout.hdt3213(), **declared)
    with pytest.raises(ConfigurationError, match=f"{next(iter(declared))}: a queue of 4 shards has no limits"):
        Queue("q", shards=4, **declared)

    assert Queue("q", shards=1, **declared).limits.fields()


def test_a_queue_says_what_it_declares():
    assert Queue("q").limits is None
    assert Queue("q", ordered=False, per_key=None).limits is None
    assert Queue("q", per_key=2, retries=3).limits.per_key == 2
    with pytest.raises(ConfigurationError, match="per_key must be 1 to"):
        Queue("q", per_key=0)


def test_a_sharded_queue_refuses_a_key_also_when_it_was_sharded_meanwhile(queue, call, client):
    call(queue, "publish", {"n": 1})
    client.set(queue.keys.map, ShardMap(1, 2, 2).text)
    for shard in (0, 1):
        client.set(queue.keys.of_shard(shard).epoch, "1")
    Connection.to(queue.target).maps.clear()
    other = Queue("q", url=queue.target, shards=2)

    with pytest.raises(ConfigurationError, match="queue 'q' has 2 shards: keys, priorities and limits need"):
        call(other, "publish", {}, key="a")
    with pytest.raises(ConfigurationError, match="queue 'q' has 2 shards"):
        call(queue, "publish", {"n": 2}, key="a", id=next(f"o{n}" for n in range(9) if home(f"o{n}", 2)))

    assert lines(client, queue) == {}
    other.close()


def test_a_worker_that_does_not_know_keys_is_named_before_the_first_message_with_one(queue, call, client, worker):
    worker()
    heard = []
    queue.observers = [heard.append]

    with pytest.raises(
        ConfigurationError, match=r"worker w1 of queue 'q' \(reliq 0.1.0, pid 7 on web-1\) does not know keys"
    ):
        call(queue, "publish", {}, key="a")
    with pytest.raises(ConfigurationError, match="stop every worker of an older version"):
        call(queue, "publish_many", [{}, Outgoing(body={}, priority="high")])

    assert call(queue, "publish", {})
    assert lines(client, queue) == {}


def test_workers_of_other_queues_and_those_that_know_keys_are_no_reason(queue, call, client, worker):
    worker(Worker("w2", "web-1", 8, "0.1.0", ("other",), 16, 0, 1.0, 1.0, 2e9))
    worker(Worker("w3", "web-1", 9, "0.2.0", ("q",), 16, 0, 1.0, 1.0, 2e9, keys=True))

    assert call(queue, "publish", {}, key="a")


def test_workers_are_asked_about_once_and_not_where_the_queue_has_keys_already(queue, call, client, worker, commands):
    call(queue, "publish", {}, key="a")
    asked = commands()
    call(queue, "publish", {}, key="b")
    assert commands()["zrevrange"] == asked["zrevrange"] == 1

    worker()  # it started since: doctor names it
    Connection.to(queue.target).keyed.clear()  # as in another process
    Connection.to(queue.target).maps.clear()
    call(Queue("q", url=queue.target), "publish", {}, key="c")

    assert commands()["zrevrange"] == 1
    assert set(lines(client, queue)) == {"a", "b", "c"}


def test_tasks_that_publish_the_first_keys_at_the_same_time_ask_once(queue, commands, worker):
    async def all_at_once(key):
        try:
            return await asyncio.gather(
                *(queue.apublish({}, key=f"{key}{n}") for n in range(50)), return_exceptions=True
            )
        finally:
            await queue.aclose()

    worker()
    assert {type(one) for one in asyncio.run(all_at_once("a"))} == {ConfigurationError}
    assert commands()["zrevrange"] == 1
    worker(Worker("w1", "web-1", 7, "0.2.0", ("q",), 16, 0, 1.0, 1.0, 2e9, keys=True))

    assert all(asyncio.run(all_at_once("b")))
    assert commands()["zrevrange"] == 2


def test_observers_hear_that_a_message_was_refused_for_the_workers(url, call, worker):
    worker()
    heard = []
    told = Queue("q", url=url, observers=[heard.append])

    with pytest.raises(ConfigurationError):
        call(told, "publish", {}, key="a")

    assert [one.outcomes for one in heard if isinstance(one, PublishEnded)] == [{"refused": 1}]
    told.close()


def test_a_message_without_a_key_asks_nobody_and_runs_the_script_that_it_always_ran(queue, call, client, commands):
    call(queue, "publish", {})

    assert "zrevrange" not in commands()
    assert client.exists(queue.keys.limits, queue.keys.ring, queue.keys.held) == 0


def test_a_next_step_of_a_job_has_a_key_as_any_message(url, client):
    first, then = Queue("first", url=url), Queue("then", url=url)
    first.publish({})
    with first.receive() as [job]:
        receipt = job.publish(then, {}, key="tenant-7")
        assert job.publish(then, {}, name="again", priority="low")

    assert set(lines(client, then)) == {"tenant-7", "\x01low"}
    assert header(client, then, receipt.id).key == "tenant-7"
    first.close()
    then.close()


def test_a_program_without_keys_imports_nothing_of_limits(url):
    program = "import sys, reliq; reliq.Queue('q').publish({}); print('reliq.limits' in sys.modules)"

    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "RELIQ_URL": url},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.stdout == "False\n", done.stderr


def test_one_exact_move_may_limit_a_queue_and_put_a_key_to_sleep(queue, client):
    queue.publish({}, key="a")

    assert queue.moves.limit({"per_key": "2"})
    queue.moves.sleep("a", for_ms=60_000)

    assert client.hget(queue.keys.limits, "per_key") == b"2"
    assert client.zscore(queue.keys.asleep, "a")
