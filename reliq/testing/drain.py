"""Works queues off in the caller's thread, one call of a handler after another, as a worker does."""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from reliq import transitions
from reliq.answers import Answer
from reliq.call import raise_first
from reliq.client.lanes import Lanes
from reliq.error_text import from_handler
from reliq.errors import UndecodableError
from reliq.receive.take import Take
from reliq.settlement import burial, is_final
from reliq.text import count_of
from reliq.worker.delivery import HandlerCall, deliveries_of
from reliq.worker.runner import Runner
from reliq.worker.ticker import Ticker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from reliq.call import Call, Request
    from reliq.client.client import Client
    from reliq.consumer.consumer import Consumer
    from reliq.handlers.handler import Handler
    from reliq.handlers.job import Job
    from reliq.handlers.periodic import Periodic
    from reliq.keys import Keys
    from reliq.message import Claimed
    from reliq.settlement import Outcome
    from reliq.worker.delivery import HeldDelivery

#: A lease of a drain, because whoever debugs a handler takes his time.
LONG_LEASE_MS = 3_600_000


@dataclass(frozen=True, slots=True)
class DrainResult:
    """
    The deliveries of a drain: their ids by their end, in their order.

    Attributes:
        nacked: delivered again later.
        dead: rejected, or failed with no retry left: dead letters.
        expired: their body was gone before a handler could have it.
    """

    acked: list[str] = field(default_factory=list)
    nacked: list[str] = field(default_factory=list)
    snoozed: list[str] = field(default_factory=list)
    dead: list[str] = field(default_factory=list)
    expired: list[str] = field(default_factory=list)

    def note(self, id: str, kind: str) -> None:
        """Add a delivery; one that was given back unspent is none."""
        if kind != "released":
            getattr(self, kind).append(id)


#: Outcome -> where it is listed.
_LISTED = {
    "ack": "acked",
    "nack": "nacked",
    "snooze": "snoozed",
    "rate_limited": "snoozed",
    "expired": "expired",
    "reject": "dead",
    "release": "released",
}


class HandlerCalls:
    """
    The calls of a consumer's handlers, made as a worker makes them, and the first failure among them.

    Attributes:
        runner: makes them; its `state` is that of the lifespan.
        failed: an exception of a handler that is no answer, or why a body does not decode.
    """

    def __init__(self, consumer: Consumer) -> None:
        self.failed: BaseException | None = None
        self.runner = Runner(
            _settle,
            consumer.around_calls,
            consumer.observers,
            threading.Event(),
            on_error=(*consumer.error_hooks, self._note),
        )

    @staticmethod
    def of(handler: Handler, deliveries: list[HeldDelivery]) -> HandlerCall:
        """Return a call of `handler`, to be made now."""
        for held in deliveries:
            held.started = True
        now = time.monotonic()
        timeout = handler.timeout_seconds
        return HandlerCall(deliveries, handler, now, None if timeout is None else now + timeout)

    def _note(self, _job: Job[Any], error: BaseException, _final: bool) -> None:
        if self.failed is None and not isinstance(error, Answer):
            self.failed = error


class Ticks(Ticker):
    """The ticks of a consumer's periodic entries; a body that cannot be made fails the test."""

    def _note_failure(self, _entry: Periodic, error: BaseException) -> None:
        raise own_traceback(error)


