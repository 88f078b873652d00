"""Traces: the span of a publish in one process is the parent of the handler's span in another."""

import asyncio
import json
import subprocess
import sys

import pytest
from opentelemetry.sdk.trace import TracerProvider
from waiting import eventually

from reliq import Consumer, Layout, OutgoingMessage, Queue, events
from reliq.errors import ConfigurationError, PublishFailed
from reliq.tracing import instrument, uninstrument


@pytest.fixture
def published(environment):
    """Instrument the publishes of this process; return the recorded spans."""
    import traced

    made, exporter = traced.provider()
    instrument(tracer_provider=made)
    yield lambda: traced.spans_of(exporter)
    uninstrument()
    traced.TRACED.close()


def test_handler_span_in_another_process_is_a_child_of_the_publish(published, environment):
    import traced

    receipt = traced.TRACED.publish("good", headers={"mine": "stays"})
    traced.TRACED.publish("bad")
    traced.TRACED.publish("snooze")

    command = [sys.executable, "-m", "traced"]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        handled = lambda counts: counts.ready == counts.unack == counts.garbage == 0  # noqa: E731
        eventually(lambda: handled(traced.TRACED.counts()), "the messages are handled")
        spans = json.loads(process.communicate(timeout=120)[0])

    sent = {span["told"]["messaging.message.id"]: span for span in published()}
    done = {span["told"]["messaging.message.id"]: span for span in spans}
    assert set(sent) == set(done)
    shared = {"messaging.system": "reliq", "messaging.destination.name": "traced", "messaging.message.id": receipt.id}
    publish = sent[receipt.id]
    assert (publish["name"], publish["kind"], publish["parent"]) == ("publish traced", "PRODUCER", None)
    assert publish["told"] == shared | {"messaging.operation.name": "publish", "messaging.operation.type": "send"}
    for id, span in done.items():
        assert (span["trace"], span["parent"]) == (sent[id]["trace"], sent[id]["id"])
    good = done[receipt.id]
    assert (good["name"], good["kind"], good["status"]) == ("process traced", "CONSUMER", "UNSET")
    processed = {"messaging.operation.name": "process", "messaging.operation.type": "process", "reliq.attempt": 1}
    assert good["told"] == shared | processed
    assert sorted(span["status"] for span in spans) == ["ERROR", "UNSET", "UNSET"]
    assert "secret" not in json.dumps(spans)


def test_publish_many_is_one_span_that_each_message_carries(published, url):
    queue = Queue("q", int, url=url)

    queue.publish_many(OutgoingMessage(body=number, headers={"n": str(number)}) for number in range(3))

    (span,) = published()
    assert span["told"]["messaging.batch.message_count"] == 3
    with queue.receive(limit=3) as jobs:
        assert [job.headers["n"] for job in jobs] == ["0", "1", "2"]
        assert {job.headers["traceparent"].split("-")[1] for job in jobs} == {span["trace"]}


def test_publishes_with_named_arguments_are_traced(published, url):
    queue = Queue("q", int, url=url)

    queue.publish(body=1, headers={"mine": "stays"})
    queue.publish_many(items=[2])

    assert [span["name"] for span in published()] == ["publish q"] * 2
    with queue.receive(limit=2) as jobs:
        assert [job.body for job in jobs] == [1, 2]
        assert all("traceparent" in job.headers for job in jobs)
        assert jobs[0].headers["mine"] == "stays"


def test_async_publishes_and_those_of_bare_bodies_are_traced(published, url):
    queue, bare = Queue("q", int, url=url), Queue("bare", bytes, url=url, layout=Layout.hdt3213())
    bare.publish(b"x")
    bare.publish_many([b"y"])
    assert bare.counts().ready == 2

    async def publish():
        await queue.apublish(1)
        await queue.apublish_many([2, 3])
        await queue.aclose()

    asyncio.run(publish())

    assert [span["name"] for span in published()] == ["publish bare"] * 2 + ["publish q"] * 2


def test_async_publishes_are_traced_though_a_plain_function_wraps_them(monkeypatch, url, environment):
    """Another instrumentation may wrap an async publish in a plain function; its result is still awaited."""
    import traced

    for name in ("apublish", "apublish_many"):
        original = getattr(Queue, name)
        monkeypatch.setattr(
            Queue, name, lambda self, *given, _original=original, **rest: _original(self, *given, **rest)
        )
    made, exporter = traced.provider()
    instrument(tracer_provider=made)

    async def publish():
        queue = Queue("q", int, url=url)
        await queue.apublish(1)
        await queue.apublish_many([2, 3])
        await queue.aclose()

    try:
        asyncio.run(publish())
    finally:
        uninstrument()
        traced.TRACED.close()

    assert [span["name"] for span in traced.spans_of(exporter)] == ["publish q"] * 2


@pytest.mark.usefixtures("impatient")
def test_failed_publish_is_an_error_span_with_its_class_only(published):
    queue = Queue("q", int, url="redis://127.0.0.1:1/0")

    with pytest.raises(ConfigurationError):
        queue.publish(1, delay=-1)
    with pytest.raises(PublishFailed):
        queue.publish(1)

    failed = [(span["status"], span["told"]["error.type"]) for span in published()]
    assert failed == [("ERROR", "ConfigurationError"), ("ERROR", "PublishFailed")]


def test_tracing_without_instrument_imports_and_wraps_nothing(url):
    queue = Queue("q", int, url=url)
    queue.publish(1)
    text = "import sys, reliq, reliq.cli.app; print('reliq.tracing' in sys.modules)"

    done = subprocess.run([sys.executable, "-c", text], check=True, capture_output=True, text=True)

    assert done.stdout == "False\n"
    assert not hasattr(Queue.publish, "__wrapped__")
    with queue.receive() as (job,):
        assert job.headers == {}


def test_job_and_its_handled_event_name_the_trace(url):
    queue = Queue("q", int, url=url)
    consumer = Consumer()
    traces = []
    handled = []
    consumer.handler(queue)(lambda body, job: traces.append(job.trace_id))
    consumer.observers.append(lambda event: isinstance(event, events.Handled) and handled.append(event.trace_id))
    instrument(consumer, tracer_provider=TracerProvider())
    consumer.start()
    try:
        queue.publish(1)
        eventually(lambda: handled, "the handler has ended")
    finally:
        uninstrument()
        consumer.stop()
        queue.close()

    assert traces == handled
    assert len(traces[0]) == 32
