"""Rule 5: only the receipt of the delivery that holds a message settles it; anything else changes nothing."""

import dataclasses

import pytest
from held_clock import NOON, micros
from msgspec.structs import replace

from reliq import transitions as t
from reliq.failure_note import FailureNote

SETTLE = {
    "ack": lambda keys, one: t.ack(keys, [(one, 1000)], clock=NOON),
    "expired": lambda keys, one: t.ack(keys, [(one, None)], kind="expired", clock=NOON),
    "nack": lambda keys, one: t.nack(keys, [(one, 9, "failed 1 x", b"")], clock=NOON),
    "reject": lambda keys, one: t.nack(keys, [(one, 0, "rejected 1 x", b"value")], clock=NOON),
    "extend": lambda keys, one: t.extend(keys, [one], lease_ms=99, clock=NOON),
    "release": lambda keys, one: t.release(keys, [one], clock=NOON),
    "snooze": lambda keys, one: t.snooze(keys, [(one, 9)], clock=NOON),
}
TWICE = {
    "ack": lambda keys, one: t.ack(keys, [(one, None), (one, None)], clock=NOON),
    "nack": lambda keys, one: t.nack(keys, [(one, 9, "failed 1 x", b""), (one, 0, "rejected 1 x", b"v")], clock=NOON),
    "extend": lambda keys, one: t.extend(keys, [one, one], lease_ms=99, clock=NOON),
    "release": lambda keys, one: t.release(keys, [one, one], clock=NOON),
    "snooze": lambda keys, one: t.snooze(keys, [(one, 9), (one, 5)], clock=NOON),
}
every_settle = pytest.mark.parametrize("settle", SETTLE.values(), ids=SETTLE)


@pytest.fixture
def held(publish, claim):
    publish("m")
    (one,) = claim(lease_ms=1000)
    return one


def refuses(settle, receipt, run, keys, dump):
    before = dump()
    answer = run(settle(keys, receipt))
    assert dump() == before
    return answer.lost == ("m",)


@every_settle
def test_the_receipt_of_the_delivery_that_holds_it_settles_a_message(settle, held, run, keys, dump):
    before = dump()

    assert run(settle(keys, held)).lost == ()

    assert dump() != before


@every_settle
def test_the_nonce_of_an_earlier_delivery_changes_nothing(settle, held, claim, run, keys, dump):
    run(t.reclaim(keys, clock=micros(1000)))
    (later,) = claim()

    assert later.nonce != held.nonce
    assert refuses(settle, held, run, keys, dump)


@pytest.mark.parametrize("verb", ["ack", "nack", "release"])
def test_a_late_receipt_beside_the_valid_one_of_its_message_hides_no_outcome(verb, held, claim, run, keys):
    run(t.reclaim(keys, clock=micros(1000)))
    (valid,) = claim()
    call = {
        "ack": t.ack(keys, [(held, None), (valid, None)], clock=NOON),
        "nack": t.nack(keys, [(one, 9, "failed 1 x", b"") for one in (held, valid)], clock=NOON),
        "release": t.release(keys, [held, valid], clock=NOON),
    }[verb]

    told = list(call.events(run(call)))

    assert [(type(one).__name__, one.ids) for one in told] == [
        ({"ack": "Acked", "nack": "Nacked", "release": "Released"}[verb], ("m",)),
        ("Lost", ("m",)),
    ]


@every_settle
def test_a_nonce_of_another_lease_changes_nothing(settle, held, run, keys, dump):
    assert refuses(settle, replace(held, nonce="worker.9:1000"), run, keys, dump)


@every_settle
def test_a_receipt_for_a_message_that_went_back_changes_nothing(settle, held, run, keys, dump):
    run(t.reclaim(keys, clock=micros(1000)))

    assert refuses(settle, held, run, keys, dump)


@every_settle
def test_a_receipt_for_a_nacked_message_changes_nothing(settle, held, run, keys, dump):
    run(t.nack(keys, [(held, 5, "failed 1 x", b"")], clock=NOON))

    assert refuses(settle, held, run, keys, dump)


@every_settle
def test_a_receipt_for_a_message_that_ended_changes_nothing(settle, held, run, keys, dump):
    run(t.ack(keys, [(held, None)]))

    assert refuses(settle, held, run, keys, dump)


@every_settle
def test_a_receipt_for_an_ended_message_that_was_published_again_changes_nothing(
    settle, held, publish, run, keys, dump
):
    run(t.ack(keys, [(held, None)]))
    publish("m", window_ms=1000)

    assert refuses(settle, held, run, keys, dump)


@pytest.mark.foreign_hands
@every_settle
def test_a_receipt_for_what_a_foreign_consumer_put_in_a_list_changes_nothing(settle, held, run, client, keys, dump):
    client.zrem(keys.unack, "m")
    client.lpush(keys.retry, "m")

    assert refuses(settle, held, run, keys, dump)


