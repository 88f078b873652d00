"""Shared limits, as a model: random bookings, refunds, repeats and deaths of many processes keep every window."""

import hashlib
import heapq
import random
import sys
from dataclasses import replace

import pytest
from held_clock import NOON
from sending import send

from reliq.keys import limit_key
from reliq.limits import Limit
from reliq.lua import transitions as t

#: No booking is further ahead than this.
AHEAD_US = 5_000_000
PROCESSES = 12
#: So many starts are due until the end of a game.
STARTS = 300


def excess(starts, limit):
    """
    Return by how much the fullest window is above burst + rate x window, as a share of the burst.

    Starts are (us, number, cost); the result is the larger one of starts and costs.
    """
    every, burst, cost_every, cost_burst = map(int, limit.declared[2].split())
    result = 0.0
    for kind, every_us, most in ((1, every / 1000, burst), (2, cost_every / 1000, cost_burst)):
        level, before = 0.0, 0
        for start in sorted(starts) if most else ():
            level = max(0.0, level - (start[0] - before) / every_us) + start[kind]
            before = start[0]
            result = max(result, level / most - 1)
    return result


def span_us(limit, number):
    """Return the us in which the limit allows `number` usual messages."""
    every, _, cost_every, cost_burst = map(int, limit.declared[2].split())
    return int(number * max(every, cost_every * usual_cost(cost_burst)) / 1000)


def usual_cost(burst):
    return sum(costs_of(burst)) / 4


