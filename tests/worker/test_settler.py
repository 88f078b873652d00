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
    def make(deliveries):
        inflight = Inflight(consumer.handlers, 1)
        inflight.add(deliveries)
        return Settler(caller, inflight, lambda: None, lambda: None), inflight

    return make


def test_many_that_go_back_keep_their_order(queue, client, deliveries, settler):
    held = deliveries(1200)
    one, inflight = settler(held)

    one.settle(inflight.withdraw(held), RELEASED)
    one.step()

    assert [int(id) for id in client.lrange(queue.keys.ready, 0, -1)][::-1] == list(range(1200))
    assert inflight.deliveries() == []


def test_an_ack_that_comes_too_late_is_told_once(queue, client, deliveries, settler, recorder):
    held = deliveries(2)
    one, inflight = settler(held)
    client.hset(queue.keys.lease, "0", "someone else")

    one.settle(held, ACKED)
    one.step()

    assert recorder.ids(Lost) == ["0"]
    assert inflight.deliveries() == []


def test_a_loss_that_is_known_is_not_told_again(queue, client, deliveries, settler, recorder):
    held = deliveries(1)
    one, _ = settler(held)
    client.hset(queue.keys.lease, "0", "someone else")
    held[0].lost = True

    one.settle(held, ACKED)
    one.step()

    assert recorder.ids(Lost) == []


#: Answers that no call to Redis can hold, if the places where answers are made ever let one through.
UNTELLABLE_ONES = [
    Outcome("nack", delay_ms=None),
    Outcome("nack", delay_ms="\ud83d"),
    Outcome("snooze", delay_ms=object()),
    Outcome("reject", reason="\ud83d"),
]


@pytest.mark.parametrize("outcome", UNTELLABLE_ONES, ids=range(4))
def test_an_answer_that_cannot_be_told_ends_as_a_dead_letter_that_says_it_and_its_neighbours_are_settled(
    queue, client, deliveries, settler, outcome, caplog
):
    held = deliveries(600)
    one, inflight = settler(held)
    bad, good = held[250], [*held[:250], *held[251:]]
    bad.delivery = Delivery(bad.delivery.claimed, b"x", BARE, b"x")

    one.settle([bad], outcome)
    one.settle(good[:300], ACKED)
    one.settle(good[300:], Outcome("nack", 60_000, error="as it happens"))
    for _ in range(4):
        one.step()

    assert inflight.deliveries() == []
    assert client.smembers(queue.keys.garbage) == {b"250"}
    assert FailureNote.parse(client.hget(queue.keys.errors, "250")).text == "its answer could not be told to Redis"
    totals = queue.counts().totals
    assert (totals["acked"], totals["nacked"]) == (300, 299 + 1)
    assert "an answer cannot be told to Redis" in caplog.text


def test_a_message_of_which_nothing_can_be_told_is_left_to_its_lease(queue, deliveries, settler):
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


def test_outcomes_that_follow_within_a_moment_go_along_and_a_nudge_ends_the_moment(
    queue, deliveries, settler, recorder, monkeypatch
):
    monkeypatch.setattr("reliq.worker.settler.GATHER_SECONDS", 3600)
    held = deliveries(3)
    one, inflight = settler(held)
    one.settle(held[:1], ACKED)
    step = threading.Thread(target=one.step, daemon=True)
    step.start()
    one.settle(held[1:2], ACKED)
    one.settle(held[2:], ACKED)

    one.nudge()

    step.join(30)
    assert [len(event.ids) for event in recorder.of(Acked)] == [3]
    assert inflight.deliveries() == []


def test_a_few_outcomes_wait_for_those_that_follow_and_go_in_one_round_trip(deliveries, settler, recorder, monkeypatch):
    monkeypatch.setattr("reliq.worker.settler.GATHER_SECONDS", NEVER_SECONDS)
    held = deliveries(2)
    one, inflight = settler(held)
    step = threading.Thread(target=one.step)

    one.settle(held[:1], ACKED)
    step.start()
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
        step = threading.Thread(target=one.step, daemon=True)
        step.start()
        step.join(PATIENCE_SECONDS)
        assert not step.is_alive(), "the step waits for more"

    assert [len(event.ids) for event in recorder.of(Acked)] == [2 * MANY, 1]


def test_an_outcome_whose_place_others_may_need_waits_for_none_unless_more_of_its_queue_is_at_work(
    make_queue, caller, consumer, recorder, monkeypatch
):
    monkeypatch.setattr("reliq.worker.settler.GATHER_SECONDS", NEVER_SECONDS)
    queue = make_queue(ordered=True)
    consumer.handler(queue)(lambda body: None)
    for key in "abc":
        queue.publish("x", key=key, id=key)
    claimed = queue.moves.claim(CallNumber("me", 1), limit=3, lease_ms=60_000, keyed=True).claimed
    first, second, last = deliveries_of(claimed, consumer.handlers[0], time.monotonic())
    inflight = Inflight(consumer.handlers, 3)
    inflight.add([first, second, last])
    one = Settler(caller, inflight, lambda: None, lambda: None)

    one.settle([first], ACKED)
    step = threading.Thread(target=one.step, daemon=True)
    step.start()
    eventually(lambda: one._unsettled, "the step has taken the first outcome")
    one.settle([second], ACKED)
    one.nudge()
    step.join(PATIENCE_SECONDS)
    one.settle([last], ACKED)
    step = threading.Thread(target=one.step, daemon=True)
    step.start()
    step.join(PATIENCE_SECONDS)

    assert not step.is_alive(), "the step waits for more"
    assert [event.ids for event in recorder.of(Acked)] == [("a", "b"), ("c",)]