class Drain:
    """
    A drain of the queues of a consumer.

    Args:
        began: a client whose clock stands at the beginning of the test: periodic entries are in force from then on.
        travel: moves the clock on by so many seconds, to the next due time; None ends the drain when nothing is due.
        fail_fast: raise the first failure.
        most: deliveries after which a drain without an end is given up.
    """

    def __init__(
        self,
        consumer: Consumer,
        client: Client,
        began: Client,
        *,
        travel: Callable[[float], None] | None,
        fail_fast: bool,
        most: int,
    ) -> None:
        self._handlers, self._client = consumer.chosen(()), client
        self._travel, self._fail_fast, self._most = travel, fail_fast, most
        self._lane, _ = Lanes().take()
        self._by_queue: Counter[str] = Counter()
        self._ticks = Ticks(client, consumer.periodic)
        if consumer.periodic:
            Ticks(began, consumer.periodic).step()
        self._asked(list(_declared(self._handlers)))
        self.calls = HandlerCalls(consumer)
        self.done = DrainResult()

    def steps(self) -> Iterator[HandlerCall | None]:
        """
        Yield each call of a handler, for the caller to make before the next is asked for; None where a round begins.

        Raises:
            AssertionError: there were more deliveries than `most`.
        """
        __tracebackhide__ = True
        while True:
            yield None
            self._ticks.step()
            waits: list[int] = []
            before = self._by_queue.total()
            for handler in self._handlers:
                for keys in handler.queue.shards():
                    yield from self._of_queue(handler, keys, waits)
            if self._by_queue.total() == before:
                if self._travel is None or not waits:
                    return
                self._travel(min(waits) / 1000)

    def _of_queue(self, handler: Handler, keys: Keys, waits: list[int]) -> Iterator[HandlerCall]:
        """Claim what one call takes, and yield it; note in how many ms something else comes due."""
        __tracebackhide__ = True
        settings = handler.queue.settings
        is_keyed = handler.queue.limits is not None or handler.queue.known_shards.is_keyed
        spread = 1 if handler.settings.batch_by_key else None
        take = Take(keys, settings, limit=handler.batch, lease_ms=LONG_LEASE_MS, keyed=is_keyed, spread=spread)
        take.looked(self._asked(take.look(self._lane.next())))
        self._bury(handler, keys, take.buried)
        waits += take.next_in_ms
        deliveries, gone = take.opened(self._asked(take.large_reads(self._asked(take.reads()))))
        self._asked(take.settle(gone))
        for ending in gone:
            self._count(handler, ending.delivery.claimed, ending.outcome)
        held = deliveries_of([one.claimed for one in deliveries], handler, time.monotonic())
        for one, delivery in zip(held, deliveries, strict=True):
            one.delivery = delivery
        alone = [[one] for one in held if one.must_start]
        together = [one for one in held if not one.must_start]
        for group in [*alone, *([together] if together else [])]:
            yield self.calls.of(handler, group)
            self._asked(take.settle(group))
            self._bury(handler, keys, [one.delivery.id for one in group if is_final(one.delivery.claimed, one.outcome)])
            for one in group:
                self._count(handler, one.delivery.claimed, one.outcome)
            if self._fail_fast and self.calls.failed is not None:
                raise own_traceback(self.calls.failed)

    def _bury(self, handler: Handler, keys: Keys, ids: Sequence[str]) -> None:
        if ids:
            self._client.run(burial(keys, handler.queue.settings, ids))

    def _count(self, handler: Handler, claimed: Claimed, outcome: Outcome) -> None:
        self.done.note(claimed.id, "dead" if is_final(claimed, outcome) else _LISTED[outcome.kind])
        self._by_queue[handler.queue_name] += 1
        if self._by_queue.total() > self._most:
            queues = ", ".join(f"{count} of {name!r}" for name, count in self._by_queue.most_common())
            raise AssertionError(
                f"not drained after {count_of(self._most, 'delivery', 'deliveries')} ({queues}): does a handler publish "
                "to itself, or snooze, without an end? Otherwise give drain(most=) a larger number"
            )

    def _asked(self, requests: Sequence[Request[Any]]) -> list[Any]:
        """Return the answers of Redis; raise the first refusal."""
        return raise_first(self._client.run_all(requests))


def _declared(handlers: Sequence[Handler]) -> Iterator[Call[bool]]:
    """Yield the calls that write the limits which queues declare, as a worker does when it starts."""
    for queue in (handler.queue for handler in handlers):
        if limits := queue.limits:
            yield transitions.limit(queue.keys, limits.fields(), declared=limits.declared)


def own_traceback(error: BaseException) -> BaseException:
    """Return an exception with the part of its traceback that begins in the user's code."""
    trace = from_handler(error.__traceback__)
    return error if trace is None or isinstance(error, UndecodableError) else error.with_traceback(trace)


def _settle(deliveries: Sequence[HeldDelivery], outcome: Outcome | None = None) -> None:
    """Note the outcome of deliveries, as a worker's settler does; the caller tells Redis."""
    for held in deliveries:
        held.settling = True
        held.outcome = held.outcome if outcome is None else outcome
