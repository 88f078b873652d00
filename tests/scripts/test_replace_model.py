"""Any calls in any order on a few ids that are published again and again: the newest body runs, and runs last."""

import random
from collections import defaultdict
from functools import partial

import pytest
from held_clock import NOON
from mutating import is_caught
from sending import send

from reliq.keys import Keys
from reliq.lua import transitions as t
from reliq.wire_format import envelope_rest

IDS = ("a", "b", "c")
MODES = ("follow", "replace", "debounce", "throttle")
SPAN_MS, MOST_MS, LEASE_MS, TTL_MS = 4_000, 9_000, 5_000, 3_600_000
QUICK, LONG = 60, 1500


class Machine:
    """A queue, and which bodies were accepted, held and acked; bodies are rising numbers."""

    def __init__(self, client, seed, *, keyed):
        self.client, self.chance, self.keyed = client, random.Random(seed), keyed
        self.keys, self.now, self.number, self.version = Keys("q"), NOON, 0, 0
        self.newest, self.since, self.held, self.started = {}, {}, defaultdict(list), {}
        self.acked, self.log = set(), []
        client.flushall()
        if keyed:
            self.run(t.limit(self.keys, {self.chance.choice(["per_key", "ordered"]): "1"}))

    def run(self, call):
        return call.at(self.now).read(send(self.client, call.at(self.now)))

    def turn(self, lane):
        self.number += 1
        return t.CallNumber(lane, self.number)

    def key_options(self):
        return {"message_keys": [self.chance.choice(["", "k", "l"])]} if self.keyed else {}

    def body(self, id):
        value = self.client.get(self.keys.msg(id))
        return None if value is None else int(value.rsplit(b"\n", 1)[1])

    def word(self, id):
        return self.client.hget(self.keys.lease, id) or b""

    def is_alive(self, id):
        return self.client.hexists(self.keys.retries_left, id)

    # ---- steps

    def publish(self):
        id, self.version = self.chance.choice(IDS), self.version + 1
        options = self.key_options()
        line = options["message_keys"][0] if options else ""
        items = [(id, envelope_rest(3, 1, 0, None, None, line) + b"%d" % self.version)]
        options |= {
            "ttl_ms": TTL_MS,
            "retries": self.chance.choice([0, 3]),
            "delay_ms": self.chance.choice([0, 0, 3000]),
        }
        mode = self.chance.choice((*MODES, *MODES, "keep"))
        if mode == "keep":
            call = t.publish(self.keys, items, self.turn("p"), window_ms=0, **options)
        else:
            options |= {"mode": mode, "span_ms": SPAN_MS, "most_ms": MOST_MS}
            call = t.replace(self.keys, items, self.turn("p"), **options)
        has_successor = b"+" in self.word(id)
        status = self.run(call).refused.get(0, "published")
        assert not (mode == "follow" and has_successor) or status in ("duplicate", "ending")
        self.log.append((mode, id, self.version, status))
        if status in ("published", "replaced", "follows"):
            self.newest[id] = self.version
            gathers = mode == "debounce" and (status == "follows" or self.word(id).startswith(b">"))
            self.since[id] = self.since.get(id) or self.now if gathers else None
        if self.chance.random() < 0.3:
            before = self.dump()
            assert self.run(call).refused.get(0, "published") == status
            assert self.dump() == before, ("a repeated call changed something", self.log[-5:])

    def claim(self):
        limit = self.chance.choice([1, 3])
        for one in self.run(t.claim(self.keys, self.turn("w"), limit=limit, lease_ms=LEASE_MS)).claimed:
            version = self.body(one.id)
            self.log.append(("start", one.id, version))
            assert version is not None, ("no body", self.log[-9:])
            assert version >= self.started.get(one.id, 0), ("an older body started", self.log[-9:])
            if version > self.started.get(one.id, 0):
                self.since[one.id] = None
            self.started[one.id] = version
            self.held[one.id].append((one, version))

    def settle(self, kind):
        ids = [id for id in IDS if self.held[id]]
        if not ids:
            return
        id = self.chance.choice(ids)
        one, version = self.held[id].pop(self.chance.randrange(len(self.held[id])))
        if kind == "extend":
            self.held[id].append((one, version))
            self.run(t.extend(self.keys, [one], lease_ms=7000))
            return
        plain = {
            "acked": lambda: t.ack(self.keys, [(one, None)]),
            "nacked": lambda: t.nack(self.keys, [(one, 2000, "failed 1 x", b"x\n0" if one.left == 0 else b"")]),
            "rejected": lambda: t.nack(self.keys, [(one, 0, "rejected 1 x", b"x\n0")]),
            "snoozed": lambda: t.snooze(self.keys, [(one, 2000)]),
            "released": lambda: t.release(self.keys, [one]),
        }[kind]
        answer = self.run(plain())
        if answer.followed and self.chance.random() < 0.1:
            self.held[id].append((one, version))  # the process died in between
            return
        while answer.followed:
            answer = self.run(t.succeed(self.keys, [one], kind=kind))
            answer = self.run(plain()) if answer.followed else answer
        self.log.append((kind, id, version, "lost" if answer.lost else "settled"))
        if kind == "acked" and not answer.lost:
            assert version not in self.acked, ("acked twice", self.log[-9:])
            self.acked.add(version)
        if not answer.lost and version == self.newest.get(id) and not self.is_alive(id):
            del self.newest[id]

    def reclaim(self):
        self.run(t.reclaim(self.keys))
        for id in list(self.newest):
            if self.client.sismember(self.keys.garbage, id):
                assert self.started.get(id) == self.newest[id], ("a body was buried before it ran", self.log[-9:])
                del self.newest[id]

    def cancel(self):
        id = self.chance.choice(IDS)
        (answer,) = self.run(t.cancel(self.keys, [id]))
        self.log.append(("cancel", id, answer))
        if answer != "not_found":
            self.newest.pop(id, None)
            self.since[id] = None

    def collect(self):
        ids = [id.decode() for id in self.client.smembers(self.keys.garbage)]
        self.run(t.collect(self.keys, ids, dead_letter_limit=100, letters_ms=10**9))

    def wait(self):
        self.now += self.chance.choice([500_000, 3_000_000, 6_000_000])

    def step(self):
        settle = self.chance.choice(["acked"] * 3 + ["nacked", "rejected", "snoozed", "released", "extend"])
        others = [self.claim] * 4 + [self.reclaim, self.collect, self.cancel, self.wait, self.wait, self.tidy]
        others += [lambda: self.run(t.promote(self.keys))] * 2 + [lambda: self.settle(settle)] * 6
        self.chance.choice([self.publish] * 7 + others)()
        self.check()

    def tidy(self):
        self.run(t.tidy(self.keys))

    # ---- checks

    def dump(self):
        return {key: self.client.dump(key) for key in self.client.scan_iter() if b":lane:" not in key}

    def check(self):
        keys, client = self.keys, self.client
        counts = self.run(t.counts(keys))
        assert counts.missing == 0, ("account", counts, self.log[-9:])
        places = [*client.zrange(keys.pending, 0, -1), *client.zrange(keys.unack, 0, -1)]
        places += [*client.lrange(keys.ready, 0, -1), *client.lrange(keys.retry, 0, -1), *client.smembers(keys.garbage)]
        for key in ("k", "l"):
            places += client.lrange(keys.line(key), 0, -1)
        assert len(places) == len(set(places)), ("two places", places, self.log[-9:])
        for id, version in self.newest.items():
            alive = self.is_alive(id)
            assert alive or version in self.acked, ("the newest body is lost", id, version, self.log[-12:])
            assert not alive or id.encode() in places, ("no place", id, self.log[-9:])
            assert not alive or self.body(id) == version, ("an older body waits", id, self.log[-9:])
            since, due = self.since.get(id), client.zscore(keys.pending, id)
            if since and due and self.word(id).startswith(b">"):
                assert due * 1000 <= since / 1000 + MOST_MS + 1, ("max_wait", id, self.log[-9:])

    def drain(self):
        """Run all that is left: each newest body is acked, and nothing remains."""
        for _ in range(60):
            self.now += 20_000_000
            self.run(t.promote(self.keys))
            self.reclaim()
            self.collect()
            self.claim()
            while any(self.held.values()):
                self.settle("acked")
            self.check()
        for id, version in self.newest.items():
            assert version in self.acked, ("the newest body never ran", id, version, self.log[-12:])
        assert not self.client.hlen(self.keys.retries_left), self.log[-12:]
        assert not self.client.hlen(self.keys.lease), self.client.hgetall(self.keys.lease)
        assert not self.client.zcard(self.keys.held)


