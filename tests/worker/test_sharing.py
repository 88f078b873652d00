"""Slots are shared fairly: among queues, among processes, and between new messages and redeliveries."""

import asyncio
import threading
from collections import Counter
from contextlib import ExitStack

import pytest
from transition import run_transition
from waiting import eventually

from reliq import Consumer, OutgoingMessage, WorkerSettings
from reliq.events import Acked, Started
from reliq.lua.transitions import CallNumber
from reliq.worker.claims import Capacity, FairOrder, fair_shares
from reliq.worker.slots import HOLD_SECONDS

#: Too slow for prefetching.
SLOW_SECONDS = HOLD_SECONDS * 1.2


def test_plain_and_async_handlers_share_the_slots_and_a_queue_its_limit(make_queue, consumer, work_until, meter):
    queues, own = [make_queue(name) for name in ("capped", "plain", "async")], type(meter)()

    def handle(body):
        with meter:
            threading.Event().wait(0.001)

    def handle_capped(body):
        with own:
            handle(body)

    async def ahandle(body):
        with meter:
            await asyncio.sleep(0.001)

    for queue, function, limit in zip(queues, (handle_capped, handle, ahandle), (2, None, None), strict=True):
        consumer.handler(queue, concurrency=limit)(function)
        queue.publish_many(["x"] * 300)
    work_until(Acked, 900, concurrency=4)

    assert own.most <= 2
    assert meter.most <= 4


def test_a_full_queue_goes_on_at_once_though_another_is_idle(no_looks, make_queue, serve, consumer, start, recorder):
    """Before the fix, the wait for the idle queue's token limited the full queue to one message a second."""
    capped = make_queue("capped")
    consumer.handler(capped, concurrency=1)(lambda body: threading.Event().wait(SLOW_SECONDS))
    serve("idle")
    start(concurrency=4)
    capped.publish_many(["x"] * 10)

    recorder.wait_for(Acked, 10)


def test_a_queue_with_all_slots_is_logged_once(serve, make_queue, consumer, start, recorder, gate, caplog, monkeypatch):
    monkeypatch.setattr("reliq.worker.fetcher.HELD_SECONDS", 0.0)
    hanging, waiting, _ = make_queue("hanging"), serve("waiting"), serve("idle")
    consumer.handler(hanging)(lambda body: gate.pass_through())
    hanging.publish_many(["x"] * 10)
    engine = start(concurrency=3)
    gate.wait_for(3)

    def four_rounds():
        for _ in range(4):
            before = engine.stats().last_claim_at
            eventually(lambda before=before: engine.stats().last_claim_at > before, "a round is over")

    four_rounds()
    assert not caplog.messages
    waiting.publish("x")
    eventually(lambda: caplog.messages, "the log names the queue")
    four_rounds()

    (line,) = caplog.messages
    assert line.startswith(
        "worker: all 3 slots have been held for 0 s, 3 of them by queue hanging, while messages wait in waiting: "
    )
    gate.open()
    recorder.wait_for(Acked, queue="waiting")


@pytest.mark.parametrize("kind", ["plain", "coroutine", "last chance"])
def test_a_fast_queue_held_ahead_leaves_slots_to_the_others(make_queue, consumer, start, recorder, gate, kind):
    """Before the fix, prefetched messages of the fast queue took every free slot until its backlog was empty."""
    fast, other = make_queue("fast"), make_queue("other", retries=0 if kind == "last chance" else 3)

    @consumer.handler(fast)
    def handle(body):
        if body == "waits":
            gate.pass_through()
        threading.Event().wait(0.001)

    async def ahandle(body): ...

    consumer.handler(other)(ahandle if kind == "coroutine" else lambda body: None)
    fast.publish_many([*["x"] * 100, *["waits"] * 2, *["x"] * 3900])
    start(concurrency=2)
    gate.wait_for(2)

    other.publish_many(["x"] * 3)
    gate.open()
    recorder.wait_for(Acked, 3, queue="other")

    assert len(recorder.ids(Acked, queue="fast")) < 2500


def test_free_slots_are_claimed_by_the_weights_of_the_queues(make_queue, consumer, fetcher_of):
    for name, weight in (("heavy", 3), ("light", 1)):
        queue = make_queue(name)
        consumer.handler(queue, weight=weight)(lambda body: None)
        queue.publish_many(["x"] * 60)
    fetcher = fetcher_of(consumer, 8)

    fetcher.step()

    assert Counter(held.queue for held in fetcher.inflight.deliveries()) == {"heavy": 6, "light": 2}


