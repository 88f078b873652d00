"""Rule 5: only the receipt of the current delivery settles a message; any other receipt changes nothing."""

import pytest
from held_clock import NOON, micros, millis

from reliq.lua import transitions as t
from reliq.message import Claimed
from reliq.wire_format import FailureNote, envelope_rest

SETTLE = {
    "ack": lambda keys, *held: t.ack(keys, [(one, 1000) for one in held], clock=NOON),
    "expired": lambda keys, *held: t.ack(keys, [(one, None) for one in held], kind="expired", clock=NOON),
    "nack": lambda keys, *held: t.nack(keys, [(one, 9, "failed 1 x", b"") for one in held], clock=NOON),
    "reject": lambda keys, *held: t.nack(keys, [(one, 0, "rejected 1 x", b"v") for one in held], clock=NOON),
    "extend": lambda keys, *held: t.extend(keys, held, lease_ms=99, clock=NOON),
    "release": lambda keys, *held: t.release(keys, held, clock=NOON),
    "snooze": lambda keys, *held: t.snooze(keys, [(one, 9) for one in held], clock=NOON),
}


@pytest.fixture
def notes(client, keys):
    """Return the failure notes of a message, the newest first."""
    return lambda name: FailureNote.parse_all(client.hget(keys.errors, name))


@pytest.mark.foreign_hands
@pytest.mark.parametrize("settle", SETTLE.values(), ids=SETTLE)
def test_a_held_message_is_settled_after_its_lease_an_extension_and_a_lost_count(
    settle, publish, claim, run, client, keys, dump
):
    publish("m")
    (held,) = claim(lease_ms=1000, clock=micros(-9000))
    run(t.extend(keys, [held], lease_ms=5000, clock=micros(-8500)))
    client.hdel(keys.retries_left, "m")
    before = dump()

    assert run(settle(keys, held)).lost == ()
    assert dump() != before


@pytest.mark.parametrize(("verb", "event"), [("ack", "Acked"), ("nack", "Nacked"), ("release", "Released")])
def test_a_late_receipt_beside_the_valid_one_of_its_message_hides_no_outcome(verb, event, publish, claim, run, keys):
    publish("m")
    (late,) = claim(lease_ms=1000)
    run(t.reclaim(keys, clock=micros(1000)))
    (valid,) = claim()
    call = SETTLE[verb](keys, late, valid)

    reported = [(type(one).__name__, one.ids) for one in call.events(run(call))]

    assert reported == [(event, ("m",)), ("LeaseLost", ("m",))]


