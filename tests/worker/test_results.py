"""Results, status and progress: how a job is, by its id."""

import asyncio
import copy
import pickle
import time
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace

import msgspec
import pytest
from pydantic import BaseModel
from tenacity import wait_fixed
from transition import run_transition
from waiting import eventually
from worker_process import AT_ONCE, Command, environment_for

from reliq import Admin, ConfigurationError, Job, Layout, Nack, Queue, Reject, Status, Tasks
from reliq.events import Acked, Handled
from reliq.handlers.settlement import RESULT_LIMIT
from reliq.lua import transitions
from reliq.lua.transitions import CallNumber, ack, checkpoint, claim
from reliq.message import Header
from reliq.redis import commands
from reliq.settings import HandlerSettings
from reliq.testing import isolated
from reliq.wire_format import encoded_checkpoint
from reliq.worker.settler import CHECKPOINT_SECONDS, Renewer
from reliq.worker.slots import deliveries_of

KEEP = {"keep": 3600}


@dataclass
class Report:
    pages: int


class Model(BaseModel):
    name: str


def claimed_of(queue, caller, number=1, **options):
    """Claim one message of a queue."""
    (claimed,) = caller.run(claim(queue.keys, CallNumber("a", number), limit=1, lease_ms=60_000, **options)).claimed
    return claimed


def acked(queue, caller, claimed, value="1", life=0):
    """Ack a message and keep a result of it."""
    return caller.run(ack(queue.keys, [(claimed, None)], results=[f"{life} 1 {value}"], keep_ms=60_000))


@pytest.mark.parametrize(
    ("answer", "result"),
    [
        (None, None),
        ({"pages": [1, 2]}, {"pages": [1, 2]}),
        ("text", "text"),
        (0, 0),
        (Report(3), {"pages": 3}),
        (Model(name="a\0\u2028é"), {"name": "a\0\u2028é"}),
        ("x" * (RESULT_LIMIT - 2), "x" * (RESULT_LIMIT - 2)),
    ],
    ids=["none", "dict", "text", "zero", "dataclass", "model", "largest"],
)
def test_acked_job_has_its_result_as_json(queue, consumer, work_until, answer, result):
    consumer.handler(queue, **KEEP)(lambda body: answer)
    receipt = queue.publish("x")
    assert receipt.state() == Status("ready", attempt=0)

    work_until(Acked)

    assert queue.status(receipt.id) == receipt.state() == Status("acked", result, attempt=1)
    assert asyncio.run(queue.astatus(receipt.id)) == asyncio.run(receipt.astate()) == receipt.state()
    assert receipt.state().has_ended


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ("x" * RESULT_LIMIT, "larger than 65536 bytes: 65538"),
        (object(), "JSON cannot hold an object"),
        (float("nan"), "NaN"),
        ("\ud800", "surrogate"),
        (lambda: 1, "JSON cannot hold a function"),
    ],
    ids=["large", "object", "nan", "surrogate", "function"],
)
def test_result_that_cannot_be_kept_is_acked_with_the_reason(queue, consumer, work_until, answer, why):
    consumer.handler(queue, **KEEP)(lambda body: answer)
    id = queue.publish("x").id

    work_until(Acked)

    status = queue.status(id)
    assert (status.state, status.result, status.attempt) == ("acked", None, 1)
    assert status.error.startswith("the result ")
    assert why in status.error


def test_handler_without_keep_stores_nothing(queue, consumer, work_until, client):
    consumer.handler(queue)(lambda body: 7)
    receipt = queue.publish("x")

    work_until(Acked)

    assert receipt.state() == Status("gone")
    assert client.keys("*:result:*") == []


def test_result_expires_after_keep(queue, consumer, work_until, client):
    consumer.handler(queue, keep=timedelta(hours=1))(lambda body: 7)
    id = queue.publish("x").id

    work_until(Acked)

    assert 3_590_000 < client.pttl(queue.keys.result(id)) <= 3_600_000
    client.delete(queue.keys.result(id))
    assert queue.status(id) == Status("gone")


