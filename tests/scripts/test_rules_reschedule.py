"""Reschedule in every place, and revival: a cancelled message that is published again where it still lies."""

import pytest
from held_clock import HOUR_MS, NOON, micros, millis

from reliq import transitions as t


@pytest.fixture
def reschedule(run, keys):
    return lambda *ids, **options: run(t.reschedule(keys, ids or ["m"], clock=NOON, **options))


@pytest.fixture
def put(publish, claim, run, keys):
    """Bring the message `m` into a list: new into ready, or as a suspect into retry."""

    def make(place):
        publish("m")
        if place == "retry":
            claim(lease_ms=1)
            run(t.reclaim(keys, clock=micros(1)))

    return make


@pytest.mark.parametrize(
    "options", [{"delay_ms": 700}, {"at_ms": millis(700)}, {"at_ms": millis(-5000)}], ids=["delay", "date", "past"]
)
def test_a_pending_message_gets_another_due_time(options, publish, reschedule, run, keys, due, where):
    publish("m", delay_ms=5000)

    assert reschedule(**options) == ["rescheduled"]

    assert where() == {"pending": ["m"]}
    is_past = options.get("at_ms", NOON) < millis()
    assert is_past or due(keys.pending, "m") == millis(700)
    assert run(t.promote(keys, clock=NOON)) == ((1, -1) if is_past else (0, 700))


@pytest.mark.parametrize("place", ["ready", "retry"])
def test_a_message_in_a_list_moves_at_the_last_due_time_when_it_is_met(
    place, put, claim, reschedule, run, keys, due, where
):
    put(place)

    assert reschedule(delay_ms=700) == reschedule(delay_ms=300) == ["rescheduled"]
    assert where() == {place: ["m"]}

    assert claim() == []
    assert (where(), due(keys.pending, "m")) == ({"pending": ["m"]}, millis(300))
    run(t.promote(keys, clock=micros(300)))
    assert [one.deaths for one in claim()] == [0]


def test_a_running_an_ended_and_a_cancelled_message_cannot_be_rescheduled(
    claim, reschedule, bury, publish, run, keys, dump
):
    bury("garbage")
    publish("running")
    claim()
    publish("cancelled")
    run(t.cancel(keys, ["cancelled"]))
    before = dump()

    answers = reschedule("running", "nowhere", "garbage", "cancelled", delay_ms=1)

    assert answers == ["running", *["not_found"] * 3]
    assert dump() == before


# ---- revival ----------------------------------------------------------------


@pytest.fixture
def cancelled(publish, run, keys):
    """The message `m`, cancelled in ready behind `first`."""
    publish("first")
    publish("m", window_ms=HOUR_MS, retries=1)
    run(t.cancel(keys, ["m"]))


@pytest.mark.usefixtures("cancelled")
def test_a_cancelled_message_that_still_lies_in_a_list_is_revived_in_its_place(
    publish, claim, where, left, word, total, client, keys
):
    publish("last")

    assert publish("m", window_ms=HOUR_MS, retries=5).refused == {}

    assert where() == {"ready": ["first", "m", "last"]}
    assert (left("m"), word("m")) == ("5", None)
    assert (total("published"), total("cancelled")) == (4, 1)
    assert client.get(keys.msg("m")).endswith(b"\nm")
    assert [one.id for one in claim()] == ["first", "m", "last"]


@pytest.mark.usefixtures("cancelled")
def test_a_message_revived_with_a_delay_moves_when_it_is_met(publish, claim, run, keys, due, where):
    publish("m", window_ms=HOUR_MS, delay_ms=700)

    assert [one.id for one in claim()] == ["first"]
    assert (where(), due(keys.pending, "m")) == ({"pending": ["m"], "unack": ["first"]}, millis(700))
    run(t.promote(keys, clock=micros(700)))
    assert [one.id for one in claim()] == ["m"]


@pytest.mark.foreign_hands
def test_a_state_word_without_a_count_revives_nothing(publish, client, keys, where, word):
    client.hset(keys.lease, "m", "!")

    publish("m", window_ms=HOUR_MS)

    assert (where(), word("m")) == ({"ready": ["m"]}, None)
