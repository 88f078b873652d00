"""A handler that blocks or breaks the event loop or a thread harms only its own message."""

import asyncio
import threading
from collections import Counter
from contextlib import asynccontextmanager

import pytest
from tenacity import wait_fixed
from waiting import eventually

from reliq import Consumer
from reliq.events import Acked, Claimed, Nacked, Released


@pytest.fixture
def blocked(make_queue, consumer, start, recorder, gate):
    """A worker of four slots; the first of 200 async messages blocks its event loop."""
    later, plain = make_queue("async"), make_queue("plain")

    @consumer.handler(later)
    async def ahandle(body):
        if body == "blocks":
            gate.pass_through()

    consumer.handler(plain)(lambda body: None)
    engine = start(concurrency=4)
    later.publish_many(["x"] * 200)
    recorder.wait_for(Acked, 200, queue="async")  # a known fast handler, so that messages are prefetched
    recorder.events.clear()
    later.publish_many(["blocks", *["x"] * 199])
    gate.wait_for()
    return later, plain, engine


def test_async_messages_go_back_once_until_the_blocked_loop_runs_again(blocked, recorder, gate, caplog):
    later, plain, engine = blocked
    eventually(lambda: "the event loop has not run for" in caplog.text, "the log says that the loop is blocked")
    eventually(lambda: all(held.started for held in engine.inflight.deliveries()), "what was held has gone back")
    claimed = len(recorder.ids(Claimed, queue="async"))

    for number in range(5):
        plain.publish_many(["x"] * 100)
        recorder.wait_for(Acked, 100 * (number + 1), queue="plain")

    assert len(recorder.ids(Claimed, queue="async")) == claimed
    times = Counter(recorder.ids(Released, queue="async"))
    assert max(times.values(), default=0) <= 2  # a second time only if the machine was too busy to check in time
    gate.open()
    recorder.wait_for(Acked, 200, queue="async")
    assert later.counts().totals.get("retried_lease", 0) == 0
    assert caplog.text.count("the event loop has not run for") == 1
    assert "Gate.pass_through" in caplog.text


def test_odd_task_factories_cost_no_slot(queue, url, start, recorder):
    """Task factories that take no context, fail, or cancel the task before its first step."""
    deeds = []

    def make(loop, coroutine):
        is_call = coroutine.__qualname__ == "AsyncExecutor._run"
        deed = deeds.pop() if is_call and deeds else ""
        if deed == "fail":
            raise RuntimeError("no task today")
        task = asyncio.Task(coroutine, loop=loop)
        if deed == "cancel":
            task.cancel()
        return task

    @asynccontextmanager
    async def lifespan():
        asyncio.get_running_loop().set_task_factory(make)
        yield

    consumer = Consumer(url, observers=[recorder], lifespan=lifespan)

    @consumer.handler(queue, backoff=wait_fixed(0.01))
    async def handle(body): ...

    start(consumer, concurrency=2)
    deeds += ["fail", "cancel"] * 10
    queue.publish_many(["x"] * 50)

    recorder.wait_for(Acked, 50)
    assert len(recorder.ids(Nacked)) == 20


def test_a_handlers_thread_goes_on_after_any_error(queue, consumer, start, recorder, monkeypatch, caplog):
    consumer.handler(queue, lease=1.0)(lambda body: None)
    engine = start(concurrency=1)
    begin, errors = engine._runner.begin, [MemoryError()]

    def fails_once(run):
        if errors:
            raise errors.pop()
        return begin(run)

    monkeypatch.setattr(engine._runner, "begin", fails_once)
    queue.publish_many(["x"] * 5)

    recorder.wait_for(Acked, 4)
    assert "internal error in a handler thread" in caplog.text
    assert engine.dead_parts() == []


#: Larger than the address space: no thread with this stack can start.
TOO_LARGE = 1 << 46


def test_a_thread_that_cannot_start_is_retried_and_loses_no_message(queue, acking, start, recorder, caplog):
    start()
    threading.stack_size(TOO_LARGE)
    try:
        with pytest.raises(RuntimeError, match="can't start new thread"):
            threading.Thread(target=print).start()
        queue.publish("x", id="x")
        recorder.wait_for(Claimed)
        eventually(lambda: "can't start new thread" in caplog.text, "the worker logs it")
    finally:
        threading.stack_size(0)

    recorder.wait_for(Acked)
    assert recorder.ids(Acked) == ["x"]
    assert queue.counts().totals.get("retried_lease", 0) == 0