def test_observers_and_history_see_a_kept_result_as_an_ack(make_queue, consumer, work_until, recorder, url):
    queue = make_queue(keep_completed=5)
    consumer.handler(queue, **KEEP)(lambda body: 7)
    id = queue.publish("x").id

    work_until(Acked)

    assert [(event.outcome, event.failed) for event in recorder.of(Handled)] == [("ack", False)]
    assert [end.kind for end in Admin(url).show(queue.name, id).ends] == ["acked"]
    assert queue.counts().totals["acked"] == 1
    assert queue.counts().missing == 0


def test_late_and_repeated_acks_do_not_replace_a_result(queue, caller):
    receipt = queue.publish("x")
    late = claimed_of(queue, caller)
    holder = msgspec.structs.replace(late, nonce="b.9:60000")
    assert acked(queue, caller, holder, "2").lost == (receipt.id,)
    assert receipt.state().state == "running"

    assert acked(queue, caller, late).lost == ()
    assert acked(queue, caller, late, "2").lost == (receipt.id,)

    assert receipt.state() == Status("acked", 1, attempt=1)


def test_results_of_a_batch_belong_to_their_messages(queue, caller):
    """A receipt in the middle that is not valid must not shift the results."""
    ids = [queue.publish("x").id for _ in range(3)]
    some = caller.run(claim(queue.keys, CallNumber("a", 1), limit=3, lease_ms=60_000)).claimed
    some[1] = msgspec.structs.replace(some[1], nonce="b.9:60000")

    caller.run(ack(queue.keys, [(one, None) for one in some], results=["0 1 0", "0 1 1", "0 1 2"], keep_ms=60_000))

    assert [queue.status(id).result for id in ids] == [0, None, 2]
    assert queue.status(ids[1]).state == "running"


