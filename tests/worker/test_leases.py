"""A lease is renewed while its handler runs, and no longer than the timeout."""

import asyncio
import threading
import time
from types import SimpleNamespace

import pytest
import redis
from tenacity import wait_fixed
from transition import run_transition
from waiting import eventually

from reliq import JobInterrupted, OutgoingMessage
from reliq.events import (
    Acked,
    Cancelled,
    Handled,
    LeaseLost,
    Reclaimed,
    RedisRecovered,
    RedisUnavailable,
    Released,
    RenewalLate,
    Started,
)
from reliq.lua.transitions import NOTHING_DUE, CallNumber, ClaimAnswer
from reliq.worker.settler import Renewer
from reliq.worker.slots import deliveries_of
from reliq.worker.upkeep import Scheduler

pytestmark = pytest.mark.slow

LEASE = 0.6
#: Long enough for a renewal in time on a machine with ten times the load.
CALM_LEASE = 3.0
#: Long enough for an immediate handler on such a machine.
CALM_TIMEOUT = 1.5
SOON = wait_fixed(0.01)


def test_a_handler_that_blocks_the_event_loop_keeps_every_lease(queue, consumer, work_until, recorder):
    @consumer.handler(queue, lease=CALM_LEASE)
    async def handle(body):
        if body == "blocks":
            time.sleep(1.5 * CALM_LEASE)  # noqa: ASYNC251  the fault under test
        else:
            await asyncio.sleep(1.2 * CALM_LEASE)

    queue.publish("waits")
    queue.publish("blocks")
    work_until(Acked, 2)

    assert len(recorder.ids(Started)) == 2
    assert recorder.of(LeaseLost) == []


def test_the_shortest_lease_is_looked_at_often_enough_to_be_renewed_in_time(queue, consumer, hold):
    engine = hold(consumer, queue, lease=0.05)

    assert engine._renewer.step() <= 0.05 / 6  # two checks before a renewal is due, four before the lease expires


def test_a_renewal_that_this_process_makes_late_is_reported(queue, consumer, hold, recorder):
    (held,) = hold(consumer, queue, lease=60).inflight.deliveries()

    held.renew_at, held.lease_until = held.renew_at - 45, held.lease_until - 45  # as after a pause of 45 s

    (event,) = recorder.wait_for(RenewalLate)
    assert event.seconds > 20
    assert event.cause == "process"


def test_a_blocked_observer_delays_neither_renewals_nor_outcomes(make_queue, consumer, start, gate, recorder):
    slow, other, overrun = make_queue("slow"), make_queue("other"), threading.Event()

    def observe(event):
        if isinstance(event, Handled) and event.outcome == "timeout":
            gate.pass_through()

    consumer.observers.append(observe)
    consumer.handler(slow, lease=60, timeout=0.1)(lambda body: overrun.wait(60))
    consumer.handler(other, lease=LEASE)(lambda body: overrun.wait(60) if body == "held" else None)
    slow.publish("overruns")
    other.publish("held", id="held")
    engine = start(concurrency=4)
    gate.wait_for()

    held = eventually(
        lambda: next((one for one in engine.inflight.deliveries() if one.delivery.id == "held" and one.started), None),
        "the other message runs",
    )
    renewed_until = held.lease_until
    other.publish("ends")

    eventually(lambda: other.counts().totals.get("acked") == 1, "another message is settled", 15)
    eventually(lambda: held.lease_until > renewed_until + 2 * LEASE, "the lease is renewed", 15)
    overrun.set()


def test_a_renewal_is_not_reported_as_late_while_redis_is_away(own_server, own_queue, own_consumer, recorder, hold):
    hold(own_consumer, own_queue, lease=0.3)

    own_server.kill()
    recorder.wait_for(RedisUnavailable, 3, part="renewer")
    own_server.start()
    recorder.wait_for(RedisRecovered, part="renewer")

    events = recorder.events
    away, back = (events.index(recorder.of(kind, part="renewer")[0]) for kind in (RedisUnavailable, RedisRecovered))
    assert not [one for one in events[away:back] if isinstance(one, RenewalLate)]


