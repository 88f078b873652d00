"""Rules 10 and 13: a message that may have killed a worker is narrowed down, and neither list starves the other."""

import random

import pytest
from held_clock import NOON, micros

from reliq import transitions as t

LEASE_MS = 1
NONE_HELD = t.Suspects(slots=16, held=0, narrowest=16)
#: A suspect runs that leaves no room for another one.
NO_ROOM = t.Suspects(slots=16, held=1, narrowest=1)


@pytest.fixture
def lose(publish, claim, run, keys):
    """Publish messages and let the lease of their delivery expire: they are suspects, in retry."""

    def make(*ids, **options):
        publish(*ids, **options)
        claim(limit=len(ids), lease_ms=LEASE_MS)
        run(t.reclaim(keys, clock=micros(LEASE_MS)))

    return make


@pytest.fixture
def die(claim, run, keys):
    """Let every message that can be claimed be delivered and not survive it, so many times; return the ms after noon."""

    def make(times, *, at_ms=0, suspects=NONE_HELD):
        for _ in range(times):
            claim(lease_ms=LEASE_MS, clock=micros(at_ms), suspects=suspects)
            run(t.reclaim(keys, clock=micros(at_ms + LEASE_MS)))
            at_ms += 60_000
            run(t.reclaim(keys, clock=micros(at_ms)))
        return at_ms

    return make


@pytest.fixture
def nack_now(run, keys):
    """Nack messages, and have them delivered again at once."""

    def make(held, at_ms=0):
        run(t.nack(keys, [(one, 0, "failed 1 x", b"") for one in held], clock=micros(at_ms)))
        run(t.reclaim(keys, clock=micros(at_ms)))

    return make


def names(claimed):
    return [one.id for one in claimed]


def test_a_message_is_a_suspect_after_a_lost_lease_and_until_it_is_nacked(lose, claim, word, nack_now, publish):
    lose("lost")
    publish("innocent")
    assert word("lost") == "suspect"

    held = claim()
    assert {one.id: one.deaths for one in held} == {"lost": 1, "innocent": 0}
    nack_now(held)

    assert word("lost") is word("innocent") is None
    assert [one.deaths for one in claim()] == [0, 0]


def test_suspects_run_in_half_of_the_slots_then_a_quarter_then_alone(publish, die, claim, run, keys):
    publish(*(f"m{number}" for number in range(20)), retries=9)
    at_ms, taken = die(1), {}

    for deaths, slots in ((1, 16), (1, 5), (1, 1), (2, 16), (3, 16)):
        at_ms = die(deaths - max(taken, default=(1, 0))[0], at_ms=at_ms, suspects=t.Suspects(10**6, 0, 10**6))
        met = claim(clock=micros(at_ms), suspects=t.Suspects(slots, 0, slots))
        assert {one.deaths for one in met} == {deaths}
        taken[deaths, slots] = len(met)
        run(t.release(keys, met))

    assert taken == {(1, 16): 8, (1, 5): 2, (1, 1): 1, (2, 16): 4, (3, 16): 1}


def test_suspects_that_a_process_holds_count_and_the_narrowest_decides(lose, claim, run, keys):
    lose(*(f"m{number}" for number in range(20)))
    taken = {}

    for held, narrowest in ((0, 16), (3, 8), (8, 8), (1, 1), (2, 4)):
        some = claim(suspects=t.Suspects(16, held, narrowest))
        taken[held, narrowest] = len(some)
        run(t.release(keys, some))

    assert taken == {(0, 16): 8, (3, 8): 5, (8, 8): 0, (1, 1): 0, (2, 4): 2}


def test_a_suspect_on_its_last_delivery_runs_alone_and_is_counted_once(lose, claim):
    lose("a", "b", retries=1)

    assert names(claim(direct=1, suspects=NONE_HELD)) == ["a"]
    assert names(claim(suspects=NO_ROOM)) == []


def test_a_suspect_keeps_its_deaths_through_a_release_and_until_a_nack(
    publish, die, claim, nack_now, run, keys, word, left, where
):
    publish("m", retries=9)
    at_ms = die(3)
    spent = left("m")
    [one] = claim(clock=micros(at_ms))
    assert (one.nonce[:2], word("m")) == ("3~", one.nonce)

    assert run(t.release(keys, [one])).lost == ()

    assert (word("m"), left("m"), where()) == ("suspect3", spent, {"ready": ["m"]})
    held = claim(clock=micros(at_ms))
    assert [again.deaths for again in held] == [3]
    nack_now(held, at_ms)
    assert [again.deaths for again in claim(clock=micros(at_ms))] == [0]


