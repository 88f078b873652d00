"""Checkpoints: the next delivery of a job goes on where the last delivery has got to."""

import asyncio
import math
import time
import uuid
from contextlib import nullcontext
from functools import reduce
from types import SimpleNamespace

import msgspec
import pytest
from lost_scripts import lose
from tenacity import wait_fixed
from transition import run_transition
from waiting import eventually

from reliq import Admin, ConfigurationError, JobInterrupted, Layout, Nack, Reject, Snooze
from reliq.errors import RedisUnavailableError
from reliq.events import Acked, Nacked, Released
from reliq.handlers.settlement import HandlerOutcome
from reliq.lua.transitions import CallNumber, checkpoint, claim, release
from reliq.message import Header
from reliq.testing import isolated
from reliq.wire_format import encoded_checkpoint
from reliq.worker.settler import Renewer, Settler
from reliq.worker.slots import deliveries_of

ITEMS = list(range(10))


@pytest.fixture
def walk(queue, consumer):
    """A handler that walks over ten items and fails once at item 4 with the given outcome; return what it did."""

    def make(outcome, **options):
        done = []

        @consumer.handler(queue, backoff=wait_fixed(0), **options)
        def handle(body, job):
            for item in job.resume(ITEMS):
                if item == 4 and len(done) == 4:
                    done.append("failed")
                    raise outcome
                done.append(item)

        return done

    return make


@pytest.mark.parametrize(
    "outcome", [ValueError("no"), Nack(delay=0), Snooze(delay=0.001)], ids=["raises", "nack", "snooze"]
)
def test_next_delivery_goes_on_at_the_item_that_failed(queue, walk, work_until, outcome):
    done = walk(outcome)
    queue.publish("x")

    work_until(Acked)

    assert done == [0, 1, 2, 3, "failed", 4, 5, 6, 7, 8, 9]


def test_stop_interrupts_at_a_checkpoint_and_spends_no_retry(no_returns, queue, consumer, start, recorder, gate):
    done, lefts = [], []

    @consumer.handler(queue)
    def handle(body, job):
        lefts.append(job.retries_left)
        for item in job.resume(ITEMS):
            if item == 3 and len(lefts) == 1:
                gate.pass_through()
                eventually(lambda: job.stopping, "the worker stops")
            done.append(item)

    queue.publish("x")
    start()
    gate.wait_for()
    gate.open()
    consumer.stop()
    assert len(recorder.ids(Released)) == 1

    start()
    recorder.wait_for(Acked)

    assert done == ITEMS
    assert lefts == [12, 12]


def test_dead_letter_and_redrive_keep_the_cursor(make_queue, consumer, start, recorder):
    queue = make_queue("short", retries=0)
    seen = []

    @consumer.handler(queue)
    def handle(body, job):
        seen.append(job.cursor)
        job.checkpoint({"page": len(seen)})
        if len(seen) == 1:
            raise ValueError

    queue.publish("x" * 3000)
    start()
    (letter,) = eventually(queue.dead_letters, "the letter is written")
    assert letter.header.checkpoint == (1, 0, {"page": 1})
    assert letter.payload == b"x" * 3000

    queue.redrive([letter])
    recorder.wait_for(Acked)

    assert seen == [None, {"page": 1}]


def test_follow_ups_keep_their_numbers_over_a_resumed_delivery(queue, make_queue, consumer, work_until):
    mails = make_queue("mails")
    failed = []

    @consumer.handler(queue, backoff=wait_fixed(0))
    def handle(body, job):
        for item in job.resume(ITEMS):
            if item == 5 and not failed:
                failed.append(item)
                raise ValueError
            job.publish(mails, str(item))

    queue.publish("x")
    work_until(Acked)

    assert mails.counts().totals["published"] == len(ITEMS)


def test_checkpoint_restarts_the_timeout(queue, consumer, work_until):
    @consumer.handler(queue, timeout=0.5)
    async def handle(body, job):
        for _ in range(12):
            await asyncio.sleep(0.1)
            job.checkpoint(None)

    queue.publish("x")
    work_until(Acked)


def test_running_job_is_stored_within_a_second(queue, consumer, hold_at, client):
    id, gate = hold_at({"row": 7})

    eventually(lambda: b'"~":"1 0 {\\"row\\":7}"' in client.get(queue.keys.msg(id)), "Redis has the cursor")
    gate.open()


@pytest.fixture
def hold_at(queue, consumer, start, gate):
    """Start a job that makes one checkpoint and then waits."""

    def make(cursor):
        @consumer.handler(queue)
        def handle(body, job):
            job.checkpoint(cursor)
            gate.pass_through()

        id = queue.publish("x").id
        start()
        gate.wait_for()
        return id, gate

    return make


