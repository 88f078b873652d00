"""`reliq publish --jsonl`: a file in bulk, and again, and again."""

import json

import pytest

from reliq import Queue

LINES = [{"n": number} for number in range(1, 1203)]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "orders.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return path


def take(url, limit=10_000):
    """Handle what is there; return the numbers."""
    queue, numbers = Queue("q", url=url), []
    while len(numbers) < limit:
        with queue.receive(limit=min(500, limit - len(numbers))) as jobs:
            numbers += [job.body["n"] for job in jobs]
        if not jobs:
            break
    queue.close()
    return numbers


def test_each_line_is_published_in_order_and_only_once(command, url, file):
    first = command("publish", "q", "--jsonl", file)
    handled = take(url)
    second = command("publish", "q", "--jsonl", file, "--json")

    assert (first.code, first.out) == (0, "1202 published, 0 were before\n")
    assert first.err == ""
    assert handled == [line["n"] for line in LINES]
    assert (second.json["published"], second.json["before"], second.json["lines"]) == (0, 1202, 1202)
    assert take(url) == []


def test_without_the_progress_file_redis_still_knows_the_lines(command, url, file):
    command("publish", "q", "--jsonl", file)
    handled = take(url, limit=500)

    file.with_name("orders.jsonl.reliq-progress").unlink()
    again = command("publish", "q", "--jsonl", file, "--json").json

    assert (again["published"], again["before"]) == (0, 1202)
    assert len(handled) + len(take(url)) == 1202


def test_another_queue_gets_the_lines_too(command, file):
    assert command("publish", "q", "--jsonl", file, "--json").json["published"] == 1202
    assert command("publish", "other", "--jsonl", file, "--json").json["published"] == 1202
    assert command("publish", "q", "--jsonl", file, "--json").json["published"] == 0


def test_a_file_that_has_changed_is_not_published_all_over(command, queue, file):
    command("publish", "q", "--jsonl", file)
    file.write_text(file.read_text() + '{"n": 1203}\n')

    ran = command("publish", "q", "--jsonl", file)

    assert (ran.code, ran.out) == (2, "")
    assert "has changed since 1,202 lines of it were published here" in ran.err
    assert queue.counts().ready == 1202


@pytest.fixture
def flawed(tmp_path):
    path = tmp_path / "flawed.jsonl"
    path.write_bytes(b'{"n": 1}\n\n{"n": \r\n[2]\r\n   \n\xff\n"three"')
    return path


def test_at_a_malformed_line_nothing_is_published_and_its_number_said(command, client, flawed):
    ran = command("publish", "q", "--jsonl", flawed)

    assert (ran.code, ran.out) == (2, "")
    assert f"{flawed}: lines 3, 6 are not JSON" in ran.err
    assert "nothing was published" in ran.err
    assert client.keys("*") == []
    assert [one.name for one in flawed.parent.iterdir()] == [flawed.name]


def test_the_rest_goes_on_when_that_is_said(command, url, flawed):
    ran = command("publish", "q", "--jsonl", flawed, "--on-error", "skip")

    assert (ran.code, ran.out) == (0, "3 published, 0 were before\n")
    assert ran.err == "reliq: 2 malformed lines were skipped: 3, 6\n"
    bodies = []
    with Queue("q", bytes, url=url).receive(limit=10) as jobs:
        bodies += [job.body for job in jobs]
    assert bodies == [b'{"n": 1}', b"[2]", b'"three"']


def test_lines_of_any_text_may_be_published(command, flawed):
    assert command("publish", "q", "--jsonl", flawed, "--raw", "--json").json["published"] == 5


def test_options_hold_for_every_line(command, file):
    command("publish", "q", "--jsonl", file, "--delay", "1h", "--header", "source=import")

    found = command("list", "q", "--state", "pending", "--limit", 3, "--json").json
    assert [one["headers"] for one in found] == [{"source": "import"}] * 3


def test_a_line_that_is_too_large_is_malformed(command, tmp_path):
    path = tmp_path / "large.jsonl"
    path.write_bytes(b'"' + b"x" * 17_000_000 + b'"\n1\n')

    ran = command("publish", "q", "--jsonl", path, "--on-error", "skip", "--json")

    assert (ran.json["published"], ran.json["malformed"]) == (1, [1])


@pytest.mark.parametrize("content", [b"[" * 5000, b"\xff", b"{}]", b'{"q":{"line":1e999}}'])
def test_a_progress_file_that_is_none_is_said_in_one_line(content, command, file):
    file.with_name("orders.jsonl.reliq-progress").write_bytes(content)

    ran = command("publish", "q", "--jsonl", file)

    assert (ran.code, ran.err.count("\n")) == (2, 1)
    assert "is not a progress file of reliq; move it away" in ran.err
