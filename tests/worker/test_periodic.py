"""Periodic jobs: valid registrations, published runs, and the cost of each check."""

from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest
from transition import PATIENT_SECONDS
from waiting import eventually

from reliq import BodyError, ConfigurationError, Consumer, Layout, Queue
from reliq.events import RedisRefused, ScheduleReplaced, Ticked
from reliq.handlers.registration import Planned
from reliq.redis.client import Client
from reliq.redis.server import Connection
from reliq.worker.upkeep import TICKER_SECONDS, Ticker

HOUR = 3600
#: 06:00 UTC on a day in May.
SIX = int(datetime(2027, 5, 3, 6, tzinfo=UTC).timestamp())
Q = Queue("q", dict[str, str])


@dataclass
class Report:
    day: str


class Process(Ticker):
    """The ticker of one process; the test sets the time of its Redis."""

    def __init__(self, url, consumer, recorder, clock):
        client = Client(Connection.to(url).wire(PATIENT_SECONDS), [recorder], lambda: int(clock.now * 1e6))
        super().__init__(client, consumer.periodic)
        self.clock = clock

    def at(self, now):
        """Run steps at this time until nothing more is due."""
        self.clock.now = now
        while self.step() == 0:
            pass

    def step_around(self, happens, now):
        """Run one step at a time; call a function between its check and its ticks."""
        register, self.clock.now = self._register, now
        self._register = lambda: (register(), happens())[0]
        wait = self.step()
        self._register = register
        return wait


@pytest.fixture
def process(url, recorder):
    """Start the ticker of a process with the periodic jobs of a consumer."""
    clock = SimpleNamespace(now=SIX)

    def make(consumer, now=None):
        clock.now = now or clock.now
        one = Process(url, consumer, recorder, clock)
        one.step()
        return one

    return make


@pytest.fixture
def entry(make_queue):
    """A consumer with one periodic job, `e`, hourly or on the given schedule."""

    def make(expression="0 * * * *", **options):
        consumer = Consumer()
        consumer.cron(expression, queue=make_queue("q", dict), **{"body": {"a": "b"}, "name": "e"} | options)
        return consumer

    return make


@pytest.fixture
def ids(client):
    """Return the ids in ready, the oldest first."""
    return lambda: [id.decode() for id in client.lrange("{reliq:q}:ready", 0, -1)][::-1]


# ---- registration


def test_a_decorated_function_makes_the_body_of_its_ticks_and_stays_as_it_is(url, process, recorder):
    consumer, reports = Consumer(), Queue("q", Report, url=url)

    @consumer.cron("0 8 * * *", queue=reports, tz="Europe/Berlin")
    def daily_report(tick: datetime) -> Report:
        return Report(f"{tick:%d %B, %H:%M %Z}")

    process(consumer, SIX - 60).at(SIX)

    assert daily_report(datetime(2027, 5, 4, tzinfo=UTC)) == Report("04 May, 00:00 UTC")
    with reports.receive() as [job]:
        assert (job.id, job.body) == (f"cron.daily_report.{SIX}", Report("03 May, 08:00 CEST"))
        assert job.headers == {"reliq-tick": "2027-05-03T08:00:00+02:00"}
        assert datetime.fromisoformat(job.headers["reliq-tick"]).timestamp() == SIX


def test_equal_intervals_are_aligned(process, ids):
    consumer = Consumer()
    consumer.every(timedelta(minutes=5), queue=Q, body={}, name="checks", catch_up="all")

    process(consumer, SIX + 7).at(SIX + 600)

    assert ids() == [f"cron.checks.{SIX + 300}", f"cron.checks.{SIX + 600}"]


async def makes_nothing(tick): ...


