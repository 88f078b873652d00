"""A script of a queue with keys cut off at any point loses no message, exceeds no limit, and blocks no key."""

import random
import time
from collections import Counter

import pytest
from cutting import Snapshot, cut_after
from held_clock import HOUR_MS
from keyed_machine import IDS, KEYS, LEASE_MS, KeyedMachine, value_of
from keyed_state import KeyedState

from reliq.admin import Admin
from reliq.lua import transitions as t
from reliq.wire_format import is_key

pytestmark = pytest.mark.foreign_hands

#: Limits of the states in which scripts are cut off, and the steps to each state. Without --long scripts are cut off
#: after every fourth write; claims after every write, because they must take places before leases.
STATES = [{"ordered": 1, "per_key": 1}, {"per_key": 2, "key_rate_us": 200_000, "key_burst": 2, "concurrency": 5}]
LONG_STATES, STEPS = 40, 40
#: Faults that may remain after a repair: the account cannot be repaired, the others disappear by themselves.
ALLOWED = {"account", "no-body", "no-word", "misplaced", "asleep"}
#: Messages that were cancelled while they waited, and the keys of their next publish.
AGAIN = {"again": "A", "moved": "A", "plain": "B"}
#: The scripts that are cut off.
CUT = {
    *("ack", "cancel", "claim", "limit", "nack", "promote", "publish", "purge", "reclaim", "redrive"),
    *("release", "reschedule", "sleep", "snooze", "tidy"),
}


def _step(one, chance):
    rows = [(f"new{chance.random()}"[:3], chance.choice([*KEYS, ""])) for _ in range(3)]
    picked = [chance.randint(0, 3), chance.randint(0, 6)]
    delay_ms = chance.choice([0, 1, 500, 60_000])
    steps = {
        lambda: one.publish(rows, delay_ms=delay_ms, left=chance.choice([0, 1, 3])): 3,
        lambda: one.publish([(chance.choice(IDS), chance.choice(KEYS))], left=2): 2,
        lambda: one.claim(chance.choice([1, 2, 4])): 4,
        lambda: one.nack(picked, delay_ms, chance.random() < 0.3): 3,
        lambda: one.ack(picked, "acked"): 1,
        lambda: one.release(picked, None): 1,
        lambda: one.snooze(picked, delay_ms): 1,
        lambda: one.tick(chance.choice([300_000, LEASE_MS * 1000])): 2,
        one.reclaim: 1,
        one.promote: 1,
        lambda: one.cancel([chance.randint(0, 9)]): 1,
        one.collect: 1,
    }
    chance.choices(list(steps), list(steps.values()))[0]()
    one.what_redis_holds_is_sound()


def machine(client, seed, fields):
    """Make a queue with keys in a random state."""
    chance = random.Random(seed)
    one = type("Machine", (KeyedMachine,), {"client": client})()
    one.begin(fields)
    one.oracle.now = time.time_ns() // 10**6 * 1000
    one.publish([("new", "A")])
    one.claim()
    one.what_redis_holds_is_sound()
    one.nack([0], 0, reject=True)
    one.what_redis_holds_is_sound()
    one.collect()
    for _ in range(STEPS):
        _step(one, chance)
    one.publish([("new", key) for key in ("A", "B", "", "A", "C")], left=1)
    one.what_redis_holds_is_sound()
    one.claim(4)
    one.what_redis_holds_is_sound()
    one.publish([("again", "A"), ("moved", "B"), ("plain", "")])
    one.cancel_these(["again", "moved", "plain"])
    one.what_redis_holds_is_sound()
    client.delete(one.keys.wake, one.keys.watch)
    return one


