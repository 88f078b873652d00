"""The slots of a process: what waits, what runs in which thread, and how much more may be claimed."""

import threading
import time
from types import SimpleNamespace

import pytest
from waiting import eventually

from reliq.events import Acked
from reliq.worker.claims import QueueClaims
from reliq.worker.slots import HOLD_SECONDS, QUICK_SECONDS, STUCK_SECONDS, HandlerCall, QuickCalls


@pytest.fixture
def slots_of(inflight_of, new_deliveries):
    """Make the slots of a process that nobody serves."""

    def make(concurrency):
        inflight = inflight_of(concurrency)

        def put(handler, amount):
            deliveries = new_deliveries(amount, handler)
            inflight.add(deliveries)
            inflight.hold(deliveries)
            return deliveries

        def capacity(handler):
            return inflight.wait_for_capacity([QueueClaims(handler)], 0)[0]

        def run_one(seconds):
            """Have a call end that took so long."""
            run = inflight.next_plain(None)
            run.started_at -= seconds
            inflight.next_async([run])

        return SimpleNamespace(inflight=inflight, put=put, capacity=capacity, run_one=run_one)

    return make


def test_as_many_messages_are_prefetched_as_start_soon(acking, slots_of, monkeypatch):
    (handler,) = acking.handlers
    for seconds, ahead in ((HOLD_SECONDS / 10, 40), (HOLD_SECONDS / 1000, 1500), (HOLD_SECONDS, 0), (60, 0)):
        slots = slots_of(4)
        assert slots.capacity(handler).ahead == 0  # nobody knows how long it takes
        slots.put(handler, 1)
        slots.run_one(seconds)
        assert slots.capacity(handler).ahead == pytest.approx(ahead, rel=0.1)

    slots = slots_of(1)
    slots.put(handler, 2)
    slots.run_one(0.001)
    assert slots.capacity(handler).ahead > 0
    later = time.monotonic() + HOLD_SECONDS  # the second takes longer than the first
    monkeypatch.setattr("reliq.worker.slots.time", SimpleNamespace(monotonic=lambda: later))
    assert slots.capacity(handler).ahead == 0


def test_slots_are_free_beside_a_queue_at_its_own_limit_and_after_a_withdrawal(make_queue, consumer, slots_of):
    consumer.handler(make_queue("capped"), concurrency=2)(lambda body: None)
    consumer.handler(make_queue("other"))(lambda body: None)
    capped, other = consumer.handlers
    slots = slots_of(8)
    slots.put(capped, 100)  # however much it holds ahead
    assert (slots.capacity(capped).slots, slots.capacity(other).slots) == (0, 6)

    slots = slots_of(2)
    deliveries = slots.put(other, 3)
    assert slots.capacity(other).slots == 0
    assert slots.inflight.withdraw(deliveries[:2]) == deliveries[:2]
    assert slots.capacity(other).slots == 1
    assert slots.inflight.next_plain(None).deliveries == deliveries[2:]


def test_a_wait_in_redis_is_ended_once_and_only_when_there_is_room(queue, consumer, slots_of):
    consumer.handler(queue, concurrency=1)(lambda body: None)
    (handler,) = consumer.handlers
    slots, nudges, claims = slots_of(2), [], [QueueClaims(handler)]
    slots.inflight.nudge = lambda: nudges.append("may be over")
    assert not slots.inflight.watch(claims)  # there is room now: no wait

    slots.put(handler, 1)
    assert slots.inflight.watch(claims)
    assert not slots.inflight.wait_is_over()
    run = slots.inflight.next_plain(None)
    assert nudges == []
    slots.inflight.next_async([run])

    assert nudges == ["may be over"]
    assert [slots.inflight.wait_is_over() for _ in range(2)] == [True, False]


def test_a_batch_that_lingers_beside_busy_threads_has_one_that_waits_for_it(queue, consumer, start, recorder, gate):
    """Twelve messages are a batch of ten and two that linger: the thread of the ten does not come back."""

    @consumer.handler(queue, batch=10, linger=0.2)
    def handle(bodies):
        if len(bodies) == 10:
            gate.pass_through()

    queue.pause()
    queue.publish_many(["x"] * 12)
    start(concurrency=4)
    queue.resume()

    gate.wait_for()

    recorder.wait_for(Acked, 2)


def test_quick_calls_are_made_by_one_thread_until_one_is_stuck(queue, acking, inflight_of, new_deliveries, monkeypatch):
    clock = SimpleNamespace(now=1000.0)
    for place in ("slots",):
        monkeypatch.setattr(f"reliq.worker.{place}.time", SimpleNamespace(monotonic=lambda: clock.now))
    deliveries, inflight, taken = new_deliveries(6), inflight_of(16), []
    inflight._quick._means[queue.name] = QUICK_SECONDS / 2
    inflight.add(deliveries)
    inflight.hold(deliveries)

    over = threading.Event()

    def take():
        taken.append(inflight.next_plain(None))
        over.wait(60)  # its number is not given to another thread

    run = inflight.next_plain(None)
    for _ in range(2):
        threading.Thread(target=take, daemon=True).start()
    eventually(lambda: inflight._resting == 2, "one looks on, one rests")
    for _ in range(2):
        run = inflight.next_plain(run)
    assert (run.deliveries, taken) == (deliveries[2:3], [])

    for at in (3, 4):  # each that takes over has the next look on
        clock.now += 2 * STUCK_SECONDS
        eventually(lambda at=at: len(taken) == at - 2, "another thread goes on")
        assert taken[-1].deliveries == deliveries[at : at + 1]

    inflight._quick._means[queue.name] = 2 * QUICK_SECONDS  # by now it is slow
    threading.Thread(target=take, daemon=True).start()
    eventually(lambda: len(taken) == 3, "another thread does not wait for it", seconds=30)
    inflight.close()
    over.set()


def test_a_handler_is_quick_while_its_calls_hardly_wait_for_anything():
    for durations, is_quick in (
        ([5e-6] * 195 + [5e-3] * 5, True),  # the interpreter was lost at times
        ([5e-6] * 7 + [8e-4] * 3, False),  # some wait for an answer that comes soon
        ([1e-3], False),
    ):
        quick, run = QuickCalls(threading.Condition()), HandlerCall([SimpleNamespace(queue="q")], None, 0.0, None)
        for turn in range(2000):
            quick.ended(run, durations[turn % len(durations)])
            assert turn < 1000 or quick._is_quick(run) == is_quick
