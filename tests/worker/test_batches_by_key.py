"""`batch_by_key`: all messages of a batch have the same key, or none."""

from collections import Counter

import pytest

from reliq import ConfigurationError, Layout, OutgoingMessage, Queue
from reliq.events import Acked, Claimed

LONG = 60.0


@pytest.fixture
def batches(consumer):
    """Register a batch handler with `batch_by_key`; return the keys of each batch, in the order of the calls."""

    def make(queue, **options):
        calls = []
        consumer.handler(queue, batch_by_key=True, **options)(lambda bodies, jobs: calls.append([j.key for j in jobs]))
        return calls

    return make


def publish(queue, *keys):
    queue.publish_many([OutgoingMessage(body="x", key=key) for key in keys])


def test_a_batch_holds_messages_of_one_key_and_is_full_where_there_are_enough(make_queue, work_until, batches):
    queue = make_queue()
    calls = batches(queue, batch=10, linger=LONG)
    publish(queue, *"abcd" * 20)

    work_until(Acked, 80, concurrency=2)

    assert Counter(map(tuple, calls)) == {(key,) * 10: 2 for key in "abcd"}


@pytest.mark.parametrize("keys", [["a", "a", None, None] * 2, [None] * 8], ids=["beside keys", "alone"])
def test_messages_without_a_key_come_together(make_queue, work_until, batches, keys):
    queue = make_queue()
    calls = batches(queue, batch=4, linger=LONG)
    publish(queue, *keys)

    work_until(Acked, 8, concurrency=1)

    assert sorted(calls, key=str) == sorted([keys[:2] * 2, [None] * 4], key=str)


def test_messages_that_come_late_join_the_lingering_batch_of_their_key(make_queue, work_until, recorder, batches):
    queue = make_queue()
    calls = batches(queue, batch=2, linger=LONG)
    publish(queue, "z", "z")  # now the queue has keys
    work_until(Acked, 2, concurrency=4)
    for claimed, key in enumerate("abb", 3):
        queue.publish("x", key=key)
        recorder.wait_for(Claimed, claimed)
    recorder.wait_for(Acked, 4)  # while the first message of the other key lingers
    queue.publish("x", key="a")

    recorder.wait_for(Acked, 6)
    assert calls == [["z", "z"], ["b", "b"], ["a", "a"]]


def test_no_more_keys_are_claimed_than_there_are_slots(no_returns, make_queue, start, recorder, consumer, gate):
    """Messages of further keys would wait without a slot."""
    queue, seen = make_queue(), []
    consumer.handler(queue, batch=5, batch_by_key=True, linger=0)(
        lambda bodies, jobs: (seen.append(jobs[0].key), gate.pass_through())
    )
    publish(queue, *[f"k{number}" for number in range(40)] * 2)

    engine = start(concurrency=3)
    gate.wait_for(3)

    assert len(recorder.ids(Claimed)) <= 3 * 5
    assert len(set(seen)) == 3
    assert all(held.started for held in engine.inflight.deliveries())
    gate.open()
    recorder.wait_for(Acked, 80)


def test_a_batch_by_key_is_refused_where_it_makes_no_sense(consumer, make_queue, url):
    refused = {
        "give batch too": (make_queue(), {}),
        "never has 2 messages; give batch=1": (make_queue(ordered=True), {"batch": 2}),
        "at most 3 messages of a key at once": (make_queue(per_key=3), {"batch": 4}),
        "in the layout .* has none": (Queue("q", str, layout=Layout.hdt3213(), url=url), {"batch": 2}),
        "of several shards has none": (make_queue(shards=4), {"batch": 2}),
    }
    for why, (queue, options) in refused.items():
        with pytest.raises(ConfigurationError, match=why):
            consumer.handler(queue, batch_by_key=True, **options)(lambda bodies: None)
    with pytest.raises(ConfigurationError, match="batch_by_key must be True or False"):
        consumer.handler(make_queue(), batch=2, batch_by_key="yes")(lambda bodies: None)

    consumer.handler(make_queue(per_key=3), batch=3, batch_by_key=True)(lambda bodies: None)
