"""Times of periodic jobs: cron expressions across clock changes, equal intervals, and invalid schedules."""

import sys
from datetime import UTC, datetime, timedelta
from itertools import islice
from zoneinfo import ZoneInfo

import pytest

from reliq.errors import ConfigurationError
from reliq.schedule import Schedule
from reliq.text import LAST_SECOND

NOON = int(datetime(2026, 5, 1, 12, tzinfo=UTC).timestamp())
#: Days with clock changes, each from noon of the day before: by an hour; on Lord Howe by half an hour, in Cairo at
#: midnight. For each expression the ticks from then on.
SPRING = {
    ("Europe/Berlin", "2026-03-28T12:00", "30 2 * * *"): "03-29T03:00+02:00 03-30T02:30+02:00 03-31T02:30+02:00",
    ("Europe/Berlin", "2026-03-28T12:00", "0,30 2 * * *"): "03-29T03:00+02:00 03-30T02:00+02:00 03-30T02:30+02:00",
    ("Europe/Berlin", "2026-03-28T12:00", "*/30 1-3 * * *"): (
        "03-29T01:00+01:00 03-29T01:30+01:00 03-29T03:00+02:00 03-29T03:30+02:00 03-30T01:00+02:00"
    ),
    ("America/New_York", "2026-03-08T00:30", "0 * * * *"): "03-08T01:00-05:00 03-08T03:00-04:00 03-08T04:00-04:00",
    ("Australia/Lord_Howe", "2026-10-03T12:00", "15 2 * * *"): "10-04T02:30+11:00 10-05T02:15+11:00",
    ("Australia/Lord_Howe", "2026-10-04T01:15", "*/30 * * * *"): "10-04T01:30+10:30 10-04T02:30+11:00",
    ("Africa/Cairo", "2026-04-23T12:00", "0 0 * * *"): "04-24T01:00+03:00 04-25T00:00+03:00",
}
FALL = {
    ("Europe/Berlin", "2026-10-24T12:00", "30 2 * * *"): "10-25T02:30+02:00 10-26T02:30+01:00",
    ("Europe/Berlin", "2026-10-24T12:00", "0 3 * * *"): "10-25T03:00+01:00 10-26T03:00+01:00",
    ("Europe/Berlin", "2026-10-25T01:15", "*/30 * * * *"): (
        "10-25T01:30+02:00 10-25T02:00+02:00 10-25T02:30+02:00 10-25T02:00+01:00 10-25T02:30+01:00 10-25T03:00+01:00"
    ),
    ("America/New_York", "2026-11-01T00:30", "0 * * * *"): "11-01T01:00-04:00 11-01T01:00-05:00 11-01T02:00-05:00",
    ("Australia/Lord_Howe", "2026-04-04T12:00", "45 1 * * *"): "04-05T01:45+11:00 04-06T01:45+10:30",
    ("Australia/Lord_Howe", "2026-04-05T01:15", "*/15 1 * * *"): (
        "04-05T01:30+11:00 04-05T01:45+11:00 04-05T01:30+10:30 04-05T01:45+10:30 04-06T01:00+10:30"
    ),
    ("Africa/Cairo", "2026-10-29T12:00", "30 23 * * *"): "10-29T23:30+03:00 10-30T23:30+02:00",
    ("Africa/Cairo", "2026-10-29T22:30", "0 * * * *"): "10-29T23:00+03:00 10-29T23:00+02:00 10-30T00:00+02:00",
}


@pytest.mark.parametrize(
    ("zone", "begin", "expression", "wanted"),
    [pytest.param(*key, ticks, id=" ".join(key)) for key, ticks in (SPRING | FALL).items()],
)
def test_ticks_where_a_clock_changes_are_those_of_the_table(zone, begin, expression, wanted):
    schedule = Schedule.cron(expression, zone)
    after = int(datetime.fromisoformat(begin).replace(tzinfo=ZoneInfo(zone)).timestamp())
    ticks = [*islice(_after(schedule, after), len(wanted.split()))]

    assert " ".join(schedule.moment(tick).isoformat(timespec="minutes")[5:] for tick in ticks) == wanted
    assert [schedule.next_after(tick - 1) for tick in ticks] == ticks  # from any start


