"""A state machine of a queue with keys on a held clock: random moves, and the invariants after each move."""

import sys
from collections import Counter

from held_clock import NOON
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from keyed_oracle import Oracle
from keyed_state import KeyedState, check_held, check_places, check_ring
from queue_machine import ALL_AT_ONCE, a_few, delays, limits, picks, some_suspects
from queue_model import call_of
from sending import send

from reliq.keys import Keys
from reliq.lua import transitions as t
from reliq.message import PRIORITY_LINES
from reliq.wire_format import ENVELOPE_START, envelope_rest, is_key, open_envelope

#: Chosen ids, used again and again; generated ids are new each time.
IDS = [f"m{number}" for number in range(5)]
KEYS = ["A", "B", "C", "a long key, é"]
LEASE_MS, WINDOW_MS, FOR_EVER_MS = 20_000, 45_000, 10**12
ALL = 500
#: Microseconds between two starts at the rate of the queue, and at the rates of keys.
RATE_US, KEY_RATES_US = 50_000, [200_000, 1_500_000]

some_keys = st.sampled_from([*KEYS, *KEYS, "", *PRIORITY_LINES.values()])
messages = st.lists(st.tuples(st.sampled_from([*IDS, "new", "new", "new"]), some_keys), min_size=1, max_size=5)
few_picks = st.lists(st.integers(0, 20), min_size=1, max_size=3)
spans_us = st.sampled_from(
    [1, 999, 20_000, 300_000, 1_500_000, LEASE_MS * 1000, 60_000_000, -1, -300_000, -3_600_000_000]
)
LIMITS = ["ordered", "per_key", "key_rate_us", "key_burst", "rate_us", "burst", "concurrency", "weight:B"]
some_limits = st.fixed_dictionaries(
    {},
    optional={
        "ordered": st.sampled_from([1]),
        "per_key": st.sampled_from([1, 1, 2, 3]),
        "key_rate_us": st.sampled_from(KEY_RATES_US),
        "key_burst": st.sampled_from([1, 2]),
        "rate_us": st.just(RATE_US),
        "burst": st.sampled_from([1, 5]),
        "concurrency": st.sampled_from([1, 3]),
        "weight:B": st.just(4),
    },
)


def natural(name):
    return len(name), name


def value_of(key, left, window_ms):
    """Return the envelope of a message for `publish`: its header contains the key."""
    return envelope_rest(left, 1, window_ms, line=key) + b"body"


