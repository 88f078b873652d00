"""What the settler tells Redis, and in which order."""

import threading
import time
from contextlib import suppress

import pytest
from waiting import eventually

from reliq.errors import ReliqError
from reliq.events import Acked, Lost
from reliq.failure_note import FailureNote
from reliq.message import BARE, Claimed, Delivery
from reliq.settlement import ACKED, RELEASED, Outcome
from reliq.transitions import CallNumber
from reliq.worker.delivery import deliveries_of
from reliq.worker.inflight import Inflight
from reliq.worker.settler import MANY, Settler

#: Longer than any test, and as long as one waits for a thread.
NEVER_SECONDS, PATIENCE_SECONDS = 3600.0, 30.0


@pytest.fixture
def deliveries(queue, consumer):
    """Claim so many messages, as deliveries of a worker; the ids are numbers in the order of their publish."""
    consumer.handler(queue)(lambda body: None)

    def make(amount):
        for number in range(amount):
            queue.publish("x", id=str(number))
        answers = [
            queue.moves.claim(CallNumber("me", turn), limit=500, lease_ms=60_000)
            for turn in range(1, amount // 500 + 2)
        ]
        return [
            one for answer in answers for one in deliveries_of(answer.claimed, consumer.handlers[0], time.monotonic())
        ]

    return make


@pytest.fixture
def settler(caller, consumer):
    def make(deliveries, buried=lambda: None):
        inflight = Inflight(consumer.handlers, 1)
        inflight.add(deliveries)
        return Settler(caller, inflight, buried, lambda: None), inflight

    return make


def stepping(one):
    """Have another thread make a step."""
    step = threading.Thread(target=one.step, daemon=True)
    step.start()
    return step


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
    client.hset(queue.keys.lease, mapping={"0": "someone else", "1": "someone else"})
    held[1].lost = True

    one.settle(held, ACKED)
    one.step()

    assert recorder.ids(Lost) == ["0"]
    assert inflight.deliveries() == []


def test_a_refused_outcome_is_tried_again_only_until_its_lease_has_expired(queue, client, deliveries, settler):
    held = deliveries(2)
    one, inflight = settler(held)
    held[0].lease_until = time.monotonic() - 1
    kept = client.dump(queue.keys.retries_left)
    client.delete(queue.keys.retries_left)
    client.set(queue.keys.retries_left, "something else wrote this")

    one.settle(held, ACKED)
    one.step()
    assert inflight.deliveries() == held[1:]

    client.delete(queue.keys.retries_left)
    client.restore(queue.keys.retries_left, 0, kept)
    while inflight.deliveries():
        one.step()
    assert (queue.counts().totals["acked"], queue.counts().unack) == (1, 1)


def test_the_janitor_is_woken_for_dead_letters_alone(deliveries, settler):
    held, woken = deliveries(3), []
    one, _ = settler(held, lambda: woken.append("janitor"))
    for single, outcome, wakes in zip(held, [ACKED, Outcome("nack"), Outcome("reject")], [0, 0, 1], strict=True):
        one.settle([single], outcome)
        one.step()
        assert len(woken) == wakes


#: Answers that no call to Redis can hold, if the places where answers are made ever let one through.
UNTELLABLE_ONES = [
    Outcome("nack", delay_ms=None),
    Outcome("nack", delay_ms="\ud83d"),
    Outcome("snooze", delay_ms=object()),
    Outcome("reject", reason="\ud83d"),
]


def test_an_answer_that_cannot_be_sent_becomes_a_dead_letter_and_others_are_settled(
    queue, client, deliveries, settler, caplog
):
    held = deliveries(600)
    one, inflight = settler(held)
    bad, good = held[250:254], [*held[:250], *held[254:]]
    for single, outcome in zip(bad, UNTELLABLE_ONES, strict=True):
        single.delivery = Delivery(single.delivery.claimed, b"x", BARE, b"x")
        one.settle([single], outcome)
    one.settle(good[:300], ACKED)
    one.settle(good[300:], Outcome("nack", 60_000, error="as it happens"))
    for _ in range(4):
        one.step()

    assert inflight.deliveries() == []
    assert client.smembers(queue.keys.garbage) == {b"250", b"251", b"252", b"253"}
    assert FailureNote.parse(client.hget(queue.keys.errors, "250")).text == "its answer could not be told to Redis"
    totals = queue.counts().totals
    assert (totals["acked"], totals["nacked"]) == (300, 296 + 4)
    assert "an answer cannot be told to Redis" in caplog.text


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
        with suppress(ReliqError):  # or it is told as the answer to each call, by newer servers
            one.step()
        assert len(inflight.deliveries()) == 3
    finally:
        client.config_set("requirepass", "")
    while inflight.deliveries():
        one.step()

    assert queue.counts().totals["acked"] == 3


def test_few_outcomes_wait_for_those_that_follow_and_go_in_one_round_trip(deliveries, settler, recorder, monkeypatch):
    monkeypatch.setattr("reliq.worker.settler.GATHER_SECONDS", NEVER_SECONDS)
    held = deliveries(2)
    one, inflight = settler(held)

    one.settle(held[:1], ACKED)
    step = stepping(one)
    eventually(lambda: one._unsettled, "the step has taken the first outcome")
    one.settle(held[1:], ACKED)
    one.nudge()

    step.join(PATIENCE_SECONDS)
    assert [event.ids for event in recorder.of(Acked)] == [("0", "1")]
    assert inflight.deliveries() == []


def test_nothing_waits_for_more_outcomes_while_they_come_in_numbers(deliveries, settler, recorder, monkeypatch):
    monkeypatch.setattr("reliq.worker.settler.GATHER_SECONDS", NEVER_SECONDS)
    held = deliveries(2 * MANY + 1)
    one, _ = settler(held)
    for some in held[:-1], held[-1:]:
        for single in some:
            one.settle([single], ACKED)
        step = stepping(one)
        step.join(PATIENCE_SECONDS)
        assert not step.is_alive(), "the step waits for more"

    assert [len(event.ids) for event in recorder.of(Acked)] == [2 * MANY, 1]


def test_an_outcome_that_frees_a_limited_place_waits_only_beside_others_of_its_queue(
    make_queue, consumer, settler, recorder, monkeypatch
):
    monkeypatch.setattr("reliq.worker.settler.GATHER_SECONDS", NEVER_SECONDS)
    queue = make_queue(ordered=True)
    consumer.handler(queue)(lambda body: None)
    for key in "abc":
        queue.publish("x", key=key, id=key)
    claimed = queue.moves.claim(CallNumber("me", 1), limit=3, lease_ms=60_000, keyed=True).claimed
    first, second, last = held = deliveries_of(claimed, consumer.handlers[0], time.monotonic())
    one, _ = settler(held)

    one.settle([first], ACKED)
    step = stepping(one)
    eventually(lambda: one._unsettled, "the step has taken the first outcome")
    one.settle([second], ACKED)
    one.nudge()
    step.join(PATIENCE_SECONDS)
    one.settle([last], ACKED)
    step = stepping(one)
    step.join(PATIENCE_SECONDS)

    assert not step.is_alive(), "the step waits for more"
    assert [event.ids for event in recorder.of(Acked)] == [("a", "b"), ("c",)]