def test_cursor_of_five_deaths_that_advanced_is_no_suspect(queue, caller):
    queue.publish("x", retries=9)
    for death in range(7):
        number = CallNumber("dead", death + 1)
        (claimed,) = caller.run(claim(queue.keys, number, limit=1, lease_ms=1)).claimed
        saved = encoded_checkpoint(death + 1, 0, death)
        assert caller.run(checkpoint(queue.keys, [(claimed, death + 1, saved)])).lost == ()
        eventually(lambda: run_transition(queue, "reclaim").overdue, "the lease has expired")
        assert claimed.deaths <= 1
    assert queue.counts().retry == 1


def test_late_and_older_checkpoints_change_nothing(queue, caller, client):
    id, run = queue.publish("x").id, caller.run
    (claimed,) = run(claim(queue.keys, CallNumber("a", 1), limit=1, lease_ms=60_000)).claimed
    run(checkpoint(queue.keys, [(claimed, 2, encoded_checkpoint(2, 0, "second"))]))
    run(checkpoint(queue.keys, [(claimed, 1, encoded_checkpoint(1, 0, "first"))]))
    late = msgspec.structs.replace(claimed, nonce="b.9:60000")
    assert run(checkpoint(queue.keys, [(late, 9, encoded_checkpoint(9, 0, "late"))])).lost == (id,)
    assert b"second" in client.get(queue.keys.msg(id))
    assert not {b"first", b"late"} & set(client.get(queue.keys.msg(id)).split(b'\\"'))


BAD_CURSORS = {
    "object": object(),
    "large": "x" * 5000,
    "class": float,
    "nan": [float("nan")],
    "uuid": uuid.UUID(int=7),
    "surrogate": "\ud800",
    "deep": reduce(lambda inner, _: [inner], range(5000), 7),
}


@pytest.mark.parametrize("cursor", BAD_CURSORS.values(), ids=BAD_CURSORS)
def test_bad_cursor_is_refused_by_name(queue, consumer, work_until, cursor):
    errors = []

    @consumer.handler(queue)
    def handle(body, job):
        with pytest.raises(ConfigurationError, match="a cursor must be") as caught:
            job.checkpoint(cursor)
        errors.append(caught.value)

    queue.publish("x")
    work_until(Acked)
    assert len(errors) == 1


def test_message_of_a_go_layout_has_no_checkpoint(make_queue, consumer, work_until):
    queue = make_queue(layout=Layout.hdt3213())

    @consumer.handler(queue)
    def handle(body, job):
        with pytest.raises(ConfigurationError, match="no envelope"):
            job.checkpoint(1)

    queue.publish("x")
    work_until(Acked)


def test_cancelled_job_ends_at_its_next_checkpoint(queue, hold_at, consumer, gate):
    ended = []

    @consumer.handler(queue)
    def handle(body, job):
        job.checkpoint(1)
        gate.pass_through()
        eventually(lambda: job.cancelled, "the renewal brings the cancellation")
        try:
            job.checkpoint(2)
        except JobInterrupted as error:
            ended.append(str(error))
            raise

    id = queue.publish("x").id
    consumer.start()
    gate.wait_for()
    queue.cancel(id)
    gate.open()
    eventually(lambda: ended, "the job is interrupted")
    consumer.stop()
    assert "cancelled" in ended[0]
    assert queue.counts().alive == 0


#: A text that would end the header, or look like its last field, if it was not escaped.
HOSTILE = 'a"}\n}\n,"~":"9 9 9"\u2028\\é\x00'


@pytest.mark.parametrize(
    "body", [b"", b"}\n" + HOSTILE.encode(), bytes(range(256)) * 4096], ids=["empty", "hostile", "1 MiB"]
)
def test_cursor_and_body_survive_any_text(make_queue, consumer, work_until, client, body):
    queue, seen = make_queue("bytes", bytes, max_body=2**21, retries=9), []

    @consumer.handler(queue, backoff=wait_fixed(0))
    def handle(found, job):
        assert (found, job.headers) == (body, {"trace": HOSTILE})
        seen.append(job.cursor)
        if len(seen) <= len(CURSORS):
            job.checkpoint("to be overwritten")
            job.checkpoint(CURSORS[len(seen) - 1])
            raise Nack(delay=0)

    id = queue.publish(body, headers={"trace": HOSTILE}, ttl=3600).id
    work_until(Acked)

    assert seen == [None, *CURSORS]
    assert not client.exists(queue.keys.msg(id))


CURSORS = [0, False, 2**70, 1.5, "", HOSTILE, [HOSTILE] * 20, {HOSTILE: None}]


