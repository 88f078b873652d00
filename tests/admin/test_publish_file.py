"""`reliq publish --jsonl`: a file in bulk, and again, and again."""

import json

import pytest
from handling import handle_all

from reliq import Queue

LINES = [{"n": number} for number in range(1, 1203)]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "orders.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return path


def test_file_is_published_once_to_each_queue(command, queue, file):
    first = command("publish", "q", "--jsonl", file)
    assert first == (0, "1202 published, 0 were before\n", "")
    assert handle_all(queue) == LINES
    again = command("publish", "q", "--jsonl", file, "--json")
    assert (again.code, again.json["published"], again.json["before"], again.json["lines"]) == (0, 0, 1202, 1202)

    assert command("publish", "other", "--jsonl", file, "--json").json["published"] == 1202
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_changed_file_counts_as_a_new_file(command, queue, file):
    command("publish", "q", "--jsonl", file)
    file.write_text(file.read_text() + '{"n": 1203}\n')

    assert command("publish", "q", "--jsonl", file) == (0, "1203 published, 0 were before\n", "")
    assert queue.counts().ready == 2405


def test_line_cancelled_with_a_tombstone_is_not_published_again(command, file):
    file.write_text("1\n2\n")
    command("publish", "q", "--jsonl", file)
    ids = [entry["id"] for entry in command("list", "q", "--state", "ready", "--json").json]
    command("cancel", "q", ids[0], "--tombstone", "3600")

    again = command("publish", "q", "--jsonl", file)

    assert again.out == "0 published, 1 was before, 1 was cancelled a short while ago\n"


def test_malformed_lines_stop_a_publish_or_are_skipped_on_request(command, client, url, tmp_path):
    flawed = tmp_path / "flawed.jsonl"
    flawed.write_bytes(b'{"n": 1}\n\n{"n": \r\n[2]\r\n   \n\xff\n"three"')
    ran = command("publish", "q", "--jsonl", flawed)
    assert (ran.code, ran.out) == (2, "")
    assert f"{flawed}: lines 3, 6 are not JSON" in ran.err
    assert (client.keys("*"), [one.name for one in tmp_path.iterdir()]) == ([], [flawed.name])

    ran = command("publish", "q", "--jsonl", flawed, "--on-error", "skip", "--header", "source=import")

    assert ran == (0, "3 published, 0 were before\n", "reliq: 2 malformed lines were skipped: 3, 6\n")
    with Queue("q", bytes, url=url).receive(limit=10) as jobs:
        assert [job.body for job in jobs] == [b'{"n": 1}', b"[2]", b'"three"']
        assert [job.headers for job in jobs] == [{"source": "import"}] * 3
    assert command("publish", "other", "--jsonl", flawed, "--raw", "--delay", "1h", "--json").json["published"] == 5
    assert len(command("list", "other", "--state", "pending", "--json").json) == 5


def test_line_that_is_too_large_is_malformed(command, tmp_path, monkeypatch):
    monkeypatch.setattr("reliq.admin.bulk.LARGEST_BODY", 1000)
    path = tmp_path / "large.jsonl"
    path.write_bytes(b'"' + b"x" * 1500 + b'"\n1\n')

    ran = command("publish", "q", "--jsonl", path, "--on-error", "skip", "--json")

    assert (ran.json["published"], ran.json["malformed"]) == (1, [1])
