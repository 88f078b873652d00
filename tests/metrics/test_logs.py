"""Log lines: levels, JSON and text formats, a limit for repeated lines, no bodies or passwords."""

import json
import logging
from datetime import datetime

import pytest
from waiting import eventually

from reliq import events
from reliq.logs import SAME_LINES, SAME_SECONDS, JsonFormatter, Limiter, LogObserver, TextFormatter
from reliq.wire_format import placed

SECRET = "the body's secret"


@pytest.fixture
def lines(caplog):
    """Log events and return the records."""
    caplog.set_level(logging.DEBUG, "reliq")

    def log(*happened):
        caplog.clear()
        observer = LogObserver()
        for event in happened:
            observer(event)
        return list(caplog.records)

    return log


def test_events_are_logged_at_their_levels_or_not_at_all(lines):
    levels = {
        events.Handled("q", "m", 1, "ack", 0.1): "DEBUG",
        events.Handled("q", "m", 1, "snooze", 0.1): "DEBUG",
        events.Handled("q", "m", 2, "nack", 0.1, "ValueError"): "INFO",
        events.Handled("q", "m", 2, "timeout", 0.1): "INFO",
        events.DeadLettered("q", ("m",)): "WARNING",
        events.Expired("q", ("m",)): "WARNING",
        events.LeaseLost("q", ("m",), "ack"): "WARNING",
        events.Reclaimed("q", ("m",), (), ()): "WARNING",
        events.Inconsistent("q", ("m",)): "WARNING",
        events.RenewalLate("q", 2.0): "WARNING",
        events.CountersRegressed("q", 7, 2): "WARNING",
        events.Ticked("q", "daily", 1_800_000_000, "overlap", 0): "WARNING",
        events.Ticked("q", "daily", 1_800_000_000, "published", 3): "WARNING",
        events.ScheduleReplaced("q", "daily"): "WARNING",
        events.RedisUnavailable("", "fetcher", "refused"): "WARNING",
        events.Published("q", ("m",)): "",
        events.Promoted("q", 1): "",
        events.Claimed("q", ("m",)): "",
    }

    assert {event: " ".join(record.levelname for record in lines(event)) for event in levels} == levels


def test_lines_are_written_although_the_application_has_disabled_all_loggers(lines, monkeypatch):
    monkeypatch.setattr(logging.getLogger("reliq"), "disabled", True)

    assert lines(events.Handled("q", "m", 2, "nack", 0.1, "ValueError"))


def test_dead_letter_line_names_the_command_that_lists_them(lines):
    (record,) = lines(events.DeadLettered("orders", ("m",)))

    assert "`reliq list orders --state dead`" in record.getMessage()


def test_json_line_has_queue_id_attempt_and_duration_and_error_text_on_request(lines, caplog):
    (record,) = lines(events.Handled("q", "m", 2, "nack", 0.25, f"ValueError: {SECRET}", "ValueError at jobs.py:31"))

    row = json.loads(JsonFormatter().format(record))

    assert row["time"].endswith("Z")
    assert (
        row["message"]
        == "queue q: message m: attempt 2 ended with nack after 0.250 s, retrying: ValueError at jobs.py:31"
    )
    expected = {"level": "info", "logger": "reliq", "event": "handled", "queue": "q", "id": "m", "attempt": 2}
    expected |= {"seconds": 0.25, "outcome": "nack", "error": "ValueError at jobs.py:31", "error_type": "ValueError"}
    assert row.items() >= expected.items()
    assert SECRET not in str(row)
    LogObserver(error_text=True)(events.Handled("q", "m", 2, "nack", 0.25, "ValueError: no", "ValueError at x.py:1"))
    assert caplog.records[-1].getMessage().endswith(": ValueError: no")


def test_place_of_an_exception_is_a_line_of_the_handler():
    def handler():
        int("x")

    with pytest.raises(ValueError, match="invalid literal") as caught:
        handler()

    in_handler = caught.value.with_traceback(caught.value.__traceback__.tb_next)
    assert placed(in_handler) == f"ValueError at test_logs.py:{handler.__code__.co_firstlineno + 1}"
    assert placed(ValueError(SECRET)) == "ValueError"


def test_foreign_ids_and_errors_are_escaped_in_a_line(lines):
    (record,) = lines(events.Handled("q", "m\n\x1b[2J", 1, "nack", 0.1, "", "ValueError at a\nb"))

    assert record.getMessage().isprintable()
    assert "ValueError at a\\nb" in record.getMessage()


def test_control_characters_are_escaped_in_lines_of_reliq_only():
    said = {"msg": "stacks:\nq \x1b[2J\x9b31m\u202e\r"}
    records = [logging.makeLogRecord(said | {"name": name}) for name in ("reliq.supervisor.main", "shop")]
    ours, theirs = map(TextFormatter(colours=False).format, records)

    assert [line.isprintable() for line in ours.split("\n")] == [True, True]
    assert r"q \x1b[2J\x9b31m\u202e\r" in ours
    assert "\x1b[2J" in theirs


