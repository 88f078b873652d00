"""Metrics of queues with keys: number of keys, largest key, longest blocked key; bounded series and commands."""

import patience
import pytest
from patience import value

from reliq import OutgoingMessage, Queue
from reliq.lua import transitions
from reliq.metrics.names import KEY_LENGTH, REST
from reliq.metrics.serving import queue_collector
from reliq.metrics.snapshot import HELD_UP_LIMIT, BlockedKeys
from reliq.redis.client import Client


@pytest.fixture
def page(connection):
    """Return the scraped metrics of a queue."""
    return lambda queue: patience.page(queue_collector(connection, [queue.keys]))


@pytest.fixture
def queue(url):
    return Queue("q", int, url=url)


def series(found, name):
    """Return the values of a metric of queue q by the label `key`."""
    return {dict(labels)["key"]: number for (one, labels), number in found.items() if one == name}


def test_largest_keys_have_a_series_each_and_the_others_share_one(queue, page, client):
    queue.publish_many(OutgoingMessage(body=1, key=f"k{at:02}") for at in range(15) for _ in range(at + 1))

    found = page(queue)

    waiting = series(found, "reliq_key_waiting")
    assert waiting == {f"k{at:02}": at + 1 for at in range(5, 15)} | {REST: 1 + 2 + 3 + 4 + 5}
    assert value(found, "reliq_messages", queue="q", state="waiting") == 120
    assert value(found, "reliq_keys", queue="q", state="in_turn") == 15
    assert value(found, "reliq_keys", queue="q", state="asleep") == 0
    assert value(found, "reliq_backlog", queue="q") == 120
    assert value(found, "reliq_messages_unaccounted", queue="q") == 0
    assert value(found, "reliq_paused", queue="q") == 0
    client.zadd(queue.keys.asleep, {"": 4e9})  # a handler put the whole queue to sleep
    assert value(page(queue), "reliq_paused", queue="q") == 1


def test_key_label_is_bounded_and_printable(queue, page):
    long = 'say "\\" ' + "x" * 100
    queue.publish(1, key=long)
    queue.publish(1, key="right\u202eto left")

    assert series(page(queue), "reliq_key_waiting") == {long[:KEY_LENGTH]: 1, "right\\u202eto left": 1, REST: 0}


def test_oldest_waiting_age_is_that_of_the_key_whose_turn_is_next(queue, client, reader):
    id = queue.publish(1, key="a").id
    seconds, _ = client.time()
    client.setrange(queue.keys.msg(id), 13, str((seconds - 9000) * 1000))

    [seen] = reader(queue.keys).look().queues.values()
    assert seen.oldest["waiting"] == pytest.approx(9000, abs=100)


@pytest.fixture
def run(connection):
    return Client(connection.wire(5.0)).run


@pytest.fixture
def held_up(queue, client, reader):
    """Read the metrics as if this many seconds had passed; return for how long a key has been blocked."""
    start = client.time()[0]
    own = reader(queue.keys, held_up=BlockedKeys())
    return lambda seconds: next(iter(own.look((start + seconds) * 1000).queues.values())).held_up


def test_key_is_held_up_while_its_first_message_stays(queue, held_up, run):
    queue.publish_many(OutgoingMessage(body=1, key="slow") for _ in range(3))
    run(transitions.sleep(queue.keys, "slow", for_ms=None))

    assert [held_up(at) for at in (0, 100)] == [0, 100]
    for at in (200, 300):  # a message of the key starts before each read
        run(transitions.sleep(queue.keys, "slow", for_ms=0))
        assert len(run(claim(queue, 1, at)).claimed) == 1
        run(transitions.sleep(queue.keys, "slow", for_ms=None))
        assert held_up(at) == 0
    assert held_up(400) == 100
    run(transitions.sleep(queue.keys, "slow", for_ms=0))
    assert [held_up(at) for at in (500, 600)] == [0, 0]  # the key waits for a worker only


def test_key_in_order_is_held_up_behind_a_failed_message(queue, client, held_up, run):
    client.hset(queue.keys.limits, mapping={"on": 1, "ordered": 1})
    queue.publish_many(OutgoingMessage(body=1, key="account") for _ in range(2))
    [first] = run(claim(queue, 9, 1)).claimed
    run(transitions.nack(queue.keys, [(first, 3600_000, "failed 1 x", b"")]))

    assert held_up(0) == 0
    assert held_up(7200) == 7200


def test_held_up_of_many_keys_keeps_the_longest(queue, held_up, run):
    for second, number in ((0, 3), (5, 2 * HELD_UP_LIMIT)):
        queue.publish_many(OutgoingMessage(body=1, key=f"{second} {at}") for at in range(number))
        for at in range(number):
            run(transitions.sleep(queue.keys, f"{second} {at}", for_ms=None))
        held_up(second)

    assert [held_up(at) for at in (10, 20, 30)] == [10, 20, 30]


def claim(queue, limit, number):
    return transitions.claim(queue.keys, transitions.CallNumber("w", number), limit=limit, lease_ms=9000)


def test_claims_held_back_by_a_rate_are_counted(queue, page, client, run):
    queue.publish_many(OutgoingMessage(body=1, key="a") for _ in range(3))
    client.hset(queue.keys.limits, mapping={"rate_us": 10**9, "burst": 1})

    assert len(run(claim(queue, 3, 1)).claimed) == 1

    assert value(page(queue), "reliq_limited_claims_total", queue="q") == 1


def test_queue_without_keys_has_no_key_series_and_no_extra_commands(queue, url, client, page, reader):
    plain = Queue("plain", int, url=url)
    plain.publish(1)
    queue.publish(1, key="a")

    def calls(queue):
        own = reader(queue.keys)
        own.look()
        client.config_resetstat()
        own.look()
        stats = client.info("commandstats")
        return {name: stats[f"cmdstat_{name}"]["calls"] for name in ("evalsha", "getrange")}

    assert calls(plain) == {"evalsha": 1, "getrange": 1}
    assert calls(queue) == {"evalsha": 2, "getrange": 1}
    found = page(plain)
    of_keys = {"reliq_keys", "reliq_key_waiting", "reliq_key_blocked_seconds", "reliq_limited_claims_total"}
    assert not {name for name, _ in found} & of_keys
    assert of_keys <= {name for name, _ in page(queue)}
    assert not [labels for name, labels in found if name == "reliq_messages" and ("state", "waiting") in labels]