@pytest.fixture
def at_maxmemory(client):
    """Let Redis refuse writes that need memory."""
    used = client.info("memory")["used_memory"]

    def make():
        client.config_set("maxmemory", used // 2)

    yield make
    client.config_set("maxmemory", 0)


def test_results_refused_at_maxmemory_are_dropped_and_counted(queue, caller, at_maxmemory):
    ids = [queue.publish("x").id for _ in range(3)]
    some = caller.run(claim(queue.keys, CallNumber("a", 1), limit=3, lease_ms=60_000)).claimed
    at_maxmemory()

    call = ack(queue.keys, [(one, None) for one in some], results=["0 1 7"] * 3, keep_ms=60_000)
    assert caller.run(call).lost == ()

    assert [queue.status(id) for id in ids] == [Status("gone")] * 3
    totals = queue.counts().totals
    assert (totals["acked"], totals["results_dropped"]) == (3, 3)
    assert queue.counts().missing == 0


def test_dead_job_has_its_error_and_backoff_before(queue, consumer, start, gate):
    @consumer.handler(queue, backoff=wait_fixed(60), **KEEP)
    def handle(body, job):
        if job.attempt == 2:
            raise Reject(reason="no such account")
        raise ValueError("timed out")

    receipt = queue.publish("x")
    start()
    status = eventually(lambda: (now := receipt.state()).state == "backoff" and now, "the job failed")
    assert (status.attempt, status.result) == (1, None)
    assert status.error.startswith("failed: ValueError: timed out (at test_results.py:")

    run_transition(queue, "reclaim", clock=time.time_ns() // 1000 + 61_000_000)
    eventually(lambda: receipt.state().state == "dead" and queue.counts().dead, "the letter is written")

    assert receipt.state() == Status("dead", error="rejected: no such account", attempt=2)


def test_garbage_is_dead_before_its_letter_is_written(queue, caller):
    id = queue.publish("x", retries=0).id
    claimed = claimed_of(queue, caller)
    caller.run(transitions.nack(queue.keys, [(claimed, 0, "rejected 1 why", b"value")]))

    assert queue.counts().garbage == 1
    assert queue.status(id) == Status("dead", error="rejected: why", attempt=1)


def test_scheduled_cancelled_purged_and_expired_messages(queue, caller, client, url):
    scheduled = queue.publish("x", delay=60)
    assert scheduled.state() == Status("pending", attempt=0)
    queue.cancel(scheduled.id)
    assert scheduled.state().state == "cancelled"

    cancelled = queue.publish("x")
    queue.cancel(cancelled.id)
    assert cancelled.state().state == "cancelled"  # its id is still in the list
    purged = queue.publish("x")
    Admin(url).purge(queue.name, "ready")
    assert purged.state().state == "purged"

    expired = queue.publish("x")
    claimed = claimed_of(queue, caller)
    client.delete(queue.keys.msg(expired.id))
    assert expired.state().state == "running"
    caller.run(ack(queue.keys, [(claimed, None)], kind="expired"))
    assert expired.state().state == "expired"
    assert queue.status("never-published") == Status("gone")


def test_earlier_life_of_a_chosen_id_never_gives_its_result(queue, caller):
    first = queue.publish("x", id="one", dedup=0)
    acked(queue, caller, claimed_of(queue, caller), life=first._message.life)
    assert first.state() == queue.status("one") == Status("acked", 1, attempt=1)

    eventually(lambda: time.time_ns() // 1_000_000 > first._message.life, "the next millisecond")
    second = queue.publish("x", id="one", dedup=0)
    assert second
    assert queue.status("one").state == "ready"
    claimed = claimed_of(queue, caller, 2)
    caller.run(transitions.nack(queue.keys, [(claimed, 0, "rejected 1 why", b"value")]))
    caller.run(transitions.collect(queue.keys, ["one"], dead_letter_limit=9, letters_ms=10**9))
    assert queue.status("one").state == second.state().state == "dead"

    third = queue.publish("x", id="one", dedup=0)
    caller.run(ack(queue.keys, [(claimed_of(queue, caller, 3), None)]))  # by a handler that keeps nothing
    assert third.state().result is None


def test_receipt_ignores_the_result_of_an_earlier_life_whose_end_is_forgotten(queue, caller, client):
    first = queue.publish("x", id="one", dedup=0)
    acked(queue, caller, claimed_of(queue, caller), life=first._message.life)
    eventually(lambda: time.time_ns() // 1_000_000 > first._message.life, "the next millisecond")
    second = queue.publish("x", id="one", dedup=0)

    caller.run(ack(queue.keys, [(claimed_of(queue, caller, 2), None)]))

    assert first.state() == queue.status("one") == Status("acked", 1, attempt=1)
    assert second.state() == Status("gone")


def test_redriven_job_has_the_result_of_its_later_end(queue, consumer, start):
    @consumer.handler(queue, **KEEP)
    def handle(body, job):
        if not done:
            done.append(job.id)
            raise Reject(reason="no")
        return "done"

    done = []
    receipt = queue.publish("x")
    start()
    (letter,) = eventually(queue.dead_letters, "the letter is written")
    assert receipt.state().state == "dead"

    queue.redrive([letter])

    assert eventually(lambda: receipt.state().result, "the job is done") == "done"


def test_ends_with_a_wrong_type_do_not_hold_up_an_ack(queue, caller, client):
    queue.publish("x")
    claimed = claimed_of(queue, caller)
    client.set(queue.keys.ends, "of another program")

    assert acked(queue, caller, claimed).lost == ()

    assert queue.counts().unack == 0


def test_progress_is_stored_within_a_second_and_kept_over_deliveries(queue, consumer, start, gate, url):
    @consumer.handler(queue, backoff=wait_fixed(60), **KEEP)
    def handle(body, job):
        job.progress(0.25)
        job.progress(0.4, 'page 40\nof "100"')
        gate.pass_through()
        raise Nack

    receipt = queue.publish("x")
    start()
    gate.wait_for()
    status = eventually(lambda: (now := receipt.state()).progress and now, "Redis has the progress")
    assert status == Status("running", progress=0.4, note='page 40 of "100"', attempt=1)
    view = Admin(url).show(queue.name, receipt.id)
    assert (view.progress, view.note, view.cursor) == (0.4, status.note, None)

    gate.open()
    status = eventually(lambda: (now := receipt.state()).state == "backoff" and now, "the job failed")
    assert (status.progress, status.note) == (0.4, 'page 40 of "100"')


def test_progress_of_a_short_job_is_stored_with_its_failure(queue, consumer, start):
    @consumer.handler(queue, backoff=wait_fixed(60))
    def handle(body, job):
        job.progress(1, "x" * 999)
        raise Nack

    id = queue.publish("x").id
    start()
    status = eventually(lambda: (now := queue.status(id)).state == "backoff" and now, "the job failed")
    assert (status.progress, status.note) == (1.0, "x" * 200)


def test_reports_are_stored_at_most_once_a_second(queue, consumer, caller, inflight_of, monkeypatch):
    clock = SimpleNamespace(now=time.monotonic())
    monkeypatch.setattr("reliq.worker.settler.time", SimpleNamespace(monotonic=lambda: clock.now))
    consumer.handler(queue)(lambda body: None)
    id = queue.publish("x").id
    (held,) = deliveries_of([claimed_of(queue, caller)], consumer.handlers[0], time.monotonic())
    inflight = inflight_of()
    inflight.add([held])
    renewer = Renewer(caller, consumer.handlers, inflight, SimpleNamespace(watch=lambda now: []), lambda *_: None)

    def report(note):
        held.checkpoint = 0, encoded_checkpoint(0, 0, None, f"0.5 {note}"), 0, None
        renewer.step()
        return queue.status(id).note

    assert [report("first"), report("second")] == ["first", "first"]
    clock.now += CHECKPOINT_SECONDS
    assert report("third") == "third"
    assert not held.unsaved


@pytest.mark.parametrize("fraction", [-0.1, 1.01, "half", True, float("nan"), None])
def test_bad_fraction_is_refused_by_name(queue, consumer, work_until, fraction):
    errors = []

    @consumer.handler(queue)
    def handle(body, job):
        with pytest.raises(ConfigurationError, match="progress must be a number from 0 to 1, not") as caught:
            job.progress(fraction)
        errors.append(caught.value)

    queue.publish("x")
    work_until(Acked)
    assert len(errors) == 1


def test_progress_keeps_cursor_and_numbers_of_follow_ups(queue, make_queue, consumer, work_until):
    """A follow-up after the last checkpoint is published again with its number, whatever progress was reported."""
    mails, sent, cursors = make_queue("mails"), [], []

    @consumer.handler(queue, backoff=wait_fixed(0))
    def handle(body, job):
        cursors.append(job.cursor)
        for item in job.resume([1, 2, 3]):
            sent.append(job.publish(mails, str(item)).id)
            job.progress(item / 3)
            if len(sent) == 2:
                raise ValueError

    queue.publish("x")
    work_until(Acked)

    assert cursors == [None, 1]
    assert [id.rpartition(".")[2] for id in sent] == ["1", "2", "2", "3"]
    assert mails.counts().ready == 3


def test_progress_proves_no_survival_and_a_later_checkpoint_does(queue, caller):
    queue.publish("x")
    (claimed,) = caller.run(claim(queue.keys, CallNumber("dead", 1), limit=1, lease_ms=1)).claimed
    eventually(lambda: run_transition(queue, "reclaim").overdue, "the lease has expired")
    claimed = claimed_of(queue, caller)
    assert claimed.deaths == 1
    word = lambda: caller.run(commands.state_words(queue.keys, [claimed.id]))[0]  # noqa: E731

    caller.run(checkpoint(queue.keys, [(claimed, 0, encoded_checkpoint(0, 0, None, "0.5 half"))]))
    assert word().deaths == 1
    assert queue.status(claimed.id).note == "half"
    caller.run(checkpoint(queue.keys, [(claimed, 1, encoded_checkpoint(1, 0, 7, "0.5 half"))]))

    assert word().deaths == 0


def test_header_with_progress_holds_cursor_and_report():
    saved = msgspec.json.decode(encoded_checkpoint(3, 2, {"row": "a\nb"}, "0.5 a b"))
    header = Header(saved=saved)
    assert header.checkpoint == (3, 2, {"row": "a\nb"})
    assert header.progress == (0.5, "a b")
    assert Header(saved="of another program").progress == (None, "")


def test_message_of_a_go_layout_has_no_result_status_or_progress(make_queue, consumer, work_until):
    queue = make_queue(layout=Layout.hdt3213())
    with pytest.raises(ConfigurationError, match="layout hdt3213 keeps no results; leave out `keep`"):
        consumer.handler(queue, **KEEP)(lambda body: 7)
    receipt = queue.publish("x")
    with pytest.raises(ConfigurationError, match="layout hdt3213 has no status of a message"):
        receipt.state()

    @consumer.handler(queue)
    def handle(body, job):
        with pytest.raises(ConfigurationError, match="checkpoint or progress: its body has no envelope"):
            job.progress(0.5)

    work_until(Acked)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"keep": 0}, "keep must be 1 to"),
        ({"keep": "1h"}, "keep must be seconds or a timedelta"),
        ({"keep": 60, "batch": 5}, "leave out either keep or batch"),
    ],
)
def test_bad_keep_is_refused_by_name(options, why):
    with pytest.raises(ConfigurationError, match=why):
        HandlerSettings(**options)


