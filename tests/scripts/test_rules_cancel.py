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
            return
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


ANSWERS = {
    "pending": "cancelled",
    "nacked": "cancelled",
    "ready": "cancelled",
    "retry": "cancelled",
    "held": "running",
    "garbage": "not_found",
    "nowhere": "not_found",
}


@pytest.mark.parametrize(("place", "answer"), ANSWERS.items())
def test_cancel_answers_by_where_the_message_is(place, answer, put, cancel, client, keys):
    if place != "nowhere":
        put(place)

    assert cancel() == [answer]
    assert client.exists(keys.msg("m")) == (place == "garbage")


@pytest.mark.parametrize(("place", "answer"), ANSWERS.items())
def test_a_repeated_cancel_gets_the_same_answer(place, answer, put, cancel, dump):
    if place != "nowhere":
        put(place)
    cancel()
    before = dump()

    assert cancel() == [answer]
    assert dump() == before


@pytest.mark.parametrize("place", ["pending", "nacked"])
def test_a_message_outside_the_lists_is_gone_at_once(place, put, cancel, client, keys, where, total):
    put(place)

    cancel()

    assert where() == {}
    assert total("cancelled") == 1
    assert client.hkeys(keys.retries_left) == client.hkeys(keys.lease) == client.hkeys(keys.errors) == []


@pytest.mark.parametrize("place", ["ready", "retry"])
def test_a_message_in_a_list_is_left_there_and_dropped_by_the_claim_that_meets_it(
    place, put, cancel, claim, client, keys, where, total
):
    put(place)

    cancel()
    assert (where(), total("cancelled")) == ({place: ["m"]}, 0)

    assert claim() == []
    assert (where(), total("cancelled")) == ({}, 1)
    assert client.hkeys(keys.retries_left) == client.hkeys(keys.lease) == []


def test_cancel_searches_no_list(put, cancel, client):
    put("ready")
    client.config_resetstat()

    cancel()

    assert {"cmdstat_lrem", "cmdstat_lrange", "cmdstat_lpos"}.isdisjoint(client.info("commandstats"))


def test_a_running_message_may_still_be_acked(publish, claim, cancel, run, keys, total):
    publish("m")
    (held,) = claim()
    cancel()

    assert run(t.ack(keys, [(held, None)])).lost == ()
    assert (total("acked"), total("cancelled")) == (1, 0)


def test_a_running_message_is_told_by_its_renewal_and_keeps_its_lease(publish, claim, cancel, run, keys, due):
    publish("m", "other")
    held = claim(lease_ms=1000)
    cancel()

    answers = [run(t.extend(keys, held, lease_ms=5000, clock=NOON)) for _ in range(2)]

    assert [(answer.lost, answer.cancelled) for answer in answers] == [((), ("m",))] * 2
    assert due(keys.unack, "m") == millis(5000)


@pytest.mark.parametrize("end", ["nack", "reject", "snooze", "release", "reclaim", "expired"])
def test_a_cancelled_message_ends_when_its_worker_lets_go(end, publish, claim, cancel, run, client, keys, where, total):
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

    if end != "expired":
        assert answer.cancelled == (() if end == "release" else ("m",))
    assert (where(), total("cancelled")) == ({}, 1)
    assert client.hkeys(keys.retries_left) == client.hkeys(keys.lease) == client.hkeys(keys.errors) == []
    assert client.keys(keys.msg("*")) == []


@pytest.mark.foreign_hands
def test_a_message_that_a_foreign_consumer_runs_is_cancelled_when_its_lease_ends(cancel, run, client, keys, where):
    client.zadd(keys.unack, {"m": NOON / 1e6 + 1})
    client.hset(keys.retries_left, "m", 3)

    assert cancel() == ["running"]
    assert run(t.reclaim(keys, clock=micros(1000))).cancelled == ("m",)
    assert where() == {}


@pytest.mark.parametrize(
    ("place", "marker"),
    [("pending", b"cancelled"), ("ready", b"cancelled"), ("held", b"cancelled"), ("nowhere", b"unknown")],
)
def test_cancel_leaves_a_tombstone(place, marker, put, cancel, client, keys):
    if place != "nowhere":
        put(place)

    cancel(tombstone_ms=60_000)

    assert client.get(keys.dedup("m")) == marker
    assert 30_000 < client.pttl(keys.dedup("m")) <= 60_000


@pytest.mark.parametrize("place", ["pending", "ready", "retry", "nacked", "nowhere"])
def test_a_cancelled_id_is_free_at_once(place, put, publish, cancel, claim):
    if place != "nowhere":
        put(place)
    cancel()

    assert publish("m", window_ms=1000).refused == {}
    assert [one.id for one in claim()] == ["m"]
    assert publish("m", window_ms=1000).refused == {0: "duplicate"}


def test_a_publish_that_comes_after_the_cancel_meets_the_tombstone(publish, cancel, where):
    cancel(tombstone_ms=1000)

    assert publish("m", window_ms=1000).refused == {0: "tombstoned"}
    assert where() == {}


def test_a_publish_that_replaces_overrides_the_tombstone(publish, cancel, where):
    cancel(tombstone_ms=1000)

    assert publish("m", window_ms=1000, replace=True).refused == {}
    assert where() == {"ready": ["m"]}


@pytest.mark.parametrize("first", ["ended", "unknown", "cancelled"])
def test_a_cancel_never_shortens_a_marker(first, publish, claim, cancel, run, client, keys):
    if first == "ended":
        publish("m", window_ms=HOUR_MS)
        run(t.ack(keys, [(one, HOUR_MS) for one in claim()]))
    else:
        if first == "cancelled":
            publish("m", window_ms=HOUR_MS, delay_ms=5)
        cancel(tombstone_ms=HOUR_MS)

    cancel(tombstone_ms=1000)

    assert client.get(keys.dedup("m")) == first.encode()
    assert client.pttl(keys.dedup("m")) > HOUR_MS - 30_000


def test_a_cancel_lengthens_a_marker(cancel, client, keys):
    cancel(tombstone_ms=1000)
    cancel(tombstone_ms=HOUR_MS)

    assert client.pttl(keys.dedup("m")) > HOUR_MS - 30_000


@pytest.mark.parametrize(("options", "marker"), [({}, b"freed"), ({"tombstone_ms": 60_000}, b"cancelled")])
def test_a_cancel_of_what_lives_says_so_even_over_a_longer_marker(options, marker, die, cancel, run, client, keys):
    letter = die("m", window_ms=HOUR_MS)
    run(t.redrive(keys, [(letter, "m", 3)], ttl_ms=HOUR_MS, clock=NOON))

    assert cancel(**options) == ["cancelled"]

    assert client.get(keys.dedup("m")) == marker


def test_a_letter_to_be_keeps_its_body_when_its_id_was_cancelled_in_an_earlier_life(
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


def test_each_id_of_a_cancel_gets_its_own_answer(publish, claim, cancel):
    publish("held")
    claim()
    publish("ready")
    publish("pending", delay_ms=5)

    assert cancel("pending", "held", "nowhere", "ready", "pending") == [
        "cancelled",
        "running",
        "not_found",
        "cancelled",
        "cancelled",
    ]
