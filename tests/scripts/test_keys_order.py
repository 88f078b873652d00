"""Messages with keys come in order: of their publish, of their due times, and again after a failure."""

from itertools import islice

import pytest
from held_clock import HOUR_MS, NOON, micros, millis

from reliq import commands, transitions as t


def test_messages_of_a_key_come_in_the_order_of_their_publish_and_keys_take_turns(publish_under, serve):
    publish_under("a", "a1", "a2", "a3")
    publish_under("b", "b1", "b2")
    publish_under("", "none")

    assert [*serve()] == ["none", "a1", "a2", "b1", "a3", "b2"]


def test_a_claim_says_the_key_of_each_message(publish_under, serve, claim, publish):
    publish_under("a", "one")
    publish_under("", "none")

    assert {id: one.key for id, one in serve().items()} == {"one": "a", "none": ""}

    publish("plain")
    assert [one.key for one in claim()] == [None]


def test_a_plain_claim_leaves_messages_with_keys_where_they_are(publish_under, publish, claim, client, keys, serve):
    publish_under("a", "keyed")
    publish("plain")
    client.lpush(keys.ready, client.rpop(keys.line("a")))  # as an earlier version promotes it

    assert [one.id for one in claim()] == ["plain"]
    assert serve() == {}
    assert [*serve()] == ["keyed"]


def test_a_plain_reclaim_leaves_messages_with_keys_where_they_are(
    publish_under, publish, claim, serve, run, keys, where
):
    publish_under("a", "keyed")
    serve()
    publish("plain")
    claim()
    later = micros(ms=HOUR_MS)

    assert run(t.reclaim(keys, clock=later)).overdue == ("plain",)
    assert where() == {"unack": ["keyed"], "retry": ["plain"]}
    assert run(t.reclaim(keys, keyed=True, clock=later)).overdue == ("keyed",)


def test_an_ordered_key_has_one_message_at_a_time(publish_under, serve, limit, ack):
    limit(ordered=1)
    publish_under("a", "a1", "a2")
    publish_under("b", "b1")

    held = serve()
    assert [*held] == ["a1", "b1"]
    assert serve() == {}

    ack(held["a1"])
    assert [*serve()] == ["a2"]


def test_a_failing_message_holds_its_own_key_until_it_ends(publish_under, serve, limit, nack, run, keys, lines):
    limit(ordered=1)
    publish_under("a", "a1", "a2")
    publish_under("b", "b1", "b2")
    held = serve()
    nack(held["a1"], delay_ms=1000)
    assert run(t.ack(keys, [(held["b1"], None)], clock=NOON)).lost == ()

    assert [*serve()] == ["b2"]
    assert run(t.reclaim(keys, keyed=True, clock=micros(ms=1000))).again == ("a1",)
    assert lines() == {"a": ["a1", "a2"]}

    again = serve()
    assert [*again] == ["a1"]
    nack(again["a1"], value=b"last")
    assert [*serve()] == ["a2"]


def test_clock_that_goes_back_prolongs_a_backoff_and_holds_up_its_ordered_key_alone(
    publish_under, serve, limit, nack, ack, run, keys
):
    limit(ordered=1)
    publish_under("a", "a1", "a2")
    nack(serve()["a1"], delay_ms=1000)
    publish_under("b", "b1")
    hour_ago, due = micros(ms=5000 - HOUR_MS), micros(ms=1000)

    assert run(t.reclaim(keys, keyed=True, clock=hour_ago)).count == 0
    held = serve(clock=hour_ago)
    assert [*held] == ["b1"]
    ack(held["b1"], clock=hour_ago)

    assert run(t.reclaim(keys, keyed=True, clock=due)).count == 1
    assert [*serve(clock=due)] == ["a1"]


def test_without_order_a_failing_message_lets_others_of_its_key_pass(publish_under, serve, limit, nack):
    limit(per_key=1)
    publish_under("a", "a1", "a2")

    nack(serve()["a1"], delay_ms=1000)

    assert [*serve()] == ["a2"]


def test_a_snoozed_message_keeps_its_place_in_order_and_comes_back_foremost(publish_under, serve, limit, run, keys):
    limit(ordered=1)
    publish_under("a", "a1", "a2")
    run(t.snooze(keys, [(serve()["a1"], 1000)], clock=NOON))

    assert serve() == {}
    assert run(t.promote(keys, keyed=True, clock=micros(ms=1000))) == (1, -1)
    assert [*serve()] == ["a1"]


