"""Rule 3, for what a foreign client may have left: work is bounded in bytes and in fields, not only in ids."""

import pytest
from held_clock import HOUR_MS, NOON, micros, millis

from reliq import transitions as t
from reliq.wireformat import open_envelope

MIB = 1 << 20
FOR_EVER_MS = 10**12


@pytest.fixture
def collect(run, keys):
    return lambda *ids, letters_max=10_000: run(
        t.collect(keys, list(ids), letters_max=letters_max, letters_ms=FOR_EVER_MS)
    )


def test_a_collect_takes_eight_mebibytes_of_bodies_and_leaves_the_rest(bury, collect, client, keys, where):
    bury("a", "b", "c", "d")
    for id in "abc":
        client.set(keys.msg(id), b"x" * 4 * MIB)

    assert collect("a", "b", "c", "d") == (("a", "b"), ())
    assert where()["garbage"] == ["c", "d"]
    assert collect("c", "d") == (("c", "d"), ())


def test_a_collect_takes_one_body_however_large(bury, collect, client, keys):
    bury("a", "b")
    client.set(keys.msg("a"), b"x" * 9 * MIB)

    assert collect("a", "b") == (("a",), ())


def test_letters_that_are_too_many_are_dropped_in_pieces(bury, collect, client, keys, total):
    with client.pipeline(transaction=False) as pipe:
        for _ in range(6000):
            pipe.xadd(keys.dead, {"id": "old", "value": "x", "note": "failed 1 x"})
        pipe.execute()
    bury("m")

    collect("m", letters_max=100)
    assert (client.xlen(keys.dead), total("letters_dropped")) == (1001, 5000)

    collect(letters_max=100)
    assert (client.xlen(keys.dead), total("letters_dropped")) == (100, 5901)


@pytest.mark.foreign_hands
def test_totals_of_nobody_are_not_read(client, keys, run):
    client.hset(keys.totals, mapping={f"x{number}": 1 for number in range(1000)} | {"acked": 3, b"\xff": 1})

    assert run(t.counts(keys)).totals == {"acked": 3}


def test_tokens_that_are_too_many_go_with_the_first_claim_of_nothing(claim, client, keys):
    client.lpush(keys.wake, *range(1000))

    assert claim() == []

    assert client.llen(keys.wake) == 1


@pytest.mark.parametrize("verb", ["nack", "snooze"])
def test_a_body_that_lasts_for_ever_and_a_day_is_put_off_like_others(verb, publish, claim, run, client, keys, where):
    publish("m")
    client.pexpireat(keys.msg("m"), 2**63 - 2**20)
    (held,) = claim()
    calls = {"nack": t.nack(keys, [(held, 5000, "failed 1 x", b"")]), "snooze": t.snooze(keys, [(held, 5000)])}

    assert run(calls[verb]).lost == ()

    assert client.pttl(keys.msg("m")) > FOR_EVER_MS


# ---- due times --------------------------------------------------------------


@pytest.mark.parametrize("at_ms", [0, 999_999_999_999])
@pytest.mark.parametrize("verb", ["nack", "snooze", "reschedule"])
def test_a_due_time_before_2001_destroys_nothing_when_another_is_written_over_it(
    verb, at_ms, publish, claim, run, client, keys
):
    publish("m", at_ms=at_ms)
    held = claim() if verb != "reschedule" else []
    calls = {
        "nack": lambda: t.nack(keys, [(held[0], 5, "failed 1 x", b"")], clock=NOON),
        "snooze": lambda: t.snooze(keys, [(held[0], 5)], clock=NOON),
        "reschedule": lambda: t.reschedule(keys, ["m"], delay_ms=5, clock=NOON),
    }
    assert open_envelope(client.get(keys.msg("m")))[0].due == 10**12

    run(calls[verb]())

    header, body = open_envelope(client.get(keys.msg("m")))
    assert (header.due, body) == (millis(5), b"m")


@pytest.mark.foreign_hands
@pytest.mark.parametrize("due", [b"0", b"99999999999999"])
def test_a_foreign_due_time_of_another_length_is_left_alone(due, publish, claim, run, client, keys):
    publish("m")
    value = b'RELIQ/1 {"d":' + due + b',"r":2}\n{"number":42}'
    client.set(keys.msg("m"), value)

    run(t.nack(keys, [(one, 0, "failed 1 x", b"") for one in claim()], clock=NOON))

    assert client.get(keys.msg("m")) == value


def test_the_time_to_live_runs_from_the_last_due_time_however_often_it_is_changed(publish, run, client, keys):
    publish("listed", ttl_ms=HOUR_MS)
    publish("planned", ttl_ms=HOUR_MS, delay_ms=HOUR_MS)
    for delay_ms in (60_000, 120_000, 600_000, 30_000):
        run(t.reschedule(keys, ["listed", "planned"], delay_ms=delay_ms, clock=micros()))

    left = [client.pttl(keys.msg(id)) for id in ("listed", "planned")]
    assert all(HOUR_MS - 30_000 < ms - 30_000 <= HOUR_MS for ms in left)
