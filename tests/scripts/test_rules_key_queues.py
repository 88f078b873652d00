"""The number of waiting messages of each key, the reason of the wait, and keys that an operator paused."""

import pytest
from held_clock import NOON, micros

from reliq.lua import transitions as t

pytestmark = pytest.mark.foreign_hands

MINUTE_MS = 60_000


@pytest.fixture
def look(run, keys):
    """Return the state of the key queues."""
    return lambda clock=NOON, **options: run(t.key_queues(keys, clock=clock, **options))


def test_the_largest_lines_come_first_with_the_messages_in_flight_of_each(publish_under, publish, serve, look):
    publish("a")
    assert look() == t.KeyQueues([], 0, 0, 0)
    serve()
    publish_under("small", "s1")
    publish_under("large", "l1", "l2", "l3")
    publish_under("worked", "w1", "w2")
    serve(3)

    seen = look(most=2)

    rows = [(one.key, one.waiting, one.in_flight, one.state) for one in seen.largest]
    assert rows == [("large", 2, 1, "in turn"), ("worked", 1, 1, "in turn")]
    assert (seen.in_turn, seen.asleep, seen.running, seen.is_full) == (2, 0, 3, False)
    assert [one.key for one in look().largest] == ["large", "worked", "small"]
    assert seen.next in ("l2", "w2")


def test_the_first_message_of_a_sleeping_or_saturated_key_is_held_up(publish_under, limit, serve, run, keys):
    limit(per_key=1)
    publish_under("taken", "t1", "t2", "t3")
    publish_under("alone", "a1")
    serve(5)
    publish_under("asleep", "s1", "s2")
    publish_under("paused", "p1")
    publish_under("in-turn", "i1")
    run(t.sleep(keys, "asleep", for_ms=MINUTE_MS, clock=NOON))
    for key in ("paused", "empty"):
        run(t.sleep(keys, key, for_ms=None, clock=NOON))

    assert run(t.held_up(keys, most=9)) == {"taken": "t2", "asleep": "s1", "paused": "p1"}
    assert set(run(t.held_up(keys, most=2))) - {"taken"} == {"paused"}  # and `empty`, which sleeps as long
    named = ["asleep", "in-turn", "empty", "alone", "nobody", "asleep"]
    assert set(run(t.held_up(keys, most=1, of=named))) - {"taken", "paused"} == {"asleep"}


def test_a_line_has_the_state_of_its_key_and_named_keys_are_answered_in_order(
    publish_under, limit, serve, client, keys, look
):
    limit(per_key=1, concurrency=2, **{"weight:vip": 4})
    publish_under("taken", "t1", "t2")
    serve(1)
    publish_under("turn", "a1")
    publish_under("lost", "b1")
    client.zrem(keys.ring, "lost")
    assert not look().is_full

    lines = look(of=["nobody", "turn", "vip", "taken", "lost"]).largest

    assert [(one.state, one.waiting, one.in_flight, one.weight) for one in lines] == [
        ("empty", 0, 0, 1),
        ("in turn", 1, 0, 1),
        ("empty", 0, 0, 4),
        ("saturated", 1, 1, 1),
        ("standing", 1, 0, 1),
    ]
    serve(1)
    assert look().is_full


def test_a_key_that_sleeps_is_not_served_until_its_time_has_come(publish_under, serve, run, keys, look, client, token):
    publish_under("a", "a1")
    publish_under("b", "b1")
    token()
    client.set(keys.watch, "another", px=2000)

    assert run(t.sleep(keys, "a", for_ms=MINUTE_MS, clock=NOON)) is False
    assert (client.exists(keys.watch), token()) == (0, True)  # a process watches its due time

    assert [*serve(5)] == ["b1"]
    [line] = look(of=["a"]).largest
    assert (line.state, line.asleep_until) == ("asleep", NOON / 10**6 + 60)
    later = micros(ms=MINUTE_MS)
    run(t.promote(keys, clock=later))
    assert [*serve(5, clock=later)] == ["a1"]


def test_a_key_that_is_paused_without_an_end_stays_so_until_it_is_woken(publish_under, serve, run, keys, look, dump):
    publish_under("a", "a1")
    before = dump()
    assert run(t.sleep(keys, "a", for_ms=0, clock=NOON)) is False
    assert dump() == before

    run(t.sleep(keys, "a", for_ms=None, clock=NOON))
    publish_under("a", "a2")
    years = micros(ms=10**11)
    run(t.promote(keys, clock=years))

    assert serve(5, clock=years) == {}
    assert (look().largest[0].state, look().largest[0].asleep_until, look().asleep) == ("paused", None, 1)
    assert run(t.sleep(keys, "a", for_ms=0, clock=NOON)) is True
    assert [*serve(5)] == ["a1", "a2"]


def test_a_look_at_very_many_keys_is_bounded_and_finds_the_largest_line(client, keys, publish_under, look):
    publish_under("noisy", *(f"n{at}" for at in range(400)))
    with client.pipeline(transaction=False) as many:
        for id in (f"q{at}" for at in range(1000)):
            many.lpush(keys.line(id), id).zadd(keys.ring, {id: 1}).hset(keys.retries_left, id, f"3 {id}")
        many.execute()
    client.zrem(keys.ring, "noisy")
    before = client.info("commandstats").get("cmdstat_llen", {}).get("calls", 0)

    seen = look()

    assert client.info("commandstats")["cmdstat_llen"]["calls"] - before <= 500
    assert (seen.largest[0].key, seen.largest[0].waiting) == ("noisy", 400)
    assert (len(seen.largest), seen.in_turn) == (10, 1000)


def test_a_key_with_a_message_in_flight_is_met_among_thousands_without_a_key(publish_under, serve, client, keys, look):
    publish_under("rare", "r1")
    serve(1)
    client.hset(keys.retries_left, mapping={f"n{at}": 3 for at in range(5000)})

    assert [(one.key, one.waiting, one.in_flight) for one in look().largest] == [("rare", 0, 1)]