def play(client, seed, *, keyed=False, steps=60):
    """Make random calls, then drain the queue."""
    machine = Machine(client, seed, keyed=keyed)
    for _ in range(steps):
        machine.step()
    machine.drain()


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("keyed", [False, True], ids=["plain", "keyed"])
def test_newest_body_runs_after_any_calls(client, request, keyed):
    for seed in range(LONG if request.config.getoption("--long") else QUICK):
        try:
            play(client, seed, keyed=keyed)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error


MUTANTS = {
    "succeed forgets the successor": ("succeed", "enter({ id }, tonumber(due))", ""),
    "reclaim forgets the successor's retries": ("reclaim", "if fresh then left, died =", "if false then left, died ="),
    "ack ends a message with a successor": (
        "ack",
        "local fate = (not holds or follows) and",
        "local fate = not holds and",
    ),
    "cancel leaves the successor": (
        "cancel",
        "pair(words, id, word:match('^[^+]*') .. '!')",
        "pair(words, id, word .. '!')",
    ),
    "debounce has no end": ("replace", "row.since + most_ms, row.is", "math.huge, row.is"),
    "replace does not know a successor": ("replace", "local has_heir = heir(row.word)", "local has_heir = nil"),
    "an older body comes back": ("replace", "if is == 'pending' then put(pending", "if false then put(pending"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_model_catches_a_mutant(client, monkeypatch, name):
    assert is_caught(monkeypatch, *MUTANTS[name], partial(play, client))
