"""The table of slots: what waits, what runs, and how much more may be claimed."""

import time
from types import SimpleNamespace

import pytest

from reliq.events import Acked
from reliq.message import Claimed
from reliq.worker.claims import QueueClaims
from reliq.worker.delivery import deliveries_of
from reliq.worker.inflight import Inflight
from reliq.worker.slots import HOLD_SECONDS


@pytest.fixture
def table(consumer):
    """The slots of a process that nobody serves, and claims of its queues that take whatever they are asked for."""

    class Table:
        def __init__(self, concurrency):
            self.inflight = Inflight(consumer.handlers, concurrency)
            self.claims = {handler.queue.name: QueueClaims(handler) for handler in consumer.handlers}

        def add(self, queue, amount, *, left=3):
            claimed = [Claimed(f"{queue}{number}", "me.1", left) for number in range(amount)]
            deliveries = deliveries_of(claimed, self.claims[queue].handler, time.monotonic())
            self.inflight.add(deliveries)
            self.inflight.hold(deliveries)
            return deliveries

        def capacity(self, queue):
            return self.inflight.wait_for_capacity([self.claims[queue]], 0)[0]

        def run_one(self, seconds):
            """Have a call end that took so long."""
            run = self.inflight.next_plain(None)
            run.started_at -= seconds
            self.inflight.next_async([run])

    return Table


def test_a_queue_at_its_own_limit_leaves_the_other_slots_free_however_much_it_holds_ahead(make_queue, consumer, table):
    consumer.handler(make_queue("capped"), concurrency=2)(lambda body: None)
    consumer.handler(make_queue("other"))(lambda body: None)
    slots = table(8)

    slots.add("capped", 100)

    assert slots.capacity("other").slots == 6
    assert slots.capacity("capped").slots == 0


@pytest.mark.parametrize(
    ("seconds", "ahead"), [(HOLD_SECONDS / 10, 40), (HOLD_SECONDS / 1000, 1500), (HOLD_SECONDS, 0), (60, 0)]
)
def test_as_much_is_held_ahead_as_starts_soon_and_none_of_slow_work(queue, consumer, table, seconds, ahead):
    consumer.handler(queue)(lambda body: None)
    slots = table(4)
    assert slots.capacity("q").ahead == 0  # nobody knows how long it takes

    slots.add("q", 1)
    slots.run_one(seconds)

    assert slots.capacity("q").ahead == pytest.approx(ahead, rel=0.1)


def test_nothing_is_held_ahead_of_calls_that_take_longer_than_they_used_to(queue, consumer, table, monkeypatch):
    consumer.handler(queue)(lambda body: None)
    slots = table(1)
    slots.add("q", 2)
    slots.run_one(0.001)
    assert slots.capacity("q").ahead > 0
    later = time.monotonic() + HOLD_SECONDS

    monkeypatch.setattr("reliq.worker.inflight.time", SimpleNamespace(monotonic=lambda: later))

    assert slots.capacity("q").ahead == 0


def test_a_call_that_nobody_makes_gives_its_slot_back_when_it_is_withdrawn(queue, consumer, table):
    consumer.handler(queue)(lambda body: None)
    slots = table(2)
    deliveries = slots.add("q", 3)
    assert slots.capacity("q").slots == 0

    withdrawn = slots.inflight.withdraw(deliveries[:2])

    assert withdrawn == deliveries[:2]
    assert slots.capacity("q").slots == 1
    assert slots.inflight.next_plain(None).deliveries == deliveries[2:]


def test_a_wait_in_redis_is_ended_once_and_only_when_there_is_room(queue, consumer, table):
    consumer.handler(queue, concurrency=1)(lambda body: None)
    slots = table(2)
    nudges = []
    slots.inflight.nudge = lambda: nudges.append("may be over")
    claims = [slots.claims["q"]]
    assert not slots.inflight.watch(claims)  # there is room now: no wait

    slots.add("q", 1)
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