@pytest.mark.foreign_hands
@pytest.mark.parametrize("verb", ["publish", "redrive"])
def test_a_state_word_left_behind_is_gone_when_its_id_comes_back(verb, publish, die, run, client, keys, word):
    letter = die("m") if verb == "redrive" else None
    client.hset(keys.lease, "m", "worker.1:1000")

    if letter:
        run(t.redrive(keys, [(letter, "m", 3)], ttl_ms=1000))
    else:
        publish("m", window_ms=1000)

    assert word("m") is None


@pytest.mark.foreign_hands
@every_settle
def test_a_missing_count_voids_no_receipt(settle, held, run, client, keys):
    client.hdel(keys.retries_left, "m")

    assert run(settle(keys, held)).lost == ()


@every_settle
def test_a_lease_that_is_over_is_still_held_until_it_is_taken_back(settle, publish, claim, run, keys):
    publish("m")
    (held,) = claim(lease_ms=1000, clock=micros(-5000))

    assert run(settle(keys, held)).lost == ()


@every_settle
def test_an_extension_voids_no_receipt(settle, held, run, keys):
    run(t.extend(keys, [held], lease_ms=5000, clock=micros(500)))
    run(t.extend(keys, [held], lease_ms=5000, clock=micros(900)))

    assert run(settle(keys, held)).lost == ()


@pytest.mark.parametrize("settle", TWICE.values(), ids=TWICE)
def test_a_receipt_given_twice_in_one_call_counts_once(settle, held, run, keys):
    assert run(settle(keys, held)).lost == ("m",)

    assert run(t.counts(keys)).alive == (settle is not TWICE["ack"])


def test_each_receipt_stands_for_itself(publish, claim, run, keys, where):
    publish("a", "b", "c")
    a, b, c = claim()

    assert run(t.ack(keys, [(a, None), (replace(b, nonce="x"), None), (c, None)])).lost == ("b",)

    assert where() == {"unack": ["b"]}


def test_a_reclaim_that_spares_leases_takes_back_only_what_nobody_can_renew(publish, claim, run, keys, where):
    publish("nacked", "cancelled", "leased")
    nacked, *_ = claim(lease_ms=1000)
    run(t.nack(keys, [(nacked, 1000, "failed 1 x", b"")], clock=NOON))
    run(t.cancel(keys, ["cancelled"]))

    answer = run(t.reclaim(keys, spare_leases=True, clock=micros(1000)))

    assert (answer.again, answer.cancelled, answer.overdue) == (("nacked",), ("cancelled",), ())
    assert where() == {"unack": ["leased"], "retry": ["nacked"]}


def test_spared_leases_do_not_hide_what_is_behind_them(publish, claim, run, keys):
    publish(*(f"m{number}" for number in range(21)))
    *leased, nacked = claim(limit=21, lease_ms=1000)
    run(t.nack(keys, [(nacked, 2000, "failed 1 x", b"")], clock=NOON))

    answer = run(t.reclaim(keys, limit=3, spare_leases=True, clock=micros(3000)))

    assert answer.again == (nacked.id,)
    assert run(t.extend(keys, leased, lease_ms=1000, clock=micros(3000))).lost == ()


def test_only_so_many_spared_leases_are_passed_over(publish, claim, run, keys):
    publish(*(f"m{number}" for number in range(21)))
    *_, nacked = claim(limit=21, lease_ms=1000)
    run(t.nack(keys, [(nacked, 2000, "failed 1 x", b"")], clock=NOON))

    assert run(t.reclaim(keys, limit=2, spare_leases=True, clock=micros(3000))).count == 0


def test_a_reclaim_that_spares_leases_leaves_their_receipts_valid(held, run, keys):
    assert run(t.reclaim(keys, spare_leases=True, clock=micros(1000))).count == 0

    assert run(t.extend(keys, [held], lease_ms=1000, clock=micros(1000))).lost == ()


def test_settling_spends_no_retry_but_reclaim_spends_one(publish, claim, run, keys, left):
    publish("m", retries=2)

    run(t.release(keys, claim()))
    run(t.snooze(keys, [(one, 0) for one in claim()], clock=NOON))
    run(t.promote(keys, clock=micros(1)))
    (held,) = claim()
    run(t.extend(keys, [held], lease_ms=5, clock=NOON))
    run(t.nack(keys, [(held, 0, "failed 1 x", b"")], clock=NOON))
    assert left("m") == "2"

    run(t.reclaim(keys, clock=micros(5)))
    assert left("m") == "1"


def test_a_message_is_delivered_once_more_than_it_has_retries(publish, claim, run, keys, where, client):
    publish("m", retries=2)

    lefts = []
    for minute in range(3):
        run(t.reclaim(keys, clock=micros(60_000 * minute)))  # after its second death it has waited
        lefts += [one.left for one in claim(lease_ms=1, clock=micros(60_000 * minute))]
        answer = run(t.reclaim(keys, clock=micros(60_000 * minute + 1)))

    assert lefts == [2, 1, 0]
    assert answer.buried == ("m",)
    assert where() == {"garbage": ["m"]}
    assert FailureNote.parse(client.hget(keys.errors, "m")).summary == "lease"
    assert client.hkeys(keys.retries_left) == client.hkeys(keys.lease) == []


