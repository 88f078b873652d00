"""Rules 10 and 13: who may have killed a worker runs alone, and neither list starves the other."""

import pytest
from held_clock import NOON, micros

from reliq import transitions as t


@pytest.fixture
def lose(publish, claim, run, keys):
    """Publish messages and let the lease of their delivery run out: they are suspects, in retry."""

    def make(*ids, **options):
        publish(*ids, **options)
        claim(limit=len(ids), lease_ms=1, suspects=99)
        run(t.reclaim(keys, clock=micros(1)))

    return make


def names(claimed):
    return [one.id for one in claimed]


def test_a_message_whose_lease_ran_out_is_a_suspect(lose, claim, word):
    lose("m")

    assert word("m") == "suspect"
    assert [one.suspect for one in claim()] == [True]


def test_a_nacked_message_is_no_suspect(publish, claim, run, keys, word):
    publish("m")
    run(t.nack(keys, [(one, 0, "failed 1 x", b"") for one in claim()], clock=NOON))
    run(t.reclaim(keys, clock=NOON))

    assert word("m") is None
    assert [one.suspect for one in claim()] == [False]


def test_a_suspect_that_was_nacked_is_none_any_more(lose, claim, run, keys):
    lose("m")
    run(t.nack(keys, [(one, 0, "failed 1 x", b"") for one in claim()], clock=NOON))
    run(t.reclaim(keys, clock=NOON))

    assert [one.suspect for one in claim()] == [False]


@pytest.mark.parametrize(("suspects", "taken"), [(0, []), (1, ["a"]), (2, ["a", "b"])])
def test_a_claim_takes_no_more_suspects_than_it_may(suspects, taken, lose, claim, where):
    lose("a", "b", "c")

    assert names(claim(suspects=suspects)) == taken
    assert where().get("unack", []) == taken
    assert where().get("retry", []) == [id for id in ("a", "b", "c") if id not in taken]


def test_a_claim_takes_one_suspect_unless_it_is_told_otherwise(lose, claim):
    lose("a", "b")

    assert names(claim()) == ["a"]


def test_a_suspect_that_may_not_run_goes_to_the_far_end_of_its_list(lose, claim, publish, where):
    lose("a", "b")
    publish("innocent")

    assert names(claim(limit=1, first="retry", suspects=0)) == ["innocent"]
    assert where() == {"unack": ["innocent"], "retry": ["b", "a"]}


def test_suspects_that_may_not_run_do_not_hide_the_innocent_behind_them(lose, claim, publish, run, keys, where):
    lose("s1", "s2")
    publish("nacked")
    run(t.nack(keys, [(one, 0, "failed 1 x", b"") for one in claim(first="ready", suspects=0)], clock=NOON))
    run(t.reclaim(keys, clock=NOON))
    assert where() == {"retry": ["s1", "s2", "nacked"]}

    met = [names(claim(limit=1, first="retry", suspects=0)) for _ in range(3)]

    assert met == [[], [], ["nacked"]]


@pytest.mark.parametrize(("direct", "taken"), [(0, ["plain"]), (1, ["last", "plain"]), (None, ["last", "s", "plain"])])
def test_messages_that_must_not_wait_in_a_buffer_are_limited_by_direct(direct, taken, lose, publish, claim):
    lose("s")
    publish("last", retries=0)
    publish("plain")

    assert sorted(names(claim(direct=direct))) == sorted(taken)


def test_a_suspect_with_no_retry_left_is_counted_once(lose, claim):
    lose("m", retries=1)

    assert names(claim(direct=1, suspects=1)) == ["m"]


def test_a_claim_that_took_nothing_because_of_suspects_pushes_no_token(lose, claim, token, where):
    lose("a", "b")
    token()

    assert names(claim(suspects=0)) == []

    assert not token()
    assert where() == {"retry": ["a", "b"]}


def test_a_claim_that_took_nothing_because_of_suspects_tells_that_they_are_there(lose, run, keys, claim_turn):
    lose("a", "b")

    assert run(t.claim(keys, claim_turn(), limit=5, lease_ms=1, suspects=0)).behind == 2


def test_a_released_suspect_stays_one(lose, claim, run, keys, word, left, where):
    lose("m")
    spent = left("m")

    run(t.release(keys, claim()))

    assert (word("m"), left("m")) == ("suspect", spent)
    assert where() == {"ready": ["m"]}
    assert [one.suspect for one in claim()] == [True]


def test_released_messages_are_the_next_to_be_claimed_in_their_order(publish, claim, run, keys):
    publish("a", "b", "c", "d")
    held = claim(limit=3)

    run(t.release(keys, held[1:]))

    assert names(claim()) == ["b", "c", "d"]


def test_of_a_batch_whose_worker_was_killed_only_the_killer_is_buried(lose, claim, run, keys, where):
    lose("a", "killer", "b", retries=1)

    for _ in range(3):
        (one,) = claim(lease_ms=1, suspects=1)
        run(t.ack(keys, [(one, None)]) if one.id != "killer" else t.reclaim(keys, clock=micros(1)))

    assert where() == {"garbage": ["killer"]}


@pytest.mark.parametrize(("first", "order"), [("ready", ["new", "old"]), ("retry", ["old", "new"])])
def test_a_claim_begins_with_the_list_it_is_told(first, order, lose, publish, claim):
    lose("old")
    publish("new")

    assert names(claim(first=first)) == order
    assert names(claim()) == []


@pytest.mark.parametrize("first", ["ready", "retry"])
def test_the_list_that_comes_first_leaves_what_is_over_to_the_other(first, lose, publish, claim):
    lose("old")
    publish("new")

    assert len(claim(limit=1, first=first)) == 1
    assert len(claim(limit=1, first=first)) == 1
