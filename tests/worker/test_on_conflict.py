"""Publishing an id that is not free: keep, follow, replace, Debounce, Throttle."""

import sqlite3
import threading

import pytest
from transition import run_transition
from waiting import eventually

from reliq import ConfigurationError, Debounce, Layout, OutgoingMessage, PublishFailed, Queue, Tasks, Throttle
from reliq.events import Acked, LeaseLost, PublishEnded
from reliq.handlers import settlement
from reliq.handlers.settlement import Settlement
from reliq.keys import Keys
from reliq.lua.transitions import CallNumber
from reliq.message import Delivery
from reliq.settings import QueueSettings
from reliq.testing import isolated

OPTIONS = ["follow", "replace", Debounce(60, max_wait=90), Throttle(60)]


@pytest.fixture
def queue(make_queue):
    return make_queue(body=int)


def taken(queue, **options):
    """Receive and ack all due messages; return their bodies."""
    with queue.receive(limit=10, **options) as jobs:
        return [job.body for job in jobs]


@pytest.mark.parametrize("option", OPTIONS, ids=["follow", "replace", "debounce", "throttle"])
def test_free_id_is_published(queue, call, option):
    receipt = call(queue, "publish", 1, id="m", on_conflict=option)

    assert (receipt.status, bool(receipt)) == ("published", True)
    assert (queue.counts().pending, queue.counts().ready) == ((1, 0) if isinstance(option, Debounce) else (0, 1))


def test_waiting_message_gets_the_new_body_in_its_place(queue, call):
    queue.publish(1, id="m")
    queue.publish(2, id="other")

    receipt = call(queue, "publish", 3, id="m", on_conflict="replace")

    assert (receipt.status, bool(receipt)) == ("replaced", True)
    assert taken(queue) == [3, 2]
    assert (queue.counts().totals["published"], queue.counts().totals["replaced"], queue.counts().missing) == (2, 1, 0)


def test_delayed_message_gets_the_new_due_time(queue):
    queue.publish(1, id="m", delay=3600)

    assert queue.publish(2, id="m", on_conflict="replace").status == "replaced"

    assert taken(queue, wait=30) == [2]


def test_due_message_that_must_start_later_waits(queue):
    queue.publish(1, id="m")

    assert queue.publish(2, id="m", delay=3600, on_conflict="replace").status == "replaced"

    assert taken(queue) == []
    assert queue.counts().pending == 1


def test_follow_changes_no_waiting_message(queue):
    queue.publish(1, id="m")

    assert queue.publish(2, id="m", on_conflict="follow").status == "duplicate"
    assert taken(queue) == [1]


ENDS = {
    "ack": lambda job: job.ack(),
    "nack": lambda job: job.nack(delay=3600),
    "reject": lambda job: job.reject(),
    "snooze": lambda job: job.snooze(delay=3600),
}


@pytest.mark.parametrize("end", ENDS)
def test_running_message_is_followed_by_the_newest_body_however_it_ends(make_queue, end):
    seen = []
    queue = make_queue(body=int, observers=[seen.append])
    queue.publish(1, id="m", retries=0 if end == "nack" else 3)

    with queue.receive() as (job,):
        assert queue.publish(2, id="m", on_conflict="follow").status == "follows"
        assert queue.publish(3, id="m", on_conflict="follow").status == "duplicate"
        assert queue.publish(4, id="m", on_conflict="replace").status == "follows"
        assert taken(queue) == []
        ENDS[end](job)

    assert taken(queue) == [4]
    counts = queue.counts()
    assert (counts.totals["acked"], counts.alive, counts.missing) == (2 if end == "ack" else 1, 0, 0)
    assert not [event for event in seen if isinstance(event, LeaseLost)]
    assert [event.ids for event in seen if isinstance(event, Acked)] == [("m",)] * counts.totals["acked"]


def test_successor_of_an_expired_lease_runs_with_its_own_retries(queue):
    queue.publish(1, id="m", retries=0)
    run_transition(queue, "claim", CallNumber("dead", 1), limit=1, lease_ms=1)
    assert queue.publish(2, id="m", retries=5, on_conflict="replace").status == "follows"

    eventually(lambda: run_transition(queue, "reclaim").overdue == ("m",), "the lease expires")

    with queue.receive() as (job,):
        assert (job.body, job.retries_left) == (2, 5)