def costs_of(burst):
    return (1, 1 + burst // 100, 1 + burst // 7, burst)


def play(client, limit, seed, *, faults=True, mutant=lambda text: text):
    """
    Let processes book, start, give back, repeat and die until 300 starts are due by a held clock.

    A process asks for a random number of starts; of a limit by cost, for one start with a random cost. With `faults`, it
    gives a random part back, before or after the time; it corrects a cost; it repeats bookings whose reply is lost; it
    books for a later time; or it dies with its booking.

    Returns:
        The starts, each as time, number and real cost, and the number of calls.
    """
    chance, starts, calls = random.Random(seed), [], 0
    most = 1 if limit.costs else max(4, limit.starts)
    one_us = span_us(limit, 1)
    idle_us = 60 * one_us if faults and seed % 2 else 5000
    events: list = [(NOON + chance.randrange(1000), process, None, 0) for process in range(PROCESSES)]
    heapq.heapify(events)

    def run(call):
        nonlocal calls
        calls += 1
        text = mutant(call.script.text)
        lua = replace(call.script, text=text, sha=hashlib.sha1(text.encode()).hexdigest())
        return call.read(send(client, replace(call, script=lua)))

    def book(now, process, cost):
        after_us = chance.randrange(3 * one_us) if faults and chance.random() < 0.03 else 0
        cost = cost or (chance.choice(costs_of(limit.costs)) if limit.costs else 0)  # the same after a refusal
        booking = run(t.book(limit, chance.randint(1, most), cost=cost, after_us=after_us, clock=now))
        if faults and chance.random() < 0.05:  # the reply is lost
            booking = run(t.book(limit, chance.randint(1, most), cost=cost, clock=now))
        if not booking.starts:
            return now + booking.wait_us, process, None, cost
        booking = booking._replace(next_us=now + booking.next_us)
        ahead_us = AHEAD_US + int(limit.declared[2].split()[2]) * limit.costs / 1000
        assert now <= booking.at_us <= now + max(after_us, 0) * bool(limit.costs) + ahead_us
        if faults and chance.random() < 0.05:  # it dies
            return booking.at_us + 1_000_000, process, None, 0
        is_early = faults and booking.wait_us > 0 and chance.random() < 0.1
        return now + chance.randrange(booking.wait_us) if is_early else booking.at_us, process, booking, cost

    while events and events[0][0] <= NOON + span_us(limit, STARTS):
        now, process, booking, cost = heapq.heappop(events)
        if booking is None:
            heapq.heappush(events, book(now, process, cost))
        elif booking.starts <= 0:
            run(t.book(limit, booking.starts, cost=cost, after_us=booking.at_us, clock=now))
            heapq.heappush(events, (max(now + chance.randrange(idle_us), booking.next_us), process, None, 0))
        else:
            used = 0 if now < booking.at_us else booking.starts
            if faults and chance.random() < 0.2:
                used = chance.randrange(used + 1)
            real = cost if used and (not faults or chance.random() < 0.6) else chance.randrange(cost + 1) * bool(used)
            starts += [(now, used, real)] * bool(used)
            unused = booking._replace(starts=used - booking.starts) if used < booking.starts or real < cost else None
            late = chance.choice((1, 1000, 3 * one_us, 12 * one_us)) if unused else 0
            next_us = now + late if unused else max(now + chance.randrange(idle_us), booking.next_us)
            heapq.heappush(events, (next_us, process, unused, real - cost if unused else 0))
    return starts, calls


@pytest.mark.foreign_hands
@pytest.mark.parametrize("seed", range(40))
def test_all_windows_keep_burst_and_rate_through_refunds_repeats_and_deaths(client, seed):
    limit = Limit("api", rate=("10/s", "100/s", "20/m", "2/s")[seed % 4], burst=(1, 3, 10)[seed % 3])

    starts, _ = play(client, limit, seed)

    assert len(starts) > 30
    assert excess(starts, limit) <= 1e-6


@pytest.mark.foreign_hands
@pytest.mark.parametrize("seed", range(40))
def test_all_windows_keep_the_rate_by_cost_through_corrections_repeats_and_deaths(client, seed):
    rate = ("1000/s by cost", "60000/m by cost", "100/s by cost", "20000/h by cost")[seed % 4]
    cost_burst = (1000, 200, 5000)[seed % 3]
    rates, bursts = ([rate], [cost_burst]) if seed % 8 < 4 else (["5/s", rate], [2, cost_burst])
    limit = Limit("api", rate=rates, burst=bursts)

    starts, _ = play(client, limit, seed)

    assert len(starts) > 30
    assert excess(starts, limit) <= 1e-6


@pytest.mark.foreign_hands
@pytest.mark.parametrize(
    ("part", "wrong"),
    [
        (" + math.max(0, math.max(us, ahead) - after)", ""),
        ("math.max(us, ahead) - after", "us - after"),
        ("one.full + whole_or_less - one.whole", "one.full + whole_or_less - one.whole - one.every"),
        ("math.max(one.full, at) + one.units", "one.full + one.units"),
    ],
    ids=["whole refund", "refund although later starts are booked", "one unit too many", "a pause counts twice"],
)
def test_a_wrong_refund_or_booking_exceeds_a_window(client, part, wrong):
    def mutant(text):
        assert part in text
        return text.replace(part, wrong)

    limits = [Limit(f"api{seed}", rate="10/s", burst=(1, 3, 10)[seed % 3]) for seed in range(18)]
    limits += [Limit(f"cost{seed}", rate="100/s by cost", burst=1000) for seed in range(9)]
    games = [excess(play(client, limit, seed, mutant=mutant)[0], limit) for seed, limit in enumerate(limits)]

    assert max(games) >= 0.5


@pytest.mark.foreign_hands
def test_small_costs_do_not_overtake_a_large_cost_for_ever(client, run):
    """Twelve processes always want a small cost, one wants the whole burst, which takes 10 s to flow in."""
    limit = Limit("api", rate="100/s by cost", burst=1000)
    turns, large = [(NOON + process, process) for process in range(PROCESSES + 1)], 0
    while turns[0][0] < NOON + 100_000_000:
        now, process = heapq.heappop(turns)
        booking = run(t.book(limit, 1, cost=50 if process else 1000, clock=now))
        large += not process and booking.starts
        heapq.heappush(turns, (now + booking.wait_us, process))

    assert large >= 5


@pytest.mark.foreign_hands
@pytest.mark.parametrize(
    ("rate", "burst"), [("500/s by cost", 1000), ("100/s by cost", 300), (["2/s", "100/s by cost"], [2, 300])]
)
def test_under_load_a_rate_by_cost_is_used_and_a_start_takes_few_calls(client, rate, burst):
    limit = Limit("api", rate=rate, burst=burst)

    starts, calls = play(client, limit, 1, faults=False)

    every, _, cost_every, _ = map(int, limit.declared[2].split())
    span_ns = 1000 * (max(starts)[0] - NOON)
    assert max(sum(cost for *_, cost in starts) * cost_every, len(starts) * every) >= 0.95 * span_ns
    assert calls <= 1.5 * len(starts)


@pytest.mark.foreign_hands
@pytest.mark.parametrize(
    ("rate", "burst", "processes"), [("10/s", 3, 12), ("2/s", 1, 12), ("60/m", 10, 12), ("60/m", 10, 40)]
)
def test_under_load_the_rate_is_used_and_a_start_takes_few_calls(client, rate, burst, processes, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "PROCESSES", processes)
    limit = Limit("api", rate=rate, burst=burst)

    starts, calls = play(client, limit, 1, faults=False)

    number = sum(count for _, count, _ in starts)
    assert number >= 0.95 * STARTS
    assert calls <= 1.5 * number


@pytest.mark.foreign_hands
def test_a_booking_is_at_most_five_seconds_ahead_and_tries_take_turns(client, run):
    limit = Limit("api", rate="1/s", burst=1)
    waits = [run(t.book(limit, 3, clock=NOON)) for _ in range(9)]

    assert [one.wait_us // 1_000_000 for one in waits] == [0, 1, 2, 3, 4, 5, 1, 2, 3]
    assert [one.starts for one in waits] == [1] * 6 + [0] * 3
    later = run(t.book(limit, 1, clock=NOON + 1_000_000))
    assert (later.wait_us, later.starts, later.next_us) == (5_000_000, 1, 5_000_000)  # after those that wait


@pytest.mark.foreign_hands
def test_no_more_starts_are_booked_than_messages_of_the_queue_wait(client, run):
    limit = Limit("api", rate="10/s", burst=2)

    def book(queue, backlog, ms):
        return run(t.book(limit, 3, queue=queue, backlog=backlog, clock=NOON + ms * 1000))[:2]

    assert book("a", 3, 0) == (0, 2)
    assert [book("a", 3, 0), book("a", 3, 1)] == [(100_000, 1), (129_000, 0)]
    assert book("b", 1, 1) == (199_000, 1)
    assert book("a", 4, 1) == (299_000, 1)
    assert book("a", 1, 330) == (70_000, 1)  # the others should have been claimed by now
    assert book("a", 1, 331)[1] == 0
    run(t.book(limit, -1, after_us=NOON + 400_000, queue="a", clock=NOON + 332_000))
    assert book("a", 1, 333)[1] == 1


@pytest.mark.foreign_hands
def test_a_clock_that_goes_back_shuts_a_limit_for_seconds_and_refunds_nothing(client, run):
    limit = Limit("api", rate="1/s", burst=2)
    one = run(t.book(limit, 2, queue="a", backlog=9, clock=NOON + 3_600_000_000))

    run(t.book(limit, -2, after_us=one.at_us, clock=NOON))

    assert run(t.book(limit, 1, queue="a", backlog=1, clock=NOON)) == (1_000_000, 0, 0, 0, "")
    assert run(t.book(limit, 1, clock=NOON + 1_000_000)).wait_us == 5_000_000
    assert run(t.book(limit, 1, clock=NOON + 7_000_000)).wait_us == 0


@pytest.mark.foreign_hands
def test_the_last_declaration_is_in_force_and_foreign_values_are_replaced(client, run):
    old, new = Limit("api", rate="1/s", burst=1), Limit("api", rate="10/s", burst=2)

    assert run(t.book(old, 0, clock=NOON)).before == run(t.book(old, 0, clock=NOON)).before == ""
    assert run(t.book(new, 0, clock=NOON)).before == "rate=1/s, burst=1"
    assert run(t.book(old, 2, clock=NOON)).starts == 2

    client.hset(limit_key("api"), mapping={"buckets": "x", "full": "y", "turn": "z", "ahead": "-"})
    assert run(t.book(old, 2, clock=NOON)).starts == 1
    assert client.hget(limit_key("api"), "rate") == b"1/s"
