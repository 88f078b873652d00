"""Any calls of publishers, operators and workers in any order on a few stored schedules: each tick is published once."""

import random
import types
from collections import defaultdict, deque
from datetime import UTC, datetime
from functools import partial
from itertools import count, islice
from typing import NamedTuple

import pytest
from cutting import cut_after
from held_clock import NOON
from mutating import is_caught
from sending import send

from reliq import Queue
from reliq.lua import transitions as t
from reliq.schedule import Schedule
from reliq.schedules import Row, StoredSchedules, schedule_of
from reliq.wire_format import open_envelope
from reliq.worker import planner
from reliq.worker.planner import Planner

NAMES = ("a", "b")
SCHEDULES = (
    {"every": 60},
    {"every": 60},
    {"every": 90},
    {"every": 3600},
    {"cron": "*/2 * * * *"},
    {"cron": "30 2 * * *", "tz": "Europe/Berlin"},
)
#: Noon, and the days before Berlin changes its clocks.
STARTS = (
    NOON,
    *(int(datetime(2027, *day, 21, tzinfo=UTC).timestamp()) * 10**6 for day in ((3, 27), (10, 30))),
)
DAY = 86_400
#: A worker's call publishes at most this many ticks, so that a worker can die between two calls.
BATCH = 3
QUICK, LONG = 60, 2000


class Spec(NamedTuple):
    """The arguments of `Queue.schedule`; `number` is the body."""

    options: int
    catch_up: str
    number: int
    key: str

    @property
    def schedule(self) -> Schedule:
        return schedule_of(**{"cron": None, "every": None, "tz": "UTC"} | SCHEDULES[self.options])


class Plan(NamedTuple):
    """The row of a schedule in the model."""

    spec: Spec
    is_paused: bool = False


class Tick(NamedTuple):
    """A tick that a worker has computed; without `at`, all ticks from `since` until `next` are missed."""

    name: str
    spec: Spec | None
    since: int
    at: int | None
    next: int | None


class Operation:
    """A call of a publisher or an operator; each `request` waits until the machine runs it."""

    def __init__(self, kind, name, spec, coroutine):
        self.kind, self.name, self.spec, self.coroutine = kind, name, spec, coroutine
        self.read = self.clock = None
        self.request = coroutine.send(None)


@types.coroutine
def ask(_driver, request):
    return (yield request)


class ReadDue(BaseException):
    """Raised in a planner that has read the due schedules and would now send the ticks."""


class Worker:
    """A planner that stops between its calls; the machine runs its `calls`, or not."""

    observers = ()

    def __init__(self, machine, *, stops=True):
        self.machine, self.stops = machine, stops
        self.ticks, self.calls = deque(), deque()

    def run_all(self, calls):
        if calls and calls[0].script.name == "plan_due":
            self.ticks.extend(self.machine.due_ticks())
            return [self.machine.run(call) for call in calls]
        self.calls.extend(calls)
        if self.stops:
            raise ReadDue
        return [self.machine.tick(self) for _ in calls]

    def read_due(self):
        try:
            Planner(self, [self.machine.keys]).step()
        except ReadDue:
            return True
        return False