def test_a_bad_entry_is_refused_when_it_is_written(entry, make_queue):
    usual = {"expression": "0 6 * * *", "queue": Q, "body": {}, "name": "e"}
    for options, complaint in (
        ({"expression": "0 6 * *"}, "five fields"),
        ({"tz": "Mars"}, "tz must be the name of a time zone, such as 'Europe/Berlin', not 'Mars'"),
        ({"name": "a b"}, "name must be 1 to 100 of A-Z a-z 0-9 _ . - , not 'a b'"),
        ({"queue": "q"}, "queue of periodic job 'e' must be a Queue, not str"),
        ({"catch_up": "some"}, "catch_up must be one of skip, latest, all, not 'some'"),
        ({"overlap": True}, "overlap must be one of allow, skip, not 'True'"),
        ({"jitter": -1}, "jitter must be 0 to 86400 seconds, not -1"),
        ({"misfire_grace_time": 59}, "misfire_grace_time must be 60 to"),
    ):
        with pytest.raises(ConfigurationError, match=complaint):
            Consumer().cron(**usual | options)
    with pytest.raises(BodyError, match="body must be dict"):
        Consumer().cron(**usual | {"body": ["no dict"]})
    for function, complaint in ((makes_nothing, "must be a plain function, not async def"), ("text", "not a str")):
        with pytest.raises(ConfigurationError, match=complaint):
            Consumer().cron("0 6 * * *", queue=Q, name="e")(function)

    consumer = entry()
    with pytest.raises(ConfigurationError, match="two periodic jobs are called 'e'; give one of them another name="):
        consumer.every(5, queue=Queue("other"), body={}, name="e")
    with pytest.raises(ConfigurationError, match="two periodic jobs are called 'e'"):
        Consumer().include(entry()).include(consumer)
    consumer.handler(make_queue("a"))(lambda body: None)
    consumer.every(5, queue=Queue("b", str, url="redis://127.0.0.1:1"), body="", name="b")
    with pytest.raises(ConfigurationError, match="name different Redis servers"):
        consumer.start()


def test_a_process_ticks_for_its_queues_and_for_those_without_a_handler(make_queue):
    other = Consumer()
    for name in "abc":
        other.every(5, queue=make_queue(name), body="", name=name)
    consumer = Consumer().include(other)
    for name in "ab":
        consumer.handler(make_queue(name))(lambda body: None)

    assert [one.name for one in consumer.ticked_beside(consumer.chosen(["a"]))] == ["a", "c"]


# ---- due ticks


POLICIES = {
    "skip": ({"catch_up": "skip"}, [(5, "missed", 5)]),
    "once": ({"catch_up": "latest"}, [(5, "published", 4)]),
    "all": ({"catch_up": "all"}, [(hour, "published", 0) for hour in range(1, 6)]),
    "all within": ({"catch_up": "all", "misfire_grace_time": 2 * HOUR}, [(4, "published", 3), (5, "published", 0)]),
    "once within": ({"catch_up": "latest", "misfire_grace_time": 600}, [(5, "missed", 5)]),
    "no overlap": ({"catch_up": "all", "overlap": "skip"}, [(hour, "overlap", 0) for hour in range(1, 6)]),
}


@pytest.mark.parametrize(("options", "missed"), POLICIES.values(), ids=POLICIES)
def test_a_tick_is_published_on_time_and_a_missed_tick_by_policy(options, missed, entry, process, recorder):
    """An hourly job, from 06:00; no process is alive from 06:30 to 11:20."""
    one = process(entry(**options), SIX - HOUR)
    for now in (SIX + 59, SIX + 5 * HOUR + 1200):
        one.at(now)

    told = [((one.at - SIX) / HOUR, one.outcome, one.missed) for one in recorder.of(Ticked)]
    assert told == [(0, "published", 0), *missed]


def test_after_a_long_absence_every_tick_is_published_or_counted(make_queue, process, recorder):
    consumer = Consumer()
    consumer.every(60, queue=make_queue("q", dict), body={}, name="e", catch_up="all", misfire_grace_time=HOUR)

    process(consumer).at(SIX + 1000 * 60)

    assert Counter(one.outcome for one in recorder.of(Ticked)) == {"missed": 9, "published": 61}
    assert sum(one.missed for one in recorder.of(Ticked)) == 939


def test_a_tick_is_published_once_however_many_processes_look(entry, process, ids):
    consumer = entry(catch_up="all")
    processes = [process(consumer) for _ in range(5)]
    for now in (SIX + HOUR, SIX + 2 * HOUR, SIX + 5 * HOUR):
        for one in processes:
            one.at(now)

    assert ids() == [f"cron.e.{SIX + hour * HOUR}" for hour in range(1, 6)]