def test_body_with_a_checkpoint_expires_as_before(queue, caller, client):
    id = queue.publish("x", ttl=60).id
    (claimed,) = caller.run(claim(queue.keys, CallNumber("a", 1), limit=1, lease_ms=60_000)).claimed
    before = client.pttl(queue.keys.msg(id))

    caller.run(checkpoint(queue.keys, [(claimed, 1, encoded_checkpoint(1, 0, 7))]))

    assert 0 < client.pttl(queue.keys.msg(id)) <= before


@pytest.mark.parametrize(
    "value",
    [b"", b"no envelope}\n", b'RELIQ/1 {"d":1,"r":1} \n{"a":{}}\n', b'RELIQ/1 {"d":1,"r":1}' + b" " * 20_000 + b"}\n"],
    ids=["gone", "bare", "space", "long"],
)
def test_value_of_another_program_is_left_as_it_is(queue, caller, client, value):
    id = queue.publish("x").id
    (claimed,) = caller.run(claim(queue.keys, CallNumber("a", 1), limit=1, lease_ms=60_000)).claimed
    client.set(queue.keys.msg(id), value) if value else client.delete(queue.keys.msg(id))

    assert caller.run(checkpoint(queue.keys, [(claimed, 1, encoded_checkpoint(1, 0, 7))])).lost == ()

    assert (client.get(queue.keys.msg(id)) or b"") == value


@pytest.mark.parametrize("saved", ["", "1", "1 0", "x 0 7", "1 0 {", "1 0 " + "[" * 12_000, "9" * 5000 + " 0 7"])
def test_checkpoint_of_another_program_is_ignored(saved):
    assert Header(saved=saved).checkpoint == (0, 0, None)


def test_checkpoint_is_stored_before_a_failure_when_redis_has_not_cached_its_script(
    queue, consumer, client, work_until
):
    seen = []

    @consumer.handler(queue, backoff=wait_fixed(0))
    def handle(body, job):
        seen.append(job.cursor)
        if len(seen) == 1:
            lose(client, "checkpoint")
            job.checkpoint(7)
            raise ValueError

    queue.publish("x")
    work_until(Acked)

    assert seen == [None, 7]


@pytest.fixture
def stepped(queue, consumer, caller, inflight_of):
    """Claim a message, make a checkpoint, and return the delivery and a renewer whose steps the test runs."""

    def make(deaths=0):
        consumer.handler(queue)(lambda body: None)
        queue.publish("x")
        (claimed,) = caller.run(claim(queue.keys, CallNumber("a", 1), limit=1, lease_ms=60_000)).claimed
        claimed = msgspec.structs.replace(claimed, deaths=deaths)
        (held,) = deliveries_of([claimed], consumer.handlers[0], time.monotonic())
        held.started, held.checkpoint = True, (1, encoded_checkpoint(1, 0, 7), 0, 7)
        inflight = inflight_of()
        inflight.add([held])
        loop = SimpleNamespace(watch=lambda now: [])
        return held, Renewer(caller, consumer.handlers, inflight, loop, lambda *_: None)

    return make


def test_refused_checkpoint_does_not_delay_renewals(queue, stepped, client):
    held, renewer = stepped()
    client.delete(queue.keys.msg(held.delivery.id))
    client.rpush(queue.keys.msg(held.delivery.id), "of a wrong type")

    renewer.step()
    assert held.unsaved
    held.renew_at = 0.0
    renewer.step()

    assert held.renew_at > time.monotonic()
    assert not renewer.is_behind(queue.keys)


@pytest.mark.parametrize("is_cluster", [False, True], ids=["raised", "answered"])
def test_outcome_is_not_sent_while_its_checkpoint_cannot_be_stored(queue, stepped, client, caller, caplog, is_cluster):
    """A client raises the error of its only server; a client of a Cluster returns it as the answer."""
    held, renewer = stepped()
    settler = Settler(caller, renewer._inflight, lambda: None)
    settler.settle([held], HandlerOutcome("nack", delay_ms=60_000))
    away, sent = RedisUnavailableError("away", maybe_ran=True), []

    def run_all(calls):
        sent.append(calls)
        if not is_cluster:
            raise away
        return [away] * len(calls)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(caller, "run_all", run_all)
        with nullcontext() if is_cluster else pytest.raises(RedisUnavailableError):
            settler.step()
    assert [len(calls) for calls in sent if calls] == [1]
    assert not held.tried
    assert "checkpoint" not in caplog.text

    while renewer._inflight.deliveries():
        settler.step()
    assert queue.counts().totals["nacked"] == 1
    assert b'"~":"1 0 7"' in client.get(queue.keys.msg(held.delivery.id))


def test_checkpoint_brings_the_cancellation(queue, stepped):
    held, renewer = stepped()
    queue.cancel(held.delivery.id)

    renewer.step()

    assert held.cancelled


