"""Schedules that are made at run time: each tick is published once, whatever changes meanwhile."""

import subprocess
import sys
from datetime import UTC, datetime
from types import SimpleNamespace

import pytest
from waiting import eventually

from reliq import ConfigurationError, Layout, Queue, RedisRefusedError
from reliq.lua import transitions as t
from reliq.redis.client import Client
from reliq.redis.server import Connection
from reliq.schedule import Schedule
from reliq.schedules import encoded, revision_of
from reliq.text import chunked
from reliq.worker.planner import Planner, ticks_of

#: 06:00 UTC on a day in May.
SIX = int(datetime(2027, 5, 3, 6, tzinfo=UTC).timestamp())
MINUTELY = Schedule.every(60)
#: A planner that gets no reply in time rests for a second.
REPLY_SECONDS = 60.0


@pytest.fixture
def clock():
    return SimpleNamespace(now=SIX)


@pytest.fixture
def queue(url):
    return Queue("q", dict, url=url)


@pytest.fixture
def rest(queue):
    """Return a row without its first line."""

    def make(schedule=MINUTELY, body=None, catch_up="latest", **options):
        value, order = encoded(queue._writer, schedule, body or {"a": 1}, catch_up, options)
        return {"revision": revision_of(value), "value": value, "line": order.line}

    return make


@pytest.fixture
def write(run, queue, clock, rest):
    """Store a schedule with its next tick from the held clock."""

    def make(name="one", schedule=MINUTELY, **options):
        next, clock_us = schedule.next_after(clock.now), int(clock.now * 1e6)
        return run(t.plan(queue.keys, "write", name, next=next, **rest(schedule, **options), clock=clock_us))

    return make


@pytest.fixture
def planner(url, queue, clock, monkeypatch):
    """
    Return a planner with the held clock; `at` moves the clock and runs it until nothing is due.

    A step takes no time of this clock: its answer is the whole wait, also on a busy machine.
    """
    monkeypatch.setattr("reliq.worker.planner.time", SimpleNamespace(monotonic=lambda: 0.0))

    def make():
        client = Client(Connection.to(url).wire(REPLY_SECONDS), [], lambda: int(clock.now * 1e6))
        one = Planner(client, [queue.keys])

        def at(now):
            clock.now = now
            while one.step() == 0:
                pass

        one.at = at
        return one

    return make


@pytest.fixture
def ids(client, queue):
    """Return the ids in ready, the oldest first."""
    return lambda: [id.decode() for id in client.lrange(queue.keys.ready, 0, -1)][::-1]


def due_of(client, queue):
    return {name.decode(): int(at) for name, at in client.zrange(queue.keys.plans_due, 0, -1, withscores=True)}


def test_each_tick_is_published_once_by_several_processes(write, planner, ids, queue, client):
    write()
    one, other = planner(), planner()
    for now in range(SIX + 30, SIX + 200, 30):
        one.at(now)
        other.at(now)
    assert ids() == [f"plan.one.{SIX + 60 * n}" for n in (1, 2, 3)]
    with queue.receive() as [job]:
        assert (job.body, job.headers) == ({"a": 1}, {"reliq-tick": "2027-05-03T06:01:00+00:00"})
    counts = queue.counts()
    assert counts.totals["published"] == 3
    assert counts.missing == 0


@pytest.mark.parametrize(
    ("day", "ticks"),
    [
        ((2026, 3, 28, 12), ["2026-03-29T03:00:00+02:00", "2026-03-30T02:30:00+02:00"]),
        ((2026, 10, 24, 12), ["2026-10-25T02:30:00+02:00", "2026-10-26T02:30:00+01:00"]),
    ],
)
def test_a_tick_in_a_clock_change_is_published_once(day, ticks, write, planner, ids, clock):
    clock.now = int(datetime(*day, tzinfo=UTC).timestamp())
    write(schedule=Schedule.cron("30 2 * * *", "Europe/Berlin"))
    one = planner()
    for _ in range(8):
        one.at(clock.now + 6 * 3600)
    assert ids() == [f"plan.one.{int(datetime.fromisoformat(tick).timestamp())}" for tick in ticks]


@pytest.mark.parametrize(("catch_up", "minutes"), [("skip", [5]), ("latest", [5]), ("all", [1, 2, 3, 4, 5])])
def test_after_a_downtime_missed_ticks_are_published_as_declared(catch_up, minutes, write, planner, ids):
    write(catch_up=catch_up)
    planner().at(SIX + 330)
    assert ids() == [f"plan.one.{SIX + 60 * minute}" for minute in minutes]


