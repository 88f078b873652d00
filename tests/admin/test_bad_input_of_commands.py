"""Wrong usage is one line that says what to do, with exit code 2; Redis away is one with exit code 1."""

import os
import subprocess
import sys

import pytest
from ports import free_port

#: A valid call of each command on a queue; FILE stands for a file of lines.
GOOD = {
    "list": ("list", "QUEUE"),
    "publish": ("publish", "QUEUE", "{}"),
    "publish --jsonl": ("publish", "QUEUE", "--jsonl", "FILE"),
    "cancel": ("cancel", "QUEUE", "id"),
    "cancel --state": ("cancel", "QUEUE", "--state", "ready", "--yes"),
    "purge": ("purge", "QUEUE", "--state", "ready", "--yes"),
    "move": ("move", "QUEUE", "other", "--state", "ready", "--yes"),
    "dead list": ("dead", "list", "QUEUE"),
    "dead show": ("dead", "show", "QUEUE", "id"),
    "dead redrive": ("dead", "redrive", "QUEUE", "--all", "--yes"),
    "dead purge": ("dead", "purge", "QUEUE", "--all", "--yes"),
    "pause": ("pause", "QUEUE"),
    "resume": ("resume", "QUEUE"),
    "forget": ("forget", "QUEUE", "--yes"),
}
every_command = pytest.mark.parametrize("name", GOOD)

WRONG = {
    "list: a state": (("list", "q", "--state", "lost"), "state must be one of pending, ready"),
    "list: a limit": (("list", "q", "--limit", "0"), "limit must be 1 to 10000, not 0"),
    "list: an offset": (("list", "q", "--offset", "-1"), "offset must be 0 to"),
    "list: a header": (("list", "q", "--header", "tenant"), "a header is written NAME=VALUE"),
    "publish: no body": (("publish", "q"), "say the BODY"),
    "publish: no JSON": (("publish", "q", "{"), "the body is not JSON"),
    "publish: an id": (("publish", "q", "{}", "--id", "a b"), "id must be 1 to 128 of"),
    "publish: a delay": (("publish", "q", "{}", "--delay", "soon"), "a duration is written 30s"),
    "publish: a moment": (("publish", "q", "{}", "--at", "2026-11-21T03:00"), "with its offset from UTC"),
    "publish: two times": (
        ("publish", "q", "{}", "--delay", "1h", "--at", "2026-11-21T03:00Z"),
        "delay or at, not both",
    ),
    "publish: dedup alone": (
        ("publish", "q", "{}", "--dedup", "1h"),
        "--dedup needs an id of yours: --id report-7 --dedup 1h",
    ),
    "publish: a name of Go": (("publish", "order:timeout", "{}"), "may be called so: --layout hdt3213"),
    "list: a name of Go": (("list", "order:timeout"), "may be called so: --layout hdt3213"),
    "pause: no time": (("pause", "q", "--for", "0s"), "--for must be 0.001 to "),
    "worker: a burst": (
        ("worker", "jobs:consumer", "--burst=never"),
        "write --burst or --burst=delayed, not 'never'",
    ),
    "publish: retries": (("publish", "q", "{}", "--retries", "-1"), "retries must be 0 to"),
    "publish: a header": (("publish", "q", "{}", "--header", "a b=c"), "a header's name must be"),
    "publish: no file": (("publish", "q", "--jsonl", "/nowhere/lines"), "cannot read /nowhere/lines: No such file"),
    "publish: a folder": (("publish", "q", "--jsonl", "/"), "cannot read /: Is a directory"),
    "publish: a body and a file": (("publish", "q", "{}", "--jsonl", "FILE"), "leave out BODY and --id"),
    "publish: on error": (("publish", "q", "--jsonl", "FILE", "--on-error", "cry"), "--on-error must be stop or skip"),
    "publish: a queue": (("publish", "a:b", "{}"), "queue name must be 1 to 128"),
    "cancel: nothing": (("cancel", "q"), "say which messages"),
    "cancel: an id": (("cancel", "q", "a b"), "id must be 1 to 128 of"),
    "cancel: both": (("cancel", "q", "id", "--state", "ready"), "say which messages"),
    "cancel: a filter for ids": (("cancel", "q", "id", "--match", "x"), "go with --state, not with ids"),
    "cancel: a state": (
        ("cancel", "q", "--state", "dead"),
        "state must be one of pending, ready, waiting, retry, unack",
    ),
    "purge: a state": (("purge", "q", "--state", "lost"), "state must be one of pending, ready"),
    "move: a state": (("move", "q", "other", "--state", "lost"), "state must be one of"),
    "move: garbage": (
        ("move", "q", "other", "--state", "garbage", "--yes"),
        "state must be one of pending, ready, waiting, retry",
    ),
    "move: dead": (("move", "q", "other", "--state", "dead"), "reliq dead redrive q --to other"),
    "move: to itself": (("move", "q", "q", "--state", "ready", "--yes"), "cannot go to 'q' itself; name another queue"),
    "move: to an unknown one": (
        ("move", "q", "nobodys", "--state", "ready", "--yes"),
        "messages go only to a queue that was used before",
    ),
    "dead list: a reason": (("dead", "list", "q", "--reason", "bored"), "reason must be one of failed, rejected"),
    "dead list: an age": (("dead", "list", "q", "--older-than", "old"), "a duration is written 30s"),
    "dead list: a limit": (("dead", "list", "q", "--limit", "0"), "--limit must be 1 to"),
    "dead show: an id": (("dead", "show", "q", "nobody"), "no dead letter of the id 'nobody'"),
    "dead redrive: nothing": (("dead", "redrive", "q"), "say which dead letters"),
    "dead redrive: everything and some": (("dead", "redrive", "q", "--all", "--error", "x"), "say which dead letters"),
    "dead redrive: a rate": (("dead", "redrive", "q", "--all", "--yes", "--rate", "fast"), "--rate is written 50/s"),
    "dead redrive: retries": (
        ("dead", "redrive", "q", "--all", "--yes", "--retries", "-1"),
        "retries must be 0 to 1000",
    ),
    "dead redrive: a limit": (("dead", "redrive", "q", "--all", "--yes", "--limit", "0"), "limit must be 1 to"),
    "dead redrive: a delay": (("dead", "redrive", "q", "--all", "--yes", "--delay", "9999d"), "delay must be 0 to"),
    "dead redrive: too fast": (("dead", "redrive", "q", "--all", "--yes", "--rate", "9999999"), "rate must be above 0"),
    "dead redrive: to itself": (
        ("dead", "redrive", "q", "--all", "--yes", "--to", "q"),
        "cannot go to 'q' itself; name another queue",
    ),
    "dead redrive: to an unknown one": (
        ("dead", "redrive", "q", "--all", "--yes", "--to", "x"),
        "there is no queue 'x' here",
    ),
    "dead purge: nothing": (("dead", "purge", "q"), "say which dead letters"),
    "pause: a time": (("pause", "q", "--for", "a while"), "a duration is written 30s"),
    "pause: a reason": (("pause", "q", "--reason", "a\nb"), "reason must be one line"),
}


