"""Reschedule in every place, and revival: a cancelled message that is published again where it still lies."""

import pytest
from held_clock import HOUR_MS, NOON, micros, millis

from reliq import transitions as t


@pytest.fixture
def reschedule(run, keys):
    return lambda *ids, **options: run(t.reschedule(keys, ids or ["m"], clock=NOON, **options))


@pytest.fixture
def lose(publish, claim, run, keys):
    """Publish `m` and let its lease run out: a suspect, in retry."""

    def make():
        publish("m")
        claim(lease_ms=1)
        run(t.reclaim(keys, clock=micros(1)))

    return make


@pytest.mark.parametrize("options", [{"delay_ms": 700}, {"at_ms": millis(700)}])
def test_a_pending_message_gets_another_due_time(options, publish, reschedule, keys, due, where):
    publish("m", delay_ms=5000)

    assert reschedule(**options) == ["rescheduled"]

    assert where() == {"pending": ["m"]}
    assert due(keys.pending, "m") == millis(700)


def test_a_nacked_message_gets_another_due_time_and_its_retry_is_still_spent_then(
    publish, claim, reschedule, run, keys, due, left
):
    publish("m", retries=3)
    run(t.nack(keys, [(one, 5000, "failed 1 x", b"") for one in claim()], clock=NOON))

    assert reschedule(delay_ms=700) == ["rescheduled"]

    assert (due(keys.unack, "m"), left("m")) == (millis(700), "3")
    assert run(t.reclaim(keys, clock=micros(700))).again == ("m",)
    assert left("m") == "2"


@pytest.mark.parametrize("suspect", [False, True])
def test_a_message_in_a_list_moves_when_it_is_met(suspect, publish, lose, claim, reschedule, run, keys, due, where):
    lose() if suspect else publish("m")
    before = where()

    assert reschedule(delay_ms=700) == ["rescheduled"]
    assert where() == before

    assert claim() == []
    assert where() == {"pending": ["m"]}
    assert due(keys.pending, "m") == millis(700)
    run(t.promote(keys, clock=micros(700)))
    assert [one.deaths > 0 for one in claim()] == [False]


@pytest.mark.parametrize("suspect", [False, True])
def test_a_message_in_a_list_may_be_rescheduled_again(suspect, publish, lose, claim, reschedule, run, keys, due):
    lose() if suspect else publish("m")

    assert reschedule(delay_ms=700) == reschedule(delay_ms=300) == ["rescheduled"]

    claim()
    assert due(keys.pending, "m") == millis(300)
    run(t.promote(keys, clock=micros(300)))
    assert [one.deaths > 0 for one in claim()] == [False]


def test_a_rescheduled_message_in_a_list_may_be_cancelled(publish, claim, reschedule, run, keys, where):
    publish("m")
    reschedule(delay_ms=700)

    assert run(t.cancel(keys, ["m"])) == ["cancelled"]
    assert claim() == []
    assert where() == {}


def test_a_running_message_is_left_alone(publish, claim, reschedule, dump):
    publish("m")
    claim()
    before = dump()

    assert reschedule(delay_ms=700) == ["running"]
    assert dump() == before


def test_a_message_that_is_nowhere_cannot_be_rescheduled(reschedule, bury, publish, run, keys, dump):
    bury("garbage")
    publish("cancelled")
    run(t.cancel(keys, ["cancelled"]))
    before = dump()

    assert reschedule("nowhere", "garbage", "cancelled", delay_ms=1) == ["not_found"] * 3
    assert dump() == before


def test_a_message_rescheduled_into_the_past_is_promoted_at_once(publish, reschedule, run, keys):
    publish("m", delay_ms=5000)

    reschedule(at_ms=millis(-5000))

    assert run(t.promote(keys, clock=NOON)) == (1, -1)


# ---- revival ----------------------------------------------------------------


@pytest.fixture
def cancelled(publish, run, keys):
    """The message `m`, cancelled in ready behind `first`."""
    publish("first")
    publish("m", window_ms=HOUR_MS, retries=1)
    run(t.cancel(keys, ["m"]))


def test_a_cancelled_message_that_still_lies_in_a_list_is_revived_in_its_place(
    cancelled, publish, claim, where, left, word, total
):
    publish("last")

    assert publish("m", window_ms=HOUR_MS, retries=5).refused == {}

    assert where() == {"ready": ["first", "m", "last"]}
    assert (left("m"), word("m")) == ("5", None)
    assert (total("published"), total("cancelled")) == (4, 1)
    assert [one.id for one in claim()] == ["first", "m", "last"]


def test_a_cancelled_message_is_revived_with_its_new_body(cancelled, publish, client, keys):
    publish("m", window_ms=HOUR_MS)

    assert client.get(keys.msg("m")).endswith(b"\nm")


def test_a_message_revived_with_a_delay_moves_when_it_is_met(cancelled, publish, claim, run, keys, due, where):
    publish("m", window_ms=HOUR_MS, delay_ms=700)

    assert [one.id for one in claim()] == ["first"]
    assert where() == {"pending": ["m"], "unack": ["first"]}
    assert due(keys.pending, "m") == millis(700)
    run(t.promote(keys, clock=micros(700)))
    assert [one.id for one in claim()] == ["m"]


def test_a_revival_overrides_the_tombstone_when_it_replaces(publish, run, keys, where, client):
    publish("m", window_ms=HOUR_MS)
    run(t.cancel(keys, ["m"], tombstone_ms=1000))

    assert publish("m", window_ms=HOUR_MS).refused == {0: "tombstoned"}
    assert publish("m", window_ms=HOUR_MS, replace=True).refused == {}

    assert where() == {"ready": ["m"]}
    assert client.exists(keys.dedup("m")) == 0


def test_a_cancelled_message_that_runs_is_not_revived(publish, claim, run, client, keys):
    publish("m", window_ms=HOUR_MS)
    claim()
    run(t.cancel(keys, ["m"]))

    assert publish("m", window_ms=HOUR_MS).refused == {0: "duplicate"}


@pytest.mark.foreign_hands
def test_a_cancelled_message_that_a_foreign_consumer_runs_is_not_revived(publish, run, client, keys):
    client.zadd(keys.unack, {"m": NOON / 1e6 + 1})
    client.hset(keys.retries_left, "m", 3)
    run(t.cancel(keys, ["m"]))

    assert publish("m", window_ms=HOUR_MS).refused == {0: "duplicate"}


@pytest.mark.foreign_hands
def test_a_state_word_without_a_count_revives_nothing(publish, client, keys, where):
    client.hset(keys.lease, "m", "!")

    publish("m", window_ms=HOUR_MS)

    assert where() == {"ready": ["m"]}
    assert client.hget(keys.lease, "m") is None


def test_a_suspect_that_was_cancelled_and_revived_is_a_new_message(lose, publish, claim, run, client, keys):
    lose()
    run(t.cancel(keys, ["m"]))

    publish("m", window_ms=HOUR_MS)

    assert [(one.deaths > 0, one.left) for one in claim()] == [(False, 3)]
