"""Rule 3 with data of a foreign client: the work of a call is bounded in bytes and fields, not only in ids."""

import pytest
from held_clock import HOUR_MS, NOON, micros, millis

from reliq.lua import transitions as t
from reliq.wire_format import open_envelope

MIB = 1 << 20
FOR_EVER_MS = 10**12


def test_a_collect_takes_eight_mebibytes_of_bodies_or_one_body_however_large(bury, collect, client, keys, where):
    bury("a", "b", "c", "d")
    for id in "abc":
        client.setrange(keys.msg(id), (9 if id == "c" else 4) * MIB - 1, "x")

    assert collect("a", "b", "c", "d") == (("a", "b"), ())
    assert where()["garbage"] == ["c", "d"]
    assert collect("c", "d") == (("c",), ())


def test_dead_letters_that_are_too_many_are_dropped_in_pieces(bury, collect, client, keys, total):
    with client.pipeline(transaction=False) as pipe:
        for _ in range(6000):
            pipe.xadd(keys.dead, {"id": "old", "value": "x", "note": "failed 1 x"})
        pipe.execute()
    bury("m")

    collect("m", dead_letter_limit=100)
    assert (client.xlen(keys.dead), total("letters_dropped")) == (1001, 5000)

    collect(dead_letter_limit=100)
    assert (client.xlen(keys.dead), total("letters_dropped")) == (100, 5901)


@pytest.mark.foreign_hands
def test_unknown_totals_are_not_read_and_tokens_that_are_too_many_go(client, keys, run, claim):
    client.hset(keys.totals, mapping={f"x{number}": 1 for number in range(1000)} | {"acked": 3, b"\xff": 1})
    client.lpush(keys.wake, *range(1000))

    assert run(t.counts(keys)).totals == {"acked": 3}
    assert claim() == []
    assert client.llen(keys.wake) == 1


@pytest.mark.foreign_hands
def test_an_id_of_any_bytes_is_given_back_by_a_repeated_claim(run, client, keys):
    ids = [b"two\nlines", b"a\ttab", b"\xff\x00", b""]
    client.lpush(keys.ready, *ids)
    client.hset(keys.retries_left, mapping=dict.fromkeys(ids, 3))
    call = t.claim(keys, t.CallNumber("w", 1), limit=9, lease_ms=60_000, clock=NOON)

    first = run(call).claimed

    assert [one.id.encode("utf-8", "surrogateescape") for one in first] == ids
    assert run(call).claimed == first


# ---- due times --------------------------------------------------------------


@pytest.mark.parametrize("verb", ["nack", "snooze", "reschedule"])
def test_a_due_time_before_2001_and_an_expiry_for_ever_are_put_off_like_others(verb, publish, claim, run, client, keys):
    publish("at 0", at_ms=0)
    publish("before 2001", at_ms=999_999_999_999)
    held = claim() if verb != "reschedule" else []
    for id in ("at 0", "before 2001"):
        assert open_envelope(client.get(keys.msg(id)))[0].due == 10**12
    client.pexpireat(keys.msg("at 0"), 2**63 - 2**20)
    call = {
        "nack": t.nack(keys, [(one, 5, "failed 1 x", b"") for one in held], clock=NOON),
        "snooze": t.snooze(keys, [(one, 5) for one in held], clock=NOON),
        "reschedule": t.reschedule(keys, ["at 0", "before 2001"], delay_ms=5, clock=NOON),
    }[verb]

    run(call)

    for id in ("at 0", "before 2001"):
        header, body = open_envelope(client.get(keys.msg(id)))
        assert (header.due, body) == (millis(5), id.encode())
    assert client.pttl(keys.msg("at 0")) > FOR_EVER_MS


@pytest.mark.foreign_hands
def test_a_foreign_due_time_of_another_length_is_left_alone(publish, claim, run, client, keys):
    publish("m", "n")
    values = [b'RELIQ/1 {"d":' + due + b',"r":2}\n{"number":42}' for due in (b"0", b"99999999999999")]
    client.mset(dict(zip([keys.msg("m"), keys.msg("n")], values, strict=True)))

    run(t.nack(keys, [(one, 0, "failed 1 x", b"") for one in claim()], clock=NOON))

    assert client.mget(keys.msg("m"), keys.msg("n")) == values


def test_a_message_for_a_moment_that_has_come_is_ready_at_once(publish, where):
    for id, at_ms in (("past", millis(-1)), ("now", millis()), ("later", millis(1))):
        publish(id, at_ms=at_ms, clock=micros(us=1))

    assert publish("at once", clock=micros(us=999)).due_ms == millis()
    assert where() == {"ready": ["past", "now", "at once"], "pending": ["later"]}


def test_a_bare_body_is_never_written_into(run, claim, client, keys):
    run(t.publish(keys, [("m", b"bare")], t.CallNumber("p", 1), ttl_ms=HOUR_MS, retries=3, bare=True, clock=NOON))
    (held,) = claim()

    run(t.snooze(keys, [(held, HOUR_MS)], clock=NOON))

    assert client.get(keys.msg("m")) == b"bare"
    assert 0 <= 2 * HOUR_MS - client.pttl(keys.msg("m")) < 30_000
