"""Quick calls are made by one thread, and none waits for a call that does not end."""

import threading
import time
from types import SimpleNamespace

import pytest
from waiting import eventually

from reliq.transitions import CallNumber
from reliq.worker.delivery import HandlerCall, deliveries_of
from reliq.worker.inflight import Inflight
from reliq.worker.quick_calls import QUICK_SECONDS, STUCK_SECONDS, QuickCalls


@pytest.fixture
def held_clock(monkeypatch):
    """The clock of calls stands still until the test moves it."""
    clock = SimpleNamespace(now=1000.0)
    held = SimpleNamespace(monotonic=lambda: clock.now)
    monkeypatch.setattr("reliq.worker.inflight.time", held)
    monkeypatch.setattr("reliq.worker.quick_calls.time", held)
    return clock


@pytest.fixture
def inflight_of(consumer):
    """Hold what is claimed of queues, some of which have quick handlers; threads that wait for calls end with the test."""
    made = []

    def make(queues, quick):
        for queue in queues:
            consumer.handler(queue)(lambda body: None)
        inflight = Inflight(consumer.handlers, 16)
        made.append(inflight)
        inflight._quick._means |= {queue.name: QUICK_SECONDS / 2 for queue in quick}
        deliveries = []
        for queue, handler in zip(queues, consumer.handlers, strict=True):
            claimed = queue.moves.claim(CallNumber("me", 1), limit=10, lease_ms=60_000).claimed
            some = deliveries_of(claimed, handler, time.monotonic(), queue.keys)
            inflight.add(some)
            deliveries += some
        inflight.hold(deliveries)
        return inflight, deliveries

    yield make
    for inflight in made:
        inflight.close()


def taking(inflight, taken):
    """Have another thread take the next call."""
    threading.Thread(target=lambda: taken.append(inflight.next_plain(None)), daemon=True).start()


def test_quick_calls_are_made_by_one_thread_until_one_is_stuck(queue, inflight_of, held_clock):
    queue.publish_many(["x"] * 5)
    inflight, deliveries = inflight_of([queue], [queue])
    taken = []

    run = inflight.next_plain(None)
    for _ in range(2):
        taking(inflight, taken)
    eventually(lambda: inflight._resting == 2, "one looks on, one rests")
    for _ in range(2):
        run = inflight.next_plain(run)
    assert (run.deliveries, taken) == (deliveries[2:3], [])

    for at in (3, 4):  # each that takes over has the next look on
        held_clock.now += 2 * STUCK_SECONDS
        eventually(lambda at=at: len(taken) == at - 2, "another thread goes on")
        assert taken[-1].deliveries == deliveries[at : at + 1]


def test_a_quick_call_does_not_wait_for_the_thread_of_a_slow_handler(make_queue, inflight_of, held_clock):
    slow, quick = make_queue("slow"), make_queue("quick")
    for queue in (slow, quick):
        queue.publish("x")
    inflight, deliveries = inflight_of([slow, quick], [quick])
    taken = []

    run = inflight.next_plain(None)
    taking(inflight, taken)

    eventually(lambda: taken, "another thread makes the quick call")
    assert [run.deliveries, taken[0].deliveries] == [deliveries[:1], deliveries[1:]]


@pytest.mark.parametrize(
    ("durations", "is_quick"),
    [
        pytest.param([5e-6] * 195 + [5e-3] * 5, True, id="short, but for the interpreter that was lost at times"),
        pytest.param([5e-6] * 7 + [8e-4] * 3, False, id="some wait for an answer that comes soon"),
    ],
)
def test_a_handler_is_quick_when_one_thread_makes_as_many_calls_as_many(durations, is_quick):
    quick = QuickCalls(threading.Condition())
    run = HandlerCall([SimpleNamespace(queue="q")], None, 0.0, None)
    found = set()

    for turn in range(2000):
        quick.ended(run, durations[turn % len(durations)])
        if turn >= 1000:
            found.add(quick._is_quick(run))

    assert found == {is_quick}
