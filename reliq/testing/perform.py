"""One call of a handler without Redis."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from reliq.message import Claimed, Delivery
from reliq.outgoing import Outgoing
from reliq.publish.orders import Writer
from reliq.settings import whole
from reliq.testing.drain import LONG_LEASE_MS, HandlerCalls, own_traceback
from reliq.wireformat import ENVELOPE_START, open_envelope
from reliq.worker.delivery import deliveries_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from uuid import UUID

    from reliq.consumer.consumer import Consumer
    from reliq.handlers.handler import Handler
    from reliq.message import Priority
    from reliq.outgoing import PublishOptions
    from reliq.queue import Queue
    from reliq.worker.delivery import HeldDelivery
    from reliq.worker.runner import Returned


class JobOptions(TypedDict, total=False):
    """The keyword arguments of `Reliq.perform` for type checkers, which describes each."""

    id: str | UUID | None
    attempt: int
    retries: int | None
    headers: Mapping[str, str] | None
    incarnation: int | None
    key: str | None
    priority: Priority


class Performance:
    """
    A call of a queue's handler with one message, which is encoded as for a publish and due now.

    Attributes:
        runner, call: what makes the call, and the call.
    """

    def __init__(self, consumer: Consumer, queue: Queue[Any], body: Any, **options: Unpack[JobOptions]) -> None:
        [handler] = consumer.chosen([queue.name])
        attempt = options.get("attempt", 1)
        published: PublishOptions = {"id": options.get("id"), "retries": options.get("retries")}
        published |= {"headers": options.get("headers"), "incarnation": options.get("incarnation")}
        published |= {"key": options.get("key"), "priority": options.get("priority", "normal")}
        outgoing = Outgoing(body=body, **published)
        self._calls = HandlerCalls(consumer)
        self.runner = self._calls.runner
        self.call = self._calls.of(handler, [_held(handler, queue, outgoing, attempt)])

    def enter(self, state: Any, entered: Any) -> None:
        """Set `job.state`: the one that was given, else what the lifespan has yielded."""
        self.runner.state = entered if state is None else state

    def answer(self, returned: Returned) -> Any:
        """Return what the handler has returned; raise what it has raised, or why the body does not decode."""
        __tracebackhide__ = True
        answer, error = returned
        if error := error or self._calls.failed:
            raise own_traceback(error)
        return answer


def _held(handler: Handler, queue: Queue[Any], outgoing: Outgoing[Any], attempt: int) -> HeldDelivery:
    bare = queue.layout.bare
    order = Writer(queue.known_shards, queue.codec, queue.settings).special(outgoing)
    whole("attempt", attempt, least=1, most=order.terms.retries + 1)
    due = b"" if bare else f"{ENVELOPE_START}{round(time.time() * 1000)}".encode()
    value = due + order.value
    claimed = Claimed(order.id, f"performed:{LONG_LEASE_MS}", order.terms.retries - attempt + 1, token=attempt)
    [held] = deliveries_of([claimed], handler, time.monotonic())
    held.delivery = Delivery(claimed, value, *open_envelope(value, bare=bare))
    return held
