"""Log lines: JSON for machines, colours for people, no flood, and nothing that is nobody's business."""

import json
import logging
from datetime import datetime

import pytest
from waiting import eventually

from reliq import events
from reliq.error_text import placed
from reliq.logs.limiter import SAME_LINES, SAME_SECONDS, Limiter
from reliq.logs.observer import LogObserver
from reliq.logs.setup import JsonFormatter, TextFormatter

SECRET = "the body's secret"


@pytest.fixture
def lines(caplog):
    """Log events and return the records."""
    caplog.set_level(logging.DEBUG, "reliq")

    def log(*happened):
        caplog.clear()
        for event in happened:
            LogObserver()(event)
        return list(caplog.records)

    return log


@pytest.mark.parametrize(
    ("event", "level"),
    [
        (events.Handled("q", "m", 1, "ack", 0.1), logging.DEBUG),
        (events.Handled("q", "m", 1, "snooze", 0.1), logging.DEBUG),
        (events.Handled("q", "m", 2, "nack", 0.1, "ValueError"), logging.INFO),
        (events.Handled("q", "m", 2, "timeout", 0.1), logging.INFO),
        (events.Collected("q", ("m",)), logging.WARNING),
        (events.Expired("q", ("m",)), logging.WARNING),
        (events.Lost("q", ("m",), "ack"), logging.WARNING),
        (events.Reclaimed("q", ("m",), (), ()), logging.WARNING),
        (events.Inconsistent("q", ("m",)), logging.WARNING),
        (events.RenewalLate("q", 2.0), logging.WARNING),
        (events.WentBack("q", 7, 2), logging.WARNING),
        (events.Ticked("q", "daily", 1_800_000_000, "overlap", 0), logging.WARNING),
        (events.Ticked("q", "daily", 1_800_000_000, "published", 3), logging.WARNING),
        (events.Superseded("q", "daily"), logging.WARNING),
        (events.RedisAway("", "fetcher", "refused"), logging.WARNING),
    ],
    ids=lambda one: type(one).__name__ if isinstance(one, events.Event) else "",
)
def test_an_event_that_matters_is_one_line_at_its_level(lines, event, level):
    assert [record.levelno for record in lines(event)] == [level]


@pytest.mark.parametrize("event", [events.Published("q", ("m",)), events.Promoted("q", 1), events.Claimed("q", ("m",))])
def test_the_ordinary_way_is_not_logged(lines, event):
    assert lines(event) == []


def test_a_json_line_has_queue_id_attempt_and_duration(lines):
    (record,) = lines(events.Handled("q", "m", 2, "nack", 0.25, f"ValueError: {SECRET}", "ValueError at jobs.py:31"))

    row = json.loads(JsonFormatter().format(record))

    assert row["time"].endswith("Z")
    assert row["message"] == "q m attempt 2 answered nack after 0.250 s: ValueError at jobs.py:31"
    expected = {"level": "info", "logger": "reliq", "event": "handled", "queue": "q", "id": "m", "attempt": 2}
    expected |= {"seconds": 0.25, "outcome": "nack", "error": "ValueError at jobs.py:31", "error_type": "ValueError"}
    assert {name: row[name] for name in expected} == expected
    assert SECRET not in str(row)


def test_what_an_exception_says_is_written_for_who_asks_for_it(caplog):
    caplog.set_level(logging.DEBUG, "reliq")

    LogObserver(error_text=True)(
        events.Handled("q", "m", 2, "nack", 0.25, "ValueError: no", "ValueError at jobs.py:31")
    )

    assert caplog.records[0].getMessage().endswith("answered nack after 0.250 s: ValueError: no")


def test_the_place_of_an_exception_is_that_of_the_handler():
    def handler():
        int("x")

    with pytest.raises(ValueError, match="invalid literal") as caught:
        handler()

    line = handler.__code__.co_firstlineno + 1
    assert placed(caught.value).startswith("ValueError at test_logs.py:")
    assert (
        placed(caught.value.with_traceback(caught.value.__traceback__.tb_next)) == f"ValueError at test_logs.py:{line}"
    )
    assert placed(ValueError(SECRET)) == "ValueError"


