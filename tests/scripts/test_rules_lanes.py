"""Rule 6: every call may be repeated; and a chosen id is published once while it lives and for a while after."""

import pytest
from held_clock import HOUR_MS, NOON, micros, millis

from reliq import transitions as t

#: So long Redis remembers a claim, by its own clock, which no test holds here.
LEASE_MS = 60_000
ITEMS = [("a", b',"r":3}\na'), ("b", b',"r":3}\nb')]


@pytest.fixture
def lane(keys):
    """A publish of two messages by a number of the lane `p`, or of another."""

    def make(number, items=ITEMS, lane="p", **options):
        return t.publish(keys, items, t.CallNumber(lane, number), ttl_ms=HOUR_MS, retries=3, clock=NOON, **options)

    return make


@pytest.fixture
def worker(keys):
    """A claim by a number of the lane `w`."""

    def make(number, clock=NOON, limit=9, **options):
        return t.claim(keys, t.CallNumber("w", number), limit=limit, lease_ms=LEASE_MS, clock=clock, **options)

    return make


@pytest.mark.parametrize("delay_ms", [0, 5], ids=["at once", "later"])
def test_a_repeated_publish_gets_its_first_answer_and_adds_nothing(delay_ms, lane, run, claim, keys, dump, where):
    run(lane(6, [("b", b"x")], window_ms=1000))
    first = run(lane(7, window_ms=1000, delay_ms=delay_ms))
    assert first.refused == {1: "duplicate"}
    before = dump()

    assert run(lane(7, window_ms=1000, delay_ms=delay_ms)) == first
    assert dump() == before

    run(t.promote(keys, clock=micros(5)))
    run(t.ack(keys, [(one, None) for one in claim()]))
    assert run(lane(7, window_ms=1000, delay_ms=delay_ms)) == first
    assert where() == {}


def test_a_publish_by_a_lower_number_of_its_lane_is_stale_and_adds_nothing(lane, reply, run, where, dump):
    run(lane(9))
    run(lane(10, [("c", b"x")]))  # numbers, not texts
    run(lane(7, [("d", b"x")], lane="other"))
    before = dump()

    assert reply(lane(9, [("late", b"x")])) == b"stale"
    assert dump() == before
    assert where() == {"ready": ["a", "b", "c", "d"]}


def test_a_repeated_claim_gets_the_same_messages_with_a_new_deadline_and_counts_once(
    lane, worker, run, keys, due, where, total
):
    run(lane(1))
    first = run(worker(1))

    again = run(worker(1, clock=micros(500)))

    assert again.claimed == first.claimed
    assert [due(keys.unack, id) for id in "ab"] == [millis(LEASE_MS + 500)] * 2
    assert (where(), total("claimed")) == ({"unack": ["a", "b"]}, 2)


def test_a_repeated_claim_returns_only_messages_that_it_still_holds(lane, worker, claim, run, keys):
    run(lane(1, [(id, b"x") for id in ("acked", "nacked", "released", "cancelled", "held")]))
    acked, nacked, released, _, held = run(worker(1)).claimed
    run(t.ack(keys, [(acked, None)]))
    run(t.nack(keys, [(nacked, 5, "failed 1 x", b"")], clock=NOON))
    run(t.release(keys, [released]))
    run(t.cancel(keys, ["cancelled"]))
    assert run(worker(1)).claimed == [held]

    run(t.reclaim(keys, clock=micros(LEASE_MS)))
    suspects = run(worker(2)).claimed
    assert {one.deaths for one in suspects if one.id == "held"} == {1}
    assert run(worker(2)).claimed == suspects

    run(t.reclaim(keys, clock=micros(2 * LEASE_MS)))
    claim(clock=micros(9 * LEASE_MS))
    assert run(worker(2)).claimed == []


def test_a_claim_of_nothing_leaves_no_lane(worker, lane, run, client, keys):
    assert run(worker(1)).claimed == []
    run(lane(1))
    assert run(worker(1, limit=0)).claimed == []
    client.set(keys.paused, "1")
    assert run(worker(1)).claimed == []
    assert client.keys(keys.lane("w")) == []
    client.delete(keys.paused)

    assert len(run(worker(1)).claimed) == 2


@pytest.mark.foreign_hands
def test_an_id_of_any_bytes_is_given_back_by_a_repeated_claim(worker, run, client, keys):
    ids = [b"two\nlines", b"a\ttab", b"\xff\x00", b""]
    client.lpush(keys.ready, *ids)
    client.hset(keys.retries_left, mapping=dict.fromkeys(ids, 3))
    first = run(worker(1)).claimed

    assert [one.id.encode("utf-8", "surrogateescape") for one in first] == ids
    assert run(worker(1)).claimed == first


# ---- chosen ids -------------------------------------------------------------


@pytest.mark.parametrize("place", ["ready", "pending", "unack", "nacked", "retry", "garbage"])
def test_a_chosen_id_is_not_published_again_while_it_lives(place, publish, claim, bury, run, keys, dump):
    if place == "garbage":
        bury("m", window_ms=HOUR_MS)
    else:
        publish("m", window_ms=HOUR_MS, delay_ms=5 if place == "pending" else 0)
    held = claim() if place in ("unack", "nacked", "retry") else []
    if place == "nacked":
        run(t.nack(keys, [(held[0], 5, "failed 1 x", b"")], clock=NOON))
    if place == "retry":
        run(t.reclaim(keys, clock=micros(30_000)))
    before = dump()

    for replace in (False, True):
        assert publish("m", window_ms=HOUR_MS, replace=replace).refused == {0: "duplicate"}
    assert {key for key, value in dump().items() if before.get(key) != value} == {keys.lane("publisher")}
