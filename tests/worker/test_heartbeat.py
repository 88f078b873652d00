"""Each worker process says in one record who it is and what runs; the record goes with it."""

import os
import socket
import threading
import time

import pytest

from reliq import Queue, commands, stacks
from reliq.errors import RedisRefusedError, RedisUnavailableError
from reliq.keys import QUEUES_KEY, WORKERS_KEY, Layout
from reliq.roster import BEAT_SECONDS, RECORD_MS, SLOTS_LIMIT
from reliq.stacks import StackReport
from reliq.worker.fetcher import POLL_SECONDS, Fetcher
from reliq.worker.heartbeat import BEAT_AGAIN_SECONDS, Heartbeat
from reliq.worker.inflight import Inflight
from reliq.worker.scheduler import Scheduler
from reliq.worker.served import Served

PATIENCE_SECONDS = 30.0
#: Longer than any test.
NEVER_SECONDS = 3600.0


@pytest.fixture
def eventually():
    """Wait for a condition, and return what it answered."""

    def wait(condition):
        for _ in range(int(PATIENCE_SECONDS / 0.02)):
            if answer := condition():
                return answer
            threading.Event().wait(0.02)
        pytest.fail("this did not come")

    return wait


@pytest.fixture
def workers(caller):
    """The records of those who are alive."""

    def look():
        ids = caller.run(commands.worker_ids())
        return [one for one in caller.run_all(commands.worker_records(ids)) if one is not None]

    return look


def no_stacks():
    return StackReport(0.0, ())


@pytest.fixture
def heartbeat(caller, start):
    """A heartbeat beside an engine's own, whose steps the test makes."""

    def make(engine):
        return Heartbeat(caller, engine._served, engine.inflight, lambda: engine.last_claim_at, no_stacks)

    return make


def test_a_worker_that_starts_says_who_it_is(consumer, queue, start, workers, eventually, client):
    consumer.handler(queue)(lambda body: None)

    start(concurrency=3)

    (one,) = eventually(workers)
    assert (one.host, one.pid, one.queues, one.slots) == (socket.gethostname(), os.getpid(), ("q",), 3)
    assert one.started <= one.seen
    assert abs(one.last_claim - one.seen) < 60
    assert 0 < client.pttl(f"reliq:worker:{one.id}") <= RECORD_MS


def test_the_record_has_what_runs(consumer, queue, start, workers, gate, client, heartbeat):
    consumer.handler(queue)(lambda body: gate.pass_through())
    engine = start(concurrency=2)
    queue.publish("x", id="a")
    queue.publish("x", id="b")
    gate.wait_for(2)

    beat = heartbeat(engine)
    assert beat.step() == BEAT_SECONDS

    (one,) = [worker for worker in workers() if worker.id == beat._id]
    assert one.busy == 2
    assert {(slot.queue, slot.id, slot.attempt) for slot in one.running} == {("q", "a", 1), ("q", "b", 1)}
    assert all(one.started <= slot.started + 1 for slot in one.running)
    gate.open()


def test_a_record_names_a_bounded_number_of_handlers(consumer, queue, start, workers, gate, heartbeat):
    consumer.handler(queue)(lambda body: gate.pass_through())
    engine = start(concurrency=SLOTS_LIMIT + 3)
    queue.publish_many(["x"] * (SLOTS_LIMIT + 3))
    gate.wait_for(SLOTS_LIMIT + 3)

    beat = heartbeat(engine)
    beat.step()

    (one,) = [worker for worker in workers() if worker.id == beat._id]
    assert (one.busy, len(one.running)) == (SLOTS_LIMIT + 3, SLOTS_LIMIT)
    gate.open()


def test_a_clean_stop_takes_the_record_away(consumer, queue, start, workers, eventually, client):
    consumer.handler(queue)(lambda body: None)
    start()
    eventually(workers)

    consumer.stop()

    assert client.keys("reliq:worker*") == []


def test_who_was_killed_is_gone_when_its_record_expires_and_leaves_the_index(
    consumer, queue, start, workers, eventually, client
):
    client.zadd(WORKERS_KEY, {"killed": 1_700_000_000})
    consumer.handler(queue)(lambda body: None)

    start()

    (one,) = eventually(workers)
    eventually(lambda: client.zrange(WORKERS_KEY, 0, -1) == [one.id.encode()])


def test_a_record_that_is_none_of_ours_is_passed_over(workers, client):
    client.zadd(WORKERS_KEY, {"strange": 2_000_000_000})
    client.set("reliq:worker:strange", b"\xff not JSON")

    assert workers() == []


