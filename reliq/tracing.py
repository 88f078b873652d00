"""
OpenTelemetry spans and metrics for publishes and handler calls. This module needs reliq's extra `otel`.

The spans and metrics follow OpenTelemetry's semantic conventions for messaging, version 1.44.0
(model/messaging/spans.yaml and metrics.yaml). The headers of a message contain the publisher's trace context: W3C
`traceparent` and `baggage`. The span of a handler call begins a new trace and links to the span of the publish, even if
another process published the message. reliq does not import OpenTelemetry unless you import this module.
"""

from __future__ import annotations

import functools
import time
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from reliq import distribution
from reliq.errors import ConfigurationError
from reliq.message import OutgoingMessage, RateLimited, Snooze
from reliq.queue import Queue
from reliq.wire_format import encoded_headers

try:
    from opentelemetry import context, metrics, propagate, trace
    from opentelemetry.trace import Link, SpanKind, Status, StatusCode
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(distribution.missing("reliq.tracing", "opentelemetry-api", "otel")) from missing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import TracerProvider

    from reliq.consumer import Consumer
    from reliq.handlers.handler import Job

#: The attribute with the number of messages of a batch.
_COUNT = "messaging.batch.message_count"
#: The bucket boundaries that the semantic conventions define for durations, in seconds.
_BOUNDARIES = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)

_publishers: dict[str, Callable[..., Any]] = {}


def instrument(
    *consumers: Consumer,
    parent: Literal["publish"] | None = None,
    tracer_provider: TracerProvider | None = None,
    meter_provider: MeterProvider | None = None,
) -> None:
    """
    Record spans and metrics for each publish of this process, and for each handler call of `consumers`.

    The span of a handler call begins a new trace, and links to the spans of the publishes of its messages. Otherwise a
    message that is due in seven days would cause a trace that lasts seven days. To record further consumers, call this
    function again; publishes are still recorded only once.

    Args:
        consumers: the consumers that run the handlers.
        parent: "publish" makes the span of a publish also the parent of the handler's span, except for handlers with
            `batch`. Default: None, a new trace.
        tracer_provider: the provider of the spans. Default: None, the global provider.
        meter_provider: the provider of the metrics. Default: None, the global provider.

    Raises:
        ConfigurationError: `parent` is neither "publish" nor None.
    """
    if parent not in (None, "publish"):
        raise ConfigurationError(f'parent must be "publish", or None for a new trace, not {str(parent)[:40]!r}')
    recorder = Recorder(tracer_provider, meter_provider)
    if not _publishers:
        for name in ("publish", "publish_many", "publish_in", "apublish", "apublish_many", "apublish_in"):
            original = getattr(Queue, name)
            _publishers[name] = original
            setattr(Queue, name, functools.wraps(original)(_traced(recorder, name, original)))
    for consumer in consumers:
        consumer.middleware(functools.partial(handling, recorder, parent))


def uninstrument() -> None:
    """Stop recording spans and metrics of publishes. Handler calls are still recorded."""
    while _publishers:
        setattr(Queue, *_publishers.popitem())


class Recorder:
    """
    Record spans and metrics with the given OpenTelemetry providers.

    Args:
        tracer_provider, meter_provider: see `instrument`.
    """

    def __init__(self, tracer_provider: TracerProvider | None, meter_provider: MeterProvider | None) -> None:
        tracer = trace.get_tracer("reliq", distribution.VERSION, tracer_provider)
        # OpenTelemetry must not record exceptions, because their texts may contain parts of message bodies. Instead,
        # the method `span` records their classes.
        exceptions: Any = {"record_exception": False, "set_status_on_exception": False}
        self._start: Any = functools.partial(tracer.start_as_current_span, **exceptions)
        meter = metrics.get_meter("reliq", distribution.VERSION, meter_provider)
        histogram = functools.partial(meter.create_histogram, unit="s", explicit_bucket_boundaries_advisory=_BOUNDARIES)
        counter = functools.partial(meter.create_counter, unit="{message}")
        client = histogram("messaging.client.operation.duration")
        sent = counter("messaging.client.sent.messages")
        processed = histogram("messaging.process.duration"), counter("messaging.client.consumed.messages")
        #: The name of each operation -> its type, its span kind, its histogram of durations, its counter of messages.
        self._operations: dict[str, tuple[str, SpanKind, Any, Any]] = {
            "create": ("create", SpanKind.PRODUCER, client, metrics.NoOpCounter("unsent")),
            "publish": ("send", SpanKind.PRODUCER, client, sent),
            "process": ("process", SpanKind.CONSUMER, *processed),
        }

    @contextmanager
    def span(self, operation: str, queue: str, details: dict[str, Any], links: Sequence[Link] = ()) -> Iterator[Any]:
        """
        Record a span and the metrics of an operation, which runs in the `with` block.

        If the block raises an exception, record only its class, because its text may contain parts of the message body.

        Args:
            operation: the name of the operation: create, publish or process.
            queue: the name of the queue.
            details: further attributes of the span. The `with` block gets this dict, and may add attributes to it.
            links: the links of the span.
        """
        type_, kind, duration, messages = self._operations[operation]
        common = {
            "messaging.system": "reliq",
            "messaging.operation.name": operation,
            "messaging.operation.type": type_,
            "messaging.destination.name": queue,
        }
        start = time.perf_counter()
        with self._start(f"{operation} {queue}", kind=kind, attributes={**common, **details}, links=links) as span:
            try:
                yield details
            except (Snooze, RateLimited):
                raise
            except Exception as error:
                common["error.type"] = type(error).__qualname__
                span.set_status(Status(StatusCode.ERROR))
                raise
            finally:
                span.set_attributes({**common, **details})
                duration.record(time.perf_counter() - start, common)
                messages.add(details.get(_COUNT, 1), common)


