"""Traces and OpenTelemetry metrics: the handler's span links to the span of the publish, by the conventions for messaging."""

import asyncio
import json
import sqlite3
import subprocess
import sys
from contextlib import closing, contextmanager

import pytest
import tenacity
from opentelemetry import baggage, context, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.semconv._incubating.attributes import messaging_attributes
from opentelemetry.semconv._incubating.metrics import messaging_metrics
from waiting import eventually

from reliq import Consumer, Layout, OutgoingMessage, Queue, Relay, Snooze, Tasks, events
from reliq.errors import ConfigurationError, PublishFailed
from reliq.outbox.tables import ddl
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


def test_handler_span_in_another_process_begins_a_trace_and_links_to_the_publish(published, environment):
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
        assert span["parent"] is None
        assert span["trace"] != sent[id]["trace"]
        assert span["links"] == [{"id": sent[id]["id"], "told": {}}]
    good = done[receipt.id]
    assert (good["name"], good["kind"], good["status"]) == ("process traced", "CONSUMER", "UNSET")
    processed = {"messaging.operation.name": "process", "messaging.operation.type": "process"}
    assert good["told"] == shared | processed | {"messaging.reliq.message.attempt": 1}
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


@pytest.fixture
def traced_consumer(published, url):
    """Instrument a consumer in this process; return it, and a function that returns the spans of an operation."""
    import traced

    made, exporter = traced.provider()
    consumer = Consumer(url)
    instrument(consumer, tracer_provider=made)

    def spans(operation):
        return [
            span
            for span in published() + traced.spans_of(exporter)
            if span["told"]["messaging.operation.name"] == operation
        ]

    consumer.spans = spans
    return consumer


def links_of(span):
    """Return the ids of the linked spans."""
    return [link["id"] for link in span["links"]]


@contextmanager
def carrying(name, value):
    """Set an entry of the baggage."""
    token = context.attach(baggage.set_baggage(name, value))
    try:
        yield
    finally:
        context.detach(token)


def test_parent_publish_makes_the_handler_span_a_child_that_links_too(published, url):
    import traced

    made, exporter = traced.provider()
    queue = Queue("q", int, url=url)
    consumer = Consumer(url)
    consumer.handler(queue)(lambda body: None)
    instrument(consumer, parent="publish", tracer_provider=made)
    queue.publish(1)
    consumer.drain()

    [sent], [handled] = published(), traced.spans_of(exporter)
    assert (handled["trace"], handled["parent"]) == (sent["trace"], sent["id"])
    assert links_of(handled) == [sent["id"]]


def test_unknown_parent_is_refused_by_name():
    with pytest.raises(ConfigurationError, match="parent must be \"publish\", or None for a new trace, not 'send'"):
        instrument(parent="send")


@pytest.mark.parametrize("parent", [None, "publish"])
def test_batch_is_one_span_with_a_link_for_each_message(published, url, parent):
    import traced

    made, exporter = traced.provider()
    queue = Queue("q", int, url=url)
    consumer = Consumer(url)
    traces = []
    handled = []

    @consumer.handler(queue, batch=10, linger=30, on_decode_error="reject")
    def handle(bodies: list[int], jobs: list) -> None:
        traces.extend(job.trace_id for job in jobs)

    consumer.observers.append(lambda event: isinstance(event, events.Handled) and handled.append(event.trace_id))
    instrument(consumer, parent=parent, tracer_provider=made)
    receipts = [queue.publish(number) for number in range(8)]
    uninstrument()
    untraced = queue.publish(8)
    Queue("q", url=url).publish({"a": 1})  # does not decode
    consumer.drain(raise_errors=False)

    sent = {span["told"]["messaging.message.id"]: span["id"] for span in published()}
    [span] = traced.spans_of(exporter)
    assert (span["name"], span["parent"]) == ("process q", None)
    assert span["told"]["messaging.batch.message_count"] == 9
    assert "messaging.message.id" not in span["told"]
    about = {link["told"]["messaging.message.id"]: link for link in span["links"]}
    assert {id: link["id"] for id, link in about.items()} == sent
    assert about.keys() == {receipt.id for receipt in receipts}
    assert untraced.id not in about
    assert {link["told"]["messaging.reliq.message.attempt"] for link in span["links"]} == {1}
    assert traces == [span["trace"]] * 9
    assert sorted(handled) == ["", *traces]


