"""How many messages of which key wait, and why; and one key that sleeps because somebody says so."""

import pytest
from held_clock import NOON, micros

from reliq import transitions as t

pytestmark = pytest.mark.foreign_hands

MINUTE_MS = 60_000


@pytest.fixture
def publish_under(publish):
    """Publish messages under a key."""
    return lambda key, *ids: publish(*ids, message_keys=[key] * len(ids))


@pytest.fixture
def look(run, keys):
    """Look at the lines."""
    return lambda clock=NOON, **options: run(t.lines(keys, clock=clock, **options))


@pytest.fixture
def limit(client, keys):
    """Set limits by hand."""
    return lambda **fields: client.hset(keys.limits, mapping={"on": 1, **fields})


def test_the_largest_lines_come_first_with_what_runs_of_each(publish_under, claim, look):
    publish_under("small", "s1")
    publish_under("large", "l1", "l2", "l3")
    publish_under("worked", "w1", "w2")
    claim(3, keyed=True)

    seen = look(most=2)

    assert [(one.key, one.waiting, one.in_flight, one.state) for one in seen.largest] == [
        ("large", 2, 1, "in turn"),
        ("worked", 1, 1, "in turn"),
    ]
    assert (seen.in_turn, seen.asleep, seen.running, seen.is_full) == (2, 0, 3, False)
    assert [one.key for one in look().largest] == ["large", "worked", "small"]
    assert seen.next in ("l2", "w2")


def test_a_queue_without_keys_has_no_lines(publish, look):
    publish("a", "b")

    assert look() == t.KeyLines([], 0, 0, 0)


def test_what_is_held_up_is_first_under_a_key_that_sleeps_or_whose_places_are_taken(
    publish_under, limit, claim, run, keys
):
    limit(per_key=1)
    publish_under("taken", "t1", "t2", "t3")
    publish_under("alone", "a1")
    claim(5, keyed=True)
    publish_under("asleep", "s1", "s2")
    publish_under("paused", "p1")
    publish_under("in-turn", "i1")
    run(t.sleep(keys, "asleep", for_ms=MINUTE_MS, clock=NOON))
    for key in ("paused", "empty"):
        run(t.sleep(keys, key, for_ms=None, clock=NOON))

    every = {"taken": "t2", "asleep": "s1", "paused": "p1"}
    assert run(t.held_up(keys, most=9)) == every
    assert set(run(t.held_up(keys, most=2))) - {"taken"} == {"paused"}  # and `empty`, which sleeps as long
    named = ["asleep", "in-turn", "empty", "alone", "nobody", "asleep"]
    assert set(run(t.held_up(keys, most=1, of=named))) - {"taken", "paused"} == {"asleep"}


def test_keys_that_are_named_are_told_in_their_order_though_nothing_waits(publish_under, limit, look):
    limit(**{"weight:vip": 4, "weighted": 1})
    publish_under("a", "a1")

    nobody, a, vip = look(of=["nobody", "a", "vip"]).largest

    assert (nobody.state, nobody.waiting, nobody.weight) == ("empty", 0, 1)
    assert (a.state, a.waiting) == ("in turn", 1)
    assert (vip.state, vip.weight) == ("empty", 4)


def test_a_key_whose_places_are_taken_is_saturated(publish_under, limit, claim, look):
    limit(per_key=1)
    publish_under("a", "a1", "a2")
    claim(5, keyed=True)

    [line] = look().largest

    assert (line.state, line.waiting, line.in_flight) == ("saturated", 1, 1)


def test_a_line_that_nothing_holds_up_and_that_is_not_served_stands(publish_under, client, keys, look):
    publish_under("a", "a1")
    client.zrem(keys.ring, "a")

    assert look().largest[0].state == "standing"


def test_a_queue_whose_concurrency_is_used_up_is_full(publish_under, limit, claim, look):
    limit(concurrency=1)
    publish_under("a", "a1", "a2")
    claim(5, keyed=True)

    assert look().is_full


def test_a_key_that_sleeps_is_not_served_until_its_time_has_come(publish_under, claim, run, keys, look):
    publish_under("a", "a1")
    publish_under("b", "b1")

    assert run(t.sleep(keys, "a", for_ms=MINUTE_MS, clock=NOON)) is False

    assert [one.id for one in claim(5, keyed=True)] == ["b1"]
    [line] = look(of=["a"]).largest
    assert (line.state, line.asleep_until) == ("asleep", NOON / 10**6 + 60)
    later = micros(ms=MINUTE_MS)
    run(t.promote(keys, keyed=True, clock=later))
    assert [one.id for one in claim(5, keyed=True, clock=later)] == ["a1"]


def test_a_key_that_is_paused_without_an_end_stays_so_until_it_is_woken(publish_under, claim, run, keys, look):
    publish_under("a", "a1")
    run(t.sleep(keys, "a", for_ms=None, clock=NOON))
    publish_under("a", "a2")
    years = micros(ms=10**11)
    run(t.promote(keys, keyed=True, clock=years))

    assert list(claim(5, keyed=True, clock=years)) == []
    assert (look().largest[0].state, look().largest[0].asleep_until, look().asleep) == ("paused", None, 1)
    assert run(t.sleep(keys, "a", for_ms=0, clock=NOON)) is True
    assert [one.id for one in claim(5, keyed=True)] == ["a1", "a2"]


def test_a_key_that_sleeps_sooner_than_all_others_has_somebody_watch_for_it(publish_under, run, keys, client, token):
    publish_under("a", "a1")
    token()
    client.set(keys.watch, "somebody", px=2000)

    run(t.sleep(keys, "a", for_ms=MINUTE_MS, clock=NOON))

    assert client.exists(keys.watch) == 0
    assert token()


def test_a_wake_of_a_key_that_did_not_sleep_changes_nothing(publish_under, run, keys, dump):
    publish_under("a", "a1")
    before = dump()

    assert run(t.sleep(keys, "a", for_ms=0, clock=NOON)) is False

    assert dump() == before


def test_a_look_at_very_many_keys_is_bounded_and_finds_the_one_that_has_most(client, keys, publish_under, look):
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
    assert len(seen.largest) == 10
    assert seen.in_turn == 1000


def test_a_key_of_which_one_message_runs_is_met_among_thousands_without_a_key(publish_under, claim, client, keys, look):
    publish_under("rare", "r1")
    claim(1, keyed=True)
    client.hset(keys.retries_left, mapping={f"n{at}": 3 for at in range(5000)})

    assert [(one.key, one.waiting, one.in_flight) for one in look().largest] == [("rare", 0, 1)]