@pytest.fixture
def words(tmp_path):
    """Fill in the names."""
    file = tmp_path / "lines"
    file.write_text("{}\n")

    def fill(template, queue="q"):
        return [{"QUEUE": queue, "FILE": str(file)}.get(word, word) for word in template]

    return fill


@pytest.mark.parametrize("what", WRONG)
def test_what_is_asked_for_wrongly_is_one_line(what, command, words, queue):
    queue.publish({}, id="there")
    call, said = WRONG[what]

    ran = command(*words(call))

    assert ran.code == 2
    assert ran.out == ""
    assert ran.err.startswith("reliq: ")
    assert said in ran.err
    assert ran.err.count("\n") == 1
    assert (queue.counts().ready, queue.counts().paused) == (1, False)


@pytest.mark.parametrize("name", [name for name in GOOD if not name.startswith("publish")])
def test_a_queue_that_nobody_knows_is_said_and_not_made(name, command, words, client):
    ran = command(*words(GOOD[name], "oders"))

    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("reliq: there is no queue 'oders' here; `reliq queues --scan` lists")
    assert ran.err.count("\n") == 1
    assert client.keys("*") == []


def test_with_redis_away_a_command_says_so_in_one_line(words):
    away = {**os.environ, "RELIQ_URL": f"redis://127.0.0.1:{free_port()}/0"}
    names = ["list", "publish --jsonl", "dead redrive"]
    start = [sys.executable, "-m", "reliq"]

    # All at once: each of them tries for two seconds.
    running = [
        subprocess.Popen(
            [*start, *words(GOOD[name])], env=away, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for name in names
    ]

    for one in running:
        out, err = one.communicate(timeout=120)
        assert (one.returncode, out) == (1, "")
        assert err.startswith("reliq: ")
        assert "Connection refused" in err
        assert err.count("\n") == 1


@every_command
def test_help_has_an_example_and_the_exit_codes(name, command):
    [*path] = [word for word in name.split() if not word.startswith("-")]

    ran = command(*path, "--help")

    assert ran.code == 0
    said = " ".join(ran.out.split())
    assert f"Example: reliq {' '.join(path)}" in said
    assert "Exit codes: 0" in said
    assert all(option in said for option in ("--json", "--url", "--layout"))


def test_without_a_redis_a_command_says_where_to_name_one(command, monkeypatch):
    monkeypatch.delenv("RELIQ_URL")

    ran = command("list", "q")

    assert ran.code == 2
    assert "RELIQ_URL" in ran.err


def test_a_key_of_another_type_is_named_and_nothing_is_shown_but_one_line(command, queue, client):
    queue.publish({})
    client.delete(queue.keys.ready)
    client.set(queue.keys.ready, "not a list")

    ran = command("purge", "q", "--state", "ready", "--yes")

    assert (ran.code, ran.err.count("\n")) == (1, 1)
    assert queue.keys.ready in ran.err


def test_the_real_command_ends_without_a_traceback(url):
    command = [sys.executable, "-m", "reliq", "purge", "nobodys", "--state", "ready"]

    ran = subprocess.run(command, env={**os.environ, "RELIQ_URL": url}, capture_output=True, text=True, check=False)

    assert ran.returncode == 2
    assert ran.stderr.startswith("reliq: there is no queue 'nobodys' here")
    assert ran.stderr.count("\n") == 1