def test_released_messages_come_back_to_the_head_of_their_line_in_order(publish_under, serve, run, keys, lines):
    publish_under("a", "a1", "a2", "a3", "a4")
    held = serve(3)

    run(t.release(keys, [held["a1"], held["a2"], held["a3"]], clock=NOON))

    assert lines() == {"a": ["a1", "a2", "a3", "a4"]}


def test_messages_whose_worker_fell_silent_come_back_to_the_head_the_first_foremost(
    publish_under, serve, run, keys, lines
):
    publish_under("a", "a1", "a2", "a3")
    serve(1)
    serve(1, clock=micros(ms=1))

    run(t.reclaim(keys, keyed=True, clock=micros(ms=HOUR_MS)))

    assert lines() == {"a": ["a1", "a2", "a3"]}


def test_in_order_a_message_that_has_killed_two_workers_holds_its_key_while_it_waits(
    publish_under, serve, limit, run, keys
):
    limit(ordered=1)
    publish_under("a", "a1", "a2")
    for hours in (1, 2):
        assert [*serve(clock=micros(ms=HOUR_MS * (hours - 1)))] == ["a1"]
        run(t.reclaim(keys, keyed=True, clock=micros(ms=HOUR_MS * hours)))
    later = HOUR_MS * 2

    assert serve(clock=micros(ms=later)) == {}
    assert run(t.reclaim(keys, keyed=True, clock=micros(ms=later + 2000))).again == ("a1",)
    assert [*serve(clock=micros(ms=later + 2000))] == ["a1"]


def test_delayed_messages_come_in_the_order_of_their_due_times(publish_under, run, keys, serve):
    publish_under("a", "late", delay_ms=300)
    publish_under("a", "early", delay_ms=100)
    publish_under("a", "now")

    run(t.promote(keys, keyed=True, clock=micros(ms=300)))

    assert [*serve()] == ["now", "early", "late"]


@pytest.mark.parametrize("due", [{"delay_ms": 300}, {"at_ms": millis(300)}])
def test_messages_with_one_due_time_start_in_the_order_of_their_publishes(due, publish_under, run, keys, serve):
    publish_under("a", "event-1", "event-10", "event-2", **due)
    publish_under("b", "other", **due)
    publish_under("a", "0", **due)
    publish_under("", "plain", **due)
    publish_under("a", "00", "event-11", **due)

    assert run(t.promote(keys, keyed=True, clock=micros(ms=299)))[0] == 0
    assert run(t.promote(keys, keyed=True, clock=micros(ms=300)))[0] == 8

    assert [id for id, one in serve().items() if one.key == "a"] == [
        *("event-1", "event-10", "event-2", "0", "00", "event-11")
    ]


def test_thousands_of_messages_with_one_due_time_start_in_order(publish_under, run, keys, lines):
    ids = [f"event-{number}" for number in range(3000)]
    left = iter(ids)
    for size in (500, 500, 493, 500, 7, 499, 1, 500):
        publish_under("a", *islice(left, size), at_ms=millis(300))
    publish_under("a", "next", at_ms=millis(400))

    while run(t.promote(keys, keyed=True, clock=micros(ms=310)))[0]:
        pass

    assert lines() == {"a": ids}


def test_the_order_of_one_due_time_changes_no_due_time_that_is_read(publish_under, client, keys):
    ids = [f"event-{number}" for number in range(300)]
    publish_under("a", *ids, at_ms=millis(300))
    publish_under("a", "last", at_ms=millis(300))
    client.zrem(keys.pending, *ids)

    all_scores, first_score = commands.scores(keys, "pending", ["last"]), commands.first_score(keys, "pending")
    assert all_scores.parse(client.execute_command(*all_scores.command)) == [millis(300) / 1000]
    assert first_score.parse(client.execute_command(*first_score.command)) == millis(300) / 1000


def test_only_the_soonest_due_time_of_a_key_wakes_a_worker(publish_under, token):
    publish_under("a", "first", delay_ms=300)
    assert token()
    publish_under("a", "same", delay_ms=300)
    publish_under("a", "later", delay_ms=301)
    assert not token()
    publish_under("a", "sooner", delay_ms=299)
    assert token()


