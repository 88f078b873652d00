"""Rule 4: a script cut off at any point loses no message: at worst a message runs twice; `check` repairs the queue."""

import random
import re
import time
from collections import Counter
from typing import get_args

import pytest
import redis
from cutting import Snapshot, cut_after
from held_clock import HOUR_MS
from test_model import QueueMachine

from reliq.admin import Admin
from reliq.lua import script_names, transitions as t
from reliq.wire_format import envelope_rest

pytestmark = [pytest.mark.foreign_hands, pytest.mark.slow]

#: Number of states, and steps to each; every script that writes is cut off in each state.
STATES, LONG_STATES, STEPS = 6, 150, 40
#: A claim takes this many messages at a time, and puts back messages that must wait.
LIMIT = 4
#: Scripts that only read, or write once, or move no message. `check` repairs unsound states, so it runs again where a script was cut off.
LOOKS = {"ask", "bodies", "book", "counts", "forget", "held_up", "key_queues", "plan_due", "remap", "status"}
#: The three steps of a move between shards: test_relocation.py cuts them off.
MOVES = {"depart", "arrive", "leave"}
#: Only for queues with keys: test_keyed_cut_off.py cuts it off.
OF_KEYS = {"limit"}
#: Faults that may remain after a repair: the account cannot be repaired, the others disappear by themselves.
ALLOWED = {"account", "no-body", "no-word"}


class Held:
    """
    The content of a queue.

    Attributes:
        alive: ids with a body that will be delivered or become a dead letter.
        letters: id -> its number of dead letters.
        places: the ids in each place.
    """

    def __init__(self, client, keys):
        with client.pipeline() as pipe:
            pipe.zrange(keys.pending, 0, -1).lrange(keys.ready, 0, -1).zrange(keys.unack, 0, -1)
            pipe.lrange(keys.retry, 0, -1).smembers(keys.garbage).hgetall(keys.lease).xrange(keys.dead)
            *places, words, letters = pipe.execute()
        self.places = [[id.decode() for id in ids] for ids in places]
        there = sorted({id for ids in self.places for id in ids})
        values = client.mget([keys.msg(id) for id in there]) if there else []
        cancelled = {id.decode() for id, word in words.items() if word.endswith(b"!")}
        self.alive = {id for id, value in zip(there, values, strict=True) if value is not None} - cancelled
        self.letters = Counter(letter[b"id"].decode() for _, letter in letters)

    def lost_of(self, before):
        """Return the messages that are gone; the id of a dead letter may live again."""
        alive = {id for id in before.alive - self.alive if self.letters[id] <= before.letters[id]}
        return alive | {
            id for id, number in before.letters.items() if self.letters[id] < number and id not in self.alive
        }

    def moved_since(self, before):
        """Return the messages that are in another state."""
        return {id for was, now in zip(before.places, self.places, strict=True) for id in {*was} ^ {*now}}


def machine(client, seed):
    """Make a queue in a random state."""
    chance = random.Random(seed)
    one = type("Machine", (QueueMachine,), {"client": client})()
    one.begin()
    one.model.now = time.time_ns() // 10**6 * 1000
    for _ in range(STEPS):
        _step(one, chance)
    one.redis_holds_what_the_model_holds()
    client.delete(one.keys.wake, one.keys.watch)
    return one


def _step(one, chance):
    ids = chance.sample([f"m{number}" for number in range(6)], chance.randint(1, 3))
    receipts = one.chosen([chance.randint(0, 3)])
    delay_ms = chance.choice([0, 1, 500, 60_000])
    steps = {
        lambda: one.publish(ids, delay_ms, chance.choice([0, 1, 3]), chance.random() < 0.8): 4,
        lambda: one.claim(chance.choice([1, 2, 4]), chance.choice(["ready", "retry"])): 4,
        lambda: one.settle(
            "nack", receipts, delay_ms=delay_ms, reject=chance.random() < 0.4, unread=chance.random() < 0.3
        ): 3,
        lambda: one.settle("release", receipts): 1,
        lambda: one.settle("snooze", receipts, delay_ms=delay_ms): 1,
        lambda: one.pass_time(chance.choice([500_000, 20_000_000])): 2,
        lambda: one.reclaim(500): 2,
        lambda: one.promote(500): 1,
        lambda: one.cancel(ids): 1,
        lambda: one.reschedule(ids, delay_ms): 1,
        lambda: one.collect(sorted(one.model.garbage)): 2,
    }
    chance.choices(list(steps), list(steps.values()))[0]()


