"""Every message ends once and is counted: collect, redrive, purge and expiry; and the janitor's work."""

import pytest
from held_clock import HOUR_MS, NOON, micros, millis

from reliq.lua import transitions as t


def test_an_acked_message_leaves_nothing_and_one_without_a_body_counts_as_expired(
    publish, claim, run, client, keys, total, where
):
    publish("acked", "gone")
    client.delete(keys.msg("gone"))
    acked, gone = claim()

    run(t.ack(keys, [(acked, None)]))
    run(t.ack(keys, [(gone, None)], kind="expired"))

    assert (where(), total("acked"), total("expired")) == ({}, 1, 1)
    assert {key.decode() for key in client.keys("*")} == {
        *(keys.totals, keys.wake, keys.token, keys.ends, keys.lane("publisher"), keys.lane("worker"))
    }


# ---- collect ----------------------------------------------------------------


def test_collect_turns_garbage_into_a_dead_letter_with_its_body_and_reason(bury, collect, client, keys, where, total):
    bury("m")
    value = client.get(keys.msg("m"))

    assert collect("m", "m") == (("m",), ())

    ((_, letter),) = client.xrange(keys.dead)
    assert letter == {b"id": b"m", b"value": value, b"note": f"rejected 1 bad card\x1d{NOON // 1000}".encode()}
    assert where() == {"dead": ["m"]}
    assert client.keys(keys.msg("*")) == client.hkeys(keys.errors) == []
    assert total("dead") == 1


def test_the_oldest_dead_letters_go_when_there_are_too_many_or_they_are_too_old(bury, collect, where, total):
    bury("a", "b", "c", "d")

    collect("a", "b", "c", dead_letter_limit=2)
    assert (where()["dead"], total("dead"), total("letters_dropped")) == (["b", "c"], 3, 1)
    collect(letters_ms=HOUR_MS, clock=micros(HOUR_MS - 1))
    assert where()["dead"] == ["b", "c"]
    collect(letters_ms=HOUR_MS, clock=micros(HOUR_MS))
    assert (where(), total("letters_dropped")) == ({"garbage": ["d"]}, 3)

    assert collect("d", dead_letter_limit=0) == (("d",), ())
    assert (where(), total("dead")) == ({}, 4)


# ---- redrive ----------------------------------------------------------------


@pytest.mark.foreign_hands
def test_a_redriven_dead_letter_is_a_message_again_once(die, run, claim, where, total, client, keys):
    def redrive(*letters):
        return run(t.redrive(keys, letters, ttl_ms=HOUR_MS, clock=NOON))

    letter, later = die("m"), die("m")
    assert redrive((letter, "another", 7), ("1-1", "m", 7)) == ["not_found", "not_found"]
    assert where() == {"dead": ["m", "m"]}

    client.hset(keys.lease, "m", "!")  # a leftover that would cancel the message
    assert redrive((letter, "m", 7), (letter, "m", 7), (later, "m", 7)) == ["redriven", "not_found", "alive"]
    assert redrive((letter, "m", 7)) == ["not_found"]

    assert (where(), total("redriven")) == ({"ready": ["m"], "dead": ["m"]}, 1)
    assert [(one.id, one.left) for one in claim()] == [("m", 7)]
    assert client.get(keys.msg("m")).endswith(b"\nm")


# ---- tidy -------------------------------------------------------------------


def test_tidy_pulls_back_a_lease_that_ends_too_far_ahead(publish, claim, run, keys, due, where):
    publish("far", "cancelled", "fine")
    claim(limit=2, lease_ms=1000, clock=micros(HOUR_MS))
    run(t.cancel(keys, ["cancelled"]))
    claim(limit=1, lease_ms=1000)

    assert run(t.tidy(keys, clock=NOON)) == (0, 0, 2, 0)

    assert {due(keys.unack, id) for id in where()["unack"]} == {millis(1000)}
    assert len(where()["unack"]) == 3


@pytest.mark.foreign_hands
def test_tidy_removes_state_words_without_a_message_a_piece_at_a_time(publish, claim, bury, run, client, keys):
    publish("held")
    claim()
    bury("garbage")
    client.hset(keys.lease, mapping={"garbage": "w.1:5"} | {f"orphan-{number}": "w.1:5" for number in range(2000)})
    client.hset(keys.errors, "orphan-7", "failed 1 x")
    client.hdel(keys.retries_left, "held")

    cursor, swept, calls = 0, 0, 0
    while calls == 0 or cursor:
        _, cursor, _, more = run(t.tidy(keys, lease_cursor=cursor))
        swept, calls = swept + more, calls + 1

    assert (swept, calls > 5) == (2000, True)
    assert set(client.hkeys(keys.lease)) == {b"held", b"garbage"}
    assert client.hkeys(keys.errors) == [b"garbage"]