def test_a_delayed_message_that_an_earlier_version_promoted_finds_its_line(
    publish_under, run, keys, serve, lines, where
):
    publish_under("a", "a1", delay_ms=100)
    run(t.promote(keys, clock=micros(ms=100)))
    assert where() == {"ready": ["a1"]}

    assert serve() == {}
    assert lines() == {"a": ["a1"]}
    assert [*serve()] == ["a1"]


def test_a_snoozed_message_that_an_earlier_version_promoted_does_not_hold_its_own_key(
    publish_under, run, keys, serve, limit
):
    limit(ordered=1)
    publish_under("a", "a1", "a2")
    run(t.snooze(keys, [(serve()["a1"], 100)], clock=NOON))
    run(t.promote(keys, clock=micros(ms=100)))

    assert serve() == {}
    assert [*serve()] == ["a2"]


def test_a_purged_message_that_an_earlier_version_promoted_gives_its_place_up(
    publish_under, run, keys, serve, limit, nothing_is_left
):
    limit(ordered=1)
    publish_under("a", "a1")
    run(t.snooze(keys, [(serve()["a1"], 100)], clock=NOON))
    run(t.promote(keys, clock=micros(ms=100)))

    assert run(t.purge(keys, ["a1"], state="ready", clock=NOON)) == 1
    assert nothing_is_left() == []


def test_a_cancelled_message_of_a_line_is_dropped_where_it_is_met(publish_under, run, keys, serve, lines, total):
    publish_under("a", "a1", "a2")

    assert run(t.cancel(keys, ["a1"], clock=NOON)) == ["cancelled"]
    assert lines() == {"a": ["a1", "a2"]}
    assert [*serve()] == ["a2"]
    assert total("cancelled") == 1


def test_a_cancelled_message_that_waits_for_its_retry_gives_its_place_up(publish_under, run, keys, serve, limit, nack):
    limit(ordered=1)
    publish_under("a", "a1", "a2")
    nack(serve()["a1"], delay_ms=HOUR_MS)

    assert run(t.cancel(keys, ["a1"], clock=NOON)) == ["cancelled"]
    assert [*serve()] == ["a2"]


@pytest.fixture
def publish_again(publish_under, run, keys):
    """Cancel messages, then publish them again under a key."""

    def make(key, *ids, **options):
        run(t.cancel(keys, ids, clock=NOON))
        return publish_under(key, *ids, window_ms=HOUR_MS, **options)

    return make


def test_a_cancelled_message_that_is_published_again_goes_to_the_end_of_its_key(
    publish_under, publish_again, serve, lines, total
):
    publish_under("a", "a1", "a2", window_ms=HOUR_MS)
    publish_again("a", "a1", "a3")
    publish_again("a", "a2")

    assert lines() == {"a": ["a1", "a3", "a2"]}
    assert [*serve()] == ["a1", "a3", "a2"]
    assert (total("published"), total("cancelled")) == (5, 2)


@pytest.mark.parametrize(("old", "new"), [("a", "b"), ("a", ""), ("", "a")])
def test_a_cancelled_message_published_again_under_another_key_goes_to_its_end(
    old, new, publish_under, publish_again, serve, ack, limit, nothing_is_left
):
    limit(per_key=2)
    publish_under(old, "one", window_ms=HOUR_MS)
    publish_under(new, "two")
    publish_again(new, "one")

    held = serve()
    assert {id: one.key for id, one in held.items()} == {"two": new, "one": new}
    assert [*held] == ["two", "one"]
    ack(*held.values())
    assert nothing_is_left() == []


def test_a_cancelled_message_that_is_published_again_for_later_is_pending_at_once(
    publish_under, publish_again, where, lines, word, due, keys
):
    publish_under("a", "a1", "a2", window_ms=HOUR_MS)
    publish_again("a", "a1", delay_ms=300)

    assert (lines(), where()) == ({"a": ["a2"]}, {"pending": ["a1"]})
    assert (word("a1"), due(keys.pending, "a1")) == (None, millis(300))


def test_a_cancelled_message_far_from_the_head_of_its_key_keeps_its_place(publish_under, lines, run, keys):
    ids = [f"a{number}" for number in range(202)]
    publish_under("a", *ids, "new", window_ms=HOUR_MS)
    run(t.cancel(keys, [ids[199], ids[200], ids[201]], clock=NOON))
    more = [f"more{number}" for number in range(497)]
    publish_under("a", ids[199], ids[200], ids[201], *more, window_ms=HOUR_MS)

    assert lines() == {"a": [*ids[:199], *ids[200:], "new", ids[199], *more]}