def test_what_a_foreign_id_or_an_error_holds_breaks_no_line(lines):
    (record,) = lines(events.Handled("q", "m\n\x1b[2J", 1, "nack", 0.1, "ValueError: a\nb"))

    assert record.getMessage().isprintable()
    assert "ValueError: a\\nb" in record.getMessage()


def test_what_reliq_writes_obeys_no_terminal_and_what_an_application_writes_is_its_own():
    formatter = TextFormatter(colours=False)
    ours, theirs = (
        formatter.format(logging.makeLogRecord({"name": name, "msg": "stacks:\nq \x1b[2J\x9b31m\u202e\r"}))
        for name in ("reliq.process.main", "shop")
    )

    assert [line.isprintable() for line in ours.split("\n")] == [True, True]
    assert r"q \x1b[2J\x9b31m\u202e\r" in ours
    assert "\x1b[2J" in theirs


def test_a_line_names_a_few_ids_and_says_how_many_there_are(lines):
    (record,) = lines(events.Collected("q", tuple(f"m{number}" for number in range(500))))

    row = json.loads(JsonFormatter().format(record))

    assert row["ids"] == ["m0", "m1", "m2", "m3", "m4"]
    assert row["count"] == 500
    assert "and 495 more" in row["message"]


def test_a_trace_is_a_field_of_its_line():
    try:
        raise ValueError("x")
    except ValueError:
        record = logging.getLogger("other").makeRecord(
            "other", 40, "f", 1, "it broke", (), __import__("sys").exc_info()
        )

    text = JsonFormatter().format(record)

    assert "\n" not in text
    assert "ValueError: x" in json.loads(text)["trace"]


def json_of(**extra):
    return JsonFormatter().format(
        logging.makeLogRecord({"msg": "it broke", "levelno": 20, "levelname": "INFO", **extra})
    )


def test_a_json_line_has_what_the_application_gave_as_extra_and_our_own_fields_win():
    row = json.loads(json_of(tenant="acme", price=7.5, level="mine", when={1, 2}))

    assert (row["tenant"], row["price"], row["level"], row["when"]) == ("acme", 7.5, "info", "{1, 2}")


@pytest.mark.parametrize("make", ["Unspeakable", "endless"])
def test_an_extra_that_json_cannot_hold_costs_the_extra_and_not_the_line(make):
    row = json.loads(json_of(tenant=globals()[make]()))

    assert (row["message"], row["extra_left_out"]) == ("it broke", ["tenant"])


class Unspeakable:
    def __str__(self):
        raise RuntimeError("no")


def endless():
    loop = []
    loop.append(loop)
    return loop


def test_a_text_line_has_its_logger_and_its_time_with_the_offset_from_utc(lines):
    (record,) = lines(events.Expired("q", ("m",)))

    moment, process, level, name, _ = TextFormatter(colours=False).format(at(record, 0.0)).split(" ", 4)

    assert datetime.fromisoformat(moment).timestamp() == 0.0
    assert (process, level, name) == (str(record.process), "WARNING", "reliq")


def test_colours_are_for_terminals(lines):
    (record,) = lines(events.Expired("q", ("m",)))

    assert TextFormatter(colours=True).format(record).startswith("\x1b[33m")
    assert "\x1b" not in TextFormatter(colours=False).format(record)


def at(record, seconds):
    record.created = seconds
    return record


