"""Rule 12: cancel and reschedule, in every place a message can be."""

import pytest
from held_clock import HOUR_MS, NOON, micros

from reliq import transitions as t

FAILED = "failed 1 x"


@pytest.fixture
def put(publish, claim, bury, run, keys):
    """Bring the message `m` into a place."""

    def make(place):
        if place == "garbage":
            bury("m", window_ms=HOUR_MS)
        elif place != "nowhere":
            publish("m", window_ms=HOUR_MS, delay_ms=5000 if place == "pending" else 0)
        if place in ("held", "nacked", "retry"):
            (one,) = claim(lease_ms=60_000)
            if place == "nacked":
                run(t.nack(keys, [(one, 5000, FAILED, b"")], clock=NOON))
            if place == "retry":
                run(t.reclaim(keys, clock=micros(60_000)))

    return make


@pytest.fixture
def cancel(run, keys):
    return lambda *ids, **options: run(t.cancel(keys, ids or ["m"], clock=NOON, **options))


@pytest.fixture
def nothing_is_kept(client, keys):
    """Whether Redis keeps no count, state word and failure of any message."""
    return lambda: client.hkeys(keys.retries_left) == client.hkeys(keys.lease) == client.hkeys(keys.errors) == []


ANSWERS = {
    "pending": "cancelled",
    "nacked": "cancelled",
    "ready": "cancelled",
    "retry": "cancelled",
    "held": "running",
    "garbage": "not_found",
    "nowhere": "not_found",
}


@pytest.mark.parametrize("place", ANSWERS)
def test_cancel_answers_by_the_place_of_the_message_also_when_repeated(
    place, put, cancel, claim, client, keys, dump, where, total, nothing_is_kept
):
    put(place)
    client.config_resetstat()

    assert cancel() == [ANSWERS[place]]
    assert {"cmdstat_lrem", "cmdstat_lrange", "cmdstat_lpos"}.isdisjoint(client.info("commandstats"))
    assert client.exists(keys.msg("m")) == (place == "garbage")
    before = dump()
    assert cancel() == [ANSWERS[place]]
    assert dump() == before

    if place in ("ready", "retry"):  # the claim that meets it drops it
        assert (where(), total("cancelled"), claim()) == ({place: ["m"]}, 0, [])
    if ANSWERS[place] == "cancelled":
        assert (where(), total("cancelled"), nothing_is_kept()) == ({}, 1, True)


# ---- tombstones ---------------------------------------------------------------
