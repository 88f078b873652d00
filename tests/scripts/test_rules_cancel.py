"""Rule 12: cancel and reschedule, in each state of a message."""

import pytest
from held_clock import HOUR_MS, NOON, micros, millis

from reliq.lua import transitions as t

ANSWERS = {
    "pending": "cancelled",
    "nacked": "cancelled",
    "ready": "cancelled",
    "retry": "cancelled",
    "held": "running",
    "garbage": "not_found",
    "nowhere": "not_found",
}


@pytest.fixture
def put(publish, claim, bury, run, keys, nack):
    """Put the message `m` into a state."""

    def make(place):
        if place == "garbage":
            bury("m", window_ms=HOUR_MS)
        elif place != "nowhere":
            publish("m", window_ms=HOUR_MS, delay_ms=5000 if place == "pending" else 0)
        if place in ("held", "nacked", "retry"):
            (one,) = claim(lease_ms=60_000)
            if place == "nacked":
                nack(one, delay_ms=5000)
            if place == "retry":
                run(t.reclaim(keys, clock=micros(60_000)))

    return make


@pytest.mark.parametrize("place", ANSWERS)
def test_cancel_answers_by_the_place_of_the_message_also_when_repeated(
    place, put, claim, run, client, keys, dump, where, total
):
    put(place)
    cancel = t.cancel(keys, ["m"], clock=NOON)
    client.config_resetstat()

    assert run(cancel) == [ANSWERS[place]]
    assert {"cmdstat_lrem", "cmdstat_lrange", "cmdstat_lpos"}.isdisjoint(client.info("commandstats"))
    assert client.exists(keys.msg("m")) == (place == "garbage")
    before = dump()
    assert run(cancel) == [ANSWERS[place]]
    assert dump() == before

    if place in ("ready", "retry"):  # the next claim drops it
        assert (where(), total("cancelled"), claim()) == ({place: ["m"]}, 0, [])
    if ANSWERS[place] == "cancelled":
        assert (where(), total("cancelled")) == ({}, 1)
        assert not client.exists(keys.retries_left, keys.lease, keys.errors)


@pytest.mark.parametrize(
    "options", [{"delay_ms": 700}, {"at_ms": millis(700)}, {"at_ms": millis(-5000)}], ids=["delay", "date", "past"]
)
def test_a_pending_message_gets_another_due_time(options, publish, run, keys, due, where):
    publish("m", delay_ms=5000)

    assert run(t.reschedule(keys, ["m"], clock=NOON, **options)) == ["rescheduled"]

    assert where() == {"pending": ["m"]}
    is_past = options.get("at_ms", NOON) < millis()
    assert is_past or due(keys.pending, "m") == millis(700)
    assert run(t.promote(keys, clock=NOON)) == ((1, -1) if is_past else (0, 700))
