"""Rates: nobody starts too soon, nobody looks in vain, and one process sleeps until the next start that is permitted."""

import time
from collections import Counter
from contextlib import ExitStack

import pytest
from overheard import Overheard, claims_in, tokens_in

from reliq import Consumer, Outgoing
from reliq.events import Acked, Claimed

RATE, BURST = 100, 5


@pytest.fixture
def overheard(url):
    one = Overheard(url)
    yield one
    one.close()


@pytest.fixture
def workers(url, recorder):
    """Start several worker engines on some queues, which stop with the test."""
    with ExitStack() as stopped:

        def make(count, *queues):
            for _ in range(count):
                consumer = Consumer(url, observers=[recorder])
                for queue in queues:
                    consumer.handler(queue)(lambda body: None)
                consumer.start()
                stopped.callback(consumer.stop, grace=0)

        yield make


def test_a_rate_is_kept_by_all_together_and_nobody_claims_in_vain(make_queue, workers, recorder, overheard):
    queue, count = make_queue(rate=f"{RATE}/s", burst=BURST), 150
    queue.publish_many(["x"] * count)

    workers(3, queue)
    began = time.monotonic()
    recorder.wait_for(Acked, count)
    took = time.monotonic() - began

    lines = overheard.all()
    assert took >= (count - BURST) / RATE - 0.2  # as long as its start may have been before the clock was read
    # A look may find a start that somebody else was just woken for.
    assert len(claims_in(lines)) - len(recorder.of(Claimed)) <= count / 10
    assert len(tokens_in(lines, queue)) <= count + count / 10


def test_what_is_published_while_the_rate_is_used_up_wakes_nobody(make_queue, workers, recorder, overheard):
    queue = make_queue(rate="1/m", burst=1)
    queue.publish("first")
    workers(2, queue)
    recorder.wait_for(Acked)
    queue.known_shards.read()  # as every minute: now it knows that there is a limit
    at = len(overheard.all())

    for _ in range(50):
        queue.publish("later")

    lines = overheard.all()[at:]
    assert tokens_in(lines, queue) == []
    assert queue.counts().ready == 50


def test_a_queue_that_waits_for_its_rate_does_not_keep_another_from_work(make_queue, workers, recorder):
    slow, quick = make_queue("slow", rate="1/m", burst=2), make_queue("quick")
    slow.publish_many(["x"] * 50)
    quick.publish_many(["x"] * 500)

    workers(1, slow, quick)

    recorder.wait_for(Acked, 500, queue="quick")
    recorder.wait_for(Acked, 2, queue="slow")
    assert Counter(event.queue for event in recorder.of(Acked) for _ in event.ids) == {"slow": 2, "quick": 500}


def test_a_key_that_has_used_up_its_rate_does_not_keep_other_keys_from_work(make_queue, workers, recorder, client):
    queue = make_queue(key_rate="1/m", key_burst=2)
    queue.publish_many([Outgoing(body="x", key=key) for key in ["loud"] * 50 + ["a", "b", "c"]])

    workers(2, queue)

    recorder.wait_for(Acked, 5)
    assert client.llen(queue.keys.line("loud")) == queue.counts().waiting == 48
