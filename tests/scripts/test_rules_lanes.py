"""Rule 6: every call may be repeated; and a chosen id is published once while it lives and for a while after."""

import pytest
from held_clock import HOUR_MS, NOON, micros, millis

from reliq import transitions as t

#: So long Redis remembers a claim, by its own clock, which no test holds here.
LEASE_MS = 60_000
ITEMS = [("a", b',"r":3}\na'), ("b", b',"r":3}\nb')]


@pytest.fixture
def lane(keys):
    """A publish of two messages by a number of the lane `p`."""

    def make(number, items=ITEMS, **options):
        return t.publish(keys, items, t.CallNumber("p", number), ttl_ms=HOUR_MS, retries=3, clock=NOON, **options)

    return make


@pytest.fixture
def worker(keys):
    """A claim by a number of the lane `w`."""

    def make(number, clock=NOON, limit=9, **options):
        return t.claim(keys, t.CallNumber("w", number), limit=limit, lease_ms=LEASE_MS, clock=clock, **options)

    return make


@pytest.mark.parametrize("delay_ms", [0, 5])
def test_a_repeated_publish_gets_its_first_answer_and_adds_nothing(delay_ms, lane, run, dump):
    first = run(lane(7, delay_ms=delay_ms))
    before = dump()

    assert run(lane(7, delay_ms=delay_ms)) == first
    assert dump() == before


def test_a_repeated_publish_adds_nothing_after_its_messages_were_acked(lane, claim, run, keys, where):
    first = run(lane(7))
    run(t.ack(keys, [(one, None) for one in claim()]))

    assert run(lane(7)) == first
    assert where() == {}


def test_a_repeated_publish_is_told_again_what_was_not_published(lane, run):
    run(lane(1, [("b", b"x")], window_ms=1000))

    first = run(lane(2, window_ms=1000))

    assert first.refused == {1: "duplicate"}
    assert run(lane(2, window_ms=1000)) == first


def test_a_publish_by_a_lower_number_adds_nothing_and_is_stale(lane, reply, run, dump):
    run(lane(7))
    before = dump()

    assert reply(lane(6, [("late", b"x")])) == b"stale"
    assert dump() == before


def test_numbers_are_compared_as_numbers(lane, run, where):
    run(lane(9))
    run(lane(10, [("c", b"x")]))

    assert where() == {"ready": ["a", "b", "c"]}


def test_lanes_do_not_know_each_other(lane, run, keys, where):
    run(lane(7))
    run(t.publish(keys, [("c", b"x")], t.CallNumber("other", 7), ttl_ms=HOUR_MS, retries=3))

    assert where() == {"ready": ["a", "b", "c"]}


def test_a_lane_remembers_a_publish_for_ten_minutes_and_a_claim_for_its_lease(lane, worker, run, client, keys):
    run(lane(1))
    run(worker(1))

    assert 590_000 < client.pttl(keys.lane("p")) <= 600_000
    assert LEASE_MS - 30_000 < client.pttl(keys.lane("w")) <= LEASE_MS


def test_a_repeated_claim_returns_the_same_messages_with_a_new_deadline(lane, worker, run, keys, due, where):
    run(lane(1))
    first = run(worker(1))

    again = run(worker(1, clock=micros(500)))

    assert again.claimed == first.claimed
    assert [due(keys.unack, id) for id in "ab"] == [millis(LEASE_MS + 500)] * 2
    assert where() == {"unack": ["a", "b"]}


def test_a_repeated_claim_returns_only_what_it_still_holds(lane, worker, run, keys):
    items = [(id, b"x") for id in ("acked", "nacked", "released", "cancelled", "held")]
    run(lane(1, items))
    acked, nacked, released, _, held = run(worker(1)).claimed
    run(t.ack(keys, [(acked, None)]))
    run(t.nack(keys, [(nacked, 5, "failed 1 x", b"")], clock=NOON))
    run(t.release(keys, [released]))
    run(t.cancel(keys, ["cancelled"]))

    assert run(worker(1)).claimed == [held]


def test_a_repeated_claim_returns_nothing_that_someone_else_claimed_since(lane, worker, claim, run, keys):
    run(lane(1))
    run(worker(1))
    run(t.reclaim(keys, clock=micros(LEASE_MS)))
    claim()

    assert run(worker(1)).claimed == []


def test_a_repeated_claim_says_again_who_is_a_suspect(lane, worker, run, keys):
    run(lane(1))
    run(worker(1))
    run(t.reclaim(keys, clock=micros(LEASE_MS)))
    first = run(worker(2)).claimed

    assert [one.deaths > 0 for one in first] == [True, True]
    assert run(worker(2)).claimed == first


def test_a_claim_is_counted_once_however_often_it_is_repeated(lane, worker, run, total):
    run(lane(1))
    run(worker(1))
    run(worker(1))

    assert total("claimed") == 2


@pytest.mark.parametrize("limit", [1, 9])
def test_a_claim_by_a_lower_number_takes_nothing(limit, lane, worker, run, dump):
    run(lane(1))
    run(worker(7))
    run(lane(2, [("c", b"x")]))
    before = dump()

    answer = run(worker(6, limit=limit))

    assert (answer.claimed, answer.promote_in_ms, answer.behind) == ([], t.NOT_WATCHING, 0)
    assert dump() == before