@pytest.mark.parametrize(
    ("schedule", "catch_up", "count", "next"),
    [
        (Schedule.every(3600), "all", 25, SIX + 3600),
        (Schedule.every(3600), "latest", 1, SIX + 3600),
        (Schedule.cron("0 6 1 * *"), "all", 0, int(datetime(2027, 6, 1, 6, tzinfo=UTC).timestamp())),
    ],
    ids=["all", "latest", "monthly"],
)
def test_a_schedule_due_decades_ago_skips_to_the_last_day(
    schedule, catch_up, count, next, write, planner, ids, client, queue
):
    write(schedule=schedule, catch_up=catch_up)
    client.zadd(queue.keys.plans_due, {"one": schedule.next_after(0)})
    one = planner()

    steps = [one.step() for _ in range(4)]

    assert steps[-1] > 0
    assert ids() == [f"plan.one.{SIX - 3600 * hour}" for hour in reversed(range(count))]
    assert due_of(client, queue) == {"one": next}


def test_an_infinite_due_time_of_another_program_is_listed(write, queue, client):
    for name, at in ("first", "-inf"), ("last", "inf"):
        write(name)
        client.zadd(queue.keys.plans_due, {name: at})

    assert [(plan.name, plan.next) for plan in queue.schedules()] == [("first", 0), ("last", 253_402_300_799)]


def test_a_tick_of_a_changed_deleted_or_paused_schedule_is_not_published(write, run, queue, ids, rest, client):
    def read():
        found = run(t.plan_due(queue.keys, limit=9, clock=(SIX + 61) * 10**6)).found
        return [tick for due in found for tick in ticks_of(due, (SIX + 61) * 1000)]

    def tick(ticks):
        return run(t.plan_tick(queue.keys, ticks, clock=(SIX + 61) * 10**6))

    write()
    ticks = read()
    assert write(body={"a": 2}) == "written"
    assert (tick(ticks), ids()) == (["superseded"], [])
    ticks = read()
    assert run(t.plan(queue.keys, "pause", "one", value=b'{"by":"me","at":1,"reason":""}')) == "paused"
    assert due_of(client, queue) == {}
    assert (tick(ticks), ids(), due_of(client, queue)) == (["superseded"], [], {})
    assert write(body={"a": 3}) == "written"
    assert due_of(client, queue) == {}  # a change keeps the pause
    known = rest(body={"a": 3})["revision"]
    assert run(t.plan(queue.keys, "resume", "one", revision="0", next=SIX + 60)) == "superseded"
    assert run(t.plan(queue.keys, "resume", "one", revision=known, next=SIX + 60)) == "resumed"
    assert run(t.plan(queue.keys, "resume", "one", revision=known, next=SIX + 60)) == "unchanged"
    assert (tick(ticks), ids()) == (["superseded"], [])
    ticks = read()
    assert (queue.unschedule("one"), due_of(client, queue)) == (True, {})
    assert (tick(ticks), ids(), queue.unschedule("one")) == (["superseded"], [], False)
    write()
    ticks = read()
    assert (tick(ticks), tick(ticks)) == (["published"], ["superseded"])


def test_a_change_or_resume_whose_next_tick_has_passed_is_refused(write, run, queue, planner, ids, rest, client):
    """Else the tick would be published again, because a worker may have published it already."""
    write()
    planner().at(SIX + 60)
    late = {"next": SIX + 60, "clock": (SIX + 60) * 10**6}
    assert run(t.plan(queue.keys, "write", "one", **rest(body={"a": 2}), **late)) == "superseded"
    assert (ids(), due_of(client, queue)) == ([f"plan.one.{SIX + 60}"], {"one": SIX + 120})
    run(t.plan(queue.keys, "pause", "one", value=b'{"by":"me","at":1,"reason":""}'))
    assert run(t.plan(queue.keys, "resume", "one", revision=rest()["revision"], **late)) == "superseded"
    assert due_of(client, queue) == {}


