"""A periodic job: the newest schedule is in force, each tick is published once, and the ticks continue."""

import pytest
import redis
from cutting import Snapshot, cut_after
from held_clock import HOUR_MS, NOON, micros, millis

from reliq import Layout, events
from reliq.keys import Keys
from reliq.lua import transitions as t
from reliq.wire_format import envelope_rest

SECOND, NEXT = NOON // 10**6, NOON // 10**6 + 60
ID = f"cron.daily.{NEXT}"


@pytest.fixture
def register(run, keys):
    """Register one periodic job; return its progress, or None."""

    def make(schedule="every 60", entry="daily", seconds=0, **options):
        _, [state] = run(t.register(keys, [(entry, schedule)], clock=micros(ms=1000 * seconds), **options))
        return state

    return make


@pytest.fixture
def call(keys):
    """Return the call of the tick a minute after noon, or of another tick."""

    def make(at=NEXT, since=SECOND, seconds=60, schedule="every 60", id="", **options):
        message = (id or f"cron.daily.{at}", envelope_rest(3, 1, 0) + b"body")
        one = t.Tick("daily", schedule, at, since, **{"message": message, **options})
        return t.tick(keys, one, ttl_ms=HOUR_MS, retries=3, clock=micros(ms=1000 * seconds))

    return make


@pytest.fixture
def tick(run, call):
    return lambda *args, **options: run(call(*args, **options))


@pytest.fixture
def state(client, keys):
    """Return what Redis stores about the periodic job."""
    return lambda: {
        name.removeprefix(b"daily ").decode(): value.decode("latin-1")
        for name, value in client.hgetall(keys.cron).items()
    }


# ---- which schedule is in force -------------------------------------------------


def test_an_entry_makes_up_for_nothing_when_it_is_new_and_stays_where_it_is_then(register, tick, client, keys):
    assert register(newest=True) == t.InForce(SECOND, None)
    tick()
    assert register(newest=True, seconds=3600) == t.InForce(NEXT, None)

    client.delete(keys.cron)
    assert register(seconds=90) == t.InForce(SECOND + 90, None)


def test_the_schedule_of_the_process_that_started_last_is_in_force(register, tick):
    register("every 60", newest=True)

    # A tick of the current second may still be missing; older ticks are not made up for.
    assert register("every 90", newest=True, seconds=7) == t.InForce(SECOND + 6, None)
    assert register("every 60", seconds=8) is None

    tick(since=SECOND + 6, schedule="every 90")
    assert register("every 60", newest=True, seconds=20) == t.InForce(NEXT, None)  # never back to a published tick


def test_a_schedule_whose_processes_are_silent_for_half_a_minute_gives_way(register):
    register("every 90", newest=True)
    register("every 90", seconds=20)  # its processes are alive

    assert register("every 60", seconds=50) is None
    assert register("every 60", seconds=51) == t.InForce(SECOND, None)  # its own ticks since then are missing


def test_a_former_schedule_with_running_processes_owes_its_ticks(register):
    register("every 60", newest=True)
    register("every 90", newest=True, seconds=3)
    register("every 90", seconds=30)
    assert register("every 60", seconds=45) is None  # superseded, but still registered
    assert register("every 60", newest=True, seconds=70) == t.InForce(SECOND + 2, None)  # by another process

    register("every 90", newest=True, seconds=80)
    assert register("every 60", newest=True, seconds=200) == t.InForce(SECOND + 199, None)  # a rollback owes no ticks


def test_processes_note_together_every_ten_seconds_that_they_are_there(register, state):
    register(newest=True)
    seen = [(register(seconds=second), int(state()["seen"]) - SECOND)[1] for second in (1, 10, 11, 12, 21, 22)]

    assert seen == [0, 0, 11, 11, 11, 22]


@pytest.mark.parametrize(
    "spoilt", ["x", "", "-1", "1e9", "9" * 20, "9" * 400, b"\xff"], ids=lambda text: repr(text)[:9]
)
def test_an_entry_whose_last_tick_is_spoilt_is_as_new(spoilt, register, client, keys):
    register(newest=True)
    for schedule, second in (("every 60", 5), ("every 90", 50)):
        client.hset(keys.cron, "daily last", spoilt)
        assert register(schedule, seconds=second).last >= SECOND + second - 1


