"""The moves of a queue as rules of a state machine: run each in Redis and on the model, and compare the answers."""

from collections import Counter

from account import HISTORY
from expiring_keys import LANE_MS, WINDOW_MS
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from queue_model import Model
from sending import send

from reliq.keys import Keys
from reliq.lua import transitions as t
from reliq.wire_format import ENVELOPE_START, envelope_rest

#: Few ids, so that each is used again and again.
IDS = [f"m{number}" for number in range(6)]
LEASE_MS = 20_000
FOR_EVER_MS, HOUR_MS = 10**12, 3_600_000

some_ids = st.lists(st.sampled_from(IDS), min_size=1, max_size=4)
picks = st.lists(st.integers(0, 12), min_size=1, max_size=4)
delays = st.sampled_from([0, 0, 1, 500, LEASE_MS, 60_000])
limits = st.sampled_from([1, 2, 4, 500])
tombstones = st.sampled_from([None, None, 1, 60_000, 3_600_000])
a_few = st.sampled_from([0, 1, 4])
#: Random worker processes: number of slots, number of suspects in flight, and how many suspects may run together.
some_suspects = st.builds(
    lambda slots, held: t.Suspects(slots, held, max(1, slots // 2) if held else slots),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([0, 0, 1, 2]),
)
ALL_AT_ONCE = t.Suspects(slots=500, held=0, narrowest=500)
retries = st.sampled_from([0, 1, 2, 5])
#: Deduplication windows. The short windows end within one or two leases, if the test holds the server's clock.
ttls = st.sampled_from([1, LEASE_MS, 2 * LEASE_MS, HOUR_MS, HOUR_MS])


class Moves(RuleBasedStateMachine):
    """
    Six ids and every move, with repeated and invalid calls.

    Attributes:
        held: the server's held clock. None: real time; scripts get the time as an argument, and no Redis key expires.
    """

    client = None
    held = None

    @initialize()
    def begin(self):
        self.client.flushall()
        self.keys, self.model = Keys("q"), Model(keys_expire=self.held is not None)
        self.numbers, self.versions, self.receipts, self.promised = Counter(), 0, [], {}
        self.last_publish = self.last_claim = None

        self.pass_time(0)

    def pass_time(self, us):
        """Move the clock forward or back; read the expired keys so that Redis deletes them immediately."""
        self.model.pass_time(us)
        if self.held:
            self.held.set(self.model.now)
            expiring = [key(name) for key in (self.keys.msg, self.keys.dedup) for name in IDS]
            self.client.exists(*expiring, self.keys.lane("p"), self.keys.lane("w"))

    @property
    def clock(self):
        """The time that scripts get as an argument; None with a held clock."""
        return None if self.held else self.model.now

    def run(self, call):
        return call.read(send(self.client, call))

    def turn(self, lane, back=0):
        self.numbers[lane] += not back
        return t.CallNumber(lane, self.numbers[lane] - back)

    def chosen(self, picked):
        """Return old receipts, the latest most often; none if there were no receipts."""
        return [self.receipts[-1 - pick % len(self.receipts)] for pick in picked] if self.receipts else []

    def wait_for(self, place):
        """Return the ms until the first message in a sorted set is due; -1 if the set is empty."""
        return max(0, min(place.values()) - self.model.down) if place else -1

    # ---- publish ------------------------------------------------------------

    def publish_call(self, ids, turn, *, delay_ms, left, replace, ttl_ms=HOUR_MS):
        items = [(id, f"{id}.{self.versions + index}") for index, id in enumerate(ids)]
        self.versions += len(ids)
        rest = envelope_rest(left, 1, WINDOW_MS)
        values = [(id, rest + body.encode()) for id, body in items]
        options = {"ttl_ms": ttl_ms, "retries": left, "delay_ms": delay_ms, "window_ms": WINDOW_MS, "replace": replace}
        return items, t.publish(self.keys, values, turn, **options, clock=self.clock)

    @rule(ids=some_ids, delay_ms=delays, left=retries, replace=st.booleans(), ttl_ms=ttls)
    def publish(self, ids, delay_ms, left, replace, ttl_ms=HOUR_MS):
        ttl_ms = ttl_ms if self.held else HOUR_MS  # without a held clock, short windows would end at random moments
        options = {"delay_ms": delay_ms, "left": left, "replace": replace, "ttl_ms": ttl_ms}
        items, call = self.publish_call(ids, self.turn("p"), **options)
        answer = self.run(call)
        self.last_publish = call, answer

        assert answer.refused == self.model.publish(items, delay_ms, left, replace, ttl_ms)

    @precondition(lambda self: "p" in self.model.lanes)
    @rule()
    def repeat_the_last_publish(self):
        call, answer = self.last_publish

        assert self.run(call) == answer
        self.model.lanes["p"] = self.model.key_time + LANE_MS

    @precondition(lambda self: "p" in self.model.lanes)
    @rule(ids=some_ids)
    def publish_by_a_number_too_low(self, ids):
        _, call = self.publish_call(ids, self.turn("p", back=1), delay_ms=0, left=1, replace=True)

        assert send(self.client, call) == b"stale"
        self.model.lanes["p"] = self.model.key_time + LANE_MS

    @rule(limit=limits)
    def promote(self, limit):
        moved, wait = self.run(t.promote(self.keys, limit=limit, clock=self.clock))

        assert moved == self.model.promote(limit)
        assert wait == self.wait_for(self.model.pending)

    @precondition(lambda self: self.model.letters)
    @rule(picked=picks, delay_ms=delays, left=retries)
    def redrive(self, picked, delay_ms, left):
        names = [name.decode() for name, _ in self.client.xrange(self.keys.dead)]
        deaths = [list(self.model.letters)[pick % len(names)] for pick in picked]
        letters = [
            (names[list(self.model.letters).index(death)], self.model.letters[death][0], left) for death in deaths
        ]
        options = {"ttl_ms": HOUR_MS, "delay_ms": delay_ms, "clock": self.clock}

        answers = self.run(t.redrive(self.keys, letters, **options))
        assert answers == [self.model.redrive(death, delay_ms, left, HOUR_MS) for death in deaths]

    # ---- claim and settle ---------------------------------------------------

    @rule()
    def a_worker_looks(self):
        """Poll: claim nothing. The next claim uses the same call number."""
        turn = t.CallNumber("w", self.numbers["w"] + 1)
        call = t.claim(self.keys, turn, limit=0, lease_ms=LEASE_MS, clock=self.clock)

        assert self.run(call).claimed == []

    @rule(limit=limits, first=st.sampled_from(["ready", "retry"]), direct=a_few, suspects=some_suspects)
    def claim_some(self, **options):
        self.claim(**options)

    def claim(self, limit, first="ready", direct=500, suspects=ALL_AT_ONCE):
        turn = self.turn("w")
        options = {"limit": limit, "first": first, "direct": direct, "suspects": suspects}
        self.last_claim = turn, options
        claimed = self.run(t.claim(self.keys, turn, lease_ms=LEASE_MS, clock=self.clock, **options)).claimed
        self.receipts += claimed
        self.promised = claimed

        assert claimed == self.model.claim(f"w.{turn.number}:{LEASE_MS}", LEASE_MS, **options)
        return claimed

    @precondition(lambda self: "w" in self.model.lanes)
    @rule()
    def repeat_the_last_claim(self):
        turn, options = self.last_claim
        answer = self.run(t.claim(self.keys, turn, lease_ms=LEASE_MS, clock=self.clock, **options))

        self.promised = self.model.claim_again(self.promised, LEASE_MS)
        assert answer.claimed == self.promised

    @precondition(lambda self: "w" in self.model.lanes)
    @rule(limit=limits)
    def claim_by_a_number_too_low(self, limit):
        call = t.claim(self.keys, self.turn("w", back=1), limit=limit, lease_ms=LEASE_MS, clock=self.clock)

        assert self.run(call).claimed == []

    def settle(self, verb, receipts, **options):
        """Settle receipts in Redis and in the model."""
        clock = {"clock": self.clock}
        last = ENVELOPE_START.encode() + b"%d" % self.model.down + envelope_rest(1, 1, WINDOW_MS) + b"last"
        match verb:
            case "ack":
                rows = [(one, WINDOW_MS) for one in receipts]
                answer = self.run(t.ack(self.keys, rows, history=HISTORY, **options, **clock))
            case "nack":
                again, end = (options["delay_ms"], "failed 1 x", b""), (0, "failed 1 x", last)
                end = (-2, "undecodable 1 x", b"") if options.get("unread") else end
                rows = [(one, *(end if options["reject"] or not one.left else again)) for one in receipts]
                answer = self.run(t.nack(self.keys, rows, **clock))
            case "extend":
                answer = self.run(t.extend(self.keys, receipts, **options, **clock))
            case "release":
                answer = self.run(t.release(self.keys, receipts, **clock))
            case "snooze":
                answer = self.run(t.snooze(self.keys, [(one, options["delay_ms"]) for one in receipts], **clock))

        assert (answer.lost, answer.cancelled) == getattr(self.model, verb)(receipts, **options)

    @rule(picked=picks, kind=st.sampled_from(["acked", "acked", "expired"]))
    def ack(self, picked, kind):
        self.settle("ack", self.chosen(picked), kind=kind)

    @rule(picked=picks, delay_ms=delays, reject=st.booleans(), unread=st.booleans())
    def nack(self, picked, delay_ms, reject, unread=False):
        self.settle("nack", self.chosen(picked), delay_ms=delay_ms, reject=reject, unread=unread)

    @rule(picked=picks, lease_ms=st.sampled_from([0, 1, LEASE_MS, 2 * LEASE_MS]))
    def extend(self, picked, lease_ms):
        self.settle("extend", self.chosen(picked), lease_ms=lease_ms)

    @rule(picked=picks)
    def release(self, picked):
        self.settle("release", self.chosen(picked))

    @rule(picked=picks, delay_ms=delays)
    def snooze(self, picked, delay_ms):
        self.settle("snooze", self.chosen(picked), delay_ms=delay_ms)

    # ---- operators ----------------------------------------------------------

    @rule(limit=limits, spare=st.booleans())
    def reclaim(self, limit, spare=False):
        answer = self.run(t.reclaim(self.keys, limit=limit, spare_leases=spare, clock=self.clock))

        told = self.model.reclaim(limit, spare)
        assert {name: list(getattr(answer, name)) for name in told} == told
        assert answer.next_in_ms == self.wait_for(self.model.unack)

    @rule(ids=some_ids, tombstone_ms=tombstones, kind=st.sampled_from(("cancelled", "purged")))
    def cancel(self, ids, tombstone_ms=None, kind="cancelled"):
        call = t.cancel(self.keys, ids, tombstone_ms=tombstone_ms, kind=kind, clock=self.clock)

        assert self.run(call) == [self.model.cancel(id, tombstone_ms, kind) for id in ids]

    @rule(ids=some_ids, delay_ms=delays)
    def reschedule(self, ids, delay_ms):
        call = t.reschedule(self.keys, ids, delay_ms=delay_ms, clock=self.clock)

        assert self.run(call) == [self.model.reschedule(id, delay_ms) for id in ids]

    @rule(ids=some_ids, dead_letter_limit=st.sampled_from([2, 100]))
    def collect(self, ids, dead_letter_limit=100):
        call = t.collect(self.keys, ids, dead_letter_limit=dead_letter_limit, letters_ms=FOR_EVER_MS, clock=self.clock)

        assert self.run(call) == self.model.collect(ids, dead_letter_limit)

    @rule(ids=some_ids, state=st.sampled_from(["pending", "ready", "retry", "garbage"]), in_order=st.booleans())
    def purge(self, ids, state, in_order):
        ids = list(getattr(self.model, state))[:3] if in_order else ids
        if ids:
            assert self.run(t.purge(self.keys, ids, state=state)) == self.model.purge(ids, state)

    @rule()
    def tidy(self):
        self.run(t.tidy(self.keys, clock=self.clock))
        self.model.tidy()

    @rule(paused=st.booleans())
    def pause_or_resume(self, paused):
        if paused:
            self.client.set(self.keys.paused, "1")
        else:
            self.client.delete(self.keys.paused)
        self.model.paused = paused
