"""Batch handlers: a list of bodies in one call, and an answer for all messages or for each."""

import asyncio
import threading
import time
from collections import Counter
from contextlib import contextmanager

import pytest
from tenacity import wait_none
from transition import run_transition
from waiting import eventually

from reliq import Job, Nack, OutgoingMessage, Reject, Snooze
from reliq.events import Acked, Claimed, Handled, LeaseLost, Nacked, Released, Snoozed, Started
from reliq.lua.transitions import CallNumber

pytestmark = pytest.mark.slow

LONG = 60.0
#: A lease or timeout that is long enough on a machine with ten times the load.
CALM_SECONDS = 2.0


def test_a_handler_gets_a_list_of_bodies_and_acks_them_together(queue, consumer, work_until, recorder, as_kind):
    calls = []

    def handle(bodies, jobs):
        assert [job.body for job in jobs] == bodies
        calls.append(bodies)

    consumer.handler(queue, batch=10, linger=LONG)(as_kind(handle))
    queue.publish_many([str(number) for number in range(40)])

    work_until(Acked, 40, concurrency=1)

    assert [len(bodies) for bodies in calls] == [10] * 4
    assert sorted(int(body) for bodies in calls for body in bodies) == list(range(40))
    assert len(recorder.ids(Started)) == len(recorder.ids(Handled, outcome="ack")) == 40


def test_a_handler_may_answer_once_for_all(queue, consumer, work_until):
    consumer.handler(queue, batch=5, linger=LONG)(lambda bodies: Snooze(delay=LONG) if len(bodies) == 5 else None)
    queue.publish_many(["x"] * 10)

    work_until(Snoozed, 10, concurrency=1)


def test_a_batch_that_is_not_full_starts_when_it_has_lingered(queue, consumer, work_until, recorder, monkeypatch):
    monkeypatch.setattr("reliq.worker.settler.HOLD_SECONDS", 2.5)  # a busy machine may start it this much later
    calls = []
    consumer.handler(queue, batch=10, linger=3.0)(lambda bodies: calls.append((len(bodies), time.monotonic())))
    queue.publish_many(["x"] * 3)
    began = time.monotonic()
    work_until(Acked, 3)

    [(size, at)] = calls
    assert size == 3
    assert at - began >= 2.9  # it has waited; the maximum depends on the machine
    assert recorder.of(Released) == []  # longer than any other hold, but on purpose


def test_messages_that_come_while_a_batch_lingers_join_it(queue, consumer, start, recorder, as_kind):
    sizes = []
    consumer.handler(queue, batch=4, linger=LONG)(as_kind(lambda bodies: sizes.append(len(bodies))))
    start()
    for number in range(4):
        queue.publish(str(number))
        recorder.wait_for(Claimed, number + 1)

    recorder.wait_for(Acked, 4)
    assert sizes == [4]


def test_each_message_may_have_an_answer_of_its_own(queue, consumer, work_until, recorder, as_kind):
    answers = {"ack": None, "nack": Nack(delay=LONG), "reject": Reject(reason="bad"), "snooze": Snooze(delay=LONG)}
    consumer.handler(queue, batch=4, linger=LONG)(as_kind(lambda bodies, jobs: [answers[body] for body in bodies]))
    queue.publish_many([OutgoingMessage(body=body, id=body) for body in answers])

    work_until(Handled, 4)
    for kind, ids in ((Acked, ["ack"]), (Nacked, ["nack", "reject"]), (Snoozed, ["snooze"])):
        recorder.wait_for(kind, len(ids))
        assert sorted(recorder.ids(kind)) == ids
    assert {event.outcome: event.id for event in recorder.of(Handled)} == {kind: kind for kind in answers}


def test_a_batch_that_raises_or_overruns_its_time_is_retried_as_a_whole(queue, consumer, work_until, recorder):
    sizes = []

    @consumer.handler(queue, batch=3, linger=LONG, timeout=CALM_SECONDS, backoff=wait_none())
    async def handle(bodies: list, jobs: list[Job]):
        sizes.append(len(bodies))
        if jobs[0].attempt == 1:
            raise ValueError("the database is down")
        if jobs[0].attempt == 2:
            await asyncio.sleep(LONG)

    queue.publish_many(["x"] * 3)
    work_until(Acked, 3)

    assert sizes == [3, 3, 3]
    assert {event.error for event in recorder.of(Handled, outcome="nack")} == {"ValueError: the database is down"}
    assert Counter(event.outcome for event in recorder.of(Handled)) == {"nack": 3, "timeout": 3, "ack": 3}


