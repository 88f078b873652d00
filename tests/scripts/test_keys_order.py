"""Messages with keys start in the order of their publishes or due times, also after a failure."""

from itertools import islice

import pytest
from held_clock import HOUR_MS, NOON, micros, millis

from reliq.admin import calls
from reliq.lua import transitions as t
from reliq.redis import commands
from reliq.wire_format import envelope_rest


def test_messages_of_a_key_come_in_the_order_of_their_publish_and_keys_take_turns(publish_under, serve, claim, publish):
    publish_under("a", "a1", "a2", "a3")
    publish_under("b", "b1", "b2")
    publish_under("", "none")

    assert [(id, one.key) for id, one in serve().items()] == [
        *(("none", ""), ("a1", "a"), ("a2", "a"), ("b1", "b"), ("a3", "a"), ("b2", "b"))
    ]
    publish("plain")
    assert [one.key for one in claim()] == [""]


# ---- one at a time ----------------------------------------------------------------


def test_a_clock_that_goes_back_holds_up_only_the_ordered_key_of_a_backoff(
    publish_under, serve, limit, nack, ack, run, keys
):
    limit(ordered=1)
    publish_under("a", "a1", "a2")
    nack(serve()["a1"], delay_ms=1000)
    publish_under("b", "b1")
    hour_ago, due = micros(ms=5000 - HOUR_MS), micros(ms=1000)

    assert run(t.reclaim(keys, clock=hour_ago)).count == 0
    held = serve(clock=hour_ago)
    assert [*held] == ["b1"]
    ack(held["b1"], clock=hour_ago)

    assert run(t.reclaim(keys, clock=due)).count == 1
    assert [*serve(clock=due)] == ["a1"]


