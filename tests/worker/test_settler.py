"""The calls that the settler sends to Redis, and their order."""

import threading
import time
from contextlib import contextmanager, suppress
from types import SimpleNamespace

import pytest
from transition import run_transition
from waiting import eventually

from reliq import OutgoingMessage
from reliq.errors import ReliqError
from reliq.events import Acked, LeaseLost
from reliq.handlers.settlement import ACKED, RELEASED, HandlerOutcome
from reliq.lua.transitions import CallNumber
from reliq.message import BARE, Claimed, Delivery
from reliq.wire_format import FailureNote
from reliq.worker.settler import MANY, Settler
from reliq.worker.slots import deliveries_of

#: A step that takes longer counts as hung.
PATIENCE_SECONDS = 30.0


@pytest.fixture
def deliveries(queue, acking):
    """Claim messages as deliveries of a worker; the ids are numbers in the order of the publishes."""

    def make(amount):
        queue.publish_many([OutgoingMessage(body="x", id=str(number)) for number in range(amount)])
        turns = (CallNumber("me", turn) for turn in range(1, amount // 500 + 2))
        answers = [run_transition(queue, "claim", turn, limit=500, lease_ms=60_000) for turn in turns]
        claimed = [message for answer in answers for message in answer.claimed]
        return deliveries_of(claimed, acking.handlers[0], time.monotonic())

    return make


@pytest.fixture
def settler(caller, inflight_of):
    """Make a settler of deliveries, and the inflight list that holds them."""

    def make(deliveries, buried=lambda: None):
        inflight = inflight_of()
        inflight.add(deliveries)
        return Settler(caller, inflight, buried), inflight

    return make


@pytest.fixture
def patient(monkeypatch):
    """A settler that waits for more outcomes until the returned event is set."""
    over = threading.Event()
    held = SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: over.wait(2 * PATIENCE_SECONDS))
    monkeypatch.setattr("reliq.worker.settler.time", held)
    return over


@contextmanager
def stepping(one):
    """Run a step in another thread, from before the block until its end."""
    step = threading.Thread(target=one.step, daemon=True)
    step.start()
    yield
    step.join(PATIENCE_SECONDS)
    assert not step.is_alive(), "the step waits for more"


@contextmanager
def gathering(one, patient):
    """Run a step in another thread that waits for more outcomes until the block ends."""
    with stepping(one):
        eventually(lambda: one._unsettled, "the step has taken the first outcome")
        yield
        patient.set()
    patient.clear()


def test_many_that_go_back_keep_their_order(queue, client, deliveries, settler):
    held = deliveries(1200)
    one, inflight = settler(held)

    one.settle(inflight.withdraw(held), RELEASED)
    one.step()

    assert [int(id) for id in client.lrange(queue.keys.ready, 0, -1)][::-1] == list(range(1200))
    assert inflight.deliveries() == []


def test_a_late_ack_is_reported_once_and_not_if_its_loss_is_known(queue, client, deliveries, settler, recorder):
    held = deliveries(3)
    one, inflight = settler(held)
    client.hset(queue.keys.lease, mapping=dict.fromkeys("01", "someone else"))
    held[1].lost = True

    one.settle(held, ACKED)
    one.step()

    assert recorder.ids(LeaseLost) == ["0"]
    assert inflight.deliveries() == []


def test_a_refused_outcome_is_tried_again_only_until_its_lease_has_expired(queue, client, deliveries, settler):
    held = deliveries(2)
    one, inflight = settler(held)
    held[0].lease_until = time.monotonic() - 1
    client.rename(queue.keys.retries_left, "kept")
    client.set(queue.keys.retries_left, "something else wrote this")

    one.settle(held, ACKED)
    one.step()
    assert inflight.deliveries() == held[1:]

    client.rename("kept", queue.keys.retries_left)
    while inflight.deliveries():
        one.step()
    assert (queue.counts().totals["acked"], queue.counts().unack) == (1, 1)


def test_the_janitor_is_woken_for_dead_letters_alone(deliveries, settler):
    held, woken = deliveries(3), []
    one, _ = settler(held, lambda: woken.append("janitor"))
    for single, outcome in zip(held, [ACKED, HandlerOutcome("nack"), HandlerOutcome("reject")], strict=True):
        assert woken == []
        one.settle([single], outcome)
        one.step()
    assert woken == ["janitor"]


#: Outcomes that cannot be encoded in a call to Redis; normally the code rejects them earlier.
UNTELLABLE_ONES = [
    HandlerOutcome("nack", delay_ms=None),
    HandlerOutcome("nack", delay_ms="\ud83d"),
    HandlerOutcome("snooze", delay_ms=object()),
    HandlerOutcome("reject", reason="\ud83d"),
]


def test_an_answer_that_cannot_be_sent_becomes_a_dead_letter_alone(queue, client, deliveries, settler, caplog):
    held = deliveries(600)
    one, inflight = settler(held)
    bad, good = held[250:254], [*held[:250], *held[254:]]
    for single, outcome in zip(bad, UNTELLABLE_ONES, strict=True):
        single.delivery = Delivery(single.delivery.claimed, b"x", BARE, b"x")
        one.settle([single], outcome)
    one.settle(good[:300], ACKED)
    one.settle(good[300:], HandlerOutcome("nack", 60_000, error="as it happens"))
    for _ in range(4):
        one.step()

    assert inflight.deliveries() == []
    assert client.smembers(queue.keys.garbage) == {b"250", b"251", b"252", b"253"}
    assert (
        FailureNote.parse(client.hget(queue.keys.errors, "250")).text
        == "the result of the handler could not be sent to Redis"
    )
    totals = queue.counts().totals
    assert (totals["acked"], totals["nacked"]) == (300, 296 + 4)
    assert "the result of its handler cannot be sent to Redis" in caplog.text


def test_a_message_that_no_call_can_name_is_left_to_its_lease(queue, deliveries, settler):
    held = deliveries(3)
    one, inflight = settler(held)
    held[1].delivery = Delivery(Claimed("\ud83d", "n:5000", 0), b"", BARE, b"")

    one.settle(held, RELEASED)
    for _ in range(3):
        one.step()

    assert inflight.deliveries() == []
    assert queue.counts().ready == 2
    assert queue.counts().unack == 1


def test_answers_outlast_a_redis_that_refuses_the_user(queue, client, deliveries, settler):
    held = deliveries(3)
    one, inflight = settler(held)
    one.settle(held, ACKED)

    client.config_set("requirepass", "changed")
    client.client_kill_filter(_type="normal")
    try:
        with suppress(ReliqError):  # newer servers return the error as the reply of each call
            one.step()
        assert len(inflight.deliveries()) == 3
    finally:
        client.config_set("requirepass", "")
    while inflight.deliveries():
        one.step()

    assert queue.counts().totals["acked"] == 3


def test_few_outcomes_wait_for_those_that_follow_and_go_in_one_round_trip(patient, deliveries, settler, recorder):
    held = deliveries(2)
    one, inflight = settler(held)

    one.settle(held[:1], ACKED)
    with gathering(one, patient):
        one.settle(held[1:], ACKED)

    assert [event.ids for event in recorder.of(Acked)] == [("0", "1")]
    assert inflight.deliveries() == []


def test_nothing_waits_for_more_outcomes_while_they_come_in_numbers(patient, deliveries, settler, recorder):
    held = deliveries(2 * MANY + 1)
    one, _ = settler(held)
    for some in held[:-1], held[-1:]:
        for single in some:
            one.settle([single], ACKED)
        with stepping(one):
            pass

    assert [len(event.ids) for event in recorder.of(Acked)] == [2 * MANY, 1]


def test_an_outcome_that_frees_a_limited_slot_waits_only_for_others(patient, serve, consumer, settler, recorder):
    queue = serve(ordered=True)
    queue.publish_many([OutgoingMessage(body="x", key=key, id=key) for key in "abc"])
    claimed = run_transition(queue, "claim", CallNumber("me", 1), limit=3, lease_ms=60_000).claimed
    first, second, last = held = deliveries_of(claimed, consumer.handlers[0], time.monotonic())
    one, _ = settler(held)

    one.settle([first], ACKED)
    with gathering(one, patient):
        one.settle([second], ACKED)
    one.settle([last], ACKED)
    with stepping(one):
        pass

    assert [event.ids for event in recorder.of(Acked)] == [("a", "b"), ("c",)]