def test_undecodable_bodies_are_settled_alone_and_left_out_of_the_batch(make_queue, consumer, work_until, recorder):
    texts, numbers = make_queue("n", str), make_queue("n", int)
    seen = []
    consumer.handler(numbers, batch=2, linger=LONG, on_decode_error="reject")(
        lambda bodies: seen.append(sorted(bodies))
    )
    for number, body in enumerate(["1", "no number", "x", "y", "neither", "2"]):
        texts.publish(body, id=str(number))

    work_until(Acked, 2, concurrency=1)
    recorder.wait_for(Nacked, 4)
    assert seen == [[1], [2]]  # no body of the second batch decodes: the handler is not called
    assert sorted(recorder.ids(Acked)) == ["0", "5"]


def test_the_last_chance_of_a_message_and_a_suspect_come_alone(queue, consumer, work_until):
    """If the process were killed, other messages of the batch would be lost with them."""
    batches = []
    consumer.handler(queue, batch=10, linger=0.1)(batches.append)
    queue.publish("suspect")
    run_transition(queue, "claim", CallNumber("dead", 1), limit=1, lease_ms=1)
    eventually(lambda: run_transition(queue, "reclaim").overdue, "its worker is dead")
    queue.publish_many([OutgoingMessage(body="safe"), OutgoingMessage(body="last", retries=0)] * 10)

    work_until(Acked, 21, concurrency=4)

    assert all(len(bodies) == 1 for bodies in batches if {"last", "suspect"} & set(bodies))
    assert Counter(body for bodies in batches for body in bodies) == {"safe": 10, "last": 10, "suspect": 1}


def test_a_slot_runs_one_batch_and_no_more_is_held_than_slots_take(queue, consumer, start, recorder, gate):
    consumer.handler(queue, batch=5, linger=LONG, concurrency=2)(lambda bodies: gate.pass_through())
    queue.publish_many(["x"] * 100)

    engine = start(concurrency=8)

    gate.wait_for(2)
    assert len(engine.inflight.deliveries()) == 10
    assert len(engine.inflight.runs()) == 2
    assert queue.counts().ready == 90


def test_every_lease_of_a_batch_is_renewed_and_its_time_can_be_extended(queue, consumer, work_until, recorder):
    @consumer.handler(queue, batch=3, linger=LONG, lease=CALM_SECONDS, timeout=CALM_SECONDS)
    def handle(bodies, jobs: list[Job]):
        jobs[2].extend_timeout(LONG)
        threading.Event().wait(1.2 * CALM_SECONDS)

    queue.publish_many(["x"] * 3)
    work_until(Acked, 3)

    assert recorder.of(LeaseLost) == []
    assert queue.counts().totals.get("retried_lease", 0) == 0


def test_a_stop_gives_back_a_batch_that_lingers_and_one_that_gives_way(queue, consumer, start, recorder, gate):
    @consumer.handler(queue, batch=2, linger=LONG)
    def handle(bodies, jobs: list[Job]):
        gate.pass_through()
        while not jobs[0].stopping:
            threading.Event().wait(0.01)
        jobs[1].raise_if_stopped()

    queue.publish_many(["x"] * 3)
    start()
    gate.wait_for()
    recorder.wait_for(Claimed, 3)
    gate.open()

    consumer.stop()

    assert len(recorder.ids(Started)) == 2
    assert queue.counts().ready == 3  # unspent
    assert queue.counts().totals.get("retried_lease", 0) == 0


def test_middleware_is_around_the_call_once_for_each_message(queue, consumer, work_until):
    log = []

    @consumer.middleware
    @contextmanager
    def around(job):
        log.append(("in", job.body))
        yield
        log.append(("out", job.body))

    consumer.handler(queue, batch=2, linger=LONG)(lambda bodies: log.append(("call", len(bodies))))
    queue.publish_many(["a", "b"])

    work_until(Acked, 2, concurrency=1)
    first, second = log[0][1], log[1][1]
    assert log == [("in", first), ("in", second), ("call", 2), ("out", second), ("out", first)]
