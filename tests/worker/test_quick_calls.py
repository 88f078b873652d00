"""Quick calls are made by one thread, and none waits for a call that does not end."""

import threading
from types import SimpleNamespace

from waiting import eventually

from reliq.worker.delivery import HandlerCall
from reliq.worker.quick_calls import QUICK_SECONDS, STUCK_SECONDS, QuickCalls


def test_quick_calls_are_made_by_one_thread_until_one_is_stuck(queue, acking, inflight_of, new_deliveries, monkeypatch):
    clock = SimpleNamespace(now=1000.0)
    for place in ("inflight", "quick_calls"):
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