def test_a_rescheduled_message_of_a_line_moves_to_pending_where_it_is_met(publish_under, run, keys, serve, where):
    publish_under("a", "a1", "a2")

    assert run(t.reschedule(keys, ["a1"], delay_ms=1000, clock=NOON)) == ["rescheduled"]
    assert [*serve()] == ["a2"]
    assert where() == {"pending": ["a1"], "unack": ["a2"]}


def test_a_redriven_message_comes_to_the_tail_of_the_line_that_its_header_names(
    publish_under, client, run, keys, lines
):
    publish_under("ä b", "a1")
    value = 'RELIQ/1 {"d":1800000000000,"r":3,"k":"ä b"}\nbody'.encode()
    letter = client.xadd(keys.dead, {"id": "died", "value": value, "note": "failed 1 x"}).decode()

    assert run(t.redrive(keys, [(letter, "died", 3)], ttl_ms=HOUR_MS, clock=NOON)) == ["redriven"]

    assert lines() == {"ä b": ["a1", "died"]}
    assert client.hget(keys.retries_left, "died") == "3 ä b".encode()


def test_a_line_is_purged_from_its_oldest_message_on(publish_under, run, keys, lines, total, serve):
    publish_under("a", "a1", "a2", "a3")
    publish_under("b", "b1")

    assert run(t.purge(keys, ["a1", "a2"], state="line", line="a", clock=NOON)) == 2
    assert lines() == {"a": ["a3"], "b": ["b1"]}
    assert run(t.purge(keys, ["a3"], state="line", line="a", clock=NOON)) == 1
    assert ([*serve()], total("purged")) == (["b1"], 3)


def test_what_waits_in_lines_is_counted_in_a_queue_with_keys_alone(publish_under, publish, run, keys):
    publish("plain")
    counts = run(t.counts(keys))
    assert (counts.waiting, counts.keyed, counts.alive) == (0, False, 1)

    publish_under("a", "a1", "a2")
    counts = run(t.counts(keys))
    assert (counts.ready, counts.waiting, counts.keyed, counts.alive) == (1, 2, True, 3)


def test_a_claim_that_is_made_again_gets_its_messages_with_their_keys(publish_under, run, keys):
    publish_under("a", "a1", "a2")
    again = t.claim(keys, t.CallNumber("lane", 1), limit=1, lease_ms=1000, keyed=True, clock=NOON)

    first, second = run(again).claimed, run(again).claimed

    assert first == second
    assert (first[0].id, first[0].key) == ("a1", "a")


def test_a_claim_of_a_spread_of_one_has_messages_of_one_key(publish_under, serve):
    for number in range(3):
        publish_under("a", f"a{number}")
        publish_under("b", f"b{number}")
        publish_under("", f"none{number}")

    claims = [[*serve(spread=1)] for _ in range(4)]

    assert sorted(map(sorted, claims)) == [[], *([f"{key}{n}" for n in range(3)] for key in ("a", "b", "none"))]


def test_nothing_is_left_of_a_key_when_its_messages_have_ended(
    publish_under, serve, limit, ack, nothing_is_left, client, keys
):
    limit(per_key=2)
    for key in "abc":
        publish_under(key, *(f"{key}{number}" for number in range(5)))

    while held := serve():
        ack(*held.values())

    assert nothing_is_left() == []
    assert {key.decode() for key in client.scan_iter(f"{keys.line('')[:-6]}*")} >= {keys.limits}


@pytest.mark.parametrize("verb", ["ack", "nack", "snooze", "release"])
def test_a_late_receipt_changes_nothing(verb, publish_under, serve, run, keys, limit, client):
    limit(ordered=1)
    publish_under("a", "a1", "a2")
    (late,) = serve(lease_ms=1000).values()
    run(t.reclaim(keys, keyed=True, clock=micros(ms=1000)))
    (held,) = serve(clock=micros(ms=1000)).values()
    calls = {
        "ack": t.ack(keys, [(late, None)]),
        "nack": t.nack(keys, [(late, 5, "failed 1 x", b"")]),
        "snooze": t.snooze(keys, [(late, 5)]),
        "release": t.release(keys, [late]),
    }

    assert run(calls[verb]).lost == ("a1",)

    assert client.zrange(keys.held, 0, -1) == [b"a\0a1"]
    assert run(t.ack(keys, [(held, None)])).lost == ()