def test_bad_id_is_refused_by_name(queue):
    with pytest.raises(ConfigurationError, match="id must be"):
        queue.status("a b")


def test_tasks_have_typed_results_and_their_own_keep(url, start, recorder):
    app = Tasks("default", url=url, observers=[recorder])

    @app.task(keep=3600)
    def report(pages: int) -> Report:
        return Report(pages)

    @app.task
    async def forget(pages: int) -> Report:
        return Report(pages)

    @app.task(keep=60)
    async def text(job: Job) -> str:
        return job.id

    receipts = [report.publish(3), forget.publish(4), text.publish()]
    start(app)
    recorder.wait_for(Acked, 3)

    assert report.of(receipts[0].id).status() == Status("acked", Report(3), attempt=1)
    assert asyncio.run(report.of(receipts[0].id).astatus()).result == Report(3)
    assert receipts[0].state().result == {"pages": 3}
    assert receipts[1].state() == Status("gone")
    assert text.of(receipts[2].id).status().result == receipts[2].id
    with pytest.raises(ConfigurationError, match="id must be"):
        text.of("a b").status()


def test_task_whose_result_type_json_cannot_hold_is_refused_by_name(url):
    app = Tasks("default", url=url)

    @app.task
    def connect() -> Queue: ...

    with pytest.raises(ConfigurationError, match="Queue cannot be read from JSON"):
        connect.of("one")