def test_redelivery_and_redrive_link_to_the_publish_again(traced_consumer, url):
    queue = Queue("q", int, url=url, retries=1)
    seen = []

    @traced_consumer.handler(queue, backoff=tenacity.wait_none())
    def handle(body: int) -> None:
        seen.append(baggage.get_baggage("tenant"))
        raise ValueError("secret")

    with carrying("tenant", "a b"):
        queue.publish(1)
    traced_consumer.drain(delayed=True, raise_errors=False)
    eventually(queue.dead_letters, "the dead letter is written")
    queue.redrive(queue.dead_letters())
    traced_consumer.drain(delayed=True, raise_errors=False)

    [sent] = traced_consumer.spans("publish")
    handled = traced_consumer.spans("process")
    assert [links_of(span) for span in handled] == [[sent["id"]]] * 4
    assert [span["told"]["messaging.reliq.message.attempt"] for span in handled] == [1, 2, 1, 2]
    assert [span["told"]["error.type"] for span in handled] == ["ValueError"] * 4
    assert len({span["trace"] for span in handled}) == 4
    assert seen == ["a b"] * 4
    assert baggage.get_all() == {}


@pytest.mark.parametrize("is_async", [False, True])
def test_outbox_carries_the_context_of_its_own_create_span_and_baggage(traced_consumer, url, tmp_path, is_async):
    queue, follow_ups = Queue("q", int, url=url), Queue("next", int, url=url)
    seen = []
    if is_async:

        @traced_consumer.handler(queue)
        async def handle(body: int) -> None:
            await asyncio.sleep(0)
            seen.append(baggage.get_baggage("tenant"))
            await follow_ups.apublish(2)
    else:

        @traced_consumer.handler(queue)
        def handle(body: int) -> None:
            seen.append(baggage.get_baggage("tenant"))
            follow_ups.publish(2)

    traced_consumer.handler(follow_ups)(lambda body: seen.append(baggage.get_baggage("tenant")))
    path = tmp_path / "shop.db"
    with closing(sqlite3.connect(path)) as database, database, carrying("tenant", "a"):
        for statement in ddl("sqlite"):
            database.execute(statement)
        database.execute("BEGIN")
        id = queue.publish_in(database, 1, headers={"mine": "stays"})
    traced_consumer.relay = Relay(f"sqlite:///{path}")
    traced_consumer.start()
    eventually(lambda: len(seen) == 2, "the message and its follow-up are handled")
    traced_consumer.stop()

    [created] = traced_consumer.spans("create")
    [sent] = traced_consumer.spans("publish")
    handled = {span["name"]: span for span in traced_consumer.spans("process")}
    assert (created["name"], created["kind"]) == ("create q", "PRODUCER")
    assert created["told"]["messaging.message.id"] == id
    assert created["told"]["messaging.operation.type"] == "create"
    assert links_of(handled["process q"]) == [created["id"]]
    assert sent["parent"] == handled["process q"]["id"]
    assert links_of(handled["process next"]) == [sent["id"]]
    assert seen == ["a", "a"]


def test_async_outbox_write_is_a_create_span(published, url, tmp_path):
    from sqlalchemy import text
    from sqlalchemy.ext.asyncio import create_async_engine

    queue = Queue("q", int, url=url)

    async def write():
        engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'shop.db'}")
        async with engine.begin() as connection:
            for statement in ddl("sqlite"):
                await connection.execute(text(statement))
            id = await queue.apublish_in(connection, 1)
        await engine.dispose()
        return id

    id = asyncio.run(write())

    assert [(span["name"], span["told"]["messaging.message.id"]) for span in published()] == [("create q", id)]


def test_tick_of_a_periodic_job_has_a_span_without_link(traced_consumer, url):
    queue = Queue("q", int, url=url)
    ticks = []
    traced_consumer.handler(queue)(lambda body, job: ticks.append(job.headers))
    traced_consumer.every(1, queue=queue, body=1, name="each-second")
    traced_consumer.start()
    eventually(lambda: ticks, "a tick is handled")
    traced_consumer.stop()

    assert {tuple(headers) for headers in ticks} == {("reliq-tick",)}
    assert {(span["parent"], *links_of(span)) for span in traced_consumer.spans("process")} == {(None,)}


def test_span_of_an_outer_middleware_is_linked_and_not_the_parent(published, url):
    import traced

    made, exporter = traced.provider()
    tracer = made.get_tracer("mine")
    queue = Queue("q", int, url=url)
    consumer = Consumer(url)
    after = []

    @consumer.middleware
    @contextmanager
    def around(job):
        with tracer.start_as_current_span("mine") as own:
            yield
            after.append(trace.get_current_span() is own)

    consumer.handler(queue)(lambda body: None)
    instrument(consumer, tracer_provider=made)
    queue.publish(1)
    consumer.drain()

    [sent], [handled, mine] = published(), traced.spans_of(exporter)
    assert (handled["parent"], links_of(handled)) == (None, [sent["id"], mine["id"]])
    assert after == [True]