def test_after_its_second_death_in_a_row_a_message_waits_longer_each_time(publish, claim, run, keys, due, word, left):
    publish("m", retries=9)
    at_ms = 0

    for deaths, wait_ms in ((1, 0), (2, 2000), (3, 4000), (4, 8000)):
        claim(lease_ms=LEASE_MS, clock=micros(at_ms))
        at_ms += LEASE_MS
        if wait_ms:
            answer = run(t.reclaim(keys, clock=micros(at_ms)))
            at_ms += wait_ms
            assert (answer.overdue, answer.again, due(keys.unack, "m")) == (("m",), (), micros(at_ms) // 1000)
            assert run(t.reclaim(keys, clock=micros(at_ms - 1))).count == 0
        assert (deaths == 1 or word("m") == f"suspect{deaths}", left("m")) == (True, str(9 - deaths + 1))
        assert run(t.reclaim(keys, clock=micros(at_ms))).count == 1
        assert left("m") == str(9 - deaths)


def test_a_message_that_survives_no_delivery_is_buried_whatever_its_retries(publish, die, where, total, client, keys):
    publish("m", retries=100)

    die(t.LEASE_DEATHS - 1)
    assert (where(), client.pttl(keys.msg("m")) > 0) == ({"retry": ["m"]}, True)
    die(1, at_ms=10**6)

    assert (where(), client.pttl(keys.msg("m"))) == ({"garbage": ["m"]}, -1)  # no TTL ends it before its letter
    assert client.hget(keys.errors, "m").startswith(b"lease ")
    assert total("retried_lease") == t.LEASE_DEATHS - 1


def test_a_message_that_waits_after_its_death_can_be_cancelled_and_rescheduled(
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


def test_suspects_that_may_not_run_go_to_the_far_end_and_hide_no_innocent_message(
    lose, claim, publish, nack_now, where, token
):
    lose("s1", "s2")
    publish("nacked")
    nack_now(claim(first="ready", suspects=NO_ROOM))
    assert where() == {"retry": ["s1", "s2", "nacked"]}
    token()

    met = [names(claim(limit=1, first="retry", suspects=NO_ROOM)) for _ in range(3)]
    assert met == [[], [], ["nacked"]]
    assert where() == {"unack": ["nacked"], "retry": ["s1", "s2"]}


def test_a_claim_that_took_nothing_because_of_suspects_says_so_and_wakes_no_worker(lose, run, keys, claim_turn, token):
    lose("a", "b")
    token()

    answer = run(t.claim(keys, claim_turn(), limit=5, lease_ms=1, suspects=NO_ROOM))

    assert (answer.claimed, answer.behind, token()) == ([], 2, False)


@pytest.mark.parametrize(
    ("direct", "taken"),
    [(0, ["plain"]), (1, ["last", "plain"]), (None, ["last", "plain", "s"])],
    ids=["none", "one", "any"],
)
def test_messages_that_must_not_wait_in_a_buffer_are_limited_by_direct(direct, taken, lose, publish, claim):
    lose("s")
    publish("last", retries=0)
    publish("plain")

    assert sorted(names(claim(direct=direct))) == taken


@pytest.mark.parametrize(
    ("first", "order"), [("ready", ["new", "old"]), ("retry", ["old", "new"])], ids=["ready", "retry"]
)
def test_a_claim_begins_with_the_list_that_it_names_and_goes_on_with_the_other(
    first, order, lose, publish, claim, run, keys
):
    lose("old")
    publish("new")

    held = claim(first=first)
    assert names(held) == order
    run(t.nack(keys, [(one, 0, "failed 1 x", b"") for one in held[:1]], clock=NOON))
    run(t.release(keys, held[1:]))
    run(t.reclaim(keys, clock=NOON))
    assert [len(claim(limit=1, first=first)) for _ in range(3)] == [1, 1, 0]


class Process:
    """A process that runs the messages it claims until one of them kills it, and all beside it."""

    def __init__(self, name, slots):
        self.name, self.slots, self.claims, self.held = name, slots, 0, []

    def suspects(self):
        room = [
            1 if one.deaths > 2 or not one.left else max(1, self.slots >> one.deaths) for one in self.held if one.deaths
        ]
        return t.Suspects(self.slots, len(room), min(room, default=self.slots))


@pytest.mark.parametrize("seed", range(12), ids=lambda seed: f"seed {seed}")
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
