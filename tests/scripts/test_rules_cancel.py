"""Rule 12: cancel and reschedule, in every place a message can be."""

import pytest
from held_clock import HOUR_MS, NOON, micros, millis

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


def test_a_running_message_is_cancelled_by_its_renewal_and_may_still_be_acked(
    publish, claim, cancel, run, keys, due, total
):
    publish("m", "other")
    held = claim(lease_ms=1000)
    cancel()

    for _ in range(2):
        answer = run(t.extend(keys, held, lease_ms=5000, clock=NOON))
        assert (answer.lost, answer.cancelled, due(keys.unack, "m")) == ((), ("m",), millis(5000))

    assert run(t.ack(keys, [(one, None) for one in held])).lost == ()
    assert (total("acked"), total("cancelled")) == (2, 0)


@pytest.mark.parametrize("end", ["nack", "reject", "snooze", "release", "reclaim", "expired"])
def test_a_cancelled_message_ends_when_its_worker_lets_go(
    end, publish, claim, cancel, run, client, keys, where, total, nothing_is_kept
):
    publish("m")
    (held,) = claim(lease_ms=1000)
    cancel()
    calls = {
        "nack": t.nack(keys, [(held, 5, FAILED, b"")], clock=NOON),
        "reject": t.nack(keys, [(held, 0, FAILED, b"value")], clock=NOON),
        "snooze": t.snooze(keys, [(held, 5)], clock=NOON),
        "release": t.release(keys, [held], clock=NOON),
        "reclaim": t.reclaim(keys, clock=micros(1000)),
        "expired": t.ack(keys, [(held, None)], kind="expired", clock=NOON),
    }

    answer = run(calls[end])

    assert end == "expired" or answer.cancelled == (() if end == "release" else ("m",))
    assert (where(), total("cancelled"), nothing_is_kept()) == ({}, 1, True)
    assert client.keys(keys.msg("*")) == []
    assert [(one[b"id"], one[b"kind"]) for _, one in client.xrange(keys.ends)] == [(b"m", b"cancelled")]


@pytest.mark.foreign_hands
def test_a_message_that_a_foreign_consumer_runs_is_cancelled_when_its_lease_ends(
    cancel, publish, run, client, keys, where
):
    client.zadd(keys.unack, {"m": NOON / 1e6 + 1})
    client.hset(keys.retries_left, "m", 3)

    assert cancel() == ["running"]
    assert publish("m", window_ms=HOUR_MS).refused == {0: "duplicate"}
    assert run(t.reclaim(keys, clock=micros(1000))).cancelled == ("m",)
    assert where() == {}


# ---- tombstones ---------------------------------------------------------------


@pytest.mark.parametrize("place", ["pending", "ready", "held", "nowhere"])
def test_cancel_leaves_a_tombstone_that_a_later_publish_meets(place, put, cancel, publish, client, keys):
    put(place)

    cancel(tombstone_ms=60_000)

    assert client.get(keys.dedup("m")) == (b"unknown" if place == "nowhere" else b"cancelled")
    assert 30_000 < client.pttl(keys.dedup("m")) <= 60_000
    assert publish("m", window_ms=1000).refused == {0: "tombstoned"}
    assert publish("m", window_ms=1000, replace=True).refused == ({0: "duplicate"} if place == "held" else {})


@pytest.mark.parametrize("place", ["pending", "ready", "retry", "nacked", "nowhere"])
def test_a_cancelled_id_without_a_tombstone_is_free_at_once(place, put, publish, cancel, claim):
    put(place)
    cancel()

    assert publish("m", window_ms=1000).refused == {}
    assert [one.id for one in claim()] == ["m"]
    assert publish("m", window_ms=1000).refused == {0: "duplicate"}


@pytest.mark.parametrize("first", ["ended", "unknown", "cancelled"])
def test_a_cancel_lengthens_a_marker_and_never_shortens_it(first, publish, claim, cancel, run, client, keys):
    if first == "ended":
        publish("m", window_ms=HOUR_MS)
        run(t.ack(keys, [(one, HOUR_MS) for one in claim()]))
    if first == "cancelled":
        publish("m", window_ms=HOUR_MS, delay_ms=5)

    if first != "ended":
        cancel(tombstone_ms=HOUR_MS)

    cancel(tombstone_ms=1000)
    assert client.get(keys.dedup("m")) == first.encode()
    assert client.pttl(keys.dedup("m")) > HOUR_MS - 30_000
    cancel(tombstone_ms=2 * HOUR_MS)
    assert client.pttl(keys.dedup("m")) > 2 * HOUR_MS - 30_000


@pytest.mark.parametrize("tombstone_ms", [None, 60_000], ids=["freed", "cancelled"])
def test_a_cancel_of_a_living_message_is_noted_even_over_a_longer_marker(tombstone_ms, die, cancel, run, client, keys):
    letter = die("m", window_ms=HOUR_MS)
    run(t.redrive(keys, [(letter, "m", 3)], ttl_ms=HOUR_MS, clock=NOON))

    assert cancel(tombstone_ms=tombstone_ms) == ["cancelled"]

    assert client.get(keys.dedup("m")) == (b"cancelled" if tombstone_ms else b"freed")


def test_garbage_keeps_its_body_when_its_id_was_cancelled_in_an_earlier_life(
    die, publish, cancel, claim, run, client, keys
):
    letter = die("m")
    publish("m", window_ms=1000, delay_ms=5)
    cancel()
    run(t.redrive(keys, [(letter, "m", 3)], ttl_ms=HOUR_MS, clock=NOON))
    (held,) = claim()
    run(t.nack(keys, [(held, 0, "rejected 1 x", b"value")], clock=NOON))

    cancel()

    assert run(t.collect(keys, ["m"], letters_max=9, letters_ms=10**12)) == (("m",), ())
