"""Limits of a queue: so many messages of a key at once, so many of the queue, and how they are changed."""

import pytest
from held_clock import HOUR_MS, NOON, micros

from reliq import transitions as t


def test_so_many_messages_of_a_key_run_at_once(publish_under, serve, limit, ack):
    limit(per_key=2)
    publish_under("a", "a1", "a2", "a3")
    publish_under("b", "b1")

    held = serve()
    assert {*held} == {"a1", "a2", "b1"}
    assert serve() == {}

    ack(held["b1"])
    assert serve() == {}
    ack(held["a1"])
    assert [*serve()] == ["a3"]


def test_messages_without_a_key_and_priorities_have_no_limit_of_a_key(publish_under, serve, limit):
    limit(per_key=1, ordered=1)
    publish_under("", "n1", "n2")
    publish_under("\1high", "h1", "h2")

    assert {*serve()} == {"n1", "n2", "h1", "h2"}


def test_so_many_messages_of_the_queue_run_at_once_whatever_their_key(publish_under, publish, serve, limit, ack, token):
    limit(concurrency=3)
    publish_under("a", "a1", "a2")
    publish_under("b", "b1")
    publish("n1", "n2")
    token()

    held = serve()
    assert len(held) == 3
    assert serve() == {}
    assert not token()

    ack(*held.values())
    assert token()
    assert len(serve()) == 2


def test_a_claim_that_has_used_the_places_up_says_that_nothing_is_left(publish_under, run, keys, claim_turn, limit):
    limit(concurrency=1)
    publish_under("a", "a1", "a2")

    answer = run(t.claim(keys, claim_turn(), limit=5, lease_ms=1000, keyed=True, clock=NOON))

    assert (len(answer.claimed), answer.behind) == (1, 0)


def test_a_message_in_backoff_that_keeps_its_key_does_not_hold_the_queue(publish_under, serve, limit, nack):
    limit(ordered=1, concurrency=1)
    publish_under("a", "a1", "a2")
    publish_under("b", "b1")
    nack(serve()["a1"], delay_ms=HOUR_MS)

    assert [*serve()] == ["b1"]


@pytest.mark.parametrize("end", ["ack", "nack", "bury", "snooze", "release", "expire", "reclaim", "cancel"])
def test_a_place_is_given_back_however_a_message_leaves_its_worker(
    end, publish_under, serve, limit, run, keys, client, nack, ack
):
    limit(per_key=1)
    publish_under("a", "a1", "a2")
    (held,) = serve().values()
    if end == "cancel":
        run(t.cancel(keys, ["a1"], clock=NOON))
    later = NOON
    {
        "ack": lambda: ack(held),
        "nack": lambda: nack(held, delay_ms=HOUR_MS),
        "bury": lambda: nack(held, value=b"last"),
        "snooze": lambda: run(t.snooze(keys, [(held, HOUR_MS)], clock=NOON)),
        "release": lambda: run(t.release(keys, [held], clock=NOON)),
        "expire": lambda: run(t.ack(keys, [(held, None)], kind="expired", clock=NOON)),
        "reclaim": lambda: run(t.reclaim(keys, keyed=True, clock=micros(ms=HOUR_MS))),
        "cancel": lambda: nack(held, delay_ms=HOUR_MS),
    }[end]()

    assert client.zcard(keys.held) == 0
    first = "a1" if end in ("release", "reclaim") else "a2"
    assert [*serve(clock=later)] == [first]


def test_raised_limits_serve_the_keys_that_had_no_place(publish_under, serve, limit, token):
    limit(per_key=1)
    publish_under("a", "a1", "a2", "a3")
    publish_under("b", "b1", "b2")
    serve()
    token()
    assert serve() == {}

    assert limit(per_key=3)

    assert token()
    assert {*serve()} == {"a2", "a3", "b2"}