def test_a_coroutine_that_overruns_is_cancelled_under_its_lease_and_retried(
    queue, consumer, start, recorder, monkeypatch
):
    monkeypatch.setattr("reliq.worker.slots.CANCEL_SECONDS", 60.0)  # the test lets it end sooner
    ends, cancelled = asyncio.Event(), threading.Event()

    @consumer.handler(queue, timeout=CALM_TIMEOUT, lease=CALM_LEASE, backoff=SOON)
    async def handle(body, job):
        if job.attempt == 1:
            try:
                await asyncio.sleep(600)
            finally:
                cancelled.set()
                await ends.wait()

    queue.publish("x")
    engine = start()
    assert cancelled.wait(30)
    (held,) = engine.inflight.deliveries()
    until = held.lease_until
    eventually(lambda: held.lease_until > until, "its lease is renewed", seconds=20)
    engine._tasks.call(ends.set)

    recorder.wait_for(Acked)
    assert recorder.of(LeaseLost) == []
    first, second = recorder.of(Handled)
    assert (first.outcome, second.outcome) == ("timeout", "ack")
    assert "timeout" in first.error
    assert queue.counts().totals["retried_nack"] == 1


def test_a_thread_that_overruns_keeps_its_slot_alone_and_loses_its_message(queue, consumer, start, recorder, gate):
    seen = []

    @consumer.handler(queue, timeout=CALM_TIMEOUT, lease=CALM_LEASE)
    def handle(body, job):
        if body == "hangs" and job.attempt == 1:
            gate.pass_through()
            seen.append(job.lease_lost)

    engine = start(concurrency=2)
    queue.publish("hangs", id="hangs")
    recorder.wait_for(Handled, outcome="timeout")
    queue.publish_many(["x"] * 10)

    recorder.wait_for(Acked, 11)
    assert engine.hung_slots == 1
    assert engine.must_be_replaced()
    gate.open()
    recorder.wait_for(LeaseLost, verb="ack")
    assert seen == [True]
    assert [e.outcome for e in recorder.of(Handled, id="hangs")] == ["timeout", "ack"]
    counts = queue.counts()
    assert (counts.totals["acked"], counts.missing, counts.alive) == (11, 0, 0)
    eventually(lambda: engine.hung_slots == 0, "its slot is free")  # the thread may notice it later than this test


@pytest.mark.parametrize("timeout", [CALM_TIMEOUT, None], ids=["extended", "without a timeout"])
def test_a_handler_with_an_extended_timeout_or_without_one_is_not_cancelled(queue, consumer, work_until, timeout):
    @consumer.handler(queue, timeout=timeout)
    async def handle(body, job):
        job.extend_timeout(60 if timeout else 0.1)  # without a timeout there is nothing to extend
        await asyncio.sleep(1.2 * timeout if timeout else 0.3)

    queue.publish("x")
    work_until(Handled, outcome="ack")


def test_a_cancelled_job_learns_of_it_and_is_acked_if_it_finishes(queue, consumer, start, recorder, gate):
    @consumer.handler(queue, lease=CALM_LEASE)
    def handle(body, job):
        gate.pass_through()
        if body == "finishes":
            return
        while not job.cancelled:
            time.sleep(0.01)
        job.raise_if_stopped()

    bodies = ("stops", "finishes")
    queue.publish_many([OutgoingMessage(body=body, id=body) for body in bodies])
    start()
    gate.wait_for(2)

    assert [queue.cancel(id) for id in bodies] == ["running"] * 2
    gate.open()

    recorder.wait_for(Released)
    recorder.wait_for(Acked)
    assert {event.id: event.outcome for event in recorder.of(Handled)} == {"stops": "release", "finishes": "ack"}
    assert recorder.ids(Cancelled) == []
    counts = queue.counts()
    assert (counts.totals["cancelled"], counts.totals["acked"], counts.alive, counts.missing) == (1, 1, 0, 0)


def test_a_job_learns_that_its_lease_is_lost(queue, consumer, start, recorder, client):
    checked = []

    @consumer.handler(queue, lease=CALM_LEASE)
    def handle(body, job):
        while not job.lease_lost:
            time.sleep(0.01)
        with pytest.raises(JobInterrupted, match="lost"):
            job.raise_if_stopped()
        checked.append(job.id)

    queue.publish("x", id="x")
    start()
    recorder.wait_for(Started)
    client.hset(queue.keys.lease, "x", "someone else")

    recorder.wait_for(Handled)
    assert checked == ["x"]
    recorder.wait_for(LeaseLost)  # another thread reports it, after the job may have noticed it
    assert len(recorder.of(LeaseLost)) == 1


def test_a_job_knows_its_message(queue, consumer, work_until, recorder):
    told = []
    consumer.handler(queue)(lambda body, job: told.append(job))
    receipt = queue.publish("hello", id="x", retries=4, headers={"a": "b"})

    work_until(Acked)

    [job] = told
    assert (job.id, job.queue, job.body, job.attempt, job.retries_left) == ("x", "q", "hello", 1, 4)
    assert (dict(job.headers), job.state, job.due) == ({"a": "b"}, None, receipt.due)
    assert abs(job.enqueued - job.due) < 60
    assert repr(job) == "Job(queue='q', id='x', attempt=1)"
    assert recorder.of(Started)[0].lag >= 0


