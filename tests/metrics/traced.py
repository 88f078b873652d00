"""A consumer in a separate process that writes its spans to standard output as JSON lines."""

import json
import sys

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from reliq import Consumer, Queue, Reject, Snooze
from reliq.tracing import instrument

TRACED = Queue("traced", str, retries=0)
consumer = Consumer()


@consumer.handler(TRACED)
def traced(body: str) -> None:
    if body == "bad":
        raise Reject(reason="secret text of the body")
    if body == "snooze":
        raise Snooze(delay=600)


def spans_of(exporter: InMemorySpanExporter) -> list[dict]:
    """Return the tested fields of finished spans."""
    return [
        {
            "name": span.name,
            "kind": span.kind.name,
            "trace": f"{span.context.trace_id:032x}",
            "id": f"{span.context.span_id:016x}",
            "parent": f"{span.parent.span_id:016x}" if span.parent else None,
            "links": [
                {"id": f"{link.context.span_id:016x}", "told": dict(link.attributes or {})} for link in span.links
            ],
            "status": span.status.status_code.name,
            "told": dict(span.attributes or {}),
        }
        for span in exporter.get_finished_spans()
    ]


def provider() -> tuple[TracerProvider, InMemorySpanExporter]:
    exporter, made = InMemorySpanExporter(), TracerProvider()
    made.add_span_processor(SimpleSpanProcessor(exporter))
    return made, exporter


if __name__ == "__main__":
    made, exporter = provider()
    instrument(consumer, tracer_provider=made)
    consumer.start()
    sys.stdin.read()
    consumer.stop()
    print(json.dumps(spans_of(exporter)))