def test_raised_per_key_reaches_thousands_of_keys_whose_first_message_runs(publish_under, serve, run, keys, limit):
    """A change looks at 1,000 keys, and promotes go on with the others: each key starts its second message."""
    limit(per_key=1)
    names = [f"key-{number}" for number in range(3000)]
    for name in names:
        publish_under(name, f"{name}.1", f"{name}.2")
    while serve(500):
        pass

    limit(per_key=2)
    for _ in range(40):
        if run(t.promote(keys, keyed=True, clock=NOON))[1] != 0:
            break
    started = set()
    while some := serve(500):
        started |= {*some}

    assert started == {f"{name}.2" for name in names}


def test_lowered_limits_hold_from_then_on(publish_under, serve, limit, ack):
    publish_under("a", "a1", "a2", "a3")
    held = serve(2)
    limit(per_key=1)

    assert serve() == {}
    ack(held["a1"])
    assert serve() == {}
    ack(held["a2"])
    assert [*serve()] == ["a3"]


def test_a_declaration_takes_the_place_of_all_limits_once(run, keys, client, limit):
    first = t.limit(keys, {"per_key": "1", "weight:vip": "4"}, declared="v1", clock=NOON)

    assert run(first) is True
    limit(per_key=9)
    assert run(first) is False
    assert client.hgetall(keys.limits) == {
        b"on": b"1", b"declared": b"v1", b"per_key": b"9", b"weight:vip": b"4", b"weighted": b"1",
    }  # fmt: skip
    assert run(t.limit(keys, {"rate_us": "5"}, declared="v2", clock=NOON)) is True
    assert client.hgetall(keys.limits) == {b"on": b"1", b"declared": b"v2", b"rate_us": b"5"}


def test_an_empty_value_removes_a_limit_and_a_weight(run, keys, client, limit):
    run(t.limit(keys, {"weight:a": "2", "weight:b": "3", "per_key": "1"}, clock=NOON))

    run(t.limit(keys, {"weight:a": "", "per_key": ""}, clock=NOON))
    assert client.hgetall(keys.limits) == {b"on": b"1", b"weight:b": b"3", b"weighted": b"1"}
    run(t.limit(keys, {"weight:b": ""}, clock=NOON))
    assert client.hgetall(keys.limits) == {b"on": b"1"}


def test_a_key_that_was_told_to_sleep_is_not_served_until_it_wakes(publish_under, serve, run, keys, token):
    publish_under("a", "a1", "a2")
    publish_under("b", "b1")
    held = serve(1)
    run(t.release(keys, [*held.values()], sleep_ms=30_000, clock=NOON))

    assert [*serve()] == ["b1"]
    assert run(t.promote(keys, keyed=True, clock=micros(ms=29_999))) == (0, 1)
    assert serve() == {}
    run(t.promote(keys, keyed=True, clock=micros(ms=30_000)))
    assert [*serve()] == ["a1", "a2"]


def test_a_shorter_sleep_does_not_end_a_longer_one(publish_under, serve, run, keys, due):
    publish_under("a", "a1", "a2")
    first, second = serve().values()

    run(t.release(keys, [first], sleep_ms=30_000, clock=NOON))
    run(t.release(keys, [second], sleep_ms=10, clock=NOON))

    assert due(keys.asleep, "a") == NOON // 1000 + 30_000


def test_of_a_message_without_a_key_the_queue_sleeps(publish_under, serve, run, keys, claim_turn, token):
    publish_under("", "n1")
    publish_under("a", "a1")
    held = serve()
    run(t.release(keys, [held["n1"]], sleep_ms=30_000, clock=NOON))
    run(t.release(keys, [held["a1"]], clock=NOON))
    token()

    answer = run(t.claim(keys, claim_turn(), limit=5, lease_ms=1000, watcher="me", keyed=True, clock=NOON))
    assert (answer.claimed, answer.behind, answer.promote_in_ms) == ([], 0, 30_000)
    assert not token()

    run(t.promote(keys, keyed=True, clock=micros(ms=30_000)))
    assert token()
    assert {*serve(clock=micros(ms=30_000))} == {"n1", "a1"}


def test_a_producer_wakes_nobody_while_the_places_of_the_queue_are_taken(publish_under, serve, limit, token):
    limit(concurrency=1)
    publish_under("a", "a1")
    serve()
    token()

    publish_under("a", "a2")
    publish_under("", "n1")

    assert not token()