def test_after_the_clock_goes_back_a_changed_schedule_repeats_no_living_message(
    write, run, queue, planner, ids, clock, client
):
    write()
    due = run(t.plan_due(queue.keys, limit=9, clock=(SIX + 60) * 10**6)).found
    old = [tick for one in due for tick in ticks_of(one, (SIX + 60) * 1000)]

    def change(number):
        clock.now = SIX + 30
        assert (write(body={"a": number}), due_of(client, queue)) == ("written", {"one": SIX + 60})

    change(2)
    assert run(t.plan_tick(queue.keys, old, clock=clock.now * 10**6)) == ["superseded"]
    for number in (3, 4):  # the message waits
        planner().at(SIX + 60)
        assert (ids(), due_of(client, queue)) == ([f"plan.one.{SIX + 60}"], {"one": SIX + 120})
        change(number)
    claimed = run(t.claim(queue.keys, t.CallNumber("w", 1), limit=1, lease_ms=30_000)).claimed
    run(t.nack(queue.keys, [(claimed[0], 0, "rejected 1 x", b"x\n0")]))
    planner().at(SIX + 60)  # its dead letter is not written yet
    assert (ids(), client.scard(queue.keys.garbage)) == ([], 1)
    assert due_of(client, queue) == {"one": SIX + 120}


def test_the_same_values_keep_the_next_tick(write, clock, client, queue):
    assert write() == "written"
    clock.now += 90  # the tick at 06:01 is due
    assert (write(), due_of(client, queue)) == ("unchanged", {"one": SIX + 60})
    assert (write(body={"a": 2}), due_of(client, queue)) == ("written", {"one": SIX + 120})
    client.zrem(queue.keys.plans_due, "one")
    assert (write(body={"a": 2}), due_of(client, queue)) == ("unchanged", {"one": SIX + 120})


def test_unreadable_rows_stay_and_do_not_block_others(write, planner, ids, client, queue, caplog):
    for number in range(250):
        name = f"a{number}"
        write(name)
        client.hset(queue.keys.plans, name, b"00 \n{}\nnew")
    write("z")
    write("orphan")
    client.hdel(queue.keys.plans, "orphan")
    one = planner()
    one.at(SIX + 60)
    assert ids() == [f"plan.z.{SIX + 60}"]
    assert max(one.step() for _ in range(4)) > 0  # it does not read them without a rest
    assert len(due_of(client, queue)) == 251
    assert [record.message for record in caplog.records if "cannot read schedule" in record.message][1:] == []


OPTIONS = b'{"schedule":"every 60","catch_up":"all","ttl_ms":%s}'
VALUE = b',"r":3,"e":1}\n{}'


@pytest.mark.parametrize(
    "row",
    [
        b"0 \n" + OPTIONS % b"0" + b"\n" + VALUE,
        b"0 \n" + OPTIONS % b"9223372036854775807" + b"\n" + VALUE,
        b"revision \n" + OPTIONS % b"1000" + b"\n" + VALUE,
        b" \n" + OPTIONS % b"1000" + b"\n" + VALUE,
    ],
    ids=["ttl too short", "ttl too long", "revision", "no revision"],
)
def test_row_that_no_script_accepts_is_reported_and_blocks_no_other(row, write, planner, ids, client, queue, caplog):
    for name in ("foreign\x1b[2J", "z"):
        write(name)
    client.hset(queue.keys.plans, "foreign\x1b[2J", row)
    one = planner()

    one.at(SIX + 60)

    assert ids() == [f"plan.z.{SIX + 60}"]
    assert [record.message for record in caplog.records if "cannot read schedule foreign\\x1b[2J" in record.message]


@pytest.fixture
def store_many(client, queue, rest):
    """Store many schedules that are due a minute after six."""

    def make(count):
        row = rest()
        text = row["revision"].encode() + b" \n" + row["value"]
        for some in chunked([f"s{number}" for number in range(count)], 5000):
            client.hset(queue.keys.plans, mapping=dict.fromkeys(some, text))
            client.zadd(queue.keys.plans_due, dict.fromkeys(some, SIX + 60))

    return make


#: Publishes due schedules, as a worker does.
PROCESS = f"""
import sys
from reliq.keys import Keys
from reliq.redis.client import Client
from reliq.redis.server import Connection
from reliq.worker.planner import Planner
client = Client(Connection.to(sys.argv[1]).wire({REPLY_SECONDS}), [], lambda: {SIX + 61} * 10**6)
planner = Planner(client, [Keys("q")])
while planner.step() == 0: pass
"""


def test_processes_publish_each_tick_once_when_one_is_killed(store_many, ids, client, queue, url):
    store_many(5000)
    fleet = [subprocess.Popen([sys.executable, "-c", PROCESS, url]) for _ in range(3)]
    eventually(lambda: client.llen(queue.keys.ready) > 500, "ticks are published")
    fleet[0].kill()
    assert [one.wait(60) for one in fleet][1:] == [0, 0]
    assert sorted(ids()) == sorted(f"plan.s{number}.{SIX + 60}" for number in range(5000))
    assert set(due_of(client, queue).values()) == {SIX + 120}
    assert queue.counts().totals["published"] == 5000