def test_a_worker_that_may_not_write_its_record_works_all_the_same(consumer, queue, start, recorder, client):
    client.set(WORKERS_KEY, "not a sorted set")
    consumer.handler(queue)(lambda body: None)
    start()

    queue.publish("x", id="m")

    from reliq.events import Acked

    recorder.wait_for(Acked)


def test_a_producer_names_its_queue_once(queue, client):
    queue.publish("x")
    first = client.hget(QUEUES_KEY, "q")
    client.hdel(QUEUES_KEY, "q")

    queue.publish("x")
    Queue("q", str, url=queue.target).publish("x")

    assert int(first) > 1_700_000_000
    assert client.hget(QUEUES_KEY, "q") is None


async def named_by_async_code(queue):
    await queue.apublish("x")
    await queue.aclose()


def test_async_producers_name_their_queue_too(make_queue, client):
    import asyncio

    asyncio.run(named_by_async_code(make_queue("async")))

    assert client.hkeys(QUEUES_KEY) == [b"async"]


def test_a_registry_that_cannot_be_written_stops_no_publish(make_queue, client):
    client.set(QUEUES_KEY, "not a hash")

    assert make_queue("other").publish("x").status == "published"


def test_a_queue_in_another_layout_is_named_with_its_layout(make_queue, consumer, start, eventually, workers, client):
    foreign = make_queue("go", bytes, layout=Layout.hdt3213())
    consumer.handler(foreign)(lambda body: None)
    consumer.handler(make_queue("ours"))(lambda body: None)
    start()

    foreign.publish(b"x")

    eventually(lambda: client.hexists(QUEUES_KEY, "ours"))
    assert sorted(client.hkeys(QUEUES_KEY)) == [b"hdt3213 go", b"ours"]


def test_the_record_of_an_idle_worker_goes_along_with_its_wait(consumer, queue, caller, workers, clock, monkeypatch):
    monkeypatch.setattr("reliq.worker.heartbeat.BEAT_SECONDS", NEVER_SECONDS)  # however slow this machine is
    consumer.handler(queue)(lambda body: None)
    inflight = Inflight(consumer.handlers, 16)
    beat = Heartbeat(caller, Served(consumer.handlers), inflight, time.monotonic, no_stacks)
    scheduler = Scheduler(caller, consumer.handlers, lambda: None)
    settle = lambda deliveries, outcome: None  # noqa: E731
    fetcher = Fetcher(caller, Served(consumer.handlers), inflight, scheduler, lambda deliveries: None, settle, beat)

    for _ in range(2):  # the first claim, and a second without a token
        fetcher.step()
    clock.now += POLL_SECONDS
    for _ in range(2):  # a look, and a wait that takes the record along
        fetcher.step()

    assert [one.id for one in workers()] == [beat._id]
    assert 0 < beat.step() < NEVER_SECONDS  # it need not write it itself
    assert beat.soon() == []


def test_a_request_for_stacks_goes_along_with_the_wait_of_an_idle_worker(consumer, queue, caller, client):
    consumer.handler(queue)(lambda body: None)
    woken = []
    beat = Heartbeat(caller, Served(consumer.handlers), Inflight(consumer.handlers, 16), time.monotonic, no_stacks)
    beat.wake = lambda: woken.append("heartbeat")
    caller.run_all(stacks.request(beat._id))

    caller.run_all(beat.soon())  # as the fetcher does, which reads no answer of these

    assert woken == ["heartbeat"]
    assert client.keys("reliq:stack*") == []
    beat.step()
    assert client.keys("reliq:stack*") == [f"reliq:stacks:{beat._id}".encode()]


def test_where_redis_refuses_to_tell_of_requests_the_record_is_written_all_the_same(consumer, queue, caller, workers):
    class OlderRule:
        def run_all(self, requests):
            answers = caller.run_all(requests)
            return [
                RedisRefusedError("no permission") if one.command[0] == "GETDEL" else answer
                for one, answer in zip(requests, answers, strict=True)
            ]

    beat = Heartbeat(OlderRule(), Served(consumer.handlers), Inflight(consumer.handlers, 16), time.monotonic, no_stacks)

    assert beat.step() == BEAT_SECONDS
    assert [one.id for one in workers()] == [beat._id]


def test_a_record_that_redis_could_not_take_is_written_as_soon_as_it_can(consumer, queue, caller, workers):
    consumer.handler(queue)(lambda body: None)

    class AwayOnce:
        trips = 0

        def run_all(self, requests):
            self.trips += 1
            return [RedisUnavailableError("away")] * len(requests) if self.trips == 1 else caller.run_all(requests)

    beat = Heartbeat(AwayOnce(), Served(consumer.handlers), Inflight(consumer.handlers, 16), time.monotonic, no_stacks)
    assert beat.step() == BEAT_AGAIN_SECONDS

    beat.step()

    assert [one.id for one in workers()] == [beat._id]