def test_turns_go_round_by_weight_and_a_queue_that_was_empty_gets_no_credit():
    for slots in (4, 1):
        turns, taken = FairOrder(), Counter()
        for _ in range(40):
            places = turns.order(["heavy", "light"])
            parts = fair_shares([Capacity(slots, 0)] * 2, (3, 1), list(places.values()))
            if slots == 1:  # both queues compete for one slot
                parts = [Capacity(int(part.slots > 0), 0) for part in parts]
            for name, weight, part in zip(places, (3, 1), parts, strict=True):
                turns.took(name, part.slots, weight)
                taken[name] += part.slots
        assert taken == {"heavy": 30 * slots, "light": 10 * slots}

    turns = FairOrder()
    for _ in range(1000):
        turns.order(["busy"])
        turns.took("busy", 10, 1)
    places = turns.order(["busy", "late"])
    assert fair_shares([Capacity(4, 0)] * 2, (1, 1), list(places.values())) == [Capacity(2, 0)] * 2


def test_no_queue_gets_more_than_its_room_and_each_with_room_ahead_gets_some():
    parts = fair_shares([Capacity(1, 0), Capacity(9, 100), Capacity(0, 3)], (1, 1, 100), [0.0, 0.0, 0.0])

    assert parts == [Capacity(1, 0), Capacity(8, 1), Capacity(0, 2)]
    assert fair_shares([], (), []) == []


@pytest.mark.parametrize("is_late", [False, True], ids=["another worker", "a worker that joins late"])
def test_a_worker_keeps_no_slow_jobs_that_another_could_start(queue, url, recorder, gate, is_late):
    """A fast burst raises the pace and so the prefetching; then each worker has slots for half of the slow jobs."""
    arecorder = type(recorder)()
    with ExitStack() as stopped:

        def start(one):
            consumer = Consumer(url, observers=[one])
            consumer.handler(queue)(lambda body: gate.pass_through() if body == "slow" else None)
            consumer.start(WorkerSettings(concurrency=8))
            stopped.callback(consumer.stop)
            stopped.callback(gate.open)

        start(recorder)
        if not is_late:
            start(arecorder)
        queue.publish_many(["fast"] * 2000)
        eventually(lambda: not queue.counts().alive, "the burst is over")
        marks = [len(one.ids(Started)) for one in (recorder, arecorder)]
        queue.publish_many(["slow"] * 16)
        recorder.wait_for(Started, marks[0] + 8)
        if is_late:
            start(arecorder)

        arecorder.wait_for(Started, marks[1] + 8)
        assert queue.counts().totals.get("retried_lease", 0) == 0
    assert queue.counts().alive == 0


def test_neither_new_messages_nor_retries_starve_the_others(queue, consumer, work_until, recorder):
    ids = [f"{sort}{number}" for sort in ("new", "again") for number in range(20)]
    queue.publish_many([OutgoingMessage(body="x", id=id) for id in ids])
    claimed = run_transition(queue, "claim", CallNumber("other", 1), limit=40, lease_ms=30_000).claimed
    run_transition(queue, "release", [one for one in claimed if one.id.startswith("new")])
    run_transition(queue, "nack", [(one, 0, "failed 1 x", b"") for one in claimed if one.id.startswith("again")])
    while queue.counts().retry < 20:  # due now, rounded up to the next millisecond
        run_transition(queue, "reclaim")
    assert queue.counts().ready == 20
    consumer.handler(queue)(lambda body: threading.Event().wait(SLOW_SECONDS))

    work_until(Started, 20, concurrency=2)
    sorts = Counter(id.rstrip("0123456789") for id in recorder.ids(Started)[:20])
    assert sorts["new"] >= 6
    assert sorts["again"] >= 2


def test_messages_with_no_retry_left_are_never_held(queue, consumer, start, recorder, gate):
    """If the process were killed, a prefetched message without retries would end without a start."""
    holding = []

    @consumer.handler(queue)
    def handle(body):
        gate.pass_through()  # wait until `engine` is set
        holding.extend(held for held in engine.inflight.deliveries() if held.must_start and not held.started)

    queue.publish_many([OutgoingMessage(body="safe", retries=1), OutgoingMessage(body="last", retries=0)] * 300)
    engine = start(concurrency=1)
    gate.open()

    recorder.wait_for(Acked, 600)
    assert holding == []


def test_last_chances_do_not_wait_for_the_next_look(no_looks, queue, acking, work_until):
    queue.publish_many(OutgoingMessage(body="x", id=str(number), retries=0) for number in range(1200))

    work_until(Acked, 1200, concurrency=1)