def test_receipt_is_copied_and_pickled_without_its_queue(queue):
    receipt = queue.publish("x", id="one")
    for other in (copy.copy(receipt), copy.deepcopy(receipt), pickle.loads(pickle.dumps(receipt))):
        assert other == receipt
        with pytest.raises(
            ConfigurationError, match=r"message 'one' is a copy without its queue: call Queue.status\('one'\)$"
        ):
            other.state()
        with pytest.raises(ConfigurationError, match="is a copy without its queue"):
            asyncio.run(other.astate())


def test_message_key_and_result_live_together(make_queue, consumer, work_until):
    queue = make_queue(per_key=1)
    consumer.handler(queue, **KEEP)(lambda body: body)
    receipts = [queue.publish(body, key="tenant") for body in "abc"]
    assert receipts[0].state() == Status("ready", attempt=0)

    work_until(Acked, 3)

    assert [receipt.state().result for receipt in receipts] == ["a", "b", "c"]


def test_status_is_found_after_the_queue_has_grown_and_shrunk(queue, consumer, url, start, recorder):
    consumer.handler(queue, **KEEP)(lambda body: body)
    ids = [f"id-{number}" for number in range(8)]
    for id in ids:
        queue.publish(id, id=id)
    start()
    recorder.wait_for(Acked, 8)
    consumer.stop()
    Admin(url).resize(queue.name, 4)
    Admin(url).finish_resize(queue.name)
    waiting = [queue.publish(f"new-{number}", id=f"new-{number}") for number in range(4)]

    assert [queue.status(id).result for id in ids] == ids
    assert {receipt.state().state for receipt in waiting} == {"ready"}
    assert queue.status("never") == Status("gone")
    start()
    recorder.wait_for(Acked, 12)
    consumer.stop()
    Admin(url).resize(queue.name, 1)
    Admin(url).finish_resize(queue.name)

    assert [receipt.state().result for receipt in waiting] == [f"new-{number}" for number in range(4)]
    queue.connection().maps.clear()  # as in a new process
    assert [Queue(queue.name, str, url=url).status(id).result for id in ids] == ids
    assert queue.status("never") == Status("gone")