class KeyedMachine(RuleBasedStateMachine):
    """
    The moves of a queue with keys.

    Attributes:
        held: the server's held clock. None: real time; scripts get the time as an argument, and no Redis key expires.
    """

    client = None
    held = None

    @initialize(fields=some_limits)
    def begin(self, fields):
        self.client.flushall()
        self.keys, self.oracle, self.latest = Keys("q"), Oracle(NOON), NOON
        self.numbers, self.made, self.receipts = Counter(), Counter(), []
        self.last_publish = self.last_claim = None
        self.by_hand = set()
        self.pass_time(0)
        self.change_limits(fields)
        self.state = KeyedState(self.client, self.keys)

    def pass_time(self, us):
        self.oracle.now += us
        self.latest = max(self.latest, self.oracle.now)
        if us < 0:
            self.oracle.forget_starts()
        if self.held:
            self.held.set(self.oracle.now)

    @property
    def clock(self):
        """The time that scripts get as an argument; None with a held clock."""
        return None if self.held else self.oracle.now

    @property
    def now_ms(self):
        return self.oracle.now // 1000

    def run(self, call):
        return call.read(send(self.client, call))

    def turn(self, lane):
        self.numbers[lane] += 1
        return t.CallNumber(lane, self.numbers[lane])

    # ---- publish ------------------------------------------------------------

    @rule(some=messages, delay_ms=delays, left=st.sampled_from([0, 1, 3]), replace=st.booleans())
    def publish(self, some, delay_ms=0, left=3, replace=True):
        """Publish new generated ids or chosen ids; one call never mixes both kinds."""
        chosen = some[0][0] != "new"
        rows = [row for row in some if (row[0] != "new") == chosen]
        self.numbers["id"] += 0 if chosen else len(rows)
        ids = [id if chosen else f"n{self.numbers['id'] - at}" for at, (id, _) in enumerate(rows)]
        window_ms = WINDOW_MS if chosen else None
        items = [(id, value_of(key, left, window_ms)) for id, (_, key) in zip(ids, rows, strict=True)]
        options = {"ttl_ms": FOR_EVER_MS, "retries": left, "delay_ms": delay_ms, "window_ms": window_ms}
        options |= {"replace": replace, "message_keys": [key for _, key in rows], "clock": self.clock}
        call = t.publish(self.keys, items, self.turn("p"), **options)
        answer = self.run(call)
        self.last_publish = call, answer
        for at, (id, (_, key)) in enumerate(zip(ids, rows, strict=True)):
            if at not in answer.refused:
                revived = id in self.oracle.alive
                assert not revived or id in self.oracle.cancelled
                before, due = self.state.key_of(id), answer.due_ms if delay_ms else 0
                moved = id in (self.state.lines.get(before, ()) if before else self.state.ready)
                self.oracle.enter(id, key, in_order=moved or not revived, due=due)

    @precondition(lambda self: self.last_publish)
    @rule()
    def repeat_the_last_publish(self):
        call, answer = self.last_publish
        assert self.run(call) == answer

    @rule(limit=limits)
    def promote(self, limit=ALL):
        self.run(t.promote(self.keys, limit=limit, clock=self.clock))
        # Also after the clock was changed, a key that used up its rate is throttled only until its next start is permitted.
        slept = KeyedState(self.client, self.keys).asleep.items() if limit == ALL else []
        longest_ms = self.oracle.number("key_rate_us") // 1000 + 2
        assert not [key for key, until in slept if until > self.now_ms + longest_ms and key not in self.by_hand]

    @rule(delay_ms=delays, left=st.sampled_from([0, 2]))
    def redrive(self, delay_ms, left):
        rows = self.client.xrange(self.keys.dead)[:3]
        letters = [(name.decode(), row[b"id"].decode(), left) for name, row in rows]
        answers = self.run(t.redrive(self.keys, letters, ttl_ms=FOR_EVER_MS, delay_ms=delay_ms, clock=self.clock))
        for (_, row), answer in zip(rows, answers, strict=True):
            key = open_envelope(row[b"value"])[0].line
            if answer == "redriven":
                self.oracle.enter(row[b"id"].decode(), key or "", in_order=False)

    # ---- claim and settle ---------------------------------------------------

    @rule(limit=limits, first=st.sampled_from(["ready", "retry"]), direct=a_few, suspects=some_suspects)
    def claim_some(self, **options):
        self.claim(**options)

    @rule(limit=limits)
    def claim_all_sorts(self, limit):
        self.claim(limit)

    def claim(self, limit=4, first="ready", direct=500, suspects=ALL_AT_ONCE):
        before, turn = self.state, self.turn("w")
        options = {"limit": limit, "first": first, "direct": direct, "suspects": suspects, "watcher": "me"}
        answer = self.run(t.claim(self.keys, turn, lease_ms=LEASE_MS, clock=self.clock, **options))
        claimed = answer.claimed
        assert len(claimed) <= limit
        assert not claimed or not before.paused
        assert [one.key for one in claimed] == [self.oracle.key_of[one.id] for one in claimed]
        self.oracle.start([one.id for one in claimed])
        # An empty claim leaves no lane; repeated, it is a new claim.
        self.last_claim = (turn, options, self.oracle.now + 1000 * LEASE_MS) if claimed else None
        self.receipts += claimed
        state = KeyedState(self.client, self.keys)
        if self.oracle.waits_for_rate(state):
            assert 0 <= answer.promote_in_ms <= RATE_US // 1000 + 1
        assert state.token or not claimed or not self.oracle.may_start(state)
        return answer

    @precondition(lambda self: self.last_claim and self.oracle.now < self.last_claim[2])
    @rule()
    def repeat_the_last_claim(self):
        turn, options, _ = self.last_claim
        again = self.run(t.claim(self.keys, turn, lease_ms=LEASE_MS, clock=self.clock, **options)).claimed
        before = {one.id: one for one in self.receipts if one.nonce.rpartition(":")[0].endswith(f"w.{turn.number}")}
        assert {one.id for one in again} <= before.keys()
        assert {one.key for one in again} <= {self.oracle.key_of[one.id] for one in again}

    def chosen(self, picked):
        """Return old receipts, the latest most often; none if there were no receipts."""
        return [self.receipts[-1 - pick % len(self.receipts)] for pick in picked] if self.receipts else []

    def good(self, receipts):
        """Return the valid receipts, each once."""
        words, unack = self.state.words, self.state.unack
        held = [one for one in receipts if one.id in unack and call_of(words.get(one.id, "")) == call_of(one.nonce)]
        return list({one.id: one for one in held}.values())

    def settled(self, receipts, answer):
        """Check the lost receipts; return the valid receipts without cancelled messages, which have finished."""
        good = self.good(receipts)
        assert set(answer.lost) >= {one.id for one in receipts} - {one.id for one in good}
        assert len(answer.lost) == len(receipts) - len(good)
        for id in answer.cancelled:
            self.oracle.end(id)
        return [one for one in good if one.id in self.oracle.alive]

    @rule(picked=picks, kind=st.sampled_from(["acked", "acked", "expired"]))
    def ack(self, picked, kind):
        self.ack_these(self.chosen(picked), kind)

    def ack_these(self, receipts, kind="acked"):
        receipts = [one for one in receipts if kind == "acked" or one.id in self.oracle.started]
        rows = [(one, WINDOW_MS) for one in receipts]
        for one in self.settled(receipts, self.run(t.ack(self.keys, rows, kind=kind, clock=self.clock))):
            if kind == "expired":
                self.oracle.take_back(one.id)
            self.oracle.end(one.id)

    @rule(picked=picks, delay_ms=delays, reject=st.booleans())
    def nack(self, picked, delay_ms, reject):
        receipts = self.chosen(picked)
        start = ENVELOPE_START.encode() + b"%d" % self.now_ms
        lasts = [start + value_of(self.oracle.key_of[one.id], 1, WINDOW_MS) for one in receipts]
        values = [last if reject or not one.left else b"" for one, last in zip(receipts, lasts, strict=True)]
        rows = [(one, delay_ms, "failed 1 x", value) for one, value in zip(receipts, values, strict=True)]
        for one in self.settled(receipts, self.run(t.nack(self.keys, rows, clock=self.clock))):
            if reject or not one.left:
                self.oracle.bury(one.id)
            elif not self.oracle.ordered:
                self.oracle.order[one.id] = None

    @rule(picked=picks, lease_ms=st.sampled_from([0, 1, 2 * LEASE_MS]))
    def extend(self, picked, lease_ms):
        self.run(t.extend(self.keys, self.chosen(picked), lease_ms=lease_ms, clock=self.clock))

    @rule(picked=picks, sleep_ms=st.sampled_from([None, None, 700]))
    def release(self, picked, sleep_ms):
        receipts = self.chosen(picked)
        good = self.settled(receipts, self.run(t.release(self.keys, receipts, sleep_ms=sleep_ms, clock=self.clock)))
        self.by_hand |= {one.key if is_key(one.key) else "" for one in good if sleep_ms}

    @rule(key=st.sampled_from(KEYS), for_ms=st.sampled_from([None, 0, 0, 500]))
    def pause_a_key(self, key, for_ms):
        """Pause a key, for a time or until it is resumed; or resume it."""
        self.run(t.sleep(self.keys, key, for_ms=for_ms, clock=self.clock))
        self.by_hand.add(key)

    @rule(picked=picks, delay_ms=delays)
    def snooze(self, picked, delay_ms):
        receipts = self.chosen(picked)
        answer = self.run(t.snooze(self.keys, [(one, delay_ms) for one in receipts], clock=self.clock))
        for one in self.settled(receipts, answer):
            self.oracle.order[one.id] = None

    # ---- operators ----------------------------------------------------------

    @rule(limit=limits, spare=st.booleans())
    def reclaim(self, limit=500, spare=False):
        answer = self.run(t.reclaim(self.keys, limit=limit, spare_leases=spare, clock=self.clock))
        self.reclaimed(answer)

    def reclaimed(self, answer):
        assert not answer.inconsistent
        for id in answer.buried:
            self.oracle.bury(id)
        for id in answer.cancelled:
            self.oracle.end(id)

    def living(self, picked):
        """Return ids of living messages, the latest most often; if no message lives, return another id."""
        alive = sorted(self.oracle.alive, key=natural)
        return [alive[-1 - pick % len(alive)] for pick in picked] if alive else IDS[:1]

    @rule(picked=few_picks)
    def cancel(self, picked):
        self.cancel_these(self.living(picked))

    def cancel_these(self, ids):
        self.run(t.cancel(self.keys, ids, clock=self.clock))
        self.oracle.cancelled |= self.oracle.alive & {*ids}

    @rule(picked=few_picks, delay_ms=delays)
    def reschedule(self, picked, delay_ms):
        some = self.living(picked)
        answers = self.run(t.reschedule(self.keys, some, delay_ms=delay_ms, clock=self.clock))
        for id, answer in zip(some, answers, strict=True):
            if answer == "rescheduled":
                self.oracle.order[id] = None

    @rule()
    def collect(self):
        ids = sorted(self.state.garbage)
        if ids:
            options = {"dead_letter_limit": 100, "letters_ms": FOR_EVER_MS, "clock": self.clock}
            buried, expired = self.run(t.collect(self.keys, ids, **options))
            self.oracle.garbage -= {*buried, *expired}

    @rule(place=st.sampled_from(["pending", "ready", "retry", "garbage", *KEYS]), many=st.integers(1, 3))
    def purge(self, place, many):
        if place in KEYS:
            ids, options = self.state.lines.get(place, [])[:many], {"state": "line", "line": place}
        else:
            ids, options = sorted(getattr(self.state, place))[:many], {"state": place}
            ids = getattr(self.state, place)[:many] if place in ("ready", "retry") else ids
        if ids:
            assert self.run(t.purge(self.keys, ids, **options, clock=self.clock)) == len(ids)
            for id in ids:
                self.oracle.end(id)
                self.oracle.garbage.discard(id)

    @rule()
    def tidy(self):
        self.run(t.tidy(self.keys, clock=self.clock))

    @rule(paused=st.booleans())
    def pause_or_resume(self, paused):
        self.client.set(self.keys.paused, "1") if paused else self.client.delete(self.keys.paused)

    @rule(fields=some_limits)
    def change_limits(self, fields):
        texts = dict.fromkeys(LIMITS, "") | {name: str(value) for name, value in fields.items()}
        self.run(t.limit(self.keys, texts, clock=self.clock))
        self.numbers["limits"] += 1
        self.oracle.change_limits(fields)

    # ---- time and expiry in Redis -------------------------------------------

    @rule(us=spans_us)
    def tick(self, us):
        self.pass_time(us)

    @rule()
    def a_client_takes_the_token(self):
        self.client.rpop(self.keys.wake)

    @rule()
    def the_script_cache_is_lost(self):
        self.client.script_flush()

    # ---- typical sequences --------------------------------------------------

    def then(self, what, *args, **options):
        what(*args, **options)
        self.what_redis_holds_is_sound()

    @rule(id=st.sampled_from(IDS), keys=st.permutations(KEYS), limit=st.sampled_from([1, 4]))
    def a_cancelled_message_is_published_again_under_another_key(self, id, keys, limit):
        for key in keys[:2]:
            self.then(self.publish, [(id, key)])
            self.then(self.cancel_these, [id])
        self.then(self.publish, [(id, keys[2]), ("new", keys[2])])
        self.then(self.publish, [("new", keys[2])])
        self.then(self.claim, limit)
        self.then(self.claim, limit)

    @rule(id=st.sampled_from(IDS), key=st.sampled_from(KEYS))
    def a_cancelled_redelivery_is_published_again_under_a_key_without_a_free_place(self, id, key):
        self.then(self.change_limits, {"per_key": 1})
        self.then(self.publish, [("new", key)])
        self.then(self.claim)
        self.then(self.publish, [(id, "")])
        self.then(self.claim)
        self.then(self.nack, [0], 0, reject=False)
        self.then(self.reclaim)
        self.then(self.cancel_these, [id])
        self.then(self.publish, [(id, key)])
        self.then(self.claim)

    @rule(key=st.sampled_from(KEYS), ids=st.permutations(IDS), delay_ms=st.sampled_from([1, 500]), limit=limits)
    def messages_of_an_ordered_key_have_one_due_time(self, key, ids, delay_ms, limit):
        self.then(self.change_limits, {"ordered": 1})
        self.then(self.publish, [(ids[0], key), (ids[1], key), (ids[2], "B")], delay_ms)
        self.then(self.publish, [("new", key)], delay_ms)
        self.then(self.publish, [(ids[3], key), (ids[4], key)], delay_ms)
        self.then(self.pass_time, delay_ms * 1000)
        self.then(self.promote, limit)
        for _ in range(3):
            self.then(self.claim)
            self.then(self.ack, [0, 1, 2, 3], "acked")

    @rule(key=st.sampled_from(KEYS), id=st.sampled_from(IDS), delay_ms=st.sampled_from([0, 500]))
    def a_cancelled_message_of_an_ordered_key_is_published_again(self, key, id, delay_ms):
        self.then(self.change_limits, {"ordered": 1})
        self.then(self.publish, [(id, key), ("m5", key)])
        self.then(self.cancel_these, [id])
        self.then(self.publish, [("new", key)], delay_ms)
        self.then(self.publish, [(id, key)], delay_ms)
        self.then(self.pass_time, delay_ms * 1000)
        self.then(self.promote)
        for _ in range(3):
            self.then(self.claim)
            self.then(self.ack, [0, 1, 2, 3], "acked")

    @rule(key=st.sampled_from(KEYS), times=st.integers(1, 3))
    def workers_die_with_the_messages_of_a_key(self, key, times):
        self.then(self.publish, [("new", key), ("new", key)])
        for _ in range(times):
            self.then(self.claim)
            self.then(self.pass_time, LEASE_MS * 1000)
            self.then(self.reclaim)
            self.then(self.claim)

    @rule(key=st.sampled_from(KEYS), delay_ms=delays)
    def a_dead_message_comes_back(self, key, delay_ms):
        self.then(self.publish, [("new", key)], left=0)
        self.then(self.claim)
        self.then(self.nack, [0], 0, reject=True)
        self.then(self.collect)
        self.then(self.redrive, delay_ms, 2)
        self.then(self.claim)

    @rule(key=st.sampled_from(KEYS), delay_ms=delays, how=st.sampled_from(["nack", "snooze"]))
    def a_message_is_put_off_while_others_of_its_key_wait(self, key, delay_ms, how):
        self.then(self.publish, [("new", key), ("new", key), ("new", key)])
        self.then(self.claim)
        if how == "nack":
            self.then(self.nack, [0], delay_ms, reject=False)
        else:
            self.then(self.snooze, [0], delay_ms)
        self.then(self.claim)
        self.then(self.pass_time, delay_ms * 1000)
        self.then(self.promote)
        self.then(self.reclaim)
        self.then(self.claim)

    # ---- invariants ---------------------------------------------------------

    @invariant()
    def what_redis_holds_is_sound(self):
        before, self.state = self.state, KeyedState(self.client, self.keys)
        for id in self.oracle.cancelled - self.state.counts.keys():
            self.oracle.end(id)  # the claim dropped it
        assert self.oracle.alive == self.state.counts.keys()
        assert self.oracle.garbage == self.state.garbage
        check_places(self.state)
        check_held(self.state)
        check_ring(self.state, self.oracle.per_key, is_steady=self.numbers["limits"] == 1)
        per_key, most = self.oracle.per_key, self.oracle.number("concurrency")
        for key, number in self.state.tally.items():
            assert not per_key or not is_key(key) or number <= max(per_key, before.tally[key])
        assert not most or self.state.running <= max(most, before.running)

        if self.oracle.may_start(self.state) and not before.paused:
            assert self.state.token or self.oracle.may_start(before)

        counts = self.run(t.counts(self.keys))
        assert counts.missing == 0
        assert counts.alive == len(self.oracle.alive) + len(self.oracle.garbage)
        assert counts.waiting == sum(map(len, self.state.lines.values()))

    def teardown(self):
        if sys.exc_info()[0] is None:
            self.drain()

    def drain(self):
        """Process all messages, with the waits that the claims return; check that nothing remains."""
        self.client.delete(self.keys.paused, self.keys.watch)
        for key in KEYS:
            self.run(t.sleep(self.keys, key, for_ms=0, clock=self.clock))
        self.state = KeyedState(self.client, self.keys)
        self.collect()
        for _ in range(20 + 6 * len(self.oracle.alive)):
            answer = self.claim(limit=50)
            self.state = KeyedState(self.client, self.keys)
            self.ack_these(answer.claimed)
            if not answer.claimed and not answer.behind:
                waits = [wait for wait in (answer.promote_in_ms, answer.reclaim_in_ms) if wait >= 0]
                if not waits:
                    break
                self.pass_time(1000 * min(waits))
                self.promote()
                self.reclaim()
        self.what_redis_holds_is_sound()
        assert not self.oracle.alive - self.oracle.cancelled
        # Cancelled messages finish at their due time, also after the clock went back.
        self.pass_time(self.latest - self.oracle.now + 7200 * 10**6)
        self.promote()
        self.run(t.tidy(self.keys, clock=self.clock))
        left = KeyedState(self.client, self.keys)
        assert not any([left.counts, left.lines, left.ring, left.places, left.kept, left.asleep, left.rates])