@pytest.mark.parametrize("deaths", [0, 1])
def test_only_the_first_checkpoint_of_a_suspect_is_stored_at_once(stepped, deaths):
    """A job that is killed in its first second again and again must not be buried as a suspect."""
    held, renewer = stepped(deaths)
    renewer._saved_at = math.inf  # checkpoints of other jobs are not due

    renewer.step()
    assert held.unsaved == (deaths == 0)
    held.checkpoint = 2, encoded_checkpoint(2, 0, 8), 0, 8
    renewer.step()

    assert held.unsaved


def test_suspect_with_a_checkpoint_is_released_as_no_suspect(queue, caller):
    queue.publish("x")
    for number in (1, 2):
        call = claim(queue.keys, CallNumber("dead", number), limit=1, lease_ms=1 if number == 1 else 60_000)
        (claimed,) = caller.run(call).claimed
        if number == 1:
            eventually(lambda: run_transition(queue, "reclaim").overdue, "the lease has expired")
    assert claimed.deaths == 1

    caller.run(checkpoint(queue.keys, [(claimed, 1, encoded_checkpoint(1, 0, 7))]))
    assert caller.run(release(queue.keys, [claimed])).lost == ()

    (claimed,) = caller.run(claim(queue.keys, CallNumber("dead", 3), limit=1, lease_ms=60_000)).claimed
    assert claimed.deaths == 0


def test_checkpoint_does_not_shorten_an_extended_timeout(queue, consumer, work_until):
    @consumer.handler(queue, timeout=0.3)
    async def handle(body, job):
        job.extend_timeout(60)
        job.checkpoint(1)
        await asyncio.sleep(0.6)

    queue.publish("x")
    work_until(Acked)


def test_error_hook_sees_the_cursor_of_the_failed_delivery(queue, consumer, work_until):
    seen = []

    @consumer.on_error
    def note(job, error, final):
        seen.append(job.cursor)

    @consumer.handler(queue)
    def handle(body, job):
        job.checkpoint("row 7")
        raise ValueError

    queue.publish("x")
    work_until(Nacked)

    assert seen == ["row 7"]


def test_each_job_of_a_batch_has_its_own_cursor(queue, consumer, work_until):
    seen = {}

    @consumer.handler(queue, batch=2, linger=30, backoff=wait_fixed(0))
    def handle(bodies, jobs):
        for body, job in zip(bodies, jobs, strict=True):
            seen.setdefault(body, []).append(job.cursor)
            job.checkpoint(body)
        return [Nack(delay=0) if len(seen[body]) == 1 else None for body in bodies]

    queue.publish_many(["a", "b"])
    work_until(Acked, 2)

    assert seen == {"a": [None, "a"], "b": [None, "b"]}


def test_cursor_moves_with_its_message_to_another_shard(queue, consumer, client, url, start, recorder):
    seen = {}

    @consumer.handler(queue, backoff=wait_fixed(0))
    def handle(body, job):
        seen.setdefault(body, []).append(job.cursor)
        job.checkpoint(body)
        if len(seen[body]) == 1:
            raise Snooze(delay=60)

    queue.publish_many([str(number) for number in range(8)])
    start()
    eventually(lambda: queue.counts().pending == 8, "all are snoozed")
    consumer.stop()
    Admin(url).resize(queue.name, 4)
    Admin(url).finish_resize(queue.name)
    for id in [id.decode() for keys in queue.shards() for id in client.zrange(keys.pending, 0, -1)]:
        queue.reschedule(id, delay=0)
    start()
    recorder.wait_for(Acked, 8)

    assert seen == {str(number): [None, str(number)] for number in range(8)}
    assert len(queue.shards()) == 4


def test_message_that_moves_to_another_queue_begins_anew(queue, make_queue, consumer, url, start, recorder):
    other, seen = make_queue("other"), []

    @consumer.handler(other)
    def handle(body, job):
        seen.append(job.cursor)

    @consumer.handler(queue)
    def walk(body, job):
        job.checkpoint(7)
        raise Reject(reason="wrong queue")

    queue.publish("x")
    start()
    eventually(queue.dead_letters, "the letter is written")
    Admin(url).redrive(queue.name, to="other")
    recorder.wait_for(Acked)

    assert seen == [None]


def test_drain_of_the_test_kit_goes_on_at_the_cursor(redis_server, consumer, make_queue):
    queue, done = make_queue(), []

    @consumer.handler(queue, backoff=wait_fixed(60))
    def handle(body, job):
        for item in job.resume(ITEMS):
            if item == 4 and job.attempt == 1:
                raise ValueError
            done.append(item)

    with isolated(f"redis://127.0.0.1:{redis_server.port}/7") as kit:
        queue.publish("x")
        kit.drain(consumer, scheduled=True, fail_fast=False)
        assert done == ITEMS
        done.clear()
        kit.perform(consumer, queue, "x", attempt=2)

    assert done == ITEMS