@pytest.mark.foreign_hands
@pytest.mark.parametrize("text", [None, "", "many", "1.5", " 3", "0x5", "9e9"])
def test_a_count_that_is_missing_or_no_number_is_none_left_and_is_told(text, publish, claim, run, client, keys, where):
    publish("m", "well")
    if text is None:
        client.hdel(keys.retries_left, "m")
    else:
        client.hset(keys.retries_left, "m", text)

    assert [(one.id, one.left) for one in claim(lease_ms=1)] == [("m", 0), ("well", 3)]
    answer = run(t.reclaim(keys, clock=micros(1)))

    assert (answer.inconsistent, answer.buried, answer.overdue) == (("m",), ("m",), ("well",))
    assert where() == {"retry": ["well"], "garbage": ["m"]}


@pytest.mark.foreign_hands
def test_a_count_greater_than_redis_can_count_loses_no_message(publish, claim, run, client, keys, where):
    publish("m")
    client.hset(keys.retries_left, "m", "9" * 30)
    claim(lease_ms=1)

    assert run(t.reclaim(keys, clock=micros(1))).overdue == ("m",)

    assert where() == {"retry": ["m"]}


def test_the_text_of_the_last_failure_stays_when_a_lease_runs_out_in_the_end(publish, claim, run, keys, client):
    publish("m", retries=1)
    (held,) = claim()
    run(t.nack(keys, [(held, 0, str(FailureNote("failed", 1, "ValueError: no")), b"")], clock=NOON))
    run(t.reclaim(keys, clock=NOON))
    claim(lease_ms=1)
    run(t.reclaim(keys, clock=micros(1)))

    notes = FailureNote.parse_all(client.hget(keys.errors, "m"))
    assert [(one.reason, one.attempt, one.text) for one in notes] == [
        ("lease", None, "ValueError: no"),
        ("failed", 1, "ValueError: no"),
    ]


def test_a_nacked_message_with_no_retry_left_keeps_why_it_failed(publish, claim, run, keys, client, where):
    publish("m", retries=0)
    (held,) = claim()

    run(t.nack(keys, [(held, 5, "failed 1 ValueError", b"value")], clock=NOON))

    assert where() == {"garbage": ["m"]}
    note = FailureNote("failed", 1, "ValueError", at_ms=NOON // 1000)
    assert FailureNote.parse_all(client.hget(keys.errors, "m")) == [note]
    assert (client.get(keys.msg("m")), client.pttl(keys.msg("m"))) == (b"value", -1)


def test_each_failure_is_kept_with_its_time_and_every_death_the_newest_first(publish, claim, run, keys, client):
    publish("m", retries=9)
    told = FailureNote("failed", 1, "boom", "ValueError at jobs.py:3", "db1:7", 12)
    (held,) = claim()
    run(t.nack(keys, [(held, 0, str(told), b"")], clock=micros(5)))
    run(t.reclaim(keys, clock=micros(5)))
    claim(lease_ms=1, clock=micros(5))

    run(t.reclaim(keys, clock=micros(7)))

    notes = FailureNote.parse_all(client.hget(keys.errors, "m"))
    noon = NOON // 1000
    assert notes == [FailureNote("lease", None, "boom", at_ms=noon + 7), dataclasses.replace(told, at_ms=noon + 5)]


def test_of_many_failures_the_newest_ten_are_kept_and_of_long_ones_two_kib_beside_the_newest(
    publish, claim, run, keys, client
):
    publish("short", "long", retries=99)
    for attempt in range(15):
        rows = [(one, 0, f"failed {attempt} {'e' * (900 if one.id == 'long' else 1)}", b"") for one in claim()]
        run(t.nack(keys, rows, clock=NOON))
        run(t.reclaim(keys, clock=NOON))

    short, long = (client.hget(keys.errors, id) for id in ("short", "long"))
    assert short.count(b"\x1e") == 9
    assert [one.attempt for one in FailureNote.parse_all(short)] == [*range(14, 4, -1)]
    assert [one.attempt for one in FailureNote.parse_all(long)] == [14, 13, 12]


def test_a_note_of_an_earlier_version_stays_beside_the_new_one(publish, claim, run, keys, client):
    publish("m")
    (held,) = claim()
    client.hset(keys.errors, "m", "failed 1 KeyError: old (at jobs.py:9)")

    run(t.nack(keys, [(held, 0, "failed 2 new", b"")], clock=NOON))

    notes = FailureNote.parse_all(client.hget(keys.errors, "m"))
    assert [(one.attempt, one.error, one.at_ms is None) for one in notes] == [
        (2, "new", False),
        (1, "KeyError: old (at jobs.py:9)", True),
    ]