def test_a_run_that_was_asked_for_is_reported_when_it_has_a_time(register, client, keys):
    register(newest=True)
    reported = {}
    for asked in ("5", "x", "-5", "9" * 18, ""):
        client.hset(keys.cron, "daily asked", asked)
        reported[asked] = register().asked

    assert reported == {"5": 5, "x": None, "-5": None, "9" * 18: None, "": None}


# ---- ticks ------------------------------------------------------------------------


def test_a_tick_is_published_once_and_the_entry_goes_on(register, tick, where, left, state, token):
    register(newest=True)

    assert [tick(), tick(), tick(seconds=7200)] == ["published", "done", "done"]

    assert (where(), left(ID), token()) == ({"ready": [ID]}, "3", True)
    ticked = {"last": str(NEXT), "ticked": str(NEXT), "id": ID}
    assert state() == {"schedule": "every 60", "seen": str(SECOND)} | ticked


def test_a_message_is_due_when_it_comes_or_later_by_its_jitter(register, tick, client, keys, due):
    register(newest=True)
    tick()
    tick(NEXT + 60, NEXT, due_ms=millis(360_000))

    assert client.get(keys.msg(ID)).startswith(b'RELIQ/1 {"d":%d,' % millis(60_000))
    assert due(keys.pending, f"cron.daily.{NEXT + 60}") == millis(360_000)
    assert client.pttl(keys.msg(f"cron.daily.{NEXT + 60}")) > HOUR_MS


@pytest.mark.parametrize("end", ["cancel", "purge", "ack"])
def test_a_tick_is_not_published_again_when_its_message_has_ended(end, register, tick, run, keys, claim):
    register(newest=True)
    tick()
    calls = {
        "cancel": lambda: t.cancel(keys, [ID]),
        "purge": lambda: t.purge(keys, [ID], state="ready", free_ids=True),
        "ack": lambda: t.ack(keys, [(one, None) for one in claim()]),
    }
    run(calls[end]())

    assert (tick(), claim()) == ("done", [])


def test_a_tick_from_another_tick_schedule_or_entry_changes_nothing(register, tick, dump):
    assert (tick(), dump()) == ("unknown", {})
    register(newest=True)
    before = dump()

    assert [tick(since=since, missed=3) for since in (SECOND - 60, SECOND + 60)] == ["done", "done"]
    assert tick(schedule="every 90") == "superseded"
    assert dump() == before


def test_a_tick_in_a_pause_is_skipped_and_counted(register, tick, client, keys, state, where):
    register(newest=True)
    client.hset(keys.cron, "daily pause", "{}")

    answers = [tick(), tick(NEXT + 120, NEXT, missed=1), tick(NEXT + 240, NEXT + 120, missed=2, message=None)]
    assert answers == ["paused"] * 3
    client.hdel(keys.cron, "daily pause")
    assert tick(NEXT + 300, NEXT + 240) == "published"

    assert where() == {"ready": [f"cron.daily.{NEXT + 300}"]}
    assert (state()["paused"], state()["last"]) == ("5", str(NEXT + 300))
    assert not {"overlap", "missed"} & state().keys()


def test_with_overlap_skip_a_tick_is_skipped_while_the_last_message_is_alive(register, tick, run, keys, state, claim):
    register(newest=True)

    assert [tick(overlap="skip"), tick(NEXT + 60, NEXT, overlap="skip")] == ["published", "overlap"]
    run(t.ack(keys, [(one, None) for one in claim()]))
    assert tick(NEXT + 120, NEXT + 60, overlap="skip") == "published"

    assert state()["overlap"] == "1"