@pytest.mark.parametrize("paused", [False, True])
def test_an_empty_claim_leaves_no_lane(paused, worker, run, client, keys):
    if paused:
        client.set(keys.paused, "1")

    assert run(worker(1)).claimed == []

    assert client.keys(keys.lane("*")) == []


def test_an_empty_claim_of_a_known_lane_keeps_its_number(worker, lane, run, where):
    run(lane(1))
    run(worker(1))
    run(worker(2))
    run(lane(2, [("c", b"x")]))

    assert run(worker(2)).claimed == run(worker(1)).claimed == []
    assert where() == {"unack": ["a", "b"], "ready": ["c"]}


def test_a_paused_claim_of_a_known_lane_keeps_its_number_and_takes_nothing(worker, lane, run, client, keys, where):
    run(lane(1))
    run(worker(1))
    run(lane(2, [("c", b"x")]))
    client.set(keys.paused, "1")
    assert run(worker(2)).claimed == []
    client.delete(keys.paused)

    assert run(worker(2)).claimed == []
    assert where() == {"unack": ["a", "b"], "ready": ["c"]}
    assert len(run(worker(3)).claimed) == 1


@pytest.mark.foreign_hands
@pytest.mark.parametrize("id", [b"two\nlines", b"a\ttab", b"\xff\x00", b""])
def test_an_id_of_any_bytes_is_given_back_by_a_repeated_claim(id, worker, run, client, keys):
    client.lpush(keys.ready, id)
    client.hset(keys.retries_left, id, 3)
    first = run(worker(1)).claimed

    assert [one.id.encode("utf-8", "surrogateescape") for one in first] == [id]
    assert run(worker(1)).claimed == first


def test_a_claim_of_nothing_uses_no_number(worker, lane, run, client, keys):
    run(lane(1))

    assert run(worker(1, limit=0)).claimed == []
    assert client.exists(keys.lane("w")) == 0
    assert len(run(worker(1)).claimed) == 2


# ---- chosen ids -------------------------------------------------------------


@pytest.mark.parametrize("place", ["ready", "pending", "unack", "nacked", "retry", "garbage"])
@pytest.mark.parametrize("replace", [False, True])
def test_a_chosen_id_is_not_published_again_while_it_lives(place, replace, publish, claim, bury, run, keys, dump):
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

    answer = publish("m", window_ms=HOUR_MS, replace=replace)

    assert answer.refused == {0: "duplicate"}
    assert {key for key, value in dump().items() if before.get(key) != value} == {keys.lane("publisher")}


def test_a_chosen_id_given_twice_in_one_call_is_published_once(publish, where):
    assert publish("m", "m", window_ms=1).refused == {1: "duplicate"}

    assert where() == {"ready": ["m"]}


def test_a_chosen_id_stays_taken_after_an_ack(publish, claim, run, keys, client, where):
    publish("m", window_ms=HOUR_MS)
    run(t.ack(keys, [(one, HOUR_MS) for one in claim()]))

    assert publish("m", window_ms=HOUR_MS).refused == {0: "duplicate"}
    assert HOUR_MS - 30_000 < client.pttl(keys.dedup("m")) <= HOUR_MS
    assert where() == {}


def test_a_chosen_id_stays_taken_after_it_became_a_letter(publish, die, client, keys):
    die("m", window_ms=HOUR_MS)

    assert publish("m", window_ms=HOUR_MS).refused == {0: "duplicate"}
    assert HOUR_MS - 30_000 < client.pttl(keys.dedup("m")) <= HOUR_MS


@pytest.mark.parametrize("window_ms", [None, 0])
def test_an_id_without_a_window_is_free_at_its_end(window_ms, publish, die, claim, run, keys, client):
    publish("acked", window_ms=window_ms)
    run(t.ack(keys, [(one, window_ms) for one in claim()]))
    die("dead", window_ms=window_ms)

    assert client.keys(keys.dedup("*")) == []
    assert publish("acked", "dead", window_ms=1).refused == {}


def test_a_publish_that_replaces_overrides_the_window(publish, claim, run, keys, client, where):
    publish("m", window_ms=HOUR_MS)
    run(t.ack(keys, [(one, HOUR_MS) for one in claim()]))

    assert publish("m", window_ms=HOUR_MS, replace=True).refused == {}

    assert where() == {"ready": ["m"]}
    assert client.exists(keys.dedup("m")) == 0


def test_an_id_is_free_when_its_window_is_over(publish, claim, run, keys, client, where):
    publish("m", window_ms=HOUR_MS)
    run(t.ack(keys, [(one, HOUR_MS) for one in claim()]))
    client.delete(keys.dedup("m"))

    assert publish("m", window_ms=HOUR_MS).refused == {}
    assert where() == {"ready": ["m"]}


def test_publish_itself_leaves_no_marker(publish, client, keys):
    publish("m", window_ms=HOUR_MS)

    assert client.keys(keys.dedup("*")) == []
