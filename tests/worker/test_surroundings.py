"""What is around a handler's call: its context, its middleware, the process's lifespan."""

import asyncio
from contextlib import asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar

import pytest

from reliq import Consumer
from reliq.events import Acked, Claimed, Handled

request = ContextVar("request", default="none")


@pytest.mark.parametrize("is_async", [True, False])
def test_what_a_handler_sets_in_its_context_does_not_leak_into_the_next(queue, consumer, start, recorder, is_async):
    seen = []

    def handle(body):
        seen.append(request.get())
        request.set(body)

    async def ahandle(body):
        handle(body)

    consumer.handler(queue)(ahandle if is_async else handle)
    for number in range(5):
        queue.publish(str(number))
    start(concurrency=1)

    recorder.wait_for(Acked, 5)
    assert seen == ["none"] * 5


@pytest.mark.parametrize("is_async", [True, False])
def test_middleware_is_around_each_call_the_first_outermost(queue, consumer, start, recorder, is_async):
    story = []

    def around(name):
        @contextmanager
        def manager(job):
            story.append(f"{name} enters {job.body}")
            try:
                yield
            finally:
                story.append(f"{name} leaves")

        return manager

    def handle(body):
        story.append(f"handles {body}")

    async def ahandle(body):
        handle(body)

    consumer.middleware(around("outer"))
    consumer.middleware(around("inner"))
    consumer.handler(queue)(ahandle if is_async else handle)
    queue.publish("x")
    start()

    recorder.wait_for(Acked)
    assert story == ["outer enters x", "inner enters x", "handles x", "inner leaves", "outer leaves"]


def test_async_middleware_runs_in_the_handlers_own_task(queue, consumer, start, recorder):
    tasks = []

    @consumer.middleware
    @asynccontextmanager
    async def around(job):
        tasks.append(asyncio.current_task())
        yield
        tasks.append(asyncio.current_task())

    @consumer.handler(queue)
    async def handle(body):
        tasks.append(asyncio.current_task())

    queue.publish("x")
    start()

    recorder.wait_for(Acked)
    assert len(tasks) == 3
    assert len(set(tasks)) == 1


def test_middleware_sees_what_a_handler_raises_and_may_deal_with_it(queue, consumer, start, recorder):
    @consumer.middleware
    @contextmanager
    def around(job):
        with suppress(KeyError):
            yield

    @consumer.handler(queue)
    def handle(body):
        raise KeyError(body)

    queue.publish("x")
    start()

    (event,) = recorder.wait_for(Handled)
    assert event.outcome == "ack"


def test_middleware_that_raises_is_a_failure_of_the_delivery(queue, consumer, start, recorder):
    called = []

    @consumer.middleware
    def around(job):
        raise RuntimeError("no database")

    consumer.handler(queue)(called.append)
    queue.publish("x")
    start()

    (event,) = recorder.wait_for(Handled)
    assert (event.outcome, event.error) == ("nack", "RuntimeError: no database")
    assert called == []


@pytest.mark.parametrize("is_async", [True, False])
def test_a_lifespan_is_entered_before_the_first_claim_and_left_after_the_last_handler(
    queue, url, recorder, gate, is_async
):
    story = []

    @contextmanager
    def lifespan():
        story.append(f"enters, {len(recorder.of(Claimed))} claimed")
        yield "the pool"
        story.append(f"leaves, {queue.counts().totals.get('acked')} acked")

    @asynccontextmanager
    async def alifespan():
        async with asyncio.timeout(60):  # can only be left by the task that entered it
            with lifespan() as state:
                yield state

    consumer = Consumer(url, lifespan=alifespan if is_async else lifespan, observers=[recorder])

    @consumer.handler(queue)
    def handle(body, job):
        gate.pass_through()
        story.append(f"handles with {job.state}")

    queue.publish("x")
    consumer.start()
    gate.wait_for()
    gate.open()
    consumer.stop()

    assert story == ["enters, 0 claimed", "handles with the pool", "leaves, 1 acked"]


@pytest.mark.parametrize("is_async", [True, False])
def test_a_lifespan_that_raises_fails_the_start(queue, url, recorder, is_async):
    @contextmanager
    def lifespan():
        raise OSError("no database")
        yield

    @asynccontextmanager
    async def alifespan():
        raise OSError("no database")
        yield

    consumer = Consumer(url, lifespan=alifespan if is_async else lifespan, observers=[recorder])
    consumer.handler(queue)(lambda body: None)
    queue.publish("x")

    with pytest.raises(OSError, match="no database"):
        consumer.start()
    assert consumer.stop()
    assert recorder.of(Claimed) == []


@pytest.mark.parametrize("is_async", [True, False])
def test_a_lifespan_that_raises_at_its_end_is_told_and_everything_is_settled(queue, url, recorder, is_async):
    @contextmanager
    def lifespan():
        yield
        raise OSError("cannot close")

    @asynccontextmanager
    async def alifespan():
        yield
        raise OSError("cannot close")

    consumer = Consumer(url, lifespan=alifespan if is_async else lifespan, observers=[recorder])
    consumer.handler(queue)(lambda body: None)
    queue.publish("x")
    consumer.start()
    recorder.wait_for(Handled)

    with pytest.raises(OSError, match="cannot close"):
        consumer.stop()
    assert queue.counts().totals["acked"] == 1
