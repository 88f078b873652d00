"""Rate limits: no message starts early, no claim is useless, and one process sleeps until the next permitted start."""

import time
from contextlib import closing

import pytest
from overheard import Overheard, claims_in, tokens_in
from waiting import eventually

from reliq import Admin, OutgoingMessage
from reliq.events import Acked, Claimed, Expired
from reliq.redis.connection import BLOCKING, run_blocking

RATE, BURST = 100, 5


@pytest.fixture
def overheard(url):
    with closing(Overheard(url)) as one:
        yield one


def test_workers_keep_a_rate_together_and_claim_nothing_in_vain(make_queue, workers, recorder, overheard):
    queue, count = make_queue(rate=f"{RATE}/s", burst=BURST), 150
    queue.publish_many(["x"] * count)

    began = time.monotonic()
    workers(3, queue)
    recorder.wait_for(Acked, count)
    took = time.monotonic() - began

    lines = overheard.all()
    assert took >= (count - BURST) / RATE - 0.01  # tolerance: Redis has another clock
    # A poll may take a message for which another worker was just woken.
    assert len(claims_in(lines)) - len(recorder.of(Claimed)) <= count / 10
    assert len(tokens_in(lines, queue)) <= count + count / 10


def test_a_publish_while_the_rate_is_used_up_wakes_no_worker(make_queue, workers, recorder, overheard):
    queue = make_queue(rate="1/m", burst=1)
    queue.publish("first")
    workers(2, queue)
    recorder.wait_for(Acked)
    run_blocking(queue.known_shards.read(BLOCKING))  # as every minute: now the queue has read its limit
    at = len(overheard.all())

    for _ in range(50):
        queue.publish("later")

    lines = overheard.all()[at:]
    assert tokens_in(lines, queue) == []
    assert queue.counts().ready == 50


def test_a_queue_or_key_that_waits_for_its_rate_keeps_no_other_from_work(make_queue, workers, recorder, client):
    slow, quick = make_queue("slow", rate="1/m", burst=2), make_queue("quick", key_rate="1/m", key_burst=2)
    slow.publish_many(["x"] * 50)
    quick.publish_many([OutgoingMessage(body="x", key=key) for key in ["loud"] * 50 + ["a", "b", "c"]])

    workers(1, slow, quick)

    recorder.wait_for(Acked, 5, queue="quick")
    recorder.wait_for(Acked, 2, queue="slow")
    assert len(recorder.ids(Acked)) == 7
    assert client.llen(quick.keys.line("loud")) == quick.counts().waiting == 48


@pytest.mark.parametrize(
    "limits", [{"rate": "1/h", "burst": 2}, {"key_rate": "1/h", "key_burst": 2}], ids=["queue", "key"]
)
def test_expired_messages_leave_the_starts_of_a_rate_to_others(limits, make_queue, workers, recorder, client):
    queue, gone = make_queue(**limits), [f"gone-{number}" for number in range(20)]
    queue.publish_many([OutgoingMessage(body="x", key="a", id=id) for id in [*gone, "first", "second", "third"]])
    client.delete(*map(queue.keys.msg, gone))

    workers(1, queue)

    recorder.wait_for(Acked, 2)
    recorder.wait_for(Expired, len(gone))
    assert sorted(recorder.ids(Expired)) == sorted(gone)
    assert (sorted(recorder.ids(Acked)), queue.counts().waiting) == (["first", "second"], 1)  # they ran side by side


def test_running_worker_wakes_every_key_that_sleeps_for_a_rate_that_is_cleared(make_queue, workers, client, url):
    queue, count = make_queue(key_rate="1/h", key_burst=1), 2200
    queue.publish_many(OutgoingMessage(body="x", key=f"key-{number}") for number in range(count) for _ in range(2))
    workers(1, queue)
    eventually(lambda: client.zcard(queue.keys.asleep) == count, "each key has used up its rate")

    Admin(url).set_limits("q", clear=["key_rate"])

    eventually(lambda: queue.counts().alive == 0, "each key starts its second message")
    assert queue.counts().totals["acked"] == 2 * count