class Machine:
    """A queue with schedules, and a model of both."""

    def __init__(self, client, seed):
        self.client, self.chance, self.goes_back = client, random.Random(seed), seed % 2
        queue = Queue("q", dict, url=client)
        self.keys, self.number, self.turns = queue.keys, count(1), count(1)
        self.now = self.chance.choice(STARTS) + self.chance.randrange(10**8)
        self.stored = StoredSchedules(self.keys, queue._writer, queue._clients, ask)
        self.operations, self.workers = [], []
        self.plans: dict[str, Plan] = {}
        self.due: dict[str, int] = {}
        self.lines, self.garbage, self.total = defaultdict(deque), set(), 0
        self.published, self.half_deleted, self.log = set(), set(), []
        client.flushall()

    def run(self, request):
        return request.at(self.now).read(send(self.client, request.at(self.now)))

    @property
    def second(self):
        return self.now // 10**6

    # ---- the model

    def due_ticks(self):
        """Return the ticks that a worker computes if it reads the schedules now."""
        for since, name in sorted((at, name) for name, at in self.due.items() if at <= self.second):
            plan = self.plans.get(name)
            if plan is None or plan.is_paused:
                yield Tick(name, None, since, None, None)
            else:
                yield from self.ticks_of(name, plan.spec, since)

    def ticks_of(self, name, spec, since):
        ticks = spec.schedule.ticks(since - 1, self.second, most=10**6)
        if not ticks:  # a change was cut off after it had stored the next tick of the new schedule
            return
        decided = max(100, sum(self.second - tick > DAY for tick in ticks))
        most_age = 60 if spec.catch_up == "skip" else DAY
        for tick in ticks[:decided]:
            if self.second - tick <= most_age and (spec.catch_up == "all" or tick == ticks[-1]):
                after = spec.schedule.next_after(tick)
                yield Tick(name, spec, since, tick, after)
                since = after
        after = [*ticks, spec.schedule.next_after(self.second)][min(decided, len(ticks))]
        if since != after:
            yield Tick(name, spec, since, None, after)

    def answer_tick(self, tick):
        """Change the model as a tick's call must change Redis; return the answer."""
        plan = self.plans.get(tick.name)
        if plan is None or plan.is_paused:
            self.due.pop(tick.name, None)
            return "superseded"
        if (plan.spec, self.due.get(tick.name)) != (tick.spec, tick.since):
            return "superseded"
        self.due[tick.name] = tick.next
        if tick.at is None:
            return "missed"
        id = f"plan.{tick.name}.{tick.at}"
        if id not in self.alive():
            assert (tick.name, tick.at) not in self.published, ("published twice", tick, self.log[-12:])
            self.published.add((tick.name, tick.at))
            self.total += 1
            self.lines[tick.spec.key].append((id, tick))
        return "published"

    def alive(self):
        return {id for line in self.lines.values() for id, _ in line} | self.garbage

    def change(self, one):
        """Return the answer that an operation's call must get, and how it changes the model, write by write."""
        name, plan = one.name, self.plans.get(one.name)
        forget_due = lambda: self.due.pop(name, None)  # noqa: E731
        if one.kind == "delete":
            return ("deleted" if plan else "unknown"), [forget_due, lambda: self.plans.pop(name, None)]
        if one.kind != "write" and plan is None:
            return "unknown", []
        if one.kind == "pause" and plan.is_paused:
            return "unchanged", [forget_due]
        if one.kind == "pause":
            return "paused", [lambda: self.plans.update({name: Plan(plan.spec, True)}), forget_due]
        if one.kind == "resume" and not plan.is_paused:
            return "unchanged", []
        if one.kind == "resume" and plan.spec != one.read:
            return "superseded", []
        spec = one.spec or plan.spec
        is_new, is_paused = plan is None or plan.spec != spec, plan is not None and plan.is_paused
        sets_next = one.kind == "resume" or (not is_paused and (is_new or name not in self.due))
        next = spec.schedule.next_after(one.clock)
        if sets_next and next <= self.second:
            return "superseded", []
        writes = [lambda: None] if one.kind == "write" and spec.key else []  # the queue has keys
        writes += [lambda: self.due.update({name: next})] if sets_next else []
        if one.kind == "write" and not is_new:
            return "unchanged", writes
        row = Plan(spec, is_paused and one.kind == "write")
        return ("resumed" if one.kind == "resume" else "written"), [*writes, lambda: self.plans.update({name: row})]

    # ---- steps

    def begin(self):
        """Begin an operation of a publisher or an operator."""
        name = self.chance.choice(NAMES)
        spec, known = None, self.plans.get(name)
        opposite = "resume" if known and known.is_paused else "pause"
        kind = self.chance.choice(["write"] * 5 + ["delete", "pause", "resume"] + [opposite] * 2)
        if kind == "write":
            spec = Spec(
                self.chance.randrange(len(SCHEDULES)),
                self.chance.choice(["skip", "latest", "all"]),
                next(self.number),
                self.chance.choice(["", "tenant"]),
            )
            if known and self.chance.random() < 0.6:  # change the body only, or nothing
                spec = known.spec._replace(number=self.chance.choice([known.spec.number, spec.number]))
            options = SCHEDULES[spec.options] | {"catch_up": spec.catch_up} | ({"key": spec.key} if spec.key else {})
            coroutine = self.stored.write(None, name, {"n": spec.number}, options)
        elif kind == "resume":
            coroutine = self.stored.resume(None, name)
        else:
            coroutine = self.stored.change(None, kind, name, b'{"by":"me","at":1,"reason":""}')
        self.operations.append(Operation(kind, name, spec, coroutine))

    def advance(self):
        """Run the next request of an operation; its reply may be lost, then the request is repeated later."""
        if not self.operations:
            return
        one = self.chance.choice(self.operations)
        verb = one.request.script.name if isinstance(one.request, t.Call) else one.request.command[0]
        expected, writes = self.change(one) if verb == "plan" else (None, [])
        if writes and self.chance.random() < 0.2:
            self.cut_off(one, writes)
            return
        reply = self.run(one.request)
        if verb == "plan":
            for write in writes:
                write()
            self.log.append((self.second, one.kind, one.name, one.spec, one.clock, reply))
            assert reply == expected, (reply, expected, self.log[-12:])
            if self.chance.random() < 0.2:
                return
        elif verb == "plan_due":
            one.clock = self.second
        elif verb == "HGET":
            one.read = one.name in self.plans and self.plans[one.name].spec
        try:
            one.request = one.coroutine.send(reply)
        except StopIteration as end:
            self.operations.remove(one)
            assert expected != "superseded"
            assert one.kind == "write" or end.value == (expected in ("deleted", "paused", "resumed"))

    def cut_off(self, one, writes):
        """Let the script of an operation end after some of its writes; the caller repeats it, or gives up."""
        number = self.chance.randrange(len(writes))
        assert cut_after(self.client, one.request.at(self.now), number)
        self.log.append((self.second, "cut off", one.kind, one.name, number))
        for write in writes[:number]:
            write()
        if one.kind == "delete":
            self.half_deleted.add(one.name)
        if self.chance.random() < 0.5:
            self.operations.remove(one)
            one.coroutine.close()

    def leave_word(self):
        """Leave the state word of a cancelled message, as an interrupted claim does, for the next tick's id."""
        for name, at in self.due.items():
            id = f"plan.{name}.{at}"
            if id not in self.alive():
                self.client.hset(self.keys.lease, id, "!")

    def look(self):
        """Let a worker read the due schedules."""
        worker = Worker(self)
        if worker.read_due():
            self.workers.append(worker)

    def tick_one(self):
        """Let a worker send its next call. Its reply may be lost, then it is sent again; or the worker dies."""
        if not self.workers:
            return
        worker = self.chance.choice(self.workers)
        if self.chance.random() < 0.1:
            worker.calls.clear()
        else:
            ticks, call = worker.ticks.copy(), worker.calls[0]
            self.tick(worker)
            if self.chance.random() < 0.2:
                worker.ticks = ticks
                worker.calls.appendleft(call)
        if not worker.calls:
            self.workers.remove(worker)

    def tick(self, worker):
        answers = self.run(worker.calls.popleft())
        ticks = list(islice(iter(worker.ticks.popleft, None), len(answers)))
        expected = [self.answer_tick(tick) for tick in ticks]
        self.log += [(self.second, *row) for row in zip(ticks, answers, strict=True)]
        assert answers == expected, (answers, expected, self.log[-12:])
        assert worker.calls or not worker.ticks
        return answers

    def consume(self, limit=1):
        """Claim messages, compare their bodies, and ack or reject them."""
        turn = t.CallNumber("w", next(self.turns))
        claimed = self.run(t.claim(self.keys, turn, limit=limit, lease_ms=30_000)).claimed
        for one in claimed:
            header, body = open_envelope(self.client.get(self.keys.msg(one.id)))
            id, tick = self.lines[header.line or ""].popleft()
            moment = tick.spec.schedule.moment(tick.at).isoformat()
            assert (one.id, body, header.headers) == (id, b'{"n":%d}' % tick.spec.number, {"reliq-tick": moment})
        if claimed and self.chance.random() < 0.5:
            self.run(t.nack(self.keys, [(one, 0, "rejected 1 x", b"x\n0") for one in claimed]))
            self.garbage |= {one.id for one in claimed}
        elif claimed:
            self.run(t.ack(self.keys, [(one, None) for one in claimed]))
        return claimed

    def collect(self):
        self.run(t.collect(self.keys, sorted(self.garbage), dead_letter_limit=100, letters_ms=10**9))
        self.garbage.clear()

    def pass_time(self):
        self.now += self.chance.choice([100_000, 5 * 10**6, 20 * 10**6, 70 * 10**6, 70 * 10**6, 600 * 10**6])

    def jump(self):
        self.now += self.chance.choice([3, 3, 26]) * 3600 * 10**6

    def go_back(self):
        """Let the clock go back: then a changed or resumed schedule may publish ticks after the new time again."""
        self.now -= self.chance.choice([10, 30, 30, 900]) * 10**6
        self.published = {(name, at) for name, at in self.published if at <= self.second}

    def step(self):
        steps = [self.begin] * 6 + [self.advance] * 12 + [self.look] * 6 + [self.tick_one] * 8
        steps += [self.pass_time] * 5 + [self.consume] * 4 + [self.collect, self.leave_word]
        seldom = [self.jump, *[self.go_back] * 4] if self.goes_back else [self.jump]
        self.chance.choice(seldom if self.chance.random() < 0.02 * len(seldom) else steps)()
        self.check()

    # ---- checks

    def check(self):
        with self.client.pipeline(transaction=False) as pipe:
            pipe.zrange(self.keys.plans_due, 0, -1, withscores=True).hgetall(self.keys.plans)
            pipe.hget(self.keys.totals, "published")
            pipe.lrange(self.keys.ready, 0, -1).lrange(self.keys.line("tenant"), 0, -1)
            due, rows, total, *lines = pipe.execute()
        known = {}
        for name, text in rows.items():
            row = Row.parse(text)
            number, line = int(row.body[5:-1]), row.header.line or ""
            known[name.decode()] = (bool(row.pause), row.options.schedule, row.options.catch_up, number, line)
        expected = {
            name: (plan.is_paused, str(plan.spec.schedule), plan.spec.catch_up, plan.spec.number, plan.spec.key)
            for name, plan in self.plans.items()
        }
        assert known == expected, self.log[-12:]
        assert {name.decode(): int(at) for name, at in due} == self.due, self.log[-12:]
        for key, ids in zip(("", "tenant"), lines, strict=True):
            assert [id.decode() for id in ids[::-1]] == [id for id, _ in self.lines[key]], (key, self.log[-12:])
        assert int(total or 0) == self.total, self.log[-12:]

    def drain(self):
        """Let two workers publish all due ticks, and consume all messages."""
        self.now += 3600 * 10**6
        for worker in (Worker(self, stops=False), Worker(self, stops=False)):
            one = Planner(worker, [self.keys])
            while one.step() == 0:
                self.check()
        assert not list(self.due_ticks())
        active = {name for name, plan in self.plans.items() if not plan.is_paused}
        assert active <= self.due.keys() | self.half_deleted
        while self.consume(limit=100):
            self.check()
        assert not self.alive() - self.garbage
        assert self.run(t.counts(self.keys)).missing == 0
        for one in self.operations:
            one.coroutine.close()