def test_drain_of_the_test_kit_keeps_results(redis_server, consumer, make_queue):
    queue = make_queue()
    consumer.handler(queue, **KEEP)(lambda body: {"did": body})

    with isolated(f"redis://127.0.0.1:{redis_server.port}/7") as kit:
        receipt = queue.publish("x")
        later = queue.publish("y", id="later", delay=60, dedup=0)
        kit.drain(consumer, scheduled=True)
        assert receipt.state() == Status("acked", {"did": "x"}, attempt=1)
        assert later.state().result == {"did": "y"}
        kit.travel(1000)
        assert queue.publish("y", id="later", delay=60, dedup=0)
        assert queue.status("later").state == "pending"
        queue.cancel("later")
        assert queue.status("later").state == "cancelled"


JOBS = """
import os
from reliq import Consumer

consumer = Consumer()


@consumer.handler("killed", lease=0.5, keep=3600)
def handle(body, job):
    run = [os.getpid(), job.token]
    if body.get("kills") and job.attempt == 1:
        os.kill(os.getpid(), 9)
    return run
"""


def test_each_job_of_killed_workers_that_is_acked_has_a_result(url, tmp_path, client):
    """Some handlers kill their process: acked jobs and results are the same, whatever ran beside them."""
    (tmp_path / "killing.py").write_text(JOBS)
    queue = Queue("killed", url=url)
    queue.publish_many([{"kills": number % 100 == 50} for number in range(300)])
    words = ("worker", "killing:consumer", "--processes", "2")
    command = Command(tmp_path, environment_for(tmp_path, url), *words, change=AT_ONCE)
    try:
        eventually(lambda: not queue.counts().alive, "all jobs have ended")
    finally:
        command.stop()
        command.close()

    ids = [key.decode().rpartition(":")[2] for key in client.keys("*:result:*")]
    found = [queue.status(id) for id in ids]
    assert queue.counts().totals["acked"] == len(ids) == 300
    assert all(len(status.result) == 2 for status in found)
    assert sum(status.attempt > 1 for status in found) >= 3  # the killed jobs, at least


def test_check_and_account_are_sound_with_results(queue, consumer, work_until, url):
    consumer.handler(queue, **KEEP)(lambda body: 7)
    receipt = queue.publish("x")
    work_until(Acked)

    report = Admin(url).check(queue.name, repair=True)

    assert report.is_sound
    assert report.faults == ()
    assert receipt.state().result == 7
