"""Limits of a queue: concurrent messages of a key, concurrent messages of the queue, and changes of limits."""

import pytest
from held_clock import HOUR_MS, NOON, micros

from reliq.lua import transitions as t


def test_so_many_messages_of_a_key_run_at_once_and_of_a_priority_or_none_any_number(publish_under, serve, limit, ack):
    limit(per_key=2)
    for key in ("a", "", "\1high"):
        publish_under(key, *(f"{key}{number}" for number in range(3)))

    held = serve()

    assert (len(held), serve()) == (2 + 3 + 3, {})
    ack(held["a0"])
    assert [*serve()] == ["a2"]


def test_so_many_messages_of_the_queue_run_at_once_and_no_worker_wakes_for_more(
    publish_under, run, keys, claim_turn, serve, limit, ack, token
):
    limit(concurrency=3)
    publish_under("a", "a1", "a2")
    publish_under("b", "b1")
    publish_under("", "n1", "n2")
    token()

    answer = run(t.claim(keys, claim_turn(), limit=5, lease_ms=1000, clock=NOON))
    assert (len(answer.claimed), answer.behind, serve()) == (3, 0, {})
    publish_under("a", "a3")
    publish_under("", "n3")
    assert not token()

    ack(*answer.claimed)
    assert token()
    assert len(serve()) == 3


@pytest.mark.parametrize("verb", ["nack", "snooze", "release", "ack"])
def test_a_place_is_given_back_beside_a_late_receipt_of_another_key(verb, publish_under, serve, limit, run, keys, nack):
    limit(per_key=1)
    publish_under("a", "m")
    (late,) = serve().values()
    run(t.cancel(keys, ["m"], clock=NOON))
    nack(late, delay_ms=0)
    publish_under("b", "m")
    (held,) = serve().values()
    run(t.cancel(keys, ["m"], clock=NOON))

    if verb == "nack":
        run(t.nack(keys, [(one, 0, "failed 1 x", b"") for one in (held, late)], clock=NOON))
    elif verb == "snooze":
        run(t.snooze(keys, [(held, 0), (late, 0)], clock=NOON))
    elif verb == "release":
        run(t.release(keys, [held, late], clock=NOON))
    else:
        run(t.ack(keys, [(held, None), (late, None)], kind="expired", clock=NOON))

    publish_under("b", "next")
    assert [*serve()] == ["next"]


@pytest.mark.parametrize("end", ["ack", "nack", "bury", "snooze", "release", "expire", "reclaim", "cancel"])
def test_a_place_is_given_back_however_a_message_leaves_its_worker(
    end, publish_under, serve, limit, run, keys, client, nack, ack
):
    limit(per_key=1)
    publish_under("a", "a1", "a2")
    (held,) = serve().values()
    if end == "cancel":
        run(t.cancel(keys, ["a1"], clock=NOON))
    {
        "ack": lambda: ack(held),
        "nack": lambda: nack(held, delay_ms=HOUR_MS),
        "bury": lambda: nack(held, value=b"last"),
        "snooze": lambda: run(t.snooze(keys, [(held, HOUR_MS)], clock=NOON)),
        "release": lambda: run(t.release(keys, [held], clock=NOON)),
        "expire": lambda: run(t.ack(keys, [(held, None)], kind="expired", clock=NOON)),
        "reclaim": lambda: run(t.reclaim(keys, clock=micros(ms=HOUR_MS))),
        "cancel": lambda: nack(held, delay_ms=HOUR_MS),
    }[end]()

    assert client.zcard(keys.held) == 0
    assert [*serve()] == ["a1" if end in ("release", "reclaim") else "a2"]


# ---- changes --------------------------------------------------------------------


def test_raised_per_key_reaches_thousands_of_keys_whose_first_message_runs(publish_under, serve, run, keys, limit):
    """A change handles 1,000 keys, and promotes handle the others: each key starts its second message."""
    limit(per_key=1)
    names = [f"key-{number}" for number in range(3000)]
    for name in names:
        publish_under(name, f"{name}.1", f"{name}.2")
    while serve(500):
        pass

    assert limit(per_key=2) is True
    for _ in range(40):
        if run(t.promote(keys, clock=NOON))[1] != 0:
            break
    started = set()
    while some := serve(500):
        started |= {*some}

    assert started == {f"{name}.2" for name in names}


def test_a_declaration_replaces_all_limits_once_and_an_empty_value_removes_one(run, keys, client, limit):
    def now():
        return {name.decode(): value.decode() for name, value in client.hgetall(keys.limits).items()}

    first = t.limit(keys, {"per_key": "1", "weight:vip": "4", "weight:a": "2"}, declared="v1", clock=NOON)
    assert run(first) is True
    limit(per_key=9)
    assert run(first) is False
    fields = {"on": "1", "declared": "v1", "weight:vip": "4", "weighted": "1"}
    assert now() == fields | {"per_key": "9", "weight:a": "2"}

    run(t.limit(keys, {"weight:a": "", "per_key": ""}, clock=NOON))
    assert now() == fields
    run(t.limit(keys, {"weight:vip": ""}, clock=NOON))
    assert now() == {"on": "1", "declared": "v1"}
    assert run(t.limit(keys, {"rate_us": "5"}, declared="v2", clock=NOON)) is True
    assert now() == {"on": "1", "declared": "v2", "rate_us": "5"}


# ---- sleeping keys and queues ---------------------------------------------------


def test_a_sleeping_key_is_not_served_before_its_time(publish_under, serve, run, keys, due):
    publish_under("a", "a1", "a2")
    publish_under("b", "b1")
    first, second = serve(2).values()
    run(t.release(keys, [first], sleep_ms=30_000, clock=NOON))
    run(t.release(keys, [second], sleep_ms=10, clock=NOON))
    assert due(keys.asleep, "a") == NOON // 1000 + 30_000  # a shorter sleep does not shorten a longer sleep

    assert [*serve()] == ["b1"]
    assert run(t.promote(keys, clock=micros(ms=29_999))) == (0, 1)
    assert serve() == {}
    run(t.promote(keys, clock=micros(ms=30_000)))
    assert {*serve()} == {"a1", "a2"}


def test_the_queue_sleeps_for_a_message_without_a_key(publish_under, serve, run, keys, claim_turn, token):
    publish_under("", "n1")
    publish_under("a", "a1")
    held = serve()
    run(t.release(keys, [held["n1"]], sleep_ms=30_000, clock=NOON))
    run(t.release(keys, [held["a1"]], clock=NOON))
    token()

    answer = run(t.claim(keys, claim_turn(), limit=5, lease_ms=1000, watcher="me", clock=NOON))
    assert (answer.claimed, answer.behind, answer.promote_in_ms, token()) == ([], 0, 30_000, False)

    run(t.promote(keys, clock=micros(ms=30_000)))
    assert token()
    assert {*serve(clock=micros(ms=30_000))} == {"n1", "a1"}
