"""Rules 10 and 13: who may have killed a worker is narrowed down, and neither list starves the other."""

import random

import pytest
from held_clock import NOON, micros

from reliq import transitions as t

LEASE_MS = 1
NONE_HELD = t.Suspects(slots=16, held=0, narrowest=16)
#: A place is taken that leaves no room for another suspect.
NO_ROOM = t.Suspects(slots=16, held=1, narrowest=1)


@pytest.fixture
def lose(publish, claim, run, keys):
    """Publish messages and let the lease of their delivery run out: they are suspects, in retry."""

    def make(*ids, **options):
        publish(*ids, **options)
        claim(limit=len(ids), lease_ms=LEASE_MS)
        run(t.reclaim(keys, clock=micros(LEASE_MS)))

    return make


@pytest.fixture
def die(claim, run, keys):
    """Let every message that can be claimed be delivered and not survive it, so many times, from some ms after noon."""

    def make(times, *, at_ms=0, suspects=NONE_HELD):
        for _ in range(times):
            claim(lease_ms=LEASE_MS, clock=micros(at_ms), suspects=suspects)
            run(t.reclaim(keys, clock=micros(at_ms + LEASE_MS)))
            at_ms += 60_000
            run(t.reclaim(keys, clock=micros(at_ms)))
        return at_ms

    return make


def names(claimed):
    return [one.id for one in claimed]


def test_a_message_whose_lease_ran_out_is_a_suspect(lose, claim, word):
    lose("m")

    assert word("m") == "suspect"
    assert [one.deaths > 0 for one in claim()] == [True]


def test_a_nacked_message_is_no_suspect(publish, claim, run, keys, word):
    publish("m")
    run(t.nack(keys, [(one, 0, "failed 1 x", b"") for one in claim()], clock=NOON))
    run(t.reclaim(keys, clock=NOON))

    assert word("m") is None
    assert [one.deaths > 0 for one in claim()] == [False]


def test_a_suspect_that_was_nacked_is_none_any_more(lose, claim, run, keys):
    lose("m")
    run(t.nack(keys, [(one, 0, "failed 1 x", b"") for one in claim()], clock=NOON))
    run(t.reclaim(keys, clock=NOON))

    assert [one.deaths > 0 for one in claim()] == [False]


@pytest.mark.parametrize(("deaths", "slots", "taken"), [(1, 16, 8), (1, 5, 2), (1, 1, 1), (2, 16, 4), (3, 16, 1)])
def test_suspects_run_in_half_of_the_slots_then_in_a_quarter_and_at_last_alone(
    deaths, slots, taken, publish, die, claim, where
):
    publish(*(f"m{number}" for number in range(20)), retries=9)
    at_ms = die(1)
    for _ in range(deaths - 1):
        at_ms = die(1, at_ms=at_ms, suspects=t.Suspects(slots=10**6, held=0, narrowest=10**6))

    met = claim(clock=micros(at_ms), suspects=t.Suspects(slots, 0, slots))

    assert len(met) == taken
    assert {one.deaths for one in met} == {deaths}
    assert len(where()["retry"]) == 20 - taken


@pytest.mark.parametrize(("held", "narrowest", "taken"), [(0, 16, 8), (3, 8, 5), (8, 8, 0), (1, 1, 0), (2, 4, 2)])
def test_what_a_process_holds_already_counts_and_the_narrowest_decides(held, narrowest, taken, lose, claim):
    lose(*(f"m{number}" for number in range(20)))

    assert len(claim(suspects=t.Suspects(16, held, narrowest))) == taken


def test_a_suspect_on_its_last_delivery_runs_alone(lose, claim):
    lose("a", "b", retries=1)

    assert names(claim(suspects=NONE_HELD)) == ["a"]
    assert names(claim(suspects=t.Suspects(16, 1, 1))) == []


def test_the_receipt_of_a_suspect_says_how_often_it_died_and_keeps_it_through_a_release(
    publish, die, claim, run, keys, word
):
    publish("m", retries=9)
    at_ms = die(3)
    [one] = claim(clock=micros(at_ms))

    assert one.nonce.startswith("3~")
    assert word("m") == one.nonce

    assert run(t.release(keys, [one])).lost == ()
    assert word("m") == "suspect3"
    assert [again.deaths for again in claim(clock=micros(at_ms))] == [3]


