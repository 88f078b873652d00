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
    file.with_name("orders.jsonl.reliq-progress").unlink()
    again = command("publish", "q", "--jsonl", file, "--json").json
    assert (again["published"], again["before"], handle_all(queue)) == (0, 1202, [])


def test_changed_file_is_refused(command, queue, file):
    command("publish", "q", "--jsonl", file)
    file.write_text(file.read_text() + '{"n": 1203}\n')

    ran = command("publish", "q", "--jsonl", file)

    assert (ran.code, ran.out) == (2, "")
    assert "has changed since 1,202 lines of it were published here" in ran.err
    assert queue.counts().ready == 1202


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
    monkeypatch.setattr("reliq.admin.publish.LARGEST_BODY", 1000)
    path = tmp_path / "large.jsonl"
    path.write_bytes(b'"' + b"x" * 1500 + b'"\n1\n')

    ran = command("publish", "q", "--jsonl", path, "--on-error", "skip", "--json")

    assert (ran.json["published"], ran.json["malformed"]) == (1, [1])


def test_bad_progress_file_is_refused_in_one_line(command, file):
    for content in (b"[" * 5000, b"\xff", b"{}]", b'{"q":{"line":1e999}}'):
        file.with_name("orders.jsonl.reliq-progress").write_bytes(content)

        ran = command("publish", "q", "--jsonl", file)

        assert (ran.code, ran.err.count("\n")) == (2, 1)
        assert "is not a progress file of reliq; move it away" in ran.err
