"""`reliq schedules`, and pause, resume and delete with --schedule."""

import pytest

from reliq import Queue


@pytest.fixture
def reports(url):
    queue = Queue("reports", dict, url=url)
    for number in range(3):
        queue.schedule(f"tenant-{number}", cron="0 6 * * *", tz="Europe/Berlin", body={"tenant": number})
    return queue


def test_schedules_are_listed_by_name_and_prefix(reports, command):
    reports.schedule("hourly", every=3600, body={})

    listed = command("schedules", "reports", "--prefix", "tenant-", "--limit", "2")

    assert listed.code == 0
    assert "tenant-1" in listed.out
    assert "0 6 * * * Europe/Berlin" in listed.out
    assert "hourly" not in listed.out
    assert "There are more than 2: --prefix or --limit shows others." in listed.out
    names = [one["name"] for one in command("schedules", "reports", "--json").json]
    assert names == ["hourly", "tenant-0", "tenant-1", "tenant-2"]


def test_queue_without_schedules_says_how_to_make_one(url, command):
    Queue("orders", dict, url=url).publish({})

    assert "orders has no stored schedule; Queue.schedule(…) makes one." in command("schedules", "orders").out


def test_schedule_is_paused_resumed_and_deleted(reports, command):
    one = ("reports", "--schedule", "tenant-1")

    paused = command("pause", *one, "--reason", "we move")
    listed = command("schedules", "reports").out
    resumed = [command("resume", *one).out for _ in range(2)]
    deleted = command("delete", *one, "--yes")

    assert "tenant-1 of reports is paused; `reliq resume reports --schedule tenant-1` ends it" in paused.out
    assert "tenant-1: paused" in listed
    assert "we move" in listed
    assert [text.strip() for text in resumed] == [
        "tenant-1 of reports is resumed",
        "tenant-1 of reports was not paused",
    ]
    assert (deleted.code, deleted.out.strip()) == (0, "tenant-1 of reports is deleted")
    assert [one.name for one in reports.schedules()] == ["tenant-0", "tenant-2"]


@pytest.mark.parametrize("verb", [("pause",), ("resume",), ("delete", "--yes")])
def test_unknown_schedule_is_refused(reports, command, verb):
    answer = command(verb[0], "reports", "--schedule", "tenant-9", *verb[1:])

    assert answer.code == 2
    assert "queue 'reports' has no stored schedule 'tenant-9'; see `reliq schedules reports`" in answer.err
    assert len(reports.schedules()) == 3


def test_options_of_different_subjects_are_refused(reports, command):
    answer = command("pause", "reports", "--schedule", "tenant-1", "--cron", "daily")

    assert (answer.code, "give only one of --key, --cron and --schedule" in answer.err) == (2, True)