@pytest.mark.parametrize("how", ["nack", "snooze"])
def test_a_waiting_message_that_is_replaced_under_another_key_frees_its_place(
    publish_under, serve, limit, nack, run, keys, client, how
):
    limit(ordered=1)
    publish_under("a", "a1", "a2")
    (held,) = serve().values()
    nack(held, delay_ms=1000) if how == "nack" else run(t.snooze(keys, [(held, 1000)], clock=NOON))
    assert not serve()

    items = [("a1", envelope_rest(3, NOON // 1000, 0, line="b") + b"new")]
    options = {"mode": "replace", "ttl_ms": HOUR_MS, "retries": 3, "message_keys": ["b"], "clock": NOON}
    assert run(t.replace(keys, items, t.CallNumber("replace", 1), **options)).refused == {0: "replaced"}

    assert not client.zscore(keys.held, "a\0a1")
    assert [*serve()] == ["a2"]


# ---- back to the head of the key queue ------------------------------------------


def test_released_and_reclaimed_messages_return_to_the_head_of_their_line(publish_under, serve, run, keys, lines):
    publish_under("a", "a1", "a2", "a3", "a4")
    run(t.release(keys, [*serve(3).values()], clock=NOON))
    assert lines() == {"a": ["a1", "a2", "a3", "a4"]}

    serve(1)
    serve(2, clock=micros(ms=1))
    run(t.reclaim(keys, clock=micros(ms=HOUR_MS)))

    assert lines() == {"a": ["a1", "a2", "a3", "a4"]}


# ---- due times --------------------------------------------------------------------


@pytest.mark.parametrize("due", [{"delay_ms": 300}, {"at_ms": millis(300)}], ids=["delay", "date"])
def test_delayed_messages_start_by_due_time_then_in_the_order_of_their_publishes(due, publish_under, run, keys, serve):
    publish_under("a", "late", delay_ms=301)
    publish_under("a", "event-1", "event-10", "event-2", **due)
    publish_under("b", "other", **due)
    publish_under("a", "0", **due)
    publish_under("", "plain", **due)
    publish_under("a", "00", "event-11", **due)
    publish_under("a", "now")

    assert run(t.promote(keys, clock=micros(ms=299)))[0] == 0
    assert run(t.promote(keys, clock=micros(ms=300)))[0] == 8
    assert run(t.promote(keys, clock=micros(ms=301)))[0] == 1

    assert [id for id, one in serve().items() if one.key == "a"] == [
        *("now", "event-1", "event-10", "event-2", "0", "00", "event-11", "late")
    ]


def test_thousands_of_messages_with_one_due_time_start_in_order(publish_under, run, keys, lines):
    ids = [f"event-{number}" for number in range(3000)]
    left = iter(ids)
    for size in (500, 500, 493, 500, 7, 499, 1, 500):
        publish_under("a", *islice(left, size), at_ms=millis(300))
    publish_under("a", "next", at_ms=millis(400))

    while run(t.promote(keys, clock=micros(ms=310)))[0]:
        pass

    assert lines() == {"a": ids}


def test_the_order_of_one_due_time_changes_no_due_time_that_is_read(publish_under, client, keys):
    ids = [f"event-{number}" for number in range(300)]
    publish_under("a", *ids, at_ms=millis(300))
    publish_under("a", "last", at_ms=millis(300))
    client.zrem(keys.pending, *ids)

    all_scores, first_score = calls.scores(keys, "pending", ["last"]), commands.first_score(keys, "pending")
    assert all_scores.parse(client.execute_command(*all_scores.command)) == [millis(300) / 1000]
    assert first_score.parse(client.execute_command(*first_score.command)) == millis(300) / 1000


def test_only_the_soonest_due_time_of_a_key_wakes_a_worker(publish_under, token):
    woken = [(publish_under("a", f"m{at}", delay_ms=ms), token())[1] for at, ms in enumerate((300, 300, 301, 299))]

    assert woken == [True, False, False, True]


# ---- cancelled, rescheduled, redriven, purged -------------------------------------


def test_cancelled_and_rescheduled_messages_leave_their_line_where_they_are_met(
    publish_under, run, keys, serve, lines, where, total
):
    publish_under("a", "a1", "a2", "a3")

    assert run(t.cancel(keys, ["a1"], clock=NOON)) == ["cancelled"]
    assert run(t.reschedule(keys, ["a2"], delay_ms=1000, clock=NOON)) == ["rescheduled"]
    assert lines() == {"a": ["a1", "a2", "a3"]}

    assert [*serve()] == ["a3"]
    assert (where(), total("cancelled")) == ({"pending": ["a2"], "unack": ["a3"]}, 1)


def test_a_cancelled_message_that_is_published_again_for_later_is_pending_at_once(
    publish_under, run, client, where, lines, due, keys
):
    publish_under("a", "a1", "a2", window_ms=HOUR_MS)
    run(t.cancel(keys, ["a1"], clock=NOON))
    publish_under("a", "a1", window_ms=HOUR_MS, delay_ms=300)

    assert (lines(), where()) == ({"a": ["a2"]}, {"pending": ["a1"]})
    assert (client.hget(keys.lease, "a1"), due(keys.pending, "a1")) == (None, millis(300))


def test_a_cancelled_message_far_from_the_head_of_its_key_keeps_its_place(publish_under, lines, run, keys):
    ids = [f"a{number}" for number in range(202)]
    publish_under("a", *ids, "new", window_ms=HOUR_MS)
    run(t.cancel(keys, [ids[199], ids[200], ids[201]], clock=NOON))
    more = [f"more{number}" for number in range(497)]
    publish_under("a", ids[199], ids[200], ids[201], *more, window_ms=HOUR_MS)

    assert lines() == {"a": [*ids[:199], *ids[200:], "new", ids[199], *more]}


@pytest.mark.foreign_hands
@pytest.mark.parametrize(
    ("key", "line"),
    [("ä b", "ä b"), ("k" * 128, "k" * 128), ("k" * 129, None), ("a\\u0000b", None)],
    ids=["text", "128 bytes", "129 bytes", "control character"],
)
def test_a_redriven_message_comes_to_the_end_of_the_line_that_its_header_names(
    key, line, publish_under, client, run, keys, lines, where
):
    publish_under(line or "a", "a1")
    value = f'RELIQ/1 {{"d":1800000000000,"r":3,"k":"{key}"}}\nbody'.encode()
    letter = client.xadd(keys.dead, {"id": "died", "value": value, "note": "failed 1 x"}).decode()

    assert run(t.redrive(keys, [(letter, "died", 3)], ttl_ms=HOUR_MS, clock=NOON)) == ["redriven"]

    if line:
        assert lines() == {line: ["a1", "died"]}
    else:
        assert where() == {"ready": ["died"]}
    assert client.hget(keys.retries_left, "died") == (f"3 {line}" if line else "3").encode()


# ---- counts and claims ------------------------------------------------------------


def test_a_claim_of_a_spread_of_one_has_messages_of_one_key(publish_under, serve):
    for number in range(3):
        for key, name in (("a", "a"), ("b", "b"), ("", "none")):
            publish_under(key, f"{name}{number}")

    claims = [[*serve(spread=1)] for _ in range(4)]

    assert sorted(map(sorted, claims)) == [[], *([f"{key}{n}" for n in range(3)] for key in ("a", "b", "none"))]


def test_a_look_keeps_the_number_of_the_next_claim_free_and_a_late_claim_gets_none(publish_under, run, keys):
    def claim(number, limit=9):
        turn = t.CallNumber("w", number)
        return [one.id for one in run(t.claim(keys, turn, limit=limit, lease_ms=9000, clock=NOON)).claimed]

    publish_under("a", "a1")
    assert claim(1) == ["a1"]
    publish_under("a", "a2")

    assert (claim(2, limit=0), claim(2), claim(3)) == ([], ["a2"], [])
    publish_under("a", "a3")
    assert claim(2) == []


def test_a_suspect_with_a_key_keeps_its_deaths_through_a_release(publish_under, serve, run, keys):
    publish_under("a", "m")
    serve(lease_ms=1)
    run(t.reclaim(keys, clock=micros(ms=1)))

    run(t.release(keys, serve().values()))

    assert [one.deaths for one in serve().values()] == [1]
