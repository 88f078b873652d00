"""The surroundings of a handler's call: its context, its middleware, the process's lifespan."""

import asyncio
from contextlib import asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar

import pytest

from reliq import Consumer
from reliq.events import Acked, Claimed, Handled

request = ContextVar("request", default="none")


def test_a_context_variable_of_a_handler_does_not_leak_into_the_next_call(queue, consumer, work_until, as_kind):
    seen = []

    def handle(body):
        seen.append(request.get())
        request.set(body)

    consumer.handler(queue)(as_kind(handle))
    for number in range(5):
        queue.publish(str(number))
    work_until(Acked, 5, concurrency=1)

    assert seen == ["none"] * 5


@pytest.mark.parametrize("kind", ["plain", "async", "async in its task"])
def test_middleware_is_around_each_call_the_first_outermost(queue, consumer, work_until, kind):
    story, tasks = [], set()

    def around(name):
        @contextmanager
        def manager(job):
            story.append(f"{name} enters {job.body}")
            try:
                yield
            finally:
                story.append(f"{name} leaves")

        @asynccontextmanager
        async def amanager(job):
            with manager(job):
                tasks.add(asyncio.current_task())
                yield
                tasks.add(asyncio.current_task())

        return amanager if kind == "async in its task" else manager

    def handle(body):
        story.append(f"handles {body}")

    async def ahandle(body):
        tasks.add(asyncio.current_task())
        handle(body)

    consumer.middleware(around("outer"))
    consumer.middleware(around("inner"))
    consumer.handler(queue)(handle if kind == "plain" else ahandle)
    queue.publish("x")
    work_until(Acked)

    assert story == ["outer enters x", "inner enters x", "handles x", "inner leaves", "outer leaves"]
    assert len(tasks) == (kind != "plain")


def test_middleware_may_suppress_errors_and_its_own_are_failures(make_queue, consumer, work_until, recorder):
    called = []

    @consumer.middleware
    @contextmanager
    def around(job):
        if job.queue == "fails":
            raise RuntimeError("no database")
        with suppress(KeyError):
            yield

    @consumer.handler(make_queue("q"))
    def handle(body):
        raise KeyError(body)

    consumer.handler(make_queue("fails"))(called.append)
    for name in ("q", "fails"):
        make_queue(name).publish("x")
    (event,) = work_until(Handled, queue="q")

    assert event.outcome == "ack"
    (event,) = recorder.wait_for(Handled, queue="fails")
    assert (event.outcome, event.error, called) == ("nack", "RuntimeError: no database", [])


@pytest.fixture(params=["plain", "async"])
def consumer_of(request, url, recorder):
    """Make a consumer with a blocking or an async lifespan from a plain lifespan."""

    def make(lifespan):
        @asynccontextmanager
        async def alifespan():
            async with asyncio.timeout(60):  # only the task that entered it can leave it
                with lifespan() as state:
                    yield state

        return Consumer(url, lifespan=alifespan if request.param == "async" else lifespan, observers=[recorder])

    return make


def test_a_lifespan_lasts_from_before_the_first_claim_to_after_the_last_handler(queue, recorder, gate, consumer_of):
    story = []

    @contextmanager
    def lifespan():
        story.append(f"enters, {len(recorder.of(Claimed))} claimed")
        yield "the pool"
        story.append(f"leaves, {queue.counts().totals.get('acked')} acked")
        raise OSError("cannot close")

    consumer = consumer_of(lifespan)

    @consumer.handler(queue)
    def handle(body, job):
        gate.pass_through()
        story.append(f"handles with {job.state}")

    queue.publish("x")
    consumer.start()
    gate.wait_for()
    gate.open()
    with pytest.raises(OSError, match="cannot close"):
        consumer.stop()

    assert story == ["enters, 0 claimed", "handles with the pool", "leaves, 1 acked"]


def test_a_lifespan_that_raises_fails_the_start(queue, recorder, consumer_of):
    @contextmanager
    def lifespan():
        raise OSError("no database")
        yield

    consumer = consumer_of(lifespan)
    consumer.handler(queue)(lambda body: None)
    queue.publish("x")

    with pytest.raises(OSError, match="no database"):
        consumer.start()
    assert consumer.stop()
    assert recorder.of(Claimed) == []