def _calls(one, chance):
    """Return a call of every script that moves messages, on the current content."""
    keys, clock = one.keys, one.clock
    ids = chance.sample([f"m{number}" for number in range(6)], 4)
    receipts = one.chosen(range(8))
    again, last, unread = (5, "failed 1 x", b""), (5, "failed 1 x", b"last"), (-2, "undecodable 1 x", b"")
    failures = [
        (held, *chance.choice([again, again, last, unread] if held.left else [last, unread])) for held in receipts
    ]
    letters = [(name.decode(), letter[b"id"].decode(), 3) for name, letter in one.client.xrange(keys.dead)]
    turn = lambda lane: t.CallNumber(lane, one.numbers[lane] + 1)  # noqa: E731
    options = {"left": 2, "replace": chance.random() < 0.5}
    yield t.ack(keys, [(held, 45_000) for held in receipts], clock=clock)
    results = ["0 1 null"] * len(receipts)
    yield t.ack(keys, [(held, 45_000) for held in receipts], results=results, keep_ms=60_000, clock=clock)
    yield t.nack(keys, failures, clock=clock)
    yield t.extend(keys, receipts, lease_ms=30_000, clock=clock)
    yield t.checkpoint(keys, [(held, 1, '"1 0 7"') for held in receipts], clock=clock)
    yield t.release(keys, receipts, clock=clock)
    yield t.snooze(keys, [(held, 500) for held in receipts], clock=clock)
    for delay_ms in (0, 700):
        yield one.publish_call([*ids, "new"], turn("p"), delay_ms=delay_ms, **options)[1]
    for first in ("ready", "retry"):
        yield t.claim(keys, turn("w"), limit=LIMIT, lease_ms=20_000, first=first, watcher="me", clock=clock)
    yield t.promote(keys, clock=one.model.now + 10**9)
    yield t.reclaim(keys, clock=one.model.now + 10**9)
    yield t.cancel(keys, ids, clock=clock)
    yield t.reschedule(keys, ids, delay_ms=900, clock=clock)
    yield t.collect(keys, sorted(one.model.garbage), dead_letter_limit=100, letters_ms=10**12, clock=clock)
    yield t.redrive(keys, letters, ttl_ms=HOUR_MS, delay_ms=chance.choice([0, 800]), clock=clock)
    for state in ("pending", "ready", "retry", "garbage"):
        yield t.purge(keys, list(getattr(one.model, state))[:2], state=state)
    for for_ms in (5, 0):
        yield t.sleep(keys, "tenant", for_ms=for_ms, clock=clock)
    yield t.tidy(keys, clock=one.model.now - 3_600_000_000)
    yield t.register(keys, [("daily", "every 60"), ("hourly", "every 3600")], newest=True, clock=clock)
    one.run(t.register(keys, [("daily", "every 60")], newest=True, clock=one.model.now))
    now = one.model.now // 10**6
    message = (f"cron.daily.{now + 60}", envelope_rest(2, 1, 0) + b"body")
    for due_ms in (0, one.model.now // 1000 + 60_000):
        due = t.Tick("daily", "every 60", now + 60, now, missed=2, message=message, due_ms=due_ms)
        yield t.tick(keys, due, ttl_ms=HOUR_MS, retries=2, clock=clock)
    replacing = {"ttl_ms": HOUR_MS, "retries": 2, "span_ms": 500, "most_ms": 5000, "clock": clock}
    items = [(id, envelope_rest(2, 1, 0) + b"newer") for id in [*ids, "newest"]]
    for mode in get_args(t.ReplaceMode):
        yield t.replace(keys, items, turn("p"), mode=mode, **replacing)
    one.run(t.replace(keys, items, turn("p"), mode="replace", **replacing))
    for kind in ("acked", "nacked"):
        yield t.succeed(keys, receipts, kind=kind, clock=clock)
    yield t.reclaim(keys, clock=one.model.now + 10**9)
    yield t.cancel(keys, ids, clock=clock)
    stored = {"revision": "a1", "next": now + 60, "value": b'{}\n,"r":3}\nbody'}
    yield t.plan(keys, "write", "stored", **stored, clock=clock)
    one.run(t.plan(keys, "write", "stored", **stored, clock=one.model.now))
    value = envelope_rest(2, 1, 0) + b"body"
    tick = t.PlanTick(f"plan.stored.{now + 60}", "stored", "a1", str(now + 60), now + 120, HOUR_MS, 2, value)
    yield t.plan_tick(keys, [tick], clock=clock)


@pytest.fixture
def survives(client, keys, run, url):
    """Run a call completely, then cut off in many ways from the same state; return the number of cuts."""
    admin = Admin(url)

    def make(call, ways):
        state, before, missing = Snapshot(client), Held(client, keys), run(t.counts(keys)).missing
        run(call)
        done, cuts = Held(client, keys), 0
        ended, most = done.lost_of(before), max(LIMIT, len(done.moved_since(before)))
        for way in ways(call, state.put_back):
            cuts += 1
            off = abs(run(t.counts(keys)).missing - missing)
            assert off <= most, (way, off)
            for after in (lambda: None, lambda: run(call), lambda: admin.check("q", repair=True)):
                after()
                assert Held(client, keys).lost_of(before) - ended == set(), way
            left = [fault for fault in admin.check("q").faults if fault.name not in ALLOWED]
            assert left == [], way
            assert before.alive - ended <= _delivered(client, keys, run), way
        state.put_back()
        return cuts

    return make


def _delivered(client, keys, run):
    """Let hours pass; return the ids that were delivered with a body or became a dead letter."""
    met, far = {letter[b"id"].decode() for _, letter in client.xrange(keys.dead)}, time.time_ns() // 1000
    for number in range(1, 5):
        far += HOUR_MS * 1000
        run(t.promote(keys, clock=far))
        run(t.reclaim(keys, clock=far))
        turn = t.CallNumber("last", number)
        met |= {
            one.id
            for one in run(t.claim(keys, turn, limit=500, lease_ms=1000, clock=far)).claimed
            if client.exists(keys.msg(one.id))
        }
    return met | {id.decode() for id in client.smembers(keys.garbage) if client.exists(keys.msg(id.decode()))}


@pytest.fixture(params=["after each write", "without each command"])
def ways(request, client, limited):
    """Restore the queue and cut off the call repeatedly: after each write, or at a denied command."""

    def after_each_write(call, put_back):
        for writes in range(1, 200):
            put_back()
            if not cut_after(client, call, writes):
                return
            yield f"{call.script.name} after {writes} writes"
        raise AssertionError(f"{call.script.name} does not come to an end")

    def without_each_command(call, put_back):
        for command in sorted({command for command, key in call.script.uses if key}):
            put_back()
            try:
                limited(call, without=command)
            except redis.ResponseError as error:
                assert re.search("permission|can't run this command", str(error)), error
                yield f"{call.script.name} without {command}"

    return after_each_write if request.param == "after each write" else without_each_command


@pytest.mark.timeout(600)
def test_a_script_that_is_cut_off_loses_nothing_in_any_state(ways, request, client, survives):
    cuts = Counter()
    for seed in range(LONG_STATES if request.config.getoption("--long") else STATES):
        one = machine(client, seed)
        for call in _calls(one, random.Random(seed)):
            cuts[call.script.name] += survives(call, ways)

    assert {name for name, number in cuts.items() if number} == {*script_names()} - LOOKS - MOVES - OF_KEYS
