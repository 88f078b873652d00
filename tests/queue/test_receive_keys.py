"""Receive from a queue with message keys or with limits."""

import time

import pytest

from reliq import ConfigurationError, OutgoingMessage
from reliq.redis.shards import ShardMap

#: A repeated call would count twice.
pytestmark = pytest.mark.usefixtures("patient")

SLEEP_SECONDS = 0.3


def rows(jobs):
    return [(job.key, job.body) for job in jobs]


def publish(queue, *bodies):
    """Publish bodies, each with its first letter as the key."""
    queue.publish_many([OutgoingMessage(body=body, key=body[0]) for body in bodies])


def test_queue_known_without_keys_receives_messages_with_keys_at_once(make_queue, receive):
    queue = make_queue(str)
    queue.publish("plain")
    assert receive(queue, rows) == [(None, "plain")]

    publish(make_queue(str), "a0", "b0")

    assert sorted(receive(queue, rows, limit=5)) == [("a", "a0"), ("b", "b0")]


def test_messages_of_an_ordered_key_are_received_one_at_a_time(make_queue, receive):
    queue = make_queue(str, ordered=True)
    publish(queue, "a0", "a1", "b0")

    def meanwhile(jobs):
        others = make_queue(str, ordered=True)
        with others.receive(limit=5) as more:
            return rows(jobs), rows(more)

    assert receive(queue, meanwhile, limit=5) == ([("a", "a0"), ("b", "b0")], [])
    assert receive(queue, rows, limit=5) == [("a", "a1")]


def test_declared_limits_are_written_by_the_first_receive(make_queue, receive, client):
    queue = make_queue(str, per_key=2)

    assert receive(queue, rows) == []

    assert client.hget(queue.keys.limits, "per_key") == b"2"
    receive(queue, rows)  # loads every script
    before = client.info("commandstats")["cmdstat_evalsha"]["calls"]
    receive(queue, rows)
    assert client.info("commandstats")["cmdstat_evalsha"]["calls"] - before == 3  # promote, reclaim, claim


def test_receive_waits_until_the_rate_permits_a_message(make_queue, receive):
    queue = make_queue(str, rate="5/s", burst=1)
    queue.publish_many(["0", "1"])
    began = time.monotonic()

    taken = [receive(queue, rows, wait=10) for _ in range(2)]

    assert taken == [[(None, "0")], [(None, "1")]]
    assert time.monotonic() - began >= 0.2 - 0.001


def test_received_job_that_spent_less_lets_the_next_start(make_queue, receive, client):
    queue = make_queue(str, rate="1/h by cost", burst=100)
    queue.publish_many([OutgoingMessage(body="x", cost=95)] * 2)

    def spend(jobs):
        for job in jobs:
            job.spent(80)
            job.spent(1)
        return len(jobs)

    assert [receive(queue, spend, limit=5) for _ in range(3)] == [1, 1, 0]


def test_received_job_refuses_a_negative_cost(make_queue, receive):
    queue = make_queue(str)
    queue.publish("x")

    def spend(jobs):
        with pytest.raises(ConfigurationError, match="cost must be 0 to 1000000000, not -1"):
            jobs[0].spent(-1)
        jobs[0].spent(5)  # without limits it has no effect

    receive(queue, spend)
    assert queue.counts().alive == 0


def test_rate_limited_job_is_returned_and_its_key_throttled(make_queue, receive):
    queue = make_queue(str, ordered=True)
    publish(queue, "a0", "a1", "b0")

    def answer(jobs):
        next(job for job in jobs if job.key == "a").rate_limited(delay=SLEEP_SECONDS, reason="429")
        return time.monotonic()

    slept_at = receive(queue, answer, limit=5)

    assert receive(queue, rows, limit=5, wait=10) == [("a", "a0")]
    assert time.monotonic() - slept_at >= SLEEP_SECONDS


def test_receive_from_a_sharded_queue_with_limits_is_refused(make_queue, receive, client):
    queue = make_queue(str, ordered=True)
    client.set(queue.keys.map, ShardMap(1, 4, 4).text)

    with pytest.raises(ConfigurationError, match="'q' has 4 shards, but limits need a single shard"):
        receive(queue, rows)


def test_receive_does_not_ask_whether_the_queue_has_keys(make_queue, receive, commands):
    queue = make_queue(str)
    for _ in range(2):  # the first round loads every script
        receive(queue, rows)
    before = commands()

    receive(queue, rows)

    more = {name: calls - before.get(name, 0) for name, calls in commands().items()}
    assert (more["evalsha"], more.get("hmget", 0)) == (3, 0)
