"""What happened to one message, from its publish on."""

import time
from functools import partial

import pytest

from reliq import Queue, commands
from reliq.admin import Admin
from reliq.keys import Layout
from reliq.roster import Slot, Worker

#: In microseconds: when every lease and every wait of these tests is over.
LATER = int(time.time() * 1e6) + 3_600_000_000


@pytest.fixture
def story(url):
    """The story of a message."""
    desk = Admin(url)
    yield partial(desk.story, "q")
    desk.close()


def fail(queue, error, **options):
    with queue.receive() as [job]:
        try:
            raise error
        except Exception as caught:
            job.nack(reason=caught, **options)
    queue.moves.reclaim(clock=LATER)


def kinds(told):
    return [event.kind for event in told.events]


def test_a_message_that_failed_twice_and_runs_tells_each_failure_and_who_has_it(story, queue, client):
    before = time.time()
    queue.publish({}, id="m", retries=5)
    fail(queue, ValueError("no"), delay=1)
    fail(queue, KeyError("k"), delay=1)
    slot = Slot("q", "m", 3, before)
    worker = Worker("w1", "db1", 7, "1", ("q",), 4, 1, before, before, before, (slot,))
    with queue.receive():
        for beat in commands.write_worker(worker):
            client.execute_command(*beat.command)
        told = story("m")

    published, first, second, _ = sorted(told.events, key=lambda event: event.attempt or 0)
    claimed = next(event for event in told.events if event.kind == "claimed")
    assert (told.state, sorted(kinds(told))) == ("leased", ["claimed", "failed", "failed", "published"])
    assert published.at == pytest.approx(before, abs=60)
    assert [(one.attempt, one.error.partition(" (")[0], one.reason) for one in (first, second)] == [
        (1, "ValueError: no", "failed"),
        (2, "KeyError: 'k'", "failed"),
    ]
    assert first.raised.startswith("ValueError at test_message_story.py:")
    assert first.by.rpartition(":")[2].isdigit()
    assert (claimed.by, claimed.attempt) == ("db1:7", 3)


def test_a_message_that_waits_between_two_tries_says_when_it_is_due(story, queue):
    queue.publish({}, id="m", retries=5)
    with queue.receive() as [job]:
        job.nack(delay=600, reason="gateway down")

    told = story("m")

    assert kinds(told) == ["published", "failed", "due"]
    assert told.events[-1].at == pytest.approx(time.time() + 600, abs=60)


def test_a_dead_letter_tells_all_its_failures_and_its_death(story, queue):
    queue.publish({}, id="m", retries=1)
    fail(queue, ValueError("no"), delay=0)
    with queue.receive() as [job]:
        job.reject(reason="enough")
    queue.moves.collect(["m"], letters_max=1000, letters_ms=10**9)

    told = story("m")

    assert (told.state, kinds(told)) == ("dead", ["published", "failed", "failed", "dead"])
    assert [event.reason for event in told.events] == ["", "failed", "rejected", "rejected"]
    assert [event.at for event in told.events] == sorted(event.at for event in told.events)


def test_a_message_that_died_was_redriven_and_acked_has_both_its_ends(story, url, die):
    die("m")
    queue = Queue("q", url=url, history=10)
    queue.redrive(queue.letters())
    with queue.receive():
        pass

    assert kinds(story("m")) == ["published", "dead", "acked"]


def test_a_message_of_an_earlier_version_and_of_go_has_a_story_too(url, story, queue, client):
    queue.publish({}, id="m")
    client.hset(queue.keys.errors, "m", "failed 1 ValueError: old (at jobs.py:3)")
    bare = Queue("q", url=url, layout=Layout.hdt3213())
    bare.publish({}, id="x")
    desk = Admin(url, layout=Layout.hdt3213())

    failed = story("m").events[1]

    assert (failed.kind, failed.error, failed.raised, failed.at) == (
        "failed",
        "ValueError: old (at jobs.py:3)",
        "",
        None,
    )
    assert [(event.kind, event.at) for event in desk.story("q", "x").events] == [("published", None)]


def test_the_command_prints_when_it_was_published_and_each_failure(command, queue):
    queue.publish({}, id="m", retries=5)
    fail(queue, ValueError("one"), delay=0)
    fail(queue, ValueError("two"), delay=0)

    lines = [line.split(maxsplit=1) for line in command("show", "q", "m").out.splitlines() if line.startswith(" ")]

    assert [word for word, _ in lines].count("published") == 1
    failures = [text for word, text in lines if word == "failed"]
    assert ["attempt 1" in failures[0], "ValueError: one" in failures[0]] == [True, True]
    assert ["attempt 2" in failures[1], "ValueError: two" in failures[1]] == [True, True]


def test_the_command_groups_dead_letters_and_redrives_a_group(command, queue, die):
    die("a", "b")
    queue.publish({"secret": "canary"}, id="c", retries=0)
    fail(queue, KeyError("canary"))
    queue.moves.collect(["c"], letters_max=1000, letters_ms=10**9)

    told = command("dead", "list", "q", "--group")
    [raised] = [
        one["raised"] for one in command("dead", "list", "q", "--group", "--json").json["groups"] if one["raised"]
    ]

    assert [line.split()[:2] for line in told.out.splitlines()[1:]] == [["2", "rejected"], ["1", "failed"]]
    assert "canary" not in told.out
    assert command("dead", "redrive", "q", "--raised", raised).out == "1 redriven\n"
    assert command("dead", "list", "q", "--raised", "", "--json").json[0]["id"] == "a"
