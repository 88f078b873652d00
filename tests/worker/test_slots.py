"""The slots of a process: waiting messages, the thread of each running message, and the room for claims."""

from itertools import count
from queue import SimpleQueue
from threading import Thread
from types import SimpleNamespace

import pytest
from waiting import eventually

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


@pytest.fixture
def lingering(queue, consumer, slots_of, new_deliveries):
    """Put messages into a batch of ten that lingers for 0.2 s."""
    consumer.handler(queue, batch=10, linger=0.2)(lambda bodies: None)
    slots = slots_of(4)

    def put(amount):
        deliveries = new_deliveries(amount)
        for held in deliveries:
            held.held_since = slots.clock.now
        slots.inflight.add(deliveries)
        slots.inflight.enqueue(deliveries)
        return deliveries

    return SimpleNamespace(inflight=slots.inflight, clock=slots.clock, put=put)


def test_a_batch_that_has_lingered_before_a_thread_waits_for_it_starts(lingering):
    deliveries = lingering.put(2)

    lingering.clock.now += 0.3  # the threads of the slots have not started yet

    assert lingering.inflight.next_plain(None).deliveries == deliveries


@pytest.mark.parametrize("amount", [2, 12], ids=["a batch", "a full batch before it"])
def test_a_batch_that_has_lingered_before_its_thread_is_woken_starts(lingering, monkeypatch, amount):
    started = SimpleQueue()
    for _ in range(2):
        Thread(target=lambda: started.put(lingering.inflight.next_plain(None)), daemon=True).start()
    eventually(lambda: lingering.inflight._idle_threads == 2, "both threads wait")
    times = count(lingering.clock.now, 0.15)  # time passes between any two looks at the clock
    monkeypatch.setattr("reliq.worker.slots.time", SimpleNamespace(monotonic=lambda: next(times)))

    deliveries = lingering.put(amount)

    runs = [started.get(timeout=60) for _ in range(-(-amount // 10))]
    lingering.inflight.close()
    assert {held for run in runs for held in run.deliveries} == set(deliveries)