def play(client, seed, steps=120):
    """Make random calls, then publish and consume the rest."""
    machine = Machine(client, seed)
    for _ in range(steps):
        machine.step()
    machine.drain()


@pytest.fixture(autouse=True)
def _small_batches(monkeypatch):
    monkeypatch.setattr(planner, "BATCH_LIMIT", BATCH)


@pytest.mark.timeout(3600)
def test_each_tick_is_published_once_after_any_calls(client, request):
    for seed in range(LONG if request.config.getoption("--long") else QUICK):
        try:
            play(client, seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error


MUTANTS = {
    "a tick is published twice": ("plan_tick", " and tonumber(expected or '') == tonumber(arg(i, SINCE))", ""),
    "a tick does not advance": ("plan_tick", ", nexts[name] = arg(i, VALUE)", ", answers.x = arg(i, VALUE)"),
    "a second tick of a call is ignored": ("plan_tick", "nexts[name] or redis.call('ZSCORE'", "redis.call('ZSCORE'"),
    "a tick keeps an old state word": ("plan_tick", "run('HDEL', lease, fresh)\n", ""),
    "a paused schedule stays due": ("plan_tick", " or (pause or '') ~= ''", ""),
    "a deleted schedule stays due": ("plan_tick", "if not row or (pause or '') ~= ''", "if (pause or '') ~= ''"),
    "a pause keeps the next tick": (
        "plan",
        "  redis.call('ZREM', plans_due, name)\n  return 'paused'",
        "  return 'paused'",
    ),
    "a second pause keeps the next tick": (
        "plan",
        "redis.call('ZREM', plans_due, name) return 'unchanged'",
        "return 'unchanged'",
    ),
    "a delete keeps the next tick": ("plan", "  redis.call('ZREM', plans_due, name)\n  return redis", "  return redis"),
    "a change ends the pause": ("plan", "(verb == 'resume' and '' or pause or '')", "''"),
    "the same values start again": ("plan", "(is_new or not redis.call('ZSCORE', plans_due, name))", "true"),
    "a change keeps the next tick": ("plan", "(is_new or not redis", "(not redis"),
    "a resume uses an old schedule": (
        "plan",
        "if verb == 'resume' and known ~= revision then return 'superseded' end\n",
        "",
    ),
    "a passed tick is accepted": ("plan", "if sets_next and next ~= ''", "if false"),
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", MUTANTS)
def test_schedules_model_catches_a_mutant(client, monkeypatch, name):
    assert is_caught(monkeypatch, *MUTANTS[name], partial(play, client))