@pytest.mark.parametrize(("deaths", "wait_ms"), [(2, 2000), (3, 4000), (4, 8000)])
def test_after_the_second_death_in_a_row_a_message_waits_longer_each_time(
    deaths, wait_ms, publish, die, claim, run, keys, due, word, left
):
    publish("m", retries=9)
    at_ms = die(deaths - 1)
    claim(lease_ms=LEASE_MS, clock=micros(at_ms))
    over = at_ms + LEASE_MS

    answer = run(t.reclaim(keys, clock=micros(over)))

    assert (answer.overdue, answer.again) == (("m",), ())
    assert due(keys.unack, "m") == micros(over + wait_ms) // 1000
    assert (word("m"), left("m")) == (f"suspect{deaths}", str(9 - deaths + 1))
    assert run(t.reclaim(keys, clock=micros(over + wait_ms - 1))).count == 0
    assert run(t.reclaim(keys, clock=micros(over + wait_ms))).again == ("m",)
    assert (word("m"), left("m")) == (f"suspect{deaths}", str(9 - deaths))


def test_a_message_that_survives_no_delivery_is_buried_however_many_retries_it_has(
    publish, die, where, total, client, keys
):
    publish("m", retries=100)

    die(t.LEASE_DEATHS - 1)
    assert where() == {"retry": ["m"]}
    die(1, at_ms=10**6)

    assert where() == {"garbage": ["m"]}
    assert client.hget(keys.errors, "m").startswith(b"lease ")
    assert total("retried_lease") == t.LEASE_DEATHS - 1


def test_a_buried_message_keeps_its_body_until_its_letter_is_written(publish, claim, run, client, keys):
    publish("m", retries=0, ttl_ms=3_600_000)
    claim(lease_ms=LEASE_MS)
    assert client.pttl(keys.msg("m")) > 0

    run(t.reclaim(keys, clock=micros(LEASE_MS)))

    assert client.pttl(keys.msg("m")) == -1
    assert run(t.collect(keys, ["m"], letters_max=10, letters_ms=LEASE_MS)) == (("m",), ())


def test_one_delivery_that_it_survives_clears_a_suspect(publish, die, claim, run, keys):
    publish("m", retries=9)
    at_ms = die(3)
    run(t.nack(keys, [(one, 0, "failed 4 x", b"") for one in claim(clock=micros(at_ms))], clock=micros(at_ms)))
    run(t.reclaim(keys, clock=micros(at_ms)))

    assert [one.deaths for one in claim(clock=micros(at_ms))] == [0]


def test_what_waits_after_its_death_can_be_cancelled_and_rescheduled_and_is_spared_no_longer(
    publish, die, claim, run, keys, where, due
):
    publish("gone", "later", "on", retries=9)
    at_ms = die(1)
    claim(lease_ms=LEASE_MS, clock=micros(at_ms))
    run(t.reclaim(keys, clock=micros(at_ms + LEASE_MS)))

    assert run(t.cancel(keys, ["gone"])) == ["cancelled"]
    assert run(t.reschedule(keys, ["later"], delay_ms=3_600_000, clock=micros(at_ms))) == ["rescheduled"]
    assert run(t.reclaim(keys, clock=micros(at_ms + 60_000), spare_leases=True)).again == ("on",)
    assert where() == {"retry": ["on"], "unack": ["later"]}
    assert due(keys.unack, "later") == micros(at_ms + 3_600_000) // 1000


def test_what_a_foreign_consumer_leased_without_a_word_is_no_suspect(publish, claim, run, keys, client, word):
    publish("m")
    claim(lease_ms=LEASE_MS)
    client.hdel(keys.lease, "m")

    assert run(t.reclaim(keys, clock=micros(LEASE_MS))).overdue == ("m",)
    assert word("m") is None
    assert [one.deaths > 0 for one in claim()] == [False]


def test_a_suspect_that_may_not_run_goes_to_the_far_end_of_its_list(lose, claim, publish, where):
    lose("a", "b")
    publish("innocent")

    assert names(claim(limit=1, first="retry", suspects=NO_ROOM)) == ["innocent"]
    assert where() == {"unack": ["innocent"], "retry": ["b", "a"]}


def test_suspects_that_may_not_run_do_not_hide_the_innocent_behind_them(lose, claim, publish, run, keys, where):
    lose("s1", "s2")
    publish("nacked")
    run(t.nack(keys, [(one, 0, "failed 1 x", b"") for one in claim(first="ready", suspects=NO_ROOM)], clock=NOON))
    run(t.reclaim(keys, clock=NOON))
    assert where() == {"retry": ["s1", "s2", "nacked"]}

    met = [names(claim(limit=1, first="retry", suspects=NO_ROOM)) for _ in range(3)]

    assert met == [[], [], ["nacked"]]