def test_an_idle_check_costs_the_same_with_many_schedules(store_many, planner, client):
    ran = []
    for count in (10, 100_000):
        store_many(count)
        one = planner()
        one.step()  # loads the script
        client.config_resetstat()
        wait = one.step()
        stats = client.info("commandstats")
        ran.append({name: row["calls"] for name, row in stats.items() if not name.startswith("cmdstat_config")})
        assert wait == 1
    assert ran[0] == ran[1]
    assert ran[0]["cmdstat_evalsha"] == 1


def test_at_maxmemory_a_schedule_is_refused_and_ticks_wait(write, planner, ids, queue, client):
    write()
    one = planner()
    client.config_set("maxmemory", 1)
    try:
        with pytest.raises(RedisRefusedError):
            queue.schedule("two", every=60, body={})
        one.at(SIX + 61)
    finally:
        client.config_set("maxmemory", 0)
    assert (ids(), due_of(client, queue)) == ([], {"one": SIX + 60})
    planner().at(SIX + 62)
    assert ids() == [f"plan.one.{SIX + 60}"]


def test_keys_and_priorities_are_those_of_the_messages(write, planner, queue, client):
    write("key", key="tenant-7")
    write("high", priority="high")
    planner().at(SIX + 60)
    assert client.hget(queue.keys.retries_left, f"plan.high.{SIX + 60}") == b"12 \1high"
    assert client.lrange(queue.keys.line("tenant-7"), 0, -1) == [b"plan.key.%d" % (SIX + 60)]
    with queue.receive(limit=2) as jobs:
        assert {(job.id.split(".")[1], job.key) for job in jobs} == {("key", "tenant-7"), ("high", None)}
    assert queue.counts().missing == 0


def test_a_queue_lists_pauses_and_resumes_its_schedules(queue):
    for number in range(205):
        queue.schedule(f"tenant-{number:03}", cron="0 6 * * *", tz="Europe/Berlin", body={"n": number})
    queue.schedule("other", every=60, body={})
    assert queue.pause_schedule("tenant-007", reason="late payment")
    assert not queue.pause_schedule("tenant-007")
    assert not queue.pause_schedule("unknown")
    found = queue.schedules("tenant-")
    assert [one.name for one in found] == [f"tenant-{number:03}" for number in range(205)]
    assert len(queue.schedules(limit=3)) == 3
    paused = found[7]
    assert (paused.next, paused.pause.reason, paused.tz) == (None, "late payment", "Europe/Berlin")
    assert found[8].next == Schedule.cron("0 6 * * *", "Europe/Berlin").next_after(found[8].next - 1)
    assert queue.resume_schedule("tenant-007")
    assert not queue.resume_schedule("tenant-007")
    assert queue.schedules("tenant-007")[0].next == found[8].next
    assert queue.unschedule("other")
    assert queue.schedules("[t]enant") == queue.schedules("other") == []


@pytest.mark.anyio
async def test_the_async_forms_do_the_same(queue):
    await queue.aschedule("one", every=60, body={})
    assert [one.schedule for one in await queue.aschedules()] == ["every 60"]
    assert await queue.apause_schedule("one")
    assert await queue.aresume_schedule("one")
    assert await queue.aunschedule("one")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"name": "a b"}, "name must be 1 to 100"),
        ({"cron": "0 6 * *", "every": None}, "five fields"),
        ({"every": None}, "give cron="),
        ({"cron": "0 6 * * *"}, "give cron="),
        ({"every": 0.5}, "whole seconds"),
        ({"every": None, "cron": "0 6 * * *", "tz": "Mars"}, "time zone"),
        ({"tz": "Europe/Berlin"}, "tz is for cron only"),
        ({"catch_up": "none"}, "catch_up must be"),
        ({"body": {"a": "x" * 70_000}}, "65536 bytes"),
        ({"key": "a", "priority": "high"}, "key or priority"),
    ],
)
def test_an_invalid_schedule_is_refused_and_nothing_is_sent(options, text, queue, client):
    with pytest.raises(ConfigurationError, match=text):
        queue.schedule(**{"name": "one", "every": 60, "body": {}} | options)
    with pytest.raises(ConfigurationError, match="the layout hdt3213 has no stored schedules"):
        Queue("q", layout=Layout.hdt3213(), url=queue.target).schedule("one", every=60, body={})
    assert client.keys("*") == []
