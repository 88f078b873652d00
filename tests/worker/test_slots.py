"""The slots of a process: waiting messages, the thread of each running message, and the room for claims."""

import time
from types import SimpleNamespace

import pytest

from reliq.events import Acked
from reliq.worker.claims import QueueClaims
from reliq.worker.slots import HOLD_SECONDS


@pytest.fixture
def slots_of(inflight_of, new_deliveries, monkeypatch):
    """Make the slots of a process without running threads; their clock moves only when the test moves it."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("reliq.worker.slots.time", SimpleNamespace(monotonic=lambda: clock.now))

    def make(concurrency):
        inflight, clock.now = inflight_of(concurrency), 0.0

        def put(handler, amount):
            deliveries = new_deliveries(amount, handler)
            inflight.add(deliveries)
            inflight.enqueue(deliveries)
            return deliveries

        def capacity(handler):
            return inflight.wait_for_capacity([QueueClaims(handler)], 0)[0]

        def run_one(seconds):
            """Run a call that takes `seconds`."""
            run = inflight.next_plain(None)
            clock.now += seconds
            inflight.next_async([run])

        return SimpleNamespace(inflight=inflight, put=put, capacity=capacity, run_one=run_one, clock=clock)

    return make


def test_as_many_messages_are_prefetched_as_start_soon(acking, slots_of):
    (handler,) = acking.handlers
    for seconds, ahead in ((HOLD_SECONDS / 10, 40), (HOLD_SECONDS / 1000, 1500), (HOLD_SECONDS, 0), (60, 0)):
        slots = slots_of(4)
        assert slots.capacity(handler).ahead == 0  # no duration is known yet
        slots.put(handler, 1)
        slots.run_one(seconds)
        assert slots.capacity(handler).ahead == pytest.approx(ahead, rel=0.1)

    slots = slots_of(1)
    slots.put(handler, 2)
    slots.run_one(0.001)
    assert slots.capacity(handler).ahead > 0
    slots.clock.now += 2 * HOLD_SECONDS  # the second call takes longer than the first
    assert slots.capacity(handler).ahead == 0


def test_slots_are_free_beside_a_queue_at_its_own_limit_and_after_a_withdrawal(make_queue, consumer, slots_of):
    consumer.handler(make_queue("capped"), concurrency=2)(lambda body: None)
    consumer.handler(make_queue("other"))(lambda body: None)
    capped, other = consumer.handlers
    slots = slots_of(8)
    slots.put(capped, 100)  # prefetched messages do not count
    assert (slots.capacity(capped).slots, slots.capacity(other).slots) == (0, 6)

    slots = slots_of(2)
    deliveries = slots.put(other, 3)
    assert slots.capacity(other).slots == 0
    assert slots.inflight.withdraw(deliveries[:2]) == deliveries[:2]
    assert slots.capacity(other).slots == 1
    assert slots.inflight.next_plain(None).deliveries == deliveries[2:]


def test_a_wait_for_tokens_is_ended_once_and_only_when_there_is_room(queue, consumer, slots_of):
    consumer.handler(queue, concurrency=1)(lambda body: None)
    (handler,) = consumer.handlers
    slots, pokes, claims = slots_of(2), [], [QueueClaims(handler)]
    slots.inflight.poke = lambda: pokes.append("over")
    assert not slots.inflight.watch(claims)  # there is room: no wait

    slots.put(handler, 1)
    assert slots.inflight.watch(claims)
    run = slots.inflight.next_plain(None)
    assert pokes == []
    slots.inflight.next_async([run])
    slots.inflight.settled(run.deliveries)

    assert pokes == ["over"]


def test_a_batch_that_lingers_beside_busy_threads_has_one_that_waits_for_it(queue, consumer, start, recorder, gate):
    """Twelve messages: a batch of ten whose thread stays busy, and two that linger for more messages."""

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


def test_a_batch_that_has_lingered_before_a_thread_waits_for_it_starts(queue, consumer, slots_of):
    consumer.handler(queue, batch=10, linger=0.2)(lambda bodies: None)
    (handler,) = consumer.handlers
    slots = slots_of(2)
    deliveries = slots.put(handler, 2)

    slots.clock.now = time.monotonic() + 0.3  # the threads of the slots have not started yet

    assert slots.inflight.next_plain(None).deliveries == deliveries
