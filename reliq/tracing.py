"""
OpenTelemetry spans for publishing and handling; they need reliq's extra `otel`.

The context of the publisher travels in the message's headers (W3C `traceparent`), so a handler's span is a child of the
publish, in whatever process. Nothing else in reliq uses tracing: without `instrument` it costs nothing.
"""

from __future__ import annotations

import functools
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from reliq import distribution
from reliq.message import Outgoing, RateLimited, Snooze
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

_SYSTEM = {"messaging.system": "reliq"}
_publishers: dict[str, Callable[..., Any]] = {}


def instrument(*consumers: Consumer, tracer_provider: TracerProvider | None = None) -> None:
    """Give every publish of this process a span, and every handler call of `consumers`; may be called again."""
    tracer = trace.get_tracer("reliq", distribution.VERSION, tracer_provider)
    if not _publishers:
        for name in ("publish", "apublish", "publish_many", "apublish_many"):
            original = getattr(Queue, name)
            make = _many if name.endswith("many") else _one
            traced = make(tracer, original, is_async=name.startswith("a"))
            _publishers[name] = original
            setattr(Queue, name, functools.wraps(original)(traced))
    for consumer in consumers:
        consumer.middleware(functools.partial(handling, tracer))


def uninstrument() -> None:
    """Publish without spans again; the middleware of consumers stays."""
    while _publishers:
        setattr(Queue, *_publishers.popitem())


@contextmanager
def handling(tracer: Tracer, job: Job[Any]) -> Iterator[None]:
    """Record a span of the handler call inside, as a child of the message's publish."""
    attributes: dict[str, Any] = {
        **_SYSTEM,
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.name": job.queue,
        "messaging.message.id": job.id,
    }
    if job.attempt is not None:
        attributes["reliq.attempt"] = job.attempt
    with tracer.start_as_current_span(
        f"process {job.queue}",
        context=propagate.extract(dict(job.headers)),
        kind=SpanKind.CONSUMER,
        attributes=attributes,
        record_exception=False,
        set_status_on_exception=False,
    ) as span:
        context = span.get_span_context()
        if context.is_valid and context.trace_flags.sampled:
            job.trace_id = f"{context.trace_id:032x}"
        try:
            yield
        except (Snooze, RateLimited):
            raise
        except Exception as error:
            # Its text may hold a part of the body: the class says enough.
            span.set_attribute("error.type", type(error).__qualname__)
            span.set_status(Status(StatusCode.ERROR))
            raise


@contextmanager
def _publishing(tracer: Tracer, queue: Queue[Any]) -> Iterator[Span]:
    """Record a span of the publish inside."""
    attributes = {
        **_SYSTEM,
        "messaging.operation.name": "publish",
        "messaging.operation.type": "send",
        "messaging.destination.name": queue.name,
    }
    with tracer.start_as_current_span(
        f"publish {queue.name}",
        kind=SpanKind.PRODUCER,
        attributes=attributes,
        record_exception=False,
        set_status_on_exception=False,
    ) as span:
        try:
            yield span
        except Exception as error:
            span.set_attribute("error.type", type(error).__qualname__)
            span.set_status(Status(StatusCode.ERROR))
            raise


def _headers(queue: Queue[Any], headers: Mapping[str, str] | None) -> dict[str, str]:
    """Return `headers` with the current context; bare bodies have no headers to carry it."""
    context: dict[str, str] = {}
    if not queue.layout.bare:
        propagate.inject(context)
    return {**context, **(headers or {})}


def _one(tracer: Tracer, original: Callable[..., Any], *, is_async: bool) -> Callable[..., Any]:
    """Return `publish` or `apublish` with a span."""

    def publish(self: Queue[Any], body: Any, *, headers: Mapping[str, str] | None = None, **options: Any) -> Any:
        with _publishing(tracer, self) as span:
            receipt = original(self, body, headers=_headers(self, headers), **options)
            span.set_attribute("messaging.message.id", receipt.id)
            return receipt

    async def apublish(self: Queue[Any], body: Any, *, headers: Mapping[str, str] | None = None, **options: Any) -> Any:
        with _publishing(tracer, self) as span:
            receipt = await original(self, body, headers=_headers(self, headers), **options)
            span.set_attribute("messaging.message.id", receipt.id)
            return receipt

    return apublish if is_async else publish


def _many(tracer: Tracer, original: Callable[..., Any], *, is_async: bool) -> Callable[..., Any]:
    """Return `publish_many` or `apublish_many` with a span."""

    def publish_many(self: Queue[Any], items: Iterable[Any], **options: Any) -> Any:
        with _publishing(tracer, self) as span:
            result = original(self, _carrying(self, items), **options)
            span.set_attribute("messaging.batch.message_count", result.published)
            return result

    async def apublish_many(self: Queue[Any], items: Iterable[Any], **options: Any) -> Any:
        with _publishing(tracer, self) as span:
            result = await original(self, _carrying(self, items), **options)
            span.set_attribute("messaging.batch.message_count", result.published)
            return result

    return apublish_many if is_async else publish_many


def _carrying(queue: Queue[Any], items: Iterable[Any]) -> Iterator[Outgoing[Any]]:
    """Yield `items`, read as they are sent, with the current context."""
    for item in items:
        outgoing = item if isinstance(item, Outgoing) else Outgoing(body=item)
        yield replace(outgoing, headers=_headers(queue, outgoing.headers))