@contextmanager
def handling(recorder: Recorder, parent: Literal["publish"] | None, job: Job[Any]) -> Iterator[None]:
    """
    Record a span for a handler call. This context manager is a middleware.

    For a batch, the middleware runs for each job, but it records a single span: in its run for the first job.
    """
    call, own = job._call, job._held  # noqa: SLF001  a part of reliq
    # The worker is already settling messages whose bodies could not be decoded: leave them out.
    held = [each for each in call.deliveries if each is own or not each.settling]
    if held[0] is not own:
        yield
        return
    around = context.get_current()
    about: list[dict[str, Any]] = []
    contexts = []
    for each in held:
        attempt = each.delivery.attempt  # None if the message has no envelope
        attempts = {} if attempt is None else {"messaging.reliq.message.attempt": attempt}
        about.append({"messaging.message.id": each.delivery.id, **attempts})
        publisher = propagate.extract(each.delivery.header.headers, context.Context())
        contexts.append(trace.get_current_span(publisher).get_span_context())
    is_batch = call.handler.is_batch
    details: dict[str, Any] = {_COUNT: len(held)} if is_batch else about[0]
    links = [Link(publish, each if is_batch else None) for publish, each in zip(contexts, about, strict=True)]
    if call.handler.task:
        details["messaging.reliq.task"] = call.handler.task
    links.append(Link(trace.get_current_span().get_span_context()))  # the span that another middleware may have begun
    if not is_batch:
        around = propagate.extract(job.headers, around)  # the handler then gets the publisher's baggage
    is_child = parent is not None and not is_batch
    parent_span = trace.NonRecordingSpan(contexts[0]) if is_child else trace.INVALID_SPAN
    token = context.attach(trace.set_span_in_context(parent_span, around))
    try:
        with recorder.span("process", job.queue, details, [link for link in links if link.context.is_valid]):
            found = trace.get_current_span().get_span_context()
            if found.is_valid and found.trace_flags.sampled:
                for each in held:
                    each.trace_id = f"{found.trace_id:032x}"
            yield
    finally:
        context.detach(token)


def _traced(recorder: Recorder, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `original`, the publish method `name` of `Queue`, so that each call of it records a span."""
    # `publish_in` only creates a message, as a row of the outbox table. An outbox relay publishes the message later.
    operation = "create" if name.endswith("in") else "publish"
    is_bulk = name.endswith("many")

    def begin(queue: Queue[Any], given: Any, options: dict[str, Any], details: dict[str, Any]) -> Any:
        """Add the current trace context to the message headers; return the positional arguments for `original`."""
        if is_bulk:
            [items] = given or [options.pop("items")]
            return (_carrying(queue, items, details),)
        options["headers"] = _headers(queue, options.get("headers"))
        return given

    def end(details: dict[str, Any], result: Any) -> Any:
        if not is_bulk:
            details["messaging.message.id"] = getattr(result, "id", result)  # `publish_in` returns a message id
        return result

    def publish(self: Queue[Any], *given: Any, **options: Any) -> Any:
        with recorder.span(operation, self.name, {_COUNT: 0} if is_bulk else {}) as details:
            given = begin(self, given, options, details)
            return end(details, original(self, *given, **options))

    async def apublish(self: Queue[Any], *given: Any, **options: Any) -> Any:
        with recorder.span(operation, self.name, {_COUNT: 0} if is_bulk else {}) as details:
            given = begin(self, given, options, details)
            return end(details, await original(self, *given, **options))

    return apublish if name.startswith("a") else publish


def _headers(queue: Queue[Any], headers: Mapping[str, str] | None) -> Mapping[str, str] | None:
    """
    Return `headers` with the current trace context.

    If the headers would become too large, leave out parts of the context, so that the publish does not fail. In the Go
    layout, messages have no headers, so return `headers` unchanged.
    """
    if queue.layout.bare:
        return headers
    carried: dict[str, str] = {}
    propagate.inject(carried)
    for part in ("baggage", "tracestate", "traceparent"):
        try:
            encoded_headers({**carried, **(headers or {})})
        except ConfigurationError:
            carried.pop(part, None)
    return {**carried, **(headers or {})}


def _carrying(queue: Queue[Any], items: Iterable[Any], details: dict[str, Any]) -> Iterator[OutgoingMessage[Any]]:
    """Yield `items` as messages with the current trace context in their headers; count the messages in `details`."""
    for item in items:
        outgoing = item if isinstance(item, OutgoingMessage) else OutgoingMessage(body=item)
        details[_COUNT] += 1
        yield replace(outgoing, headers=_headers(queue, outgoing.headers))
