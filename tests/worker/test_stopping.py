"""A graceful shutdown loses no message, spends no retry, and lets running handlers finish."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest
from transition import run_transition
from waiting import eventually

from reliq import JobInterrupted, Nack, WorkerSettings
from reliq.errors import ConfigurationError
from reliq.events import Acked, Handled, Released, Started, WorkerReady, WorkerStopping
from reliq.logs import LogObserver
from reliq.lua.transitions import CallNumber


def test_a_stop_lets_handlers_finish_and_logs_how_many_run(queue, consumer, hold, gate, recorder, monkeypatch, caplog):
    monkeypatch.setattr("reliq.worker.engine.STOP_REPORT_SECONDS", 0.05)
    caplog.set_level("INFO", "reliq")
    consumer.observers.insert(0, LogObserver())  # before the observer that the test waits for
    hold(consumer, queue)
    with ThreadPoolExecutor() as pool:
        pool.submit(consumer.stop, 7.0)
        recorder.wait_for(WorkerStopping, 3)
        gate.open()
    assert (len(recorder.ids(Acked)), queue.counts().alive) == (1, 0)
    assert recorder.of(WorkerReady) == [WorkerReady("", ("q",))]
    told = [(event.running, event.grace) for event in recorder.of(WorkerStopping)]
    assert told[0] == (1, 7.0)
    assert [running for running, _ in told] == [1] * len(told)
    assert [left for _, left in told] == sorted({left for _, left in told}, reverse=True)
    assert caplog.messages[:2] == [
        "worker: ready; working on q",
        "worker: stopping; waiting up to 7 s for 1 handler to finish",
    ]

    caplog.clear()
    consumer.start()
    consumer.stop()
    assert caplog.messages == ["worker: ready; working on q", "worker: stopping; no handler runs"]


def test_prefetched_messages_go_back_unspent_and_in_order(queue, consumer, gate, recorder, client):
    """A burst makes the worker prefetch many messages; then the handlers become slow."""

    @consumer.handler(queue)
    def handle(body):
        if body == "slow":
            gate.pass_through()

    queue.publish_many(["fast"] * 200)
    consumer.start(WorkerSettings(concurrency=1))
    recorder.wait_for(Acked, 200)
    queue.pause()
    ids = [queue.publish("slow", id=f"s{number:02}", retries=2).id for number in range(20)]
    queue.resume()
    gate.wait_for()
    inflight = consumer._engine.inflight

    with ThreadPoolExecutor() as pool:
        pool.submit(consumer.stop)
        eventually(lambda: inflight.closed, "nothing more starts")
        gate.open()

    assert recorder.ids(Acked)[-1] == "s00"
    waiting = [id.decode() for id in client.lrange(queue.keys.ready, 0, -1)][::-1]
    assert waiting == ids[1:]
    assert {client.hget(queue.keys.retries_left, id) for id in waiting} == {b"2"}
    assert queue.counts().unack == 0


def test_a_thread_that_outlasts_the_grace_period_keeps_its_lease(queue, consumer, hold):
    hold(consumer, queue)

    assert not consumer.stop(grace=0)

    assert [held.delivery.id for held in consumer.unfinished] == ["x"]
    assert queue.counts().unack == 1


def test_a_coroutine_that_outlasts_the_grace_period_goes_back_unspent(queue, consumer, recorder, client):
    @consumer.handler(queue)
    async def handle(body):
        await asyncio.sleep(3600)

    queue.publish("x", id="x", retries=1)
    consumer.start()
    recorder.wait_for(Started)

    assert consumer.stop(grace=0)

    assert recorder.of(Handled)[0].outcome == "release"
    assert (queue.counts().ready, client.hget(queue.keys.retries_left, "x")) == (1, b"1")


def test_a_running_job_learns_of_the_stop_and_may_give_way_unspent(no_returns, make_queue, consumer, start, recorder):
    answers, gives_way = make_queue("answers"), make_queue("gives-way")

    @consumer.handler(answers)
    async def handle(body, job):
        assert not job.stopping
        while not job.stopping:  # noqa: ASYNC110  a handler has this flag alone
            await asyncio.sleep(0.01)
        raise Nack(delay=0)

    @consumer.handler(gives_way)
    def give_way(body, job):
        while not job.stopping:
            pass
        with pytest.raises(JobInterrupted, match="stopping"):
            job.raise_if_stopped()
        job.raise_if_stopped()

    answers.publish("x")
    gives_way.publish("x", id="x", retries=0)
    start()
    recorder.wait_for(Started, 2)

    assert consumer.stop()
    assert recorder.of(Handled, queue="answers")[0].outcome == "nack"
    assert recorder.ids(Released) == ["x"]
    assert gives_way.counts().ready == 1


def test_an_idle_worker_ends_its_wait_and_its_watch_at_a_stop(queue, acking, start, recorder, client, threads_since):
    before = threads_since()
    engine = start()
    queue.publish("x")
    recorder.wait_for(Acked)
    queue.publish("later", delay=60)

    acking.stop()

    # No test waits for the threads of the handlers.
    eventually(lambda: not threads_since(before), "every thread of the worker ends")
    assert not engine.inflight.deliveries()
    assert not client.exists(queue.keys.watch)
    assert client.llen(queue.keys.wake) <= 1


def test_a_drain_takes_messages_of_a_dead_worker(queue, consumer, recorder):
    queue.publish("x", id="x")
    queue.publish("y", id="y", retries=0)
    run_transition(queue, "claim", CallNumber("dead", 1), limit=2, lease_ms=50)
    consumer.handler(queue, lease=3.0)(lambda body: None)

    consumer.drain()

    counts = queue.counts()
    assert (counts.alive, counts.dead, counts.totals["acked"]) == (0, 1, 1)
    assert queue.dead_letters()[0].reason == "lease"


@pytest.mark.parametrize("way", ["start", "drain", "run"])
def test_handler_that_stops_its_consumer_ends_the_wait_for_it(queue, consumer, recorder, as_kind, way):
    told = []
    consumer.handler(queue)(as_kind(lambda body: told.append(consumer.stop())))
    queue.publish_many(["x", "y", "z"])

    getattr(consumer, way)(WorkerSettings(concurrency=1))

    recorder.wait_for(Started)
    eventually(lambda: told, "the handler has stopped its consumer")
    assert consumer.stop()
    assert told == [False]
    assert len(recorder.ids(Acked)) == 1
    assert queue.counts().ready == 2


def test_a_worker_may_be_started_again_after_a_stop_and_not_twice_without(queue, acking, recorder):
    assert acking.stop()  # without a start
    for count in (1, 2, 3):
        acking.start()
        with pytest.raises(ConfigurationError, match="has been started"):
            acking.start()
        queue.publish("x")
        recorder.wait_for(Acked, count)
        acking.stop()

    assert queue.counts().totals["acked"] == 3


def test_a_worker_stops_although_redis_is_away(own_server, own_queue, own_consumer, recorder):
    own_consumer.handler(own_queue)(lambda body: None)
    own_queue.publish("x")
    own_consumer.start()
    recorder.wait_for(Acked)

    own_server.kill()

    assert own_consumer.stop(grace=1)