class Unspeakable:
    def __str__(self):
        raise RuntimeError("no")


def json_of(**extra):
    said = {"msg": "it broke", "levelno": 20, "levelname": "INFO"}
    return JsonFormatter().format(logging.makeLogRecord(said | extra))


def test_json_line_has_extras_and_the_traceback_and_its_own_fields_win():
    failed = (ValueError, ValueError("x"), None)
    text = json_of(tenant="acme", price=7.5, level="mine", when={1, 2}, exc_info=failed)

    assert json.loads(text).items() >= {"tenant": "acme", "price": 7.5, "level": "info", "when": "{1, 2}"}.items()
    assert json.loads(text)["trace"] == "ValueError: x"


def test_extra_that_is_no_json_is_left_out_of_its_line():
    endless = []
    endless.append(endless)
    row = json.loads(json_of(unspeakable=Unspeakable(), endless=endless))

    assert (row["message"], row["extra_left_out"]) == ("it broke", ["unspeakable", "endless"])


def test_text_line_has_time_with_offset_process_level_and_logger(lines):
    (record,) = lines(events.Expired("q", tuple(f"m{number}" for number in range(500))))

    moment, process, level, name, message = TextFormatter(colours=False).format(at(record, 0.0)).split(" ", 4)

    assert datetime.fromisoformat(moment).timestamp() == 0.0
    assert (process, level, name) == (str(record.process), "WARNING", "reliq")
    assert message.endswith("m0, m1, m2, m3, m4 and 495 more")
    assert TextFormatter(colours=True).format(record).startswith("\x1b[33m")


def at(record, seconds):
    record.created = seconds
    return record


def test_repeated_lines_are_held_back_and_reported_with_the_next(lines, caplog):
    limiter = Limiter()
    failures = [events.Handled("q", f"m{number}", 1, "nack", 0.1, "", "ValueError") for number in range(30)]

    written = [record for record in lines(*failures) if limiter.filter(at(record, 1000.0))]
    (later,) = lines(failures[0])

    assert len(written) == SAME_LINES
    assert limiter.filter(at(later, 1000.0 + SAME_SECONDS))
    told = caplog.records[-1]
    assert told.getMessage().startswith("log: held back 20 lines like: queue q: message m10: attempt 1 ended with nack")
    assert told.reliq["ids"] == [f"m{number}" for number in range(10, 30)]


def test_held_back_lines_are_reported_without_a_further_line(lines, caplog, monkeypatch):
    monkeypatch.setattr("reliq.logs.SAME_SECONDS", 0.01)
    limiter = Limiter()

    lost = lines(*[events.LeaseLost("q", ("m",), "ack")] * (SAME_LINES + 2))
    written = [limiter.filter(at(record, 1000.0)) for record in lost]  # all in one window, on any machine

    def reported():
        return sum(one.reliq["count"] for one in list(caplog.records) if "held back" in one.getMessage())

    eventually(lambda: reported() == written.count(False), "all are reported, in one line or two")


def test_redis_away_and_back_are_one_line_each_for_all_parts(lines):
    said = lines(
        *[events.RedisUnavailable("", part, "refused") for part in ("fetcher", "janitor", "fetcher")],
        *[events.RedisUnavailable("orders", part, "gone") for part in ("fetcher", "settler")],
        *[events.RedisRecovered("orders", part) for part in ("fetcher", "settler")],
        *[events.RedisRecovered("", part) for part in ("start", "janitor", "fetcher", "fetcher")],
    )

    assert [record.getMessage().partition(" (")[0].partition(" after ")[0] for record in said] == [
        "Redis is away; retrying until it is back",
        "queue orders: its Redis is away, others go on; retrying until it is back",
        "queue orders: its Redis is back",
        "Redis is back",
    ]


def test_different_lines_and_debug_lines_are_not_held_back(lines):
    limiter = Limiter()
    others = [events.Handled(f"q{number}", "m", 1, "nack", 0.1, "ValueError") for number in range(50)]
    acks = [events.Handled("q", f"m{number}", 1, "ack", 0.1) for number in range(50)]

    assert all(limiter.filter(at(record, 1000.0)) for record in lines(*others, *acks))


def test_worker_logs_json_without_bodies_or_passwords(command, jobs, environment, url):
    environment["RELIQ_URL"] = url.replace("redis://", "redis://default:hunter2@")
    jobs.SHOP.publish_many(["poison", "flaky", SECRET])

    options = ("--log-format", "json", "--log-level", "debug", "--queue", "shop")
    running = command("worker", "monitored:consumer", "--burst-delayed", *options)
    running.wait()
    assert any('"dead"' in line for line in running.lines)

    rows = [json.loads(line) for line in running.lines if line.startswith("{")]
    handled = {row["outcome"]: row for row in rows if row.get("event") == "handled"}
    assert (handled["ack"]["level"], handled["reject"]["queue"]) == ("debug", "shop")
    assert handled["nack"]["error"].startswith("ValueError at monitored.py:")
    assert [secret for secret in ("not today", "hunter2", SECRET) if secret in "".join(running.lines)] == []