def _after(schedule, unix):
    while (unix := schedule.next_after(unix)) is not None:
        yield unix


def test_ticks_are_those_after_the_last_until_now():
    hourly = Schedule.cron("0 * * * *")

    assert hourly.ticks(NOON, NOON + 7200, most=100) == [NOON + 3600, NOON + 7200]
    assert hourly.ticks(NOON, NOON + 3599, most=100) == []
    assert len(hourly.ticks(0, NOON, most=7)) == 7


@pytest.mark.parametrize("interval", [90, 90.0, timedelta(minutes=1.5)], ids=["int", "float", "timedelta"])
def test_intervals_count_from_1970(interval):
    schedule = Schedule.every(interval)

    assert schedule.ticks(89, 271, most=100) == [90, 180, 270]
    assert schedule.next_after(90) == 180
    assert schedule.moment(90) == datetime(1970, 1, 1, 0, 1, 30, tzinfo=UTC)


def test_schedule_is_parsed_from_its_own_text():
    for schedule in (Schedule.every(5), Schedule.cron(" 0  6 * * MON-FRI ", "Africa/Cairo")):
        assert Schedule.parse(str(schedule)) == schedule


def test_bad_schedule_is_refused_with_the_reason():
    for text in ("", "every", "every x", "every 0", "0 6 * * *", "0 6 * * * Nowhere", "x " * 400):
        with pytest.raises(ConfigurationError):
            Schedule.parse(text)
    for expression, complaint in {
        "": "must have five fields, such as '0 6 \\* \\* \\*' for each day at six, not ''",
        "0 6 * *": "must have five fields",
        5: "for each day at six, not 5$",
        "61 * * * *": "the cron expression '61 \\* \\* \\* \\*' is not valid: bad minute",
        "*/70 * * * *": "must have steps of at most 60 in field 1, not '\\*/70 ",
        "0 6 */32 * *": "at most 31 in field 3",
        "0 6 * * FUN": "is not valid: bad day-of-week",
        "0 0 30 2 *": "is not valid: bad day-of-month",
    }.items():
        with pytest.raises(ConfigurationError, match=complaint):
            Schedule.cron(expression)
    for zone in ("", "Europe", "../etc/passwd", "Nowhere/City", "x\0y", None, 5):
        with pytest.raises(
            ConfigurationError, match="tz must be the name of a time zone, such as 'Europe/Berlin', not"
        ):
            Schedule.cron("0 6 * * *", zone)
    for interval in (0, 1.5, "5", None, True, float("nan"), timedelta(days=4000)):
        with pytest.raises(ConfigurationError, match="interval must be"):
            Schedule.every(interval)


def test_machine_without_time_zones_is_pointed_to_tzdata(monkeypatch):
    monkeypatch.setattr("zoneinfo._tzpath.TZPATH", ())
    monkeypatch.setattr("zoneinfo.TZPATH", ())
    for name in {"tzdata", *(one for one in sys.modules if one.startswith("tzdata."))}:
        monkeypatch.setitem(sys.modules, name, None)  # it may be installed
    ZoneInfo.clear_cache()

    with pytest.raises(ConfigurationError, match="this machine has no time zones: install the package tzdata"):
        Schedule.cron("0 6 * * *", "Europe/Berlin")
    assert Schedule.cron("0 6 * * *", "UTC").next_after(NOON) == NOON + 18 * 3600


def test_schedule_ends_with_the_last_date_of_python():
    assert Schedule.every(5).next_after(LAST_SECOND) is None
    assert Schedule.cron("0 6 * * *").next_after(10**30) is None
