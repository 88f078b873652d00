"""A rate by cost: what may start in any time, what returns to the rate, and what holds up the queue."""

import heapq
from dataclasses import dataclass, field
from functools import partial
from random import Random

import msgspec
import pytest
from held_clock import HOUR_MS, NOON, micros

from reliq.lua import transitions as t
from reliq.wire_format import envelope_rest

#: 1,000 units a second, with a burst of 4,000.
EVERY_US, BURST = 1000, 4000
COSTS = {"cost_ns": EVERY_US * 1000, "cost_burst": BURST}


def line(cost, key=""):
    return f"{key}\x03{cost}"


def told(claimed, spent):
    """Return a receipt that says what its message has cost."""
    return msgspec.structs.replace(claimed, spent=spent)


def replace(run, keys, id, its_line, clock=NOON):
    """Give a waiting message a new line, or a running message a successor."""
    items = [(id, envelope_rest(3, clock // 1000, 0, line=its_line))]
    options = {"mode": "replace", "ttl_ms": HOUR_MS, "retries": 3, "message_keys": [its_line], "clock": clock}
    return run(t.replace(keys, items, t.CallNumber("replace", clock), **options)).refused[0]


def follow(run, keys, id, its_line, clock=NOON):
    """Publish a successor of a running message."""
    assert replace(run, keys, id, its_line, clock) == "follows"


def worst(starts, every_us=EVERY_US):
    """Return the most that starts, pairs of us and cost, took from the rate at once: the most of any window."""
    level = most = before = 0
    for at, cost in sorted(starts):
        level = max(0, level - (at - before) / every_us) + cost
        most, before = max(most, level), at
    return most


@pytest.fixture
def publish_costs(publish):
    """Publish messages, each with its cost."""
    return lambda key="", **costs: publish(*costs, message_keys=[line(cost, key) for cost in costs.values()])


@dataclass
class Fleet:
    """
    Four processes on a held clock with a queue that is never empty.

    Each claims up to four messages, runs them for some time, and then acks or nacks them, releases one that it has not
    started, or dies. Some calls are made twice, as after a lost reply.
    """

    run: object
    keys: object
    chance: Random
    now: int = NOON
    number: int = 0
    claims: int = 0
    #: message id -> its estimate
    estimates: dict = field(default_factory=dict)
    #: [us, cost] of each start, with its estimate until it is told
    starts: list = field(default_factory=list)
    served: dict = field(default_factory=dict)

    def publish(self, many):
        for key, cost, count in [("", 200, many), ("small", 20, many), ("mid", 80, many), ("large", 1500, many // 4)]:
            ids = [f"{key or 'none'}-{self.now}-{at}" for at in range(count)]
            self.estimates |= dict.fromkeys(ids, cost)
            items = [(id, b',"r":3}\nx') for id in ids]
            call = t.CallNumber("publisher", self.now + cost)
            options = {"ttl_ms": HOUR_MS, "retries": 3, "window_ms": 0, "clock": self.now}
            for at in range(0, count, 500):
                numbered = t.CallNumber(f"{call.lane}-{key}", call.number + at)
                part = items[at : at + 500]
                self.run(t.publish(self.keys, part, numbered, message_keys=[line(cost, key)] * len(part), **options))

    def claim(self, process):
        self.number += 1
        options = {
            "limit": self.chance.randint(1, 4),
            "lease_ms": 10_000,
            "first": self.chance.choice(["ready", "retry"]),
        }
        call = t.claim(
            self.keys, t.CallNumber(f"p{process}", self.number), watcher=f"p{process}", clock=self.now, **options
        )
        answer = self.run(call)
        self.claims += 1
        if self.chance.random() < 0.1:
            assert [one.id for one in self.run(call).claimed] == [one.id for one in answer.claimed]
        return answer

    def work(self, seconds, kills=0.02, quiet=0.0):
        end, events, quiet_until = self.now + seconds * 1_000_000, [], 0
        exact_until = 0 if quiet else end
        for process in range(4):
            heapq.heappush(events, (self.now + process, process, "claim", None))
        while events:
            self.now, process, what, job = heapq.heappop(events)
            if self.now > end:
                break
            if what == "end":
                self.settle(*job)
                continue
            if self.now < quiet_until:
                heapq.heappush(events, (quiet_until + process, process, "claim", None))
                continue
            if self.chance.random() < quiet:
                quiet_until = self.now + self.chance.randint(0, 5_000_000)
                exact_until = quiet_until + 3_000_000
            self.run(t.promote(self.keys, clock=self.now))
            self.run(t.reclaim(self.keys, clock=self.now))
            answer = self.claim(process)
            for one in answer.claimed:
                start = [self.now, self.estimates[one.id]]
                self.starts.append(start)
                key = one.id.partition("-")[0]
                self.served[key] = self.served.get(key, 0) + 1
                truth = 1.0 if self.now < exact_until else self.chance.uniform(0.05, 0.3)
                if self.chance.random() >= kills:
                    took = self.chance.randint(10_000, 9_000_000)
                    heapq.heappush(
                        events,
                        (self.now + took, process + 4 * len(self.starts), "end", (one, start, round(start[1] * truth))),
                    )
            wait = 2000 if answer.claimed else 50_000
            heapq.heappush(events, (self.now + wait, process, "claim", None))

    def settle(self, one, start, spent):
        # Of a message that waits long before it is released, little returns to the rate.
        rare = 4 if spent < start[1] else 0
        kinds = {"ack": 80, "nack": 5, "snooze": 3, "silent": 5, "release": rare, "expired": rare}
        kind = self.chance.choices([*kinds], [*kinds.values()])[0]
        if kind in ("release", "expired"):
            spent = 0
        held = one if kind == "silent" else told(one, spent)
        call = {
            "ack": lambda: t.ack(self.keys, [(held, None)], clock=self.now),
            "silent": lambda: t.ack(self.keys, [(held, None)], clock=self.now),
            "expired": lambda: t.ack(self.keys, [(held, None)], kind="expired", clock=self.now),
            "nack": lambda: t.nack(self.keys, [(held, 50, "failed 1 x", b"")], clock=self.now),
            "snooze": lambda: t.snooze(self.keys, [(held, 50)], clock=self.now),
            "release": lambda: t.release(self.keys, [held], clock=self.now),
        }[kind]()
        for _ in range(2 if self.chance.random() < 0.1 else 1):
            self.run(call)
        start[1] = start[1] if kind == "silent" else spent


@pytest.mark.foreign_hands  # the simulation ends with messages in flight
@pytest.mark.parametrize("seed", range(4))
def test_no_window_takes_more_than_burst_and_rate_and_exact_estimates_use_the_rate(run, keys, limit, seed):
    limit(**COSTS)
    seconds = 20
    fleet = Fleet(run, keys, Random(seed))
    fleet.publish(300)
    fleet.work(seconds)

    # The simulated deaths end within a lease; what they took is spent.
    assert worst(fleet.starts) <= BURST + 1
    assert sum(cost for _, cost in fleet.starts) >= 0.95 * (BURST + seconds * 1_000_000 / EVERY_US)
    assert min(fleet.served.values()) > 0.5 * max(fleet.served.values()), fleet.served


@pytest.mark.foreign_hands
@pytest.mark.parametrize("seed", range(4))
def test_refunds_of_estimates_that_are_too_high_exceed_no_window(run, keys, limit, seed):
    limit(**COSTS)
    fleet = Fleet(run, keys, Random(seed))
    fleet.publish(600)
    # While the queue is quiet the bucket fills up, so that a refund in full would fill it a second time.
    fleet.work(120, quiet=0.01)

    assert worst(fleet.starts) <= BURST + 1


def test_the_head_that_cannot_be_paid_holds_up_all_until_it_can(run, keys, limit, publish_costs, serve, token, client):
    limit(**COSTS)
    publish_costs(a=3000, b=1500, c=1)

    assert [*serve(limit=1)] == ["a"]
    assert not serve()
    token()
    publish_costs("key", d=1)
    assert not token()
    assert not serve(clock=micros(ms=499))
    assert run(t.promote(keys, clock=micros(ms=499)))[1] == 1
    assert not token()
    assert run(t.promote(keys, clock=micros(ms=500)))[0] == 0
    assert token()
    assert [*serve(limit=1, clock=micros(ms=500))] == ["b"]
    assert not serve(clock=micros(ms=500))
    assert sorted([*serve(clock=micros(ms=501)), *serve(clock=micros(ms=502))]) == ["c", "d"]


def test_messages_without_a_key_that_come_one_by_one_do_not_overtake_a_large_one(limit, publish, publish_costs, serve):
    limit(**COSTS)
    publish_costs(first=10)
    assert [*serve()] == ["first"]
    publish_costs("tenant", large=4000)

    for ms, started in (0, []), (10, ["large"]):
        publish(f"small-{ms}", clock=micros(ms=ms), message_keys=[line(10)])
        assert [*serve(clock=micros(ms=ms))] == started


def test_the_claim_that_is_cut_short_watches_for_the_time_when_the_head_can_be_paid(run, keys, limit, publish_costs):
    limit(**COSTS)
    publish_costs(a=3000, b=1500)
    options = {"limit": 9, "lease_ms": 1000, "watcher": "me", "clock": NOON}

    answer = run(t.claim(keys, t.CallNumber("w", 1), **options))

    assert ([one.id for one in answer.claimed], answer.behind, answer.promote_in_ms) == (["a"], 0, 500)
    assert run(t.counts(keys)).totals["limited"] == 1


def test_a_claim_that_can_pay_for_no_message_takes_the_watch(run, keys, limit, publish_costs):
    limit(**COSTS)
    options = {"limit": 9, "lease_ms": HOUR_MS, "clock": NOON}
    publish_costs(a=4000)
    assert run(t.claim(keys, t.CallNumber("w", 1), watcher="other", **options)).claimed
    publish_costs(b=1500)

    answer = run(t.claim(keys, t.CallNumber("w", 2), watcher="me", **options))

    assert (answer.claimed, answer.promote_in_ms) == ([], 1500)


def test_a_rate_of_starts_and_a_rate_by_cost_both_hold(limit, publish_costs, serve):
    limit(rate_us=1_000_000, burst=2, **COSTS)
    publish_costs(a=100, b=3900, c=1)

    assert [*serve()] == ["a", "b"]
    assert not serve(clock=micros(ms=999))
    assert [*serve(clock=micros(ms=1001))] == ["c"]


@pytest.mark.parametrize(("cost", "waits"), [(6000, 2001), (40_000, 4001)])
def test_a_message_that_costs_more_than_the_burst_starts_from_a_full_bucket(limit, publish_costs, serve, cost, waits):
    limit(**COSTS)
    publish_costs(a=1, b=cost, c=1)

    assert [*serve()] == ["a"]
    assert [*serve(clock=micros(ms=1))] == ["b"]
    assert not serve(clock=micros(ms=waits))
    assert [*serve(clock=micros(ms=waits + 1))] == ["c"]


@pytest.mark.parametrize("back_ms", [HOUR_MS, 100])
def test_a_clock_that_goes_back_shuts_the_queue_for_two_bursts_at_most(run, keys, limit, publish_costs, serve, back_ms):
    limit(**COSTS)
    publish_costs(a=4000, b=4000, c=4000)
    assert [*serve()] == ["a"]

    waits = run(t.promote(keys, clock=micros(ms=-back_ms)))[1]
    assert waits == min(8000, 4000 + back_ms)
    assert not serve(clock=micros(ms=waits - back_ms - 1))
    assert [*serve(clock=micros(ms=8000 - back_ms))] == ["b"]


def test_a_paused_queue_a_repeated_claim_and_a_cancelled_head_spend_nothing(
    run, keys, limit, publish_costs, serve, client, publish
):
    limit(rate_us=1000, burst=4, **COSTS)
    publish("x", message_keys=[line(4000)], window_ms=0)
    publish_costs(a=4000)
    client.set(keys.paused, "")
    assert not serve()
    client.delete(keys.paused)
    assert run(t.cancel(keys, ["x"], clock=NOON, tombstone_ms=1000)) is not None
    call = t.claim(keys, t.CallNumber("w", 1), limit=9, lease_ms=HOUR_MS, clock=NOON)

    assert [one.id for one in run(call).claimed] == ["a"]
    before = client.zrange(keys.rates, 0, -1, withscores=True)
    assert [one.id for one in run(call).claimed] == ["a"]
    assert client.zrange(keys.rates, 0, -1, withscores=True) == before


def test_less_spent_lets_the_head_start_earlier_and_more_spent_later(run, keys, limit, publish_costs, serve, token):
    limit(**COSTS)
    publish_costs(a=4000, b=1000, c=1000, d=1000)
    held = serve()
    assert [*held] == ["a"]
    token()

    run(t.ack(keys, [(told(held["a"], 1000), None)], clock=micros(ms=500)))  # 500 have flowed in since the claim
    assert token()
    held = serve(clock=micros(ms=500))
    assert [*held] == ["b", "c", "d"]

    run(t.nack(keys, [(told(held["b"], 3000), 0, "failed 1 x", b"")], clock=micros(ms=500)))
    run(t.reclaim(keys, clock=micros(ms=501)))
    assert not serve(clock=micros(ms=3499))
    assert [*serve(clock=micros(ms=3501))] == ["b"]


@pytest.mark.parametrize("end", [t.cancel, partial(t.purge, state="ready")], ids=["cancel", "purge"])
def test_a_head_that_could_not_be_paid_and_was_cancelled_holds_up_nothing(
    run, keys, limit, publish_costs, serve, token, end
):
    limit(**COSTS)
    publish_costs(a=3000, b=1500, c=1)
    assert [*serve(limit=1)] == ["a"]
    assert not serve()
    token()

    run(end(keys, ["unknown"], clock=NOON))
    assert not token()
    run(end(keys, ["b"], clock=NOON))

    assert token()
    assert [*serve()] == ["c"]


def test_a_cancel_behind_the_head_that_cannot_be_paid_lets_no_message_overtake_it(
    run, keys, limit, publish_costs, serve
):
    limit(**COSTS)
    publish_costs(a=3000, b=1500, c=1, d=1)
    assert [*serve(limit=1)] == ["a"]
    assert not serve()

    run(t.cancel(keys, ["c"], clock=NOON))

    assert not serve()
    assert [*serve(clock=micros(ms=500), limit=1)] == ["b"]


@pytest.mark.parametrize("verb", ["release", "snooze"])
def test_a_released_or_snoozed_message_returns_the_rest_of_its_cost(
    run, keys, limit, publish_costs, serve, client, verb
):
    limit(**COSTS)
    publish_costs(a=4000)
    held = told(serve()["a"], 1000)

    run(t.release(keys, [held], clock=NOON) if verb == "release" else t.snooze(keys, [(held, 0)], clock=NOON))

    assert client.zscore(keys.rates, "\x03") == micros(ms=1000)


def test_a_replaced_message_pays_its_new_cost(run, keys, limit, publish_costs, serve, client):
    limit(**COSTS)
    publish_costs(a=4000)

    assert replace(run, keys, "a", line(1000)) == "replaced"

    assert [*serve()] == ["a"]
    assert client.zscore(keys.rates, "\x03") == micros(ms=1000)


def test_far_more_spent_holds_up_the_queue_for_one_burst_at_most(run, keys, limit, publish_costs, serve):
    limit(**COSTS)
    publish_costs(a=4000, b=1)

    run(t.ack(keys, [(told(serve()["a"], 10**9), None)], clock=NOON))

    assert not serve(clock=micros(ms=4000))
    assert [*serve(clock=micros(ms=4001))] == ["b"]


def test_less_spent_returns_nothing_after_the_clock_went_back(run, keys, limit, publish_costs, serve):
    limit(**COSTS)
    publish_costs(a=3000, b=4000)

    run(t.ack(keys, [(told(serve()["a"], 0), None)], clock=micros(ms=-1)))

    assert not serve(clock=micros(ms=2999))
    assert [*serve(clock=micros(ms=3000))] == ["b"]


def test_what_is_told_twice_or_by_a_lost_receipt_changes_the_rate_once(run, keys, limit, publish_costs, serve, client):
    limit(**COSTS)
    publish_costs(a=4000)
    held = serve()["a"]
    call = t.ack(keys, [(told(held, 0), None)], clock=NOON)

    run(call)
    before = client.zscore(keys.rates, "\x03")
    assert run(call).lost == ("a",)

    assert (before, client.zscore(keys.rates, "\x03")) == (NOON, NOON)


@pytest.mark.parametrize("end", ["nack", "snooze", "release", "lease", "redrive"])
def test_a_message_keeps_its_cost_until_it_ends(run, keys, limit, publish, serve, client, left, collect, end):
    limit(**COSTS)
    rest = b',"r":3,"k":"tenant\\u00037"}\n'
    call = t.CallNumber("p", 1)
    options = {"ttl_ms": HOUR_MS, "retries": 3, "window_ms": None, "clock": NOON, "message_keys": [line(7, "tenant")]}
    run(t.publish(keys, [("a", rest)], call, **options))
    held = serve(lease_ms=1000)["a"]
    assert held.key == "tenant"
    later = micros(ms=2000)

    if end == "nack":
        run(t.nack(keys, [(held, 0, "failed 1 x", b"")], clock=NOON))
    elif end == "snooze":
        run(t.snooze(keys, [(held, 0)], clock=NOON))
    elif end == "release":
        run(t.release(keys, [held], clock=NOON))
    elif end == "redrive":
        run(t.nack(keys, [(held, 0, "rejected 1 x", client.get(keys.msg("a")))], clock=NOON))
        collect("a")
        letter = client.xrevrange(keys.dead, count=1)[0][0].decode()
        run(t.redrive(keys, [(letter, "a", 3)], clock=NOON, ttl_ms=HOUR_MS))
    run(t.reclaim(keys, clock=later))
    run(t.promote(keys, clock=later))

    assert left("a").endswith("tenant\x037")
    before = client.zscore(keys.rates, "\x03")
    again = serve(clock=later)
    assert {one.key for one in again.values()} == {"tenant"}
    assert client.zscore(keys.rates, "\x03") == max(before, later) + 7000


def test_other_limits_let_the_head_start_at_once(limit, publish_costs, serve, run, keys):
    limit(**COSTS)
    publish_costs(a=4000, b=4000)
    assert [*serve()] == ["a"]

    assert not serve()

    limit(cost_ns=1, cost_burst=10_000)

    assert not serve(clock=micros(ms=1))  # still in debt, by a burst of the new rate
    assert [*serve(clock=micros(ms=2))] == ["b"]


@pytest.mark.parametrize("settle", ["ack", "nack", "snooze", "release", "succeed"])
def test_a_settlement_that_another_script_must_make_returns_no_cost(run, keys, limit, publish, serve, client, settle):
    """The worker tries `ack` before it knows of a successor, and `succeed` while it knows of one that was withdrawn."""
    limit(**COSTS)
    publish("a", message_keys=[line(4000)], window_ms=0)
    held = told(serve()["a"], 1000)
    ends = {
        "ack": lambda: t.ack(keys, [(held, None)], clock=NOON),
        "nack": lambda: t.nack(keys, [(held, 0, "failed 1 x", b"")], clock=NOON),
        "snooze": lambda: t.snooze(keys, [(held, 0)], clock=NOON),
        "release": lambda: t.release(keys, [held], clock=NOON),
        "succeed": lambda: t.succeed(keys, [held], kind="acked", clock=NOON),
    }
    if settle != "succeed":
        follow(run, keys, "a", line(5))

    assert run(ends[settle]()).followed == ("a",)
    assert client.zscore(keys.rates, "\x03") == micros(ms=4000)
    run(ends["ack" if settle == "succeed" else "succeed"]())
    assert client.zscore(keys.rates, "\x03") == micros(ms=1000)


def test_a_successor_of_a_settled_message_has_its_own_key_and_cost_and_no_failures(
    run, keys, limit, publish, serve, client, left, lines
):
    limit(**COSTS, per_key=1)
    publish("a", message_keys=[line(7, "tenant")], window_ms=0)
    run(t.nack(keys, [(serve()["a"], 0, "failed 1 x", b"")], clock=NOON))
    run(t.reclaim(keys, clock=NOON))
    held = serve()["a"]
    follow(run, keys, "a", line(5, "other"))

    run(t.succeed(keys, [held], kind="acked", history=9, clock=NOON))

    assert (left("a"), lines()) == ("3 other\x035", {"other": ["a"]})
    assert (client.hlen(keys.errors), client.xlen(keys.history)) == (0, 1)


@pytest.mark.parametrize("deaths", [1, 2, t.LEASE_DEATHS])
def test_a_successor_of_a_message_whose_lease_expired_has_its_own_key_and_cost(
    run, keys, limit, publish, serve, client, left, deaths
):
    limit(**COSTS, per_key=1)
    publish("a", message_keys=[line(7, "tenant")], window_ms=0, retries=9)
    now = NOON
    for death in range(deaths):
        assert serve(clock=now, lease_ms=1000)
        now += 1_000_000
        for _ in range(2 * (death < deaths - 1)):
            run(t.reclaim(keys, clock=now))
            now += micros(ms=1000 * 2**death) - NOON
    follow(run, keys, "a", line(5, "other"), clock=now)
    for _ in range(2):
        run(t.reclaim(keys, clock=now))
        now += micros(ms=1000 * 2**deaths) - NOON

    again = serve(clock=now) or serve(clock=now)

    assert (left("a"), again["a"].key) == ("3 other\x035", "other")
    assert client.zrange(keys.held, 0, -1) == [b"other\x00a"]
    assert client.zscore(keys.rates, "\x03") == now + 5000