def test_a_message_that_this_process_claims_again_keeps_its_new_lease(queue, consumer, hold, gate, client, recorder):
    engine = hold(consumer, queue, lease=60)
    client.zadd(queue.keys.unack, {"x": 1})  # its lease has expired
    run_transition(queue, "reclaim")
    gate.wait_for()
    first, second = engine.inflight.deliveries()
    until = second.lease_until

    first.renew_at = second.renew_at = time.monotonic()  # both in one check

    recorder.wait_for(LeaseLost, verb="extend")
    eventually(lambda: second.lease_until > until, "the second lease is renewed", seconds=20)
    assert first.lost
    assert not second.lost
    assert recorder.ids(LeaseLost) == ["x"]


def test_a_renewal_that_redis_held_up_is_not_blamed_on_the_worker(
    queue, consumer, caller, inflight_of, recorder, monkeypatch
):
    clock = SimpleNamespace(now=time.monotonic())
    monkeypatch.setattr("reliq.worker.settler.time", SimpleNamespace(monotonic=lambda: clock.now))
    consumer.handler(queue, lease=60)(lambda body: None)
    queue.publish("x")
    claimed = run_transition(queue, "claim", CallNumber("me", 1), limit=1, lease_ms=60_000).claimed
    (held,) = deliveries_of(claimed, consumer.handlers[0], clock.now)
    held.started = True
    inflight = inflight_of()
    inflight.add([held])

    def run_all(calls):
        answers = caller.run_all(calls)
        clock.now += 50  # Redis replies after the next renewal is due
        return answers

    client = SimpleNamespace(run_all=run_all, observers=[recorder])
    renewer = Renewer(client, consumer.handlers, inflight, SimpleNamespace(watch=lambda now: []), lambda *_: None)
    clock.now = held.renew_at
    for _ in range(2):
        renewer.step()

    assert [event.cause for event in recorder.of(RenewalLate)] == ["redis"]


def test_a_process_reclaims_no_lease_it_must_renew(queue, consumer, hold, gate, recorder, caller, client, monkeypatch):
    """After Redis or the process hung, a renewal and a reclaim are both due: the process renews its own lease first."""
    hangs, held_up = threading.Event(), threading.Event()
    engine = hold(consumer, queue, lease=60)
    monkeypatch.setattr(engine._tasks, "watch", lambda now: (hangs.set(), held_up.wait(60), [])[-1])
    assert hangs.wait(30)  # the step before may still renew a lease
    scheduler = Scheduler(caller, consumer.handlers, lambda: None, engine._scheduler._is_behind)
    scheduler._spared_at.clear()  # as long after its start
    (held,) = engine.inflight.deliveries()
    held.renew_at, held.lease_until = held.renew_at - 60, held.lease_until - 60
    client.zadd(queue.keys.unack, {"x": 1})  # its lease has expired

    scheduler.note(queue.keys, ClaimAnswer(NOTHING_DUE, 0, 0, []), time.monotonic())
    wait = scheduler.step()

    assert 0 < wait <= 1  # it checks again
    assert recorder.of(Reclaimed) == []
    held_up.set()
    eventually(lambda: not engine._renewer.is_behind(queue.keys), "the lease is renewed")
    gate.open()
    recorder.wait_for(Acked)
    assert recorder.of(LeaseLost) == []


def test_a_process_reclaims_no_lease_whose_outcome_is_on_its_way(own_server, own_queue, own_consumer, hold, gate):
    renewer = hold(own_consumer, own_queue, lease=CALM_LEASE)._renewer
    eventually(lambda: not renewer.is_behind(own_queue.keys), "nothing is due")

    with redis.Redis.from_url(own_server.url) as admin:
        admin.client_pause(60_000, all=False)
        gate.open()
        eventually(lambda: renewer.is_behind(own_queue.keys), "the renewal is due")
        admin.client_unpause()

    eventually(lambda: not renewer.is_behind(own_queue.keys), "it is settled")


def test_an_outcome_is_awaited_a_third_of_a_lease_after_its_end(queue, consumer, caller, inflight_of, new_deliveries):
    """Redis may refuse it for longer; then another worker may get the message."""
    consumer.handler(queue, lease=600)(lambda body: None)
    inflight, (held,) = inflight_of(), new_deliveries(age=500)
    inflight.add([held])
    held.settling, now = True, time.monotonic()
    renewer = Renewer(caller, consumer.handlers, inflight, None, None)

    for ago, is_waited_for in ((-100, True), (100, True), (300, False)):
        held.lease_until = now - ago
        assert renewer.is_behind(queue.keys) == is_waited_for, ago