def test_a_process_stopped_between_look_and_tick_publishes_nothing_again(entry, process, ids, url):
    late = process(entry())

    def meanwhile():
        process(entry()).at(SIX + HOUR)
        with Queue("q", url=url).receive():  # its message finishes
            pass

    late.step_around(meanwhile, SIX + HOUR)

    assert ids() == []


def test_jitter_is_the_same_in_every_process_and_within_its_limit(entry, process, client, ids):
    one = process(entry(catch_up="all", jitter=600, misfire_grace_time=timedelta(days=30)))
    one.at(SIX + 200 * HOUR)
    dues = {id.decode(): due for id, due in client.zrange("{reliq:q}:pending", 0, -1, withscores=True)}
    again = entry(jitter=600).periodic[0]

    planned = [Planned(SIX + hour * HOUR, SIX, 0, is_published=True) for hour in range(1, 201)]
    shifts = [again.tick(tick).due_ms - tick.at * 1000 for tick in planned]
    assert 0 <= min(shifts) < 60_000
    assert 540_000 < max(shifts) <= 600_000
    last = SIX + 200 * HOUR
    assert dues == {f"cron.e.{last}": last + shifts[-1] / 1000}  # the other due times have passed: they are in ready
    assert len(ids()) == 199


def test_a_tick_in_a_layout_of_go_has_a_bare_body_and_its_time_in_the_id(url, process, client):
    consumer, queue = Consumer(), Queue("q", str, url=url, layout=Layout.hdt3213())
    consumer.cron("0 * * * *", queue=queue, body=str, name="e")

    process(consumer).at(SIX + HOUR)

    assert client.get(f"dp:q:msg:cron.e.{SIX + HOUR}") == b"2027-05-03 07:00:00+00:00"
    with queue.receive() as [job]:
        assert (job.id, job.headers) == (f"cron.e.{SIX + HOUR}", {})


# ---- deploys, and a Redis without its data


def test_the_process_that_started_last_decides_in_a_deploy_and_a_rollback(entry, process, recorder, ids):
    six, eight = entry("0 6 * * *"), entry("0 8 * * *")
    old = process(six, SIX + 60)
    new = process(eight, SIX + 60)
    for hour in (24, 26):  # 06:00 and 08:00 of the next day
        for one in (new, old):
            one.at(SIX + hour * HOUR)
    assert recorder.of(ScheduleReplaced) == [ScheduleReplaced("q", "e")]

    back = process(six, SIX + 27 * HOUR)
    for hour in (48, 50):
        for one in (back, new):
            one.at(SIX + hour * HOUR)

    assert ids() == [f"cron.e.{SIX + hour * HOUR}" for hour in (2, 26, 48)]


@pytest.mark.parametrize(
    ("new", "old", "old_starts", "tick"),
    [("30 * * * *", "0 * * * *", 70, 1800), ("0 * * * *", "59 5 * * *", HOUR - 10, HOUR)],
    ids=["before a tick", "during a tick"],
)
def test_an_old_process_in_a_deploy_has_the_entry_while_it_lives(new, old, old_starts, tick, entry, process, ids):
    living = process(entry(new), SIX + 60)
    process(entry(old), SIX + old_starts)  # it is removed after its registration

    for second in [*range(old_starts + 5, old_starts + 70, 5), tick + 60]:
        living.at(SIX + second)

    assert ids() == [f"cron.e.{SIX + tick}"]


def test_an_entry_is_as_new_in_a_redis_that_has_lost_its_data(entry, process, client, ids):
    one = process(entry(catch_up="all"))
    one.at(SIX + HOUR)
    client.flushall()
    one.at(SIX + 5 * HOUR)
    one.at(SIX + 6 * HOUR)
    assert ids() == [f"cron.e.{SIX + 6 * HOUR}"]

    assert one.step_around(client.flushall, SIX + 7 * HOUR) == 0  # it checks again immediately
    one.at(SIX + 7 * HOUR + 5)
    assert ids() == []
    assert client.hget("{reliq:q}:cron", "e last") == str(SIX + 7 * HOUR + 5).encode()