@pytest.mark.parametrize(("direct", "taken"), [(0, ["plain"]), (1, ["last", "plain"]), (None, ["last", "s", "plain"])])
def test_messages_that_must_not_wait_in_a_buffer_are_limited_by_direct(direct, taken, lose, publish, claim):
    lose("s")
    publish("last", retries=0)
    publish("plain")

    assert sorted(names(claim(direct=direct))) == sorted(taken)


def test_a_suspect_with_no_retry_left_is_counted_once(lose, claim):
    lose("m", retries=1)

    assert names(claim(direct=1)) == ["m"]


def test_a_claim_that_took_nothing_because_of_suspects_pushes_no_token(lose, claim, token, where):
    lose("a", "b")
    token()

    assert names(claim(suspects=NO_ROOM)) == []

    assert not token()
    assert where() == {"retry": ["a", "b"]}


def test_a_claim_that_took_nothing_because_of_suspects_tells_that_they_are_there(lose, run, keys, claim_turn):
    lose("a", "b")

    assert run(t.claim(keys, claim_turn(), limit=5, lease_ms=1, suspects=NO_ROOM)).behind == 2


def test_a_released_suspect_stays_one(lose, claim, run, keys, word, left, where):
    lose("m")
    spent = left("m")

    run(t.release(keys, claim()))

    assert (word("m"), left("m")) == ("suspect", spent)
    assert where() == {"ready": ["m"]}
    assert [one.deaths > 0 for one in claim()] == [True]


def test_released_messages_are_the_next_to_be_claimed_in_their_order(publish, claim, run, keys):
    publish("a", "b", "c", "d")
    held = claim(limit=3)

    run(t.release(keys, held[1:]))

    assert names(claim()) == ["b", "c", "d"]


def test_of_a_batch_whose_worker_was_killed_only_the_killer_is_buried(lose, claim, run, keys, where):
    lose("a", "killer", "b", retries=1)

    for _ in range(3):
        (one,) = claim(lease_ms=1, suspects=NONE_HELD)
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


class Process:
    """One that runs what it claims until it meets a message that kills it, and everything beside it."""

    def __init__(self, name, slots):
        self.name, self.slots, self.claims, self.held = name, slots, 0, []

    def suspects(self):
        room = [
            1 if one.deaths > 2 or not one.left else max(1, self.slots >> one.deaths) for one in self.held if one.deaths
        ]
        return t.Suspects(self.slots, len(room), min(room, default=self.slots))


@pytest.mark.parametrize("seed", range(12))
def test_however_killers_and_innocents_meet_no_innocent_is_buried(seed, publish, run, keys, where):
    chance = random.Random(seed)
    names = [f"m{number}" for number in range(40)]
    killers = set(chance.sample(names, chance.choice([1, 2, 5])))
    chance.shuffle(names)
    publish(*names, retries=chance.choice([3, 4, 12]))
    fleet, at_ms, acked = [Process(f"p{number}", chance.choice([1, 4, 16])) for number in range(3)], 0, set()

    for _ in range(500):
        process = chance.choice(fleet)
        at_ms += 500
        process.claims += 1
        turn = t.CallNumber(process.name, process.claims)
        free = chance.randint(1, max(1, process.slots - len(process.held)))
        options = {"lease_ms": 1000, "direct": free, "suspects": process.suspects(), "clock": micros(at_ms)}
        process.held += run(t.claim(keys, turn, limit=free, **options)).claimed
        if any(one.id in killers for one in process.held):
            process.held = []
            at_ms += 1000
        else:
            done = [one for one in process.held if chance.random() < 0.7]
            run(t.ack(keys, [(one, None) for one in done]))
            acked |= {one.id for one in done}
            process.held = [one for one in process.held if one not in done]
        for other in fleet:
            if other.held:
                run(t.extend(keys, other.held, lease_ms=1000, clock=micros(at_ms)))
        run(t.reclaim(keys, clock=micros(at_ms)))
        if len(acked) == len(names) - len(killers) and set(where()) == {"garbage"}:
            break

    assert where() == {"garbage": sorted(killers)}
    assert acked == set(names) - killers