@pytest.mark.parametrize("verb", [*SETTLE, "succeed"])
def test_invalid_receipts_of_any_ids_are_reported_beside_valid_receipts(verb, publish, claim, run, keys):
    """A reply that cannot be read would keep all messages of the call unsettled."""
    publish("m", "followed")
    held = claim()
    value = envelope_rest(3, NOON // 1000, None)
    run(
        t.replace(keys, [("followed", value)], t.CallNumber("p", 1), mode="replace", ttl_ms=1000, retries=3, clock=NOON)
    )
    settle = SETTLE.get(verb, lambda keys, *held: t.succeed(keys, held, kind="acked", clock=NOON))
    strange = ("\udcff", "+m", "+followed", "")

    answer = run(settle(keys, *(Claimed(id, "lane.1:30000", 3) for id in strange), *held))

    assert answer.lost == strange
    assert answer.followed == {"extend": (), "succeed": ("m",)}.get(verb, ("followed",))


# ---- spared leases --------------------------------------------------------------


def test_a_reclaim_passes_over_ten_times_its_limit_of_spared_leases(publish, claim, run, keys):
    publish(*(f"m{number}" for number in range(21)))
    *leased, nacked = claim(limit=21, lease_ms=1000)
    run(t.nack(keys, [(nacked, 2000, "failed 1 x", b"")], clock=NOON))

    assert run(t.reclaim(keys, limit=2, spare_leases=True, clock=micros(3000))).count == 0
    assert run(t.reclaim(keys, limit=3, spare_leases=True, clock=micros(3000))).again == (nacked.id,)
    assert run(t.extend(keys, leased, lease_ms=1000, clock=micros(3000))).lost == ()


# ---- retries --------------------------------------------------------------------


@pytest.mark.foreign_hands
@pytest.mark.parametrize("text", [None, "", "many", "1.5", " 3", "0x5", "9e9"], ids=repr)
def test_a_count_that_is_no_number_counts_as_no_retry_left_and_is_reported(
    text, publish, claim, run, client, keys, where
):
    publish("m", "well", "huge")
    client.hdel(keys.retries_left, "m") if text is None else client.hset(keys.retries_left, "m", text)
    client.hset(keys.retries_left, "huge", "9" * 30)

    assert [(one.id, one.left) for one in claim(lease_ms=1)] == [("m", 0), ("well", 3), ("huge", 10**6)]
    answer = run(t.reclaim(keys, clock=micros(1)))

    assert (answer.inconsistent, answer.buried, {*answer.overdue}) == (("m",), ("m",), {"well", "huge"})
    assert where()["garbage"] == ["m"]


# ---- reasons of failures --------------------------------------------------------


def test_the_last_failure_stays_when_the_last_lease_expires(publish, claim, run, keys, notes):
    publish("m", retries=1)
    failed = FailureNote("failed", 1, "boom", "ValueError at jobs.py:3", "db1:7", 12)
    run(t.nack(keys, [(one, 0, str(failed), b"") for one in claim()], clock=NOON))
    run(t.reclaim(keys, clock=NOON))
    claim(lease_ms=1)
    run(t.reclaim(keys, clock=micros(1)))

    assert notes("m") == [
        FailureNote("lease", None, "boom", at_ms=millis(1)),
        FailureNote("failed", 1, "boom", "ValueError at jobs.py:3", "db1:7", 12, at_ms=millis()),
    ]


def test_the_newest_ten_failures_are_kept_or_two_kib_of_long_ones(publish, claim, run, keys, client, notes):
    publish("short", "long", retries=99)
    for attempt in range(15):
        rows = [(one, 0, f"failed {attempt} {'e' * (900 if one.id == 'long' else 1)}", b"") for one in claim()]
        run(t.nack(keys, rows, clock=NOON))
        run(t.reclaim(keys, clock=NOON))

    assert client.hget(keys.errors, "short").count(b"\x1e") == 9
    assert [one.attempt for one in notes("short")] == [*range(14, 4, -1)]
    assert [one.attempt for one in notes("long")] == [14, 13, 12]


def test_a_note_of_an_earlier_version_stays_beside_the_new_one(publish, claim, run, keys, client, notes):
    publish("m")
    (held,) = claim()
    client.hset(keys.errors, "m", "failed 1 KeyError: old (at jobs.py:9)")

    run(t.nack(keys, [(held, 0, "failed 2 new", b"")], clock=NOON))

    new, old = notes("m")
    assert (new.attempt, new.error) == (2, "new")
    assert (old.attempt, old.error, old.at_ms) == (1, "KeyError: old (at jobs.py:9)", None)


def test_lease_that_the_supervisor_ended_is_not_spared_before_its_successor(publish, claim, run, keys):
    publish("ended")
    held = claim(lease_ms=1000)
    run(t.extend(keys, held, lease_ms=0, clock=NOON))
    run(t.replace(keys, [("ended", b"}\n2")], t.CallNumber("p", 1), mode="replace", ttl_ms=9999, retries=1, clock=NOON))

    answer = run(t.reclaim(keys, spare_leases=True, clock=micros(60_000)))

    assert (answer.overdue, answer.buried) == (("ended",), ())


def test_lease_that_the_supervisor_ended_is_not_spared_until_it_is_renewed(publish, claim, run, keys, client):
    publish("renewed", "ended", "expired")
    held = claim(limit=3, lease_ms=1000)
    assert run(t.extend(keys, held[:2], lease_ms=0, clock=NOON)).lost == ()
    run(t.extend(keys, held[:1], lease_ms=50, clock=NOON))

    answer = run(t.reclaim(keys, spare_leases=True, clock=micros(60_000)))

    assert (answer.overdue, answer.buried) == (("ended",), ())
    assert client.hget(keys.lease, "ended") == b"suspect"
    assert run(t.ack(keys, [(held[0], None)])).lost == ()