def test_a_tick_whose_schedule_was_replaced_since_the_look_is_not_made_and_not_done(entry, process, recorder, ids):
    one = process(entry())
    assert one.step_around(lambda: process(entry("0 9 * * *")), SIX + HOUR) == 0  # it checks again immediately

    one.step()

    assert (ids(), recorder.of(ScheduleReplaced)) == ([], [ScheduleReplaced("q", "e")])


# ---- failures


def test_a_body_that_fails_holds_up_its_own_entry_alone_and_its_tick_waits(entry, process, ids, caplog):
    bodies = [LookupError("no rate for today"), ["no dict"]]

    def body(tick):
        made = bodies.pop(0) if bodies else {}
        if isinstance(made, Exception):
            raise made
        return made

    consumer = entry(body=body, catch_up="all")
    consumer.cron("0 * * * *", queue=Q, body={}, name="sound")
    one = process(consumer)
    for failures, hour in enumerate((1, 1, 2), 1):
        one.at(SIX + hour * HOUR)
        if failures < 3:
            assert ids() == [f"cron.sound.{SIX + HOUR}"]
            one._failures["e"] = (failures, 0.0)  # the backoff is over
    assert "the body function of periodic job 'e' failed (attempt 1); its tick waits" in caplog.text
    assert "no rate for today" in caplog.text
    assert "BodyError" in caplog.text

    assert ids()[1:] == [f"cron.e.{SIX + HOUR}", f"cron.e.{SIX + 2 * HOUR}", f"cron.sound.{SIX + 2 * HOUR}"]


def test_a_tick_waits_at_maxmemory(entry, process, client, recorder, ids):
    one = process(entry())
    client.config_set("maxmemory", 1)
    try:
        one.at(SIX + HOUR)
    finally:
        client.config_set("maxmemory", 0)
    assert [(event.queue, event.part) for event in recorder.of(RedisRefused)] == [("q", "ticker")]

    for backoff in (one._registering, one._ticking):  # the backoff is over
        backoff.until.clear()
    one.at(SIX + HOUR + 10)

    assert ids() == [f"cron.e.{SIX + HOUR}"]


def test_a_queue_with_a_spoilt_key_holds_up_no_other(entry, make_queue, process, client, recorder):
    consumer = entry()
    consumer.cron("0 * * * *", queue=make_queue("sound", dict), body={}, name="sound")
    client.set("{reliq:q}:cron", "x")

    process(consumer).at(SIX + HOUR)

    assert [event.queue for event in recorder.of(RedisRefused)][:1] == ["q"]
    assert [(event.queue, event.outcome) for event in recorder.of(Ticked)] == [("sound", "published")]


# ---- costs


def test_a_look_is_one_round_trip_however_many_entries_there_are(process, make_queue, monkeypatch):
    consumer, queues = Consumer(), [make_queue(name, dict) for name in "abc"]
    for number in range(1000):
        consumer.cron("0 * * * *", queue=queues[number % 3], body={}, name=f"e{number}")
    one = process(consumer)
    wire, trips = one._client._transport, []
    exchange = wire.exchange
    monkeypatch.setattr(wire, "exchange", lambda commands: trips.append(len(commands)) or exchange(commands))

    one.clock.now = SIX + 1
    assert 2 < one.step() <= TICKER_SECONDS
    assert len(trips) == 1

    one.clock.now = SIX + HOUR - 2
    assert one.step() <= 2  # it sleeps until the next tick
    one.clock.now = SIX + HOUR
    assert one.step() > 0
    assert trips[2:] == [trips[0], *[100] * 10]


def test_a_worker_publishes_the_ticks_of_its_entries(consumer, make_queue, start):
    queue, seen = make_queue("q", dict), []
    consumer.handler(queue)(lambda body, job: seen.append((job.id, body)))
    assert "ticker" not in start()._loops
    consumer.stop()
    body = lambda tick: {"at": int(tick.timestamp())}  # noqa: E731
    consumer.every(1, queue=queue, body=body, name="e", catch_up="all")  # after a pause of this machine, too

    start(concurrency=1)

    eventually(lambda: len(seen) >= 2, "two ticks are worked")
    first = seen[0][1]["at"]
    assert seen[:2] == [(f"cron.e.{at}", {"at": at}) for at in (first, first + 1)]