def test_successors_of_more_messages_than_a_call_settles(queue):
    ids = [f"m{n}" for n in range(501)]
    queue.publish_many(OutgoingMessage(body=1, id=id) for id in ids)
    claims = [run_transition(queue, "claim", CallNumber("w", n), limit=500, lease_ms=60_000).claimed for n in (1, 2)]
    queue.publish_many(OutgoingMessage(body=2, id=id, on_conflict="replace") for id in ids)
    held = [Settlement(Delivery(one), has_successor=True) for one in (*claims[0], *claims[1])]

    pieces = [piece for _, piece in settlement.calls(Keys(queue.name), QueueSettings(), held)]

    assert [len(piece) for piece in pieces] == [500, 1]


def test_successor_of_a_message_whose_body_does_not_decode_enters_at_once(queue, make_queue, monkeypatch):
    queue.publish(1, id="m")
    decode = settlement.decoded

    def replaced_meanwhile(delivery, decoder):
        monkeypatch.setattr(settlement, "decoded", decode)
        queue.publish(2, id="m", on_conflict="replace")
        raise ValueError

    monkeypatch.setattr(settlement, "decoded", replaced_meanwhile)

    assert taken(queue) == []
    assert taken(queue) == [2]


def test_id_is_free_after_the_end_of_a_message_with_an_option(queue):
    queue.publish(1, id="m", dedup=3600)
    assert taken(queue) == [1]

    assert queue.publish(2, id="m", on_conflict="replace").status == "published"

    assert taken(queue) == [2]
    assert queue.publish(3, id="m", dedup=3600).status == "published"


def test_cancel_withdraws_the_successor(queue):
    queue.publish(1, id="m")

    with queue.receive():
        queue.publish(2, id="m", on_conflict="replace")
        assert queue.cancel("m") == "running"

    assert taken(queue) == []
    assert queue.counts().missing == 0


def test_successor_of_a_cancelled_message_runs(queue, client):
    queue.publish(1, id="m")

    with queue.receive() as (job,):
        queue.cancel("m")
        assert queue.publish(2, id="m", on_conflict="replace").status == "follows"
        job.nack()

    assert taken(queue) == [2]
    assert (queue.counts().totals["cancelled"], queue.counts().missing) == (1, 0)
    assert [entry[b"kind"] for _, entry in client.xrange(queue.keys.ends)] == [b"cancelled"]


def test_message_in_backoff_runs_with_the_new_body(queue):
    queue.publish(1, id="m", retries=1)
    with queue.receive() as (job,):
        job.nack(delay=3600)

    assert queue.publish(2, id="m", retries=0, on_conflict="replace").status == "replaced"

    with queue.receive(wait=30) as (job,):
        assert (job.body, job.attempt, job.retries_left) == (2, 1, 0)


def test_successor_does_not_resume_at_the_checkpoint_of_the_older_message(queue, consumer, start):
    seen = []

    @consumer.handler(queue)
    def handle(body, job):
        seen.append((body, job.cursor))
        if body == 1:
            queue.publish(2, id="m", on_conflict="replace")
            job.checkpoint(7)
            raise OSError("failed after a checkpoint")

    queue.publish(1, id="m")
    start()

    eventually(lambda: len(seen) == 2, "both run")
    assert seen == [(1, None), (2, None)]


def test_tombstone_refuses_every_publish(queue):
    queue.cancel("m", tombstone=60)

    assert [queue.publish(1, id="m", on_conflict=option).status for option in OPTIONS] == ["tombstoned"] * 4


def test_id_that_becomes_a_dead_letter_is_tried_again_and_refused(queue, monkeypatch):
    monkeypatch.setattr("reliq.publish.PUBLISH_SECONDS", 0.2)
    queue.publish(1, id="m")
    with queue.receive() as (job,):
        job.reject()  # no worker writes the dead letter

    with pytest.raises(PublishFailed, match="message m is about to become a dead letter") as failed:
        queue.publish(2, id="m", on_conflict="replace")

    (rest,) = failed.value.rest
    assert (failed.value.outcome, rest.id, rest.on_conflict, rest.body) == ("refused", "m", "replace", 2)