def test_lines_that_say_the_same_are_held_back_and_told_with_their_ids_by_the_next_line(lines, caplog):
    limiter = Limiter()
    failures = [events.Handled("q", f"m{number}", 1, "nack", 0.1, "ValueError: no") for number in range(30)]

    written = [record for record in lines(*failures) if limiter.filter(at(record, 1000.0))]
    (later,) = lines(failures[0])

    assert len(written) == SAME_LINES
    assert limiter.filter(at(later, 1000.0 + SAME_SECONDS))
    told = caplog.records[-1]
    assert told.getMessage().startswith(
        "held back 20 lines like: q m10 attempt 1 answered nack after 0.100 s: ValueError: no; ids: m10, "
    )
    assert told.getMessage().endswith(", m14 and 15 more")
    assert told.reliq["ids"] == [f"m{number}" for number in range(10, 30)]


def test_what_was_held_back_is_told_when_no_further_line_comes(lines, caplog, monkeypatch):
    monkeypatch.setattr("reliq.logs.limiter.SAME_SECONDS", 0.01)
    limiter = Limiter()

    written = [limiter.filter(record) for record in lines(*[events.Lost("q", ("m",), "ack")] * (SAME_LINES + 2))]

    eventually(lambda: any("held back" in one.getMessage() for one in caplog.records), "the end of the window tells")
    assert sum(one.reliq["count"] for one in caplog.records if "held back" in one.getMessage()) == written.count(False)


def test_redis_away_is_said_once_for_all_parts_and_redis_back_once(caplog):
    caplog.set_level(logging.DEBUG, "reliq")
    observer = LogObserver()
    for event in (
        *[events.RedisAway("", "fetcher", "refused")] * 3,
        *[events.RedisAway("", "janitor", "refused")] * 3,
        events.RedisBack("", "start"),
        events.RedisBack("", "janitor"),
        events.RedisBack("", "fetcher"),
        events.RedisBack("", "fetcher"),
    ):
        observer(event)

    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert said[0] == "Redis is away, trying again until it is back (refused)"
    assert said[1].startswith("Redis is back after ")


def test_a_server_of_one_queue_that_is_away_is_said_once_for_this_queue(caplog):
    caplog.set_level(logging.DEBUG, "reliq")
    observer = LogObserver()
    for event in (
        *[events.RedisAway("orders", part, "gone") for part in ("fetcher", "settler", "fetcher")],
        events.RedisAway("mails", "fetcher", "gone"),
        events.RedisBack("orders", "fetcher"),
        events.RedisBack("orders", "settler"),
    ):
        observer(event)

    said = [record.getMessage() for record in caplog.records]
    assert said[:2] == [
        f"{name}: its server is away, others go on, trying again until it is back (gone)"
        for name in ("orders", "mails")
    ]
    assert [line.startswith("orders: its server is back after ") for line in said[2:]] == [True]


def test_lines_that_say_something_else_and_those_for_debugging_are_not(lines):
    limiter = Limiter()
    others = [events.Handled(f"q{number}", "m", 1, "nack", 0.1, "ValueError") for number in range(50)]
    acks = [events.Handled("q", f"m{number}", 1, "ack", 0.1) for number in range(50)]

    assert all(limiter.filter(at(record, 1000.0)) for record in lines(*others, *acks))


def test_a_worker_writes_json_without_bodies_or_passwords(command, jobs, environment, url):
    environment["RELIQ_URL"] = url.replace("redis://", "redis://default:hunter2@")
    jobs.SHOP.publish_many(["poison", "flaky", SECRET])

    running = command(
        "worker",
        "monitored:consumer",
        "--burst=delayed",
        "--log-format",
        "json",
        "--log-level",
        "debug",
        "--queue",
        "shop",
    )
    running.wait()
    assert any('"dead"' in line for line in running.lines)

    rows = [json.loads(line) for line in running.lines if line.startswith("{")]
    handled = {row["outcome"]: row for row in rows if row.get("event") == "handled"}
    assert handled["ack"]["level"] == "debug"
    assert handled["reject"]["queue"] == "shop"
    assert handled["nack"]["error"].startswith("ValueError at monitored.py:")
    assert "not today" not in "".join(running.lines)
    assert "hunter2" not in "".join(running.lines)
    assert SECRET not in "".join(running.lines)
