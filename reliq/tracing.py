"""
OpenTelemetry spans for publishing and handling. This module needs reliq's extra `otel`.

The context of the publisher travels in the message's headers (W3C `traceparent`), so a handler's span is a child of the
publish, in whatever process. Nothing else in reliq uses tracing: without `instrument` it costs nothing.
"""

from __future__ import annotations

import functools
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from reliq import distribution
from reliq.message import OutgoingMessage, RateLimited, Snooze
from reliq.queue import Queue

try:
    from opentelemetry import propagate, trace
    from opentelemetry.trace import SpanKind, Status, StatusCode
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(distribution.missing("reliq.tracing", "opentelemetry-api", "otel")) from missing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from opentelemetry.trace import Span, Tracer, TracerProvider

    from reliq.consumer import Consumer
    from reliq.handlers.handler import Job

_publishers: dict[str, Callable[..., Any]] = {}


def instrument(*consumers: Consumer, tracer_provider: TracerProvider | None = None) -> None:
    """Record a span for each publish of this process, and for each handler call of `consumers`; may be called again."""
    tracer = trace.get_tracer("reliq", distribution.VERSION, tracer_provider)
    if not _publishers:
        for name in ("publish", "apublish", "publish_many", "apublish_many"):
            original = getattr(Queue, name)
            _publishers[name] = original
            setattr(Queue, name, functools.wraps(original)(_traced(tracer, name, original)))
    for consumer in consumers:
        consumer.middleware(functools.partial(handling, tracer))


def uninstrument() -> None:
    """Stop recording spans for publishes; the middleware of consumers stays."""
    while _publishers:
        setattr(Queue, *_publishers.popitem())


@contextmanager
def handling(tracer: Tracer, job: Job[Any]) -> Iterator[None]:
    """Record a span for a handler call, as a child of the message's publish."""
    attributes: dict[str, Any] = {"messaging.operation.type": "process", "messaging.message.id": job.id}
    if job.attempt is not None:
        attributes["reliq.attempt"] = job.attempt
    context = propagate.extract(dict(job.headers))
    with _span(tracer, "process", job.queue, attributes, kind=SpanKind.CONSUMER, context=context) as span:
        found = span.get_span_context()
        if found.is_valid and found.trace_flags.sampled:
            job.trace_id = f"{found.trace_id:032x}"
        yield


@contextmanager
def _span(tracer: Tracer, operation: str, queue: str, attributes: dict[str, Any], **options: Any) -> Iterator[Span]:
    """Record a span, with the class of an exception only: its text may hold a part of the body."""
    with tracer.start_as_current_span(
        f"{operation} {queue}",
        attributes={
            "messaging.system": "reliq",
            "messaging.operation.name": operation,
            "messaging.destination.name": queue,
            **attributes,
        },
        record_exception=False,
        set_status_on_exception=False,
        **options,
    ) as span:
        try:
            yield span
        except (Snooze, RateLimited):
            raise
        except Exception as error:
            span.set_attribute("error.type", type(error).__qualname__)
            span.set_status(Status(StatusCode.ERROR))
            raise


def _traced(tracer: Tracer, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of `Queue` that publishes, with a span around it."""

    def begin(queue: Queue[Any], given: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
        """Add the current context to the headers; return the positional arguments."""
        if name.endswith("many"):
            [items] = given or [options.pop("items")]
            return (_carrying(queue, items),)
        options["headers"] = _headers(queue, options.get("headers"))
        return given

    def end(span: Span, result: Any) -> Any:
        if name.endswith("many"):
            span.set_attribute("messaging.batch.message_count", result.published)
        else:
            span.set_attribute("messaging.message.id", result.id)
        return result

    send = {"messaging.operation.type": "send"}

    def publish(self: Queue[Any], *given: Any, **options: Any) -> Any:
        with _span(tracer, "publish", self.name, send, kind=SpanKind.PRODUCER) as span:
            given = begin(self, given, options)
            return end(span, original(self, *given, **options))

    async def apublish(self: Queue[Any], *given: Any, **options: Any) -> Any:
        with _span(tracer, "publish", self.name, send, kind=SpanKind.PRODUCER) as span:
            given = begin(self, given, options)
            return end(span, await original(self, *given, **options))

    return apublish if name.startswith("a") else publish


def _headers(queue: Queue[Any], headers: Mapping[str, str] | None) -> dict[str, str]:
    """Return `headers` with the current context; bare bodies have no headers to carry it."""
    context: dict[str, str] = {}
    if not queue.layout.bare:
        propagate.inject(context)
    return {**context, **(headers or {})}


def _carrying(queue: Queue[Any], items: Iterable[Any]) -> Iterator[OutgoingMessage[Any]]:
    """Yield `items`, read as they are sent, with the current context."""
    for item in items:
        outgoing = item if isinstance(item, OutgoingMessage) else OutgoingMessage(body=item)
        yield replace(outgoing, headers=_headers(queue, outgoing.headers))
