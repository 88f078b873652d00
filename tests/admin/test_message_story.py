"""The timeline of a message, from its publish on."""

import re
import time
from functools import partial

import pytest
from handling import bury_all, raised
from transition import run_transition

from reliq import Queue
from reliq.admin import Admin
from reliq.keys import Layout
from reliq.redis.commands import RunningJob

#: In microseconds: after every lease and every wait of these tests.
LATER = int(time.time() * 1e6) + 86_400_000_000


@pytest.fixture
def story(admin):
    """Return a message of queue q with its timeline."""
    return partial(admin.show, "q")


def fail(queue, error, **options):
    with queue.receive() as [job]:
        job.nack(reason=raised(error), **options)
    run_transition(queue, "reclaim", clock=LATER)


def kinds(told):
    return [event.kind for event in told.timeline]


def test_story_of_a_running_message_has_its_failures_and_its_worker(story, queue, alive):
    before = time.time()
    queue.publish({}, id="m", retries=5)
    fail(queue, ValueError("no"), delay=1)
    fail(queue, KeyError("k"), delay=1)
    with queue.receive():
        alive(running=(RunningJob("q", "m", 3, before),))
        told = story("m")

    published, first, second, claimed = sorted(told.timeline, key=lambda event: event.attempt or 0)
    assert (told.state, sorted(kinds(told))) == ("unack", ["claimed", "failed", "failed", "published"])
    assert published.at == pytest.approx(before, abs=60)
    errors = [(one.attempt, one.error.partition(" (")[0], one.reason) for one in (first, second)]
    assert errors == [(1, "ValueError: no", "failed"), (2, "KeyError: 'k'", "failed")]
    assert first.raised.startswith("ValueError at handling.py:")
    assert first.by.rpartition(":")[2].isdigit()
    assert (claimed.by, claimed.attempt) == ("db1:7", 3)


def test_story_of_a_message_in_backoff_and_then_dead_has_all_its_failures(story, queue):
    queue.publish({}, id="m", retries=1)
    with queue.receive() as [job]:
        job.nack(delay=600, reason="gateway down")
    waits = story("m")
    assert kinds(waits) == ["published", "failed", "due"]
    assert waits.timeline[-1].at == pytest.approx(time.time() + 600, abs=60)

    run_transition(queue, "reclaim", clock=LATER)
    bury_all(queue)
    told = story("m")
    assert (told.state, kinds(told)) == ("dead", ["published", "failed", "failed", "dead"])
    assert [event.reason for event in told.timeline] == ["", "failed", "rejected", "rejected"]
    assert [event.at for event in told.timeline] == sorted(event.at for event in told.timeline)


def test_story_of_a_redriven_and_acked_message_has_both_ends(story, url, die):
    die("m")
    queue = Queue("q", url=url, keep_completed=10)
    queue.redrive(queue.dead_letters())
    with queue.receive():
        pass

    assert kinds(story("m")) == ["published", "dead", "acked"]


def test_story_of_a_message_of_an_earlier_version_and_of_go(url, story, queue, client):
    queue.publish({}, id="m")
    client.hset(queue.keys.errors, "m", "failed 1 ValueError: old (at jobs.py:3)")
    failed = story("m").timeline[1]
    assert (failed.kind, failed.raised, failed.at) == ("failed", "", None)
    assert failed.error == "ValueError: old (at jobs.py:3)"

    Queue("q", url=url, layout=Layout.hdt3213()).publish({}, id="x")
    go = Admin(url, layout=Layout.hdt3213())
    assert [(event.kind, event.at) for event in go.show("q", "x").timeline] == [("published", None)]


def test_show_prints_the_publish_and_each_failure(command, queue):
    queue.publish({}, id="m", retries=5)
    fail(queue, ValueError("one"), delay=0)
    fail(queue, ValueError("two"), delay=0)

    told = command("show", "q", "m").out

    assert len(re.findall("^ *published ", told, re.MULTILINE)) == 1
    assert re.search(
        "^ *failed .*attempt 1.*ValueError: one.*\n *failed .*attempt 2.*ValueError: two", told, re.MULTILINE
    )


def test_dead_list_groups_letters_and_redrive_takes_a_group(command, queue, die):
    die("a", "b")
    queue.publish({"secret": "canary"}, id="c", retries=0)
    fail(queue, KeyError("canary"))
    run_transition(queue, "collect", ["c"], dead_letter_limit=1000, letters_ms=10**9)

    told = command("list", "q", "--state", "dead", "--group").out
    groups = command("list", "q", "--state", "dead", "--group", "--json").json["groups"]

    assert [line.split()[:2] for line in told.splitlines()[1:]] == [["2", "rejected"], ["1", "failed"]]
    assert "canary" not in told
    assert command("redrive", "q", "--exception", groups[1]["raised"]).out == "1 redriven\n"
    assert command("list", "q", "--state", "dead", "--exception", "", "--json").json[-1]["id"] == "a"