def test_ticks_that_were_missed_are_counted_with_the_next(register, tick, state, where):
    register(newest=True)

    assert tick(NEXT + 180, SECOND, missed=3) == "published"
    assert tick(NEXT + 240, NEXT + 180, missed=1, message=None) == "missed"

    assert (state()["missed"], state()["last"]) == ("4", str(NEXT + 240))
    assert where() == {"ready": [f"cron.daily.{NEXT + 180}"]}


@pytest.mark.parametrize("spoilt", ["x", "", "1e400", b"\xff"], ids=repr)
def test_a_count_that_is_spoilt_begins_anew_and_stops_no_tick(spoilt, register, tick, client, keys, state):
    register(newest=True)
    client.hset(keys.cron, mapping={"daily missed": spoilt, "daily overlap": spoilt, "daily id": spoilt})

    assert tick(missed=2) == "published"
    assert state()["last"] == str(NEXT)


def test_a_run_that_was_asked_for_is_published_once_and_is_no_tick(register, tick, client, keys, state, where):
    register(newest=True)
    client.hset(keys.cron, mapping={"daily asked": "7", "daily pause": "{}"})

    asked = {"asked": 7, "id": "cron.daily.run.7", "overlap": "skip"}
    assert [tick(**asked), tick(**asked)] == ["published", "done"]

    assert where() == {"ready": ["cron.daily.run.7"]}
    assert (state()["last"], state()["id"]) == (str(SECOND), "cron.daily.run.7")
    assert not {"asked", "ticked", "paused"} & state().keys()


def test_a_tick_whose_message_is_in_garbage_is_not_published_again(register, tick, claim, nack, client, keys, where):
    register(newest=True)
    tick()
    nack(*claim(), value=b"last")
    client.hset(keys.cron, "daily last", SECOND)  # as after a cut-off script

    assert (tick(), where()) == ("published", {"garbage": [ID]})


# ---- faults -----------------------------------------------------------------------


@pytest.mark.foreign_hands
def test_wherever_a_tick_is_cut_off_it_is_published_and_then_the_entry_goes_on(
    register, call, tick, client, keys, state, where, left
):
    register(newest=True)
    fresh, writes = Snapshot(client), 0
    while cut_after(client, call(), writes):
        is_there = where().get("ready") and client.get(keys.msg(ID))
        assert state()["last"] == str(SECOND) or is_there
        if state()["last"] == str(SECOND):
            is_counted = bool(left(ID))  # a counted id is not counted again
            assert (tick(), len(where()["ready"]) == 1 or not is_counted) == ("published", True)
        writes += 1
        fresh.put_back()

    assert writes >= 5
    assert where() == {"ready": [ID]}


@pytest.mark.parametrize("overlap", ["allow", "skip"])
def test_at_maxmemory_a_tick_is_neither_lost_nor_skipped(overlap, register, tick, client, where, dump):
    register(newest=True)
    before = dump()
    client.config_set("maxmemory", 1)
    try:
        for options in ({"overlap": overlap}, {"message": None}):
            with pytest.raises(redis.ResponseError, match="maxmemory"):
                tick(missed=1, **options)
    finally:
        client.config_set("maxmemory", 0)

    assert dump() == before
    assert (tick(), where()) == ("published", {"ready": [ID]})


def test_observers_hear_of_ticks_that_were_published_or_skipped(call):
    reported = {answer: [*call(missed=2).events(answer)] for answer in ("published", "overlap", "done", "superseded")}

    assert reported == {
        "published": [events.Published("q", (ID,)), events.Ticked("q", "daily", NEXT, "published", 2)],
        "overlap": [events.Ticked("q", "daily", NEXT, "overlap", 2)],
        "done": [],
        "superseded": [],
    }


def test_a_bare_body_is_written_as_it_is(run, client):
    keys = Keys("q", Layout.hdt3213())
    run(t.register(keys, [("daily", "every 60")], newest=True, clock=NOON))
    one = t.Tick("daily", "every 60", NEXT, SECOND, message=(ID, b"body"))

    assert run(t.tick(keys, one, ttl_ms=HOUR_MS, retries=3, clock=micros(ms=60_000))) == "published"
    assert client.get(keys.msg(ID)) == b"body"
