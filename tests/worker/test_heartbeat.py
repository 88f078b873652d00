"""Each worker process publishes a record with its identity and its running messages, and removes it at its end."""

import os
import socket
import time
from types import SimpleNamespace

import pytest
from waiting import eventually

from reliq import Queue
from reliq.admin import calls
from reliq.errors import RedisRefusedError, RedisUnavailableError
from reliq.events import Acked
from reliq.keys import QUEUES_KEY, WORKERS_KEY
from reliq.redis.commands import BEAT_SECONDS, RECORD_MS, SLOTS_LIMIT, StackReport
from reliq.worker.claims import ServedQueues
from reliq.worker.upkeep import BEAT_AGAIN_SECONDS, Heartbeat


@pytest.fixture
def records(caller):
    """Return the records of living workers."""

    def look():
        ids = caller.run(calls.worker_ids())
        return [one for one in caller.run_all(calls.worker_records(ids)) if one is not None]

    return look


@pytest.fixture
def beat_of(caller, consumer, inflight_of):
    """Make a heartbeat, with an engine's own heartbeat if one is given; the test runs its steps."""

    def make(engine=None, client=caller):
        served, inflight = ServedQueues(consumer.handlers), inflight_of()
        if engine:
            served, inflight = engine._served, engine.inflight
        return Heartbeat(client, served, inflight, time.monotonic, lambda: StackReport(0.0, ()))

    return make


def test_a_worker_that_starts_writes_its_record(acking, start, records, client):

    start(concurrency=3)

    (one,) = eventually(records, "its record")
    assert (one.host, one.pid, one.queues, one.slots) == (socket.gethostname(), os.getpid(), ("q",), 3)
    assert one.started <= one.seen
    assert abs(one.last_claim - one.seen) < 60
    assert 0 < client.pttl(f"reliq:worker:{one.id}") <= RECORD_MS

    acking.stop()
    assert client.keys("reliq:worker*") == []


def test_the_record_has_the_handlers_that_run_up_to_a_limit(consumer, queue, start, records, gate, beat_of):
    consumer.handler(queue)(lambda body: gate.pass_through())
    engine = start(concurrency=SLOTS_LIMIT + 3)

    def record():
        beat = beat_of(engine)
        assert beat.step() == BEAT_SECONDS
        return next(worker for worker in records() if worker.id == beat._id)

    for id in "ab":
        queue.publish("x", id=id)
    gate.wait_for(2)
    one = record()
    assert one.busy == 2
    assert {(slot.queue, slot.id, slot.attempt) for slot in one.running} == {("q", "a", 1), ("q", "b", 1)}
    assert all(one.started <= slot.started + 1 for slot in one.running)

    queue.publish_many(["x"] * (SLOTS_LIMIT + 1))
    gate.wait_for(SLOTS_LIMIT + 1)
    one = record()
    assert (one.busy, len(one.running)) == (SLOTS_LIMIT + 3, SLOTS_LIMIT)


def test_a_killed_worker_leaves_the_index_and_a_foreign_record_is_passed_over(acking, start, records, client):
    client.zadd(WORKERS_KEY, {"killed": 1_700_000_000, "strange": 2_000_000_000})
    client.set("reliq:worker:strange", b"\xff not JSON")

    start()

    (one,) = eventually(records, "its record")
    left = {one.id.encode(), b"strange"}
    eventually(lambda: set(client.zrange(WORKERS_KEY, 0, -1)) == left, "the killed worker leaves")


def test_registries_that_cannot_be_written_stop_no_publish_and_no_worker(acking, queue, start, recorder, client):
    client.set(WORKERS_KEY, "not a sorted set")
    client.set(QUEUES_KEY, "not a hash")
    start()

    queue.publish("x")

    recorder.wait_for(Acked)


def test_a_producer_names_its_queue_once(call, queue, client):
    call(queue, "publish", "x")
    first = client.hget(QUEUES_KEY, "q")
    client.hdel(QUEUES_KEY, "q")

    call(queue, "publish", "x")
    Queue("q", str, url=queue.target).publish("x")

    assert int(first) > 1_700_000_000
    assert client.hget(QUEUES_KEY, "q") is None


def test_a_request_for_stacks_is_read_with_the_record_and_answered_in_the_next_step(acking, caller, client, beat_of):
    woken = []
    beat = beat_of()
    beat.wake = lambda: woken.append("heartbeat")
    caller.run_all(calls.ask_stacks(beat._id))

    beat.step()

    assert woken == ["heartbeat"]
    assert client.keys("reliq:stack*") == []
    beat.step()
    assert client.keys("reliq:stack*") == [f"reliq:stacks:{beat._id}".encode()]


def test_a_record_is_written_after_an_outage_and_without_the_right_to_getdel(caller, records, beat_of):
    def away(requests):
        return [RedisUnavailableError("away")] * len(requests)

    def older_rule(requests):
        refused = RedisRefusedError("no permission")
        answers = zip(requests, caller.run_all(requests), strict=True)
        return [refused if one.command[0] == "GETDEL" else answer for one, answer in answers]

    client = SimpleNamespace(run_all=away)
    beat = beat_of(client=client)
    assert beat.step() == BEAT_AGAIN_SECONDS
    client.run_all = older_rule

    assert beat.step() == BEAT_SECONDS
    assert [one.id for one in records()] == [beat._id]
