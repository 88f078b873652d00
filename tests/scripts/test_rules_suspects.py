"""Rules 10 and 13: a message that may have killed a worker is isolated step by step, and neither list starves."""

import random

import pytest
from held_clock import NOON, micros

from reliq.lua import transitions as t

LEASE_MS = 1
#: A running suspect leaves no room for another suspect.
NO_ROOM = t.Suspects(slots=16, held=1, narrowest=1)


@pytest.fixture
def lose(publish, claim, run, keys):
    """Publish messages and let their leases expire: they become suspects in retry."""

    def make(*ids, **options):
        publish(*ids, **options)
        claim(limit=len(ids), lease_ms=LEASE_MS)
        run(t.reclaim(keys, clock=micros(LEASE_MS)))

    return make


def names(claimed):
    return [one.id for one in claimed]


def test_suspects_that_a_process_holds_count_and_the_narrowest_decides(lose, claim, run, keys):
    lose(*(f"m{number}" for number in range(20)))
    taken = {}

    for held, narrowest in ((0, 16), (3, 8), (8, 8), (1, 1), (2, 4)):
        some = claim(suspects=t.Suspects(16, held, narrowest))
        taken[held, narrowest] = len(some)
        run(t.release(keys, some))

    assert taken == {(0, 16): 8, (3, 8): 5, (8, 8): 0, (1, 1): 0, (2, 4): 2}


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
    """A process that runs claimed messages until a message kills it with all messages beside it."""

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
