"""`reliq publish`: one body, and the printed outcome."""

import io
import sys
from datetime import UTC, datetime, timedelta

import pytest
from handling import handle_all

from reliq import Queue
from reliq.keys import Layout


def test_publish_of_a_used_id_exits_3(command, url, queue, client):
    report = ("publish", "reports", "{}", "--id", "report", "--dedup", "86400")
    reports = Queue("reports", url=url)
    assert command(*report)[:2] == (0, "published report\n")
    assert command(*report)[:2] == (3, "duplicate report\n")
    assert handle_all(reports) == [{}]
    assert command(*report)[:2] == (3, "duplicate report\n")
    assert 86_000_000 < client.pttl(reports.keys.dedup("report")) <= 86_400_000

    queue.cancel("m", tombstone=60)
    ran = command("publish", "q", "{}", "--id", "m", "--json")
    assert (ran.code, ran.json["status"]) == (3, "tombstoned")


def test_options_of_publish_arrive(command, queue, client):
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

    at = datetime.now(UTC) + timedelta(hours=1)
    command("publish", "q", "{}", "--id", "m", "--at", at.isoformat())
    assert client.zscore(queue.keys.pending, "m") == pytest.approx(at.timestamp(), abs=0.002)


def test_body_arrives_as_it_was_written(command, url, monkeypatch):
    bodies = ['{"a":  1}', "[1, 2]\n", '"text"', "null"]
    for body in bodies:
        command("publish", "q", body)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"from": "a pipe"}')))
    command("publish", "q", "-")
    command("publish", "q", "--raw", "--", "-- {")

    with Queue("q", bytes, url=url).receive(limit=9) as jobs:
        assert [job.body.decode() for job in jobs] == [*bodies, '{"from": "a pipe"}', "-- {"]


def test_publish_in_the_go_layout_writes_a_bare_body(command, url, client):
    command("publish", "q", "{}", "--layout", "hdt3213", "--id", "m")

    assert client.get(Queue("q", url=url, layout=Layout.hdt3213()).keys.msg("m")) == b"{}"


def test_key_and_priority_arrive(command, queue, client, tmp_path):
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"n": 1}\n{"n": 2}\n')

    command("publish", "q", "{}", "--key", "tenant-7", "--id", "keyed")
    command("publish", "q", "{}", "--priority", "high", "--id", "first")
    command("publish", "q", "--jsonl", str(lines), "--key", "tenant-8")

    assert client.lrange(queue.keys.line("tenant-7"), 0, -1) == [b"keyed"]
    assert client.lrange(queue.keys.line("\x01high"), 0, -1) == [b"first"]
    assert client.llen(queue.keys.line("tenant-8")) == 2