def test_many_messages_and_the_outcomes_of_an_event(make_queue, call):
    seen = []
    queue = make_queue(body=int, observers=[seen.append])
    queue.publish(0, id="a")

    items = [OutgoingMessage(body=n, id=id, on_conflict="replace") for n, id in enumerate("ab", 1)]
    result = call(queue, "publish_many", items)

    assert (result.published, result.duplicates) == (2, ())
    assert [event.outcomes for event in seen if isinstance(event, PublishEnded)][-1] == {"replaced": 1, "published": 1}
    assert taken(queue) == [1, 2]


def test_debounced_message_starts_after_the_last_publish_but_not_after_max_wait():
    with isolated() as reliq:
        queue = Queue("q", int)
        for n in range(3):
            assert queue.publish(n, id="m", on_conflict=Debounce(5, max_wait=12)).status == (
                "replaced" if n else "published"
            )
            reliq.travel(4)
            bodies = taken(queue)

        assert bodies == [2]  # after 12 s


def test_throttled_messages_start_apart_and_the_last_body_wins():
    with isolated() as reliq:
        queue = Queue("q", int)
        first = queue.publish(0, id="m", on_conflict=Throttle(30))
        assert taken(queue) == [0]

        again = [queue.publish(n, id="m", on_conflict=Throttle(30)) for n in (1, 2, 3)]

        assert [one.status for one in again] == ["published", "replaced", "replaced"]
        assert all(29.99 < one.due - first.due < 60 for one in again)  # the machine may stall
        assert queue.publish(4, id="m").status == "duplicate"
        assert taken(queue) == []
        reliq.travel(31)
        assert taken(queue) == [3]


def test_message_keys_hold_for_successors(queue):
    queue.publish(1, id="m", key="a")

    with queue.receive():
        assert queue.publish(2, id="m", key="b", on_conflict="replace").status == "follows"
    with queue.receive() as (job,):
        assert (job.body, job.key) == (2, "b")

    assert queue.counts().missing == 0


def test_worker_runs_the_successor_of_its_own_message(queue, consumer, start):
    ran, replaced = [], threading.Event()

    @consumer.handler(queue)
    def handle(body):
        ran.append(body)
        if body == 1:
            assert queue.publish(2, id="m", on_conflict="replace").status == "follows"
            replaced.set()

    queue.publish(1, id="m")
    start()

    eventually(lambda: queue.counts().totals.get("acked") == 2, "both are acked")
    assert (ran, replaced.is_set(), queue.counts().missing) == ([1, 2], True, 0)


def test_test_kit_and_tasks_run_successors():
    with isolated() as reliq:
        app, ran = Tasks("default"), []

        @app.task
        def sync(version: int) -> None:
            ran.append(version)
            if version == 1:
                sync.options(id="cart-7", on_conflict="replace").publish(2)

        sync.options(id="cart-7").publish(1)
        reliq.drain(app)

        assert ran == [1, 2]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"on_conflict": "replace"}, "on_conflict needs an id"),
        ({"id": "m", "on_conflict": "overwrite"}, "on_conflict must be .* not 'overwrite'"),
        ({"id": "m", "on_conflict": "replace", "dedup": 60}, "leave out dedup"),
        ({"id": "m", "on_conflict": "follow", "ignore_dedup": True}, "leave out ignore_dedup"),
        ({"id": "m", "on_conflict": "replace", "publication_id": 1}, "leave out publication_id"),
        ({"id": "m", "on_conflict": Debounce(5), "delay": 1}, "leave out delay"),
        ({"id": "m", "on_conflict": Debounce(5, max_wait=4)}, "max_wait must be"),
        ({"id": "m", "on_conflict": Throttle(0)}, "Throttle must be"),
    ],
)
def test_bad_option_is_refused(queue, options, why):
    with pytest.raises(ConfigurationError, match=why):
        queue.publish(1, **options)
    assert queue.counts().alive == 0


def test_outbox_and_go_layout_refuse_on_conflict_by_name(url):
    with pytest.raises(ConfigurationError, match="on_conflict cannot be used with an outbox"):
        Queue("q", int, url=url).publish_in(sqlite3.connect(":memory:"), 1, id="m", on_conflict="replace")
    with pytest.raises(ConfigurationError, match="on_conflict cannot be sent on a queue in the hdt3213 layout"):
        Queue("q", bytes, url=url, layout=Layout.hdt3213()).publish(b"1", id="m", on_conflict="replace")