def test_task_is_an_attribute_of_its_span(url):
    import traced

    made, exporter = traced.provider()
    app = Tasks("t", url=url)

    @app.task
    def send(to: str) -> None: ...

    instrument(app, tracer_provider=made)
    try:
        send.publish("a")
        app.drain()
    finally:
        uninstrument()

    assert traced.spans_of(exporter)[-1]["told"]["messaging.reliq.task"] == "send"


@pytest.mark.parametrize(
    ("own", "kept"),
    [(6000, {"mine", "traceparent", "tracestate"}), (7500, {"mine", "traceparent"}), (8170, {"mine"})],
)
def test_context_without_room_in_the_headers_fails_no_publish(published, url, own, kept):
    queue = Queue("q", int, url=url)
    state = trace.TraceState([("vendor", "v" * 200), ("other", "o" * 250), ("third", "t" * 240)])
    outer = trace.NonRecordingSpan(trace.SpanContext(1, 1, True, trace.TraceFlags(1), state))

    with carrying("big", "b" * 4000), trace.use_span(outer):
        queue.publish(1, headers={"mine": "m" * own})

    with queue.receive() as [job]:
        assert set(job.headers) == kept


def test_metrics_are_those_of_the_conventions(published, url):
    import traced

    uninstrument()
    reader = InMemoryMetricReader()
    made, exporter = traced.provider()
    queue = Queue("q", int, url=url, retries=0)
    consumer = Consumer(url)

    @consumer.handler(queue)
    def handle(body: int) -> None:
        if body == 1:
            raise ValueError("secret")
        if body == 2:
            raise Snooze(delay=600)

    instrument(consumer, tracer_provider=made, meter_provider=MeterProvider([reader]))
    queue.publish(0)
    queue.publish_many([1, 2])
    with pytest.raises(ConfigurationError):
        queue.publish(1, delay=-1)
    with closing(sqlite3.connect(":memory:")) as database:
        database.executescript(";".join(ddl("sqlite")))
        database.execute("BEGIN")
        queue.publish_in(database, 3)
    consumer.drain(raise_errors=False)

    found = {}
    for metric in reader.get_metrics_data().resource_metrics[0].scope_metrics[0].metrics:
        for point in metric.data.data_points:
            told = dict(point.attributes)
            assert told.pop("messaging.system") == "reliq"
            assert told.pop("messaging.destination.name") == "q"
            assert told.pop("messaging.operation.type") == {"publish": "send"}.get(
                told["messaging.operation.name"], told["messaging.operation.name"]
            )
            amount = getattr(point, "count", None) or point.value
            found[metric.name, metric.unit, told.pop("messaging.operation.name"), told.pop("error.type", "")] = amount
            assert told == {}
    assert found == {
        (messaging_metrics.MESSAGING_CLIENT_OPERATION_DURATION, "s", "create", ""): 1,
        (messaging_metrics.MESSAGING_CLIENT_OPERATION_DURATION, "s", "publish", ""): 2,
        (messaging_metrics.MESSAGING_CLIENT_OPERATION_DURATION, "s", "publish", "ConfigurationError"): 1,
        (messaging_metrics.MESSAGING_CLIENT_SENT_MESSAGES, "{message}", "publish", ""): 3,
        (messaging_metrics.MESSAGING_CLIENT_SENT_MESSAGES, "{message}", "publish", "ConfigurationError"): 1,
        (messaging_metrics.MESSAGING_PROCESS_DURATION, "s", "process", ""): 2,
        (messaging_metrics.MESSAGING_PROCESS_DURATION, "s", "process", "ValueError"): 1,
        (messaging_metrics.MESSAGING_CLIENT_CONSUMED_MESSAGES, "{message}", "process", ""): 2,
        (messaging_metrics.MESSAGING_CLIENT_CONSUMED_MESSAGES, "{message}", "process", "ValueError"): 1,
    }
    named = {value for name, value in vars(messaging_attributes).items() if name.startswith("MESSAGING_")}
    told = {name for span in traced.spans_of(exporter) for name in span["told"]}
    assert {name for name in told if name not in named} == {"messaging.reliq.message.attempt", "error.type"}