def _calls(one, chance):
    """Return a call of every script that moves messages, on the current content."""
    keys, clock, state = one.keys, one.clock, one.state
    turn = lambda lane: t.CallNumber(lane, one.numbers[lane] + 1)  # noqa: E731
    receipts = one.good(one.receipts)
    failures = [(held, 5, "failed 1 x", b"" if held.left and chance.random() < 0.6 else b"last") for held in receipts]
    letters = [(name.decode(), letter[b"id"].decode(), 3) for name, letter in one.client.xrange(keys.dead)]
    alive = sorted(one.oracle.alive)
    far = one.oracle.now + 10**9
    yield t.ack(keys, [(held, 45_000) for held in receipts], clock=clock)
    yield t.nack(keys, failures, clock=clock)
    yield t.snooze(keys, [(held, 500) for held in receipts], clock=clock)
    for sleep_ms in (None, 700):
        yield t.release(keys, receipts, sleep_ms=sleep_ms, clock=clock)
    for delay_ms in (0, 700):
        items = [(id, value_of("A", 2, None)) for id in ("new-1", "new-2", "new-3")]
        options = {"ttl_ms": HOUR_MS, "retries": 2, "delay_ms": delay_ms, "message_keys": ["A", "fresh", ""]}
        yield t.publish(keys, items, turn("p"), **options, clock=clock)
        items = [(id, value_of(key, 2, 45_000)) for id, key in AGAIN.items()]
        options |= {"window_ms": 45_000, "message_keys": list(AGAIN.values())}
        yield t.publish(keys, items, turn("p"), **options, clock=clock)
    for first in ("ready", "retry"):
        yield t.claim(keys, turn("w"), limit=4, lease_ms=20_000, first=first, watcher="me", clock=far)
    yield t.promote(keys, clock=far)
    yield t.reclaim(keys, clock=far)
    yield t.cancel(keys, alive, clock=clock)
    yield t.reschedule(keys, alive, delay_ms=900, clock=clock)
    yield t.redrive(keys, letters, ttl_ms=HOUR_MS, clock=clock)
    yield t.purge(keys, sorted(state.pending)[:2], state="pending", clock=clock)
    for key, ids in state.lines.items():
        yield t.purge(keys, ids[:2], state="line", line=key, clock=clock)
    yield t.limit(keys, {"per_key": "3"}, clock=clock)
    for for_ms in (500, 0):
        yield t.sleep(keys, "A", for_ms=for_ms, clock=clock)
    yield t.tidy(keys, clock=clock)


def lost_of(before, after):
    """Return the living messages with a body that are gone."""
    there = after.met.keys() | after.garbage
    return {id for id in before.counts if not before.cancelled(id)} - there


def broken_limits(state, per_key):
    """Return the keys with more leased messages than their limit."""
    leased = Counter(state.key_of(id) for id in state.leased)
    return {key for key, number in leased.items() if is_key(key) and number > per_key}


@pytest.mark.timeout(900)
def test_a_script_that_is_cut_off_loses_nothing_and_holds_no_key_up(request, url, client):
    admin, cuts = Admin(url), Counter()
    is_long = request.config.getoption("--long")
    for seed, fields in enumerate(STATES * LONG_STATES if is_long else STATES):
        one = machine(client, seed, fields)
        for call in _calls(one, random.Random(seed)):
            first, step = (1, 1) if is_long or call.script.name == "claim" else (1 + seed % 4, 4)
            cuts[call.script.name] += cut_after_writes(one, call, admin, fields["per_key"], first, step)

    assert {name for name, number in cuts.items() if number} == CUT


def cut_after_writes(one, call, admin, per_key, first, step):
    """Cut a call off after every `step` writes, from the same state; return the number of cuts."""
    client, keys = one.client, one.keys
    state, before = Snapshot(client), KeyedState(client, keys)
    one.run(call)
    done = KeyedState(client, keys)
    ended = lost_of(before, done)
    for writes in range(first, 400, step):
        state.put_back()
        if not cut_after(client, call, writes):
            state.put_back()
            return writes - first
        told, cut = f"{call.script.name} after {writes} writes", KeyedState(client, keys)
        assert not broken_limits(cut, per_key), told
        assert {(cut.key_of(id), id) for id in cut.leased} <= cut.places, told
        assert lost_of(before, KeyedState(client, keys)) <= ended, told
        one.run(call)
        again = KeyedState(client, keys)
        assert not broken_limits(again, per_key), told
        if call.script.name == "publish":
            assert {id for id in done.met if not done.cancelled(id)} <= {
                id for id in again.met if not again.cancelled(id)
            }, told
        admin.check("q", repair=True)
        assert lost_of(before, KeyedState(client, keys)) <= ended, told
        left = [fault for fault in admin.check("q").faults if fault.name not in ALLOWED]
        assert left == [], told
        assert not lost_of(before, KeyedState(client, keys)) - ended, told
        _all_is_served(one, told)
    raise AssertionError(f"{call.script.name} does not come to an end")


def _all_is_served(one, told):
    """Let hours pass: every message ends, and no key remains."""
    far = one.oracle.now + 10**9
    for number in range(1, 200):
        far += 30_000_000
        one.run(t.promote(one.keys, clock=far))
        one.run(t.reclaim(one.keys, clock=far))
        turn = t.CallNumber("last", number)
        claimed = one.run(t.claim(one.keys, turn, limit=500, lease_ms=1000, clock=far)).claimed
        one.run(t.ack(one.keys, [(held, None) for held in claimed], clock=far))
        if not one.client.exists(one.keys.retries_left):
            break
    left = KeyedState(one.client, one.keys)
    assert not [*left.counts, *left.lines, *left.places, *left.kept], told
