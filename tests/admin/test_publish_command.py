"""`reliq publish`: one body and what became of it."""

import io
import sys
from datetime import UTC, datetime, timedelta

import pytest

from reliq import Queue
from reliq.keys import Layout

REPORT = ("publish", "reports", "{}", "--id", "report-2026-11-21", "--dedup", "86400")


def test_a_cron_job_publishes_once_and_is_told_so_in_its_exit_code_too(command, url):
    first, second = command(*REPORT), command(*REPORT)
    with Queue("reports", url=url).receive() as [job]:
        assert job.body == {}
    third = command(*REPORT)

    assert (first.code, first.out) == (0, "published report-2026-11-21\n")
    assert (second.code, second.out) == (3, "duplicate report-2026-11-21\n")
    assert (third.code, third.out) == (3, "duplicate report-2026-11-21\n")


def test_a_tombstone_is_told_in_the_exit_code_too(command, queue, tmp_path):
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"n": 1}\n')
    queue.cancel("m", tombstone=60)

    ran = command("publish", "q", "{}", "--id", "m", "--json")
    twice = [command("publish", "q", "--jsonl", str(lines)).code for _ in range(2)]

    assert (ran.code, ran.json["status"]) == (3, "tombstoned")
    assert twice == [0, 0]


def test_how_long_the_id_is_known_is_as_said(command, url, client):
    command(*REPORT)
    queue = Queue("reports", url=url)
    with queue.receive():
        pass

    assert 86_000_000 < client.pttl(queue.keys.dedup("report-2026-11-21")) <= 86_400_000


def test_every_option_arrives(command, queue, client):
    ran = command(
        *("publish", "q", '{"n": 1}', "--delay", "10m", "--retries", 3, "--ttl", "2h", "--json"),
        *("--header", "tenant=acme", "--header", "trace=a=b"),
    )

    receipt = ran.json
    [one] = command("list", "q", "--state", "pending", "--json").json
    assert (receipt["status"], receipt["id"]) == ("published", one["id"])
    assert (one["headers"], one["retries_left"]) == ({"tenant": "acme", "trace": "a=b"}, 3)
    assert one["when"] == pytest.approx(receipt["due"])
    assert client.pttl(queue.keys.msg(one["id"])) / 1000 == pytest.approx(7800, abs=60)


def test_a_moment_may_be_given(command, queue, client):
    at = datetime.now(UTC) + timedelta(hours=1)

    command("publish", "q", "{}", "--id", "m", "--at", at.isoformat())

    assert client.zscore(queue.keys.pending, "m") == pytest.approx(at.timestamp(), abs=0.002)


@pytest.mark.parametrize("body", ['{"a":  1}', "[1, 2]\n", '"text"', "42", "null"])
def test_the_body_arrives_as_it_was_written(body, command, url):
    command("publish", "q", body)

    with Queue("q", bytes, url=url).receive() as [job]:
        assert job.body == body.encode()


def test_a_body_may_come_through_a_pipe(command, url, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"from": "a pipe"}')))

    assert command("publish", "q", "-").code == 0

    with Queue("q", url=url).receive() as [job]:
        assert job.body == {"from": "a pipe"}


def test_bytes_may_be_sent_that_are_no_json(command, url):
    assert command("publish", "q", "--raw", "--", "-- {").code == 0

    with Queue("q", str, url=url).receive() as [job]:
        assert job.body == "-- {"


def test_a_queue_of_the_go_original_gets_a_bare_body(command, url, client):
    command("publish", "q", "{}", "--layout", "hdt3213", "--id", "m")

    assert client.get(Queue("q", url=url, layout=Layout.hdt3213()).keys.msg("m")) == b"{}"


def test_a_key_and_a_priority_arrive_and_exclude_each_other(command, queue, client):
    assert command("publish", "q", "{}", "--key", "tenant-7", "--id", "keyed").code == 0
    assert command("publish", "q", "{}", "--priority", "high", "--id", "first").code == 0
    both = command("publish", "q", "{}", "--key", "tenant-7", "--priority", "high")
    neither = command("publish", "q", "{}", "--priority", "urgent")

    assert client.lrange(queue.keys.line("tenant-7"), 0, -1) == [b"keyed"]
    assert client.lrange(queue.keys.line("\x01high"), 0, -1) == [b"first"]
    assert (both.code, neither.code) == (2, 2)
    assert "give key or priority, not both" in both.err
    assert "priority must be one of high, normal, low, not 'urgent'" in neither.err


def test_the_lines_of_a_file_have_the_key_that_is_given(command, queue, client, tmp_path):
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"n": 1}\n{"n": 2}\n')

    assert command("publish", "q", "--jsonl", str(lines), "--key", "tenant-7").code == 0

    assert client.llen(queue.keys.line("tenant-7")) == 2
