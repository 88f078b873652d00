"""Cancel, reschedule, counts, pause, dead letters: blocking and async."""

import getpass
import json
import socket
import time
from datetime import UTC, datetime, timedelta

import pytest
from transition import PATIENT_SECONDS, run_transition

from reliq import Pause, Queue
from reliq.admin import calls

#: A repeated call would count twice.
pytestmark = pytest.mark.usefixtures("patient")


def read_pause(queue):
    return queue._clients.blocking(PATIENT_SECONDS).run(calls.paused(queue.keys))


@pytest.fixture
def dead_letter(queue):
    """A message that was rejected and collected."""

    def make(id, **options):
        queue.publish({"id": id}, id=id, **options)
        with queue.receive() as [job]:
            job.reject(reason="bad card")
        run_transition(queue, "collect", [id], dead_letter_limit=100, letters_ms=10**9)
        return queue.dead_letters()[-1]

    return make


@pytest.mark.parametrize("delay", [0, 60], ids=["ready", "pending"])
def test_cancel_removes_a_waiting_message(queue, call, delay):
    queue.publish({}, id="m", delay=delay)

    assert call(queue, "cancel", "m") == "cancelled"

    with queue.receive() as jobs:
        assert jobs == []
    counts = queue.counts()
    assert (counts.alive, counts.totals["cancelled"], counts.missing) == (0, 1, 0)
    assert (call(queue, "cancel", "none"), call(queue, "reschedule", "none")) == ("not_found", "not_found")


def test_reschedule_changes_the_due_time_of_a_waiting_message(queue, call, client):
    queue.publish({}, id="m", delay=60)
    at = datetime.now(UTC) + timedelta(hours=1)

    assert call(queue, "reschedule", "m", at=at) == "rescheduled"
    assert 0 <= client.zscore(queue.keys.pending, "m") - at.timestamp() < 0.0011
    assert call(queue, "reschedule", "m", delay=0) == "rescheduled"

    with queue.receive(wait=30) as [job]:
        assert job.id == "m"
        assert call(queue, "reschedule", "m", delay=5) == "running"


def test_counts_have_every_state_at_the_same_moment(queue, call):
    queue.publish_many([{}, {}, {}])
    queue.publish({}, delay=60)

    with queue.receive():
        counts = call(queue, "counts")

    assert (counts.pending, counts.ready, counts.unack, counts.retry) == (1, 2, 1, 0)
    assert (counts.alive, counts.missing, counts.totals["published"], counts.paused) == (4, 0, 4, False)


def test_paused_queue_is_not_claimed_until_resumed(queue, call):
    queue.publish({})

    call(queue, "pause", reason="the gateway is away")
    with queue.receive() as jobs:
        assert jobs == []
    assert call(queue, "counts").paused
    assert call(queue, "resume") is True
    assert call(queue, "resume") is False

    with queue.receive() as jobs:
        assert len(jobs) == 1


def test_pause_stores_person_time_and_reason(queue, client):
    before = time.time()
    assert read_pause(queue) is None

    queue.pause(reason="the gateway is away", for_=timedelta(minutes=1))

    written = json.loads(client.get(queue.keys.paused))
    pause = read_pause(queue)
    assert set(written) == {"by", "at", "reason", "until"}
    assert (pause.by, pause.reason) == (f"{getpass.getuser()}@{socket.gethostname()}", "the gateway is away")
    assert before - 0.001 <= pause.at <= time.time() + 0.001  # milliseconds, rounded
    assert pause.until == pytest.approx(pause.at + 60)
    assert 0 < client.pttl(queue.keys.paused) <= 60_000


def test_foreign_text_in_the_pause_is_its_reason(queue, client):
    for text in ("1", "a deploy", '{"since": 5}', "[" * 100_000):
        client.set(queue.keys.paused, text)
        assert read_pause(queue) == Pause("", None, text[:200])


def test_letters_are_read_in_pages_and_redriven_once(queue, call, dead_letter):
    letters = [dead_letter(id, headers={"a": "b"}) for id in ("a", "b", "c")]

    first = call(queue, "dead_letters", limit=2)
    assert first + call(queue, "dead_letters", limit=2, after=first[-1].letter) == letters
    assert {(one.reason, one.error, one.attempts) for one in letters} == {("rejected", "bad card", 1)}
    assert (letters[0].payload, letters[0].header.headers) == (b'{"id":"a"}', {"a": "b"})
    assert call(queue, "redrive", letters) == 3
    assert call(queue, "redrive", letters) == 0

    with queue.receive(limit=5) as jobs:
        assert sorted(job.id for job in jobs) == ["a", "b", "c"]
        assert {job.retries_left for job in jobs} == {12}
    counts = queue.counts()
    assert (counts.dead, counts.alive, counts.missing) == (0, 0, 0)


@pytest.mark.parametrize(
    ("limit", "calls"), [(10_000, 1), (2_500, 2), (1_000, 4), (1, 4)], ids=["all", "two", "one", "less"]
)
def test_redrive_is_split_by_the_bytes_of_its_bodies(queue, commands, monkeypatch, limit, calls):
    """Four bodies of a thousand bytes: each call carries as many as fit, and a larger body goes alone."""
    monkeypatch.setattr("reliq.queue.LETTER_BYTES", limit)
    text = Queue("q", str, url=queue.target)
    ids = [text.publish("x" * 1000, retries=0).id for _ in range(4)]
    with text.receive(limit=4) as jobs:
        for job in jobs:
            job.reject()
    run_transition(queue, "collect", ids, dead_letter_limit=10, letters_ms=10**9)
    before = commands().get("evalsha", 0)

    assert queue.redrive(queue.dead_letters()) == 4

    assert commands()["evalsha"] - before == calls
    with text.receive(limit=4) as jobs:
        assert [job.id for job in jobs] == ids  # in their order
