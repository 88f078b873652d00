"""
A drain delivers due messages in the caller's thread or on its event loop, until nothing is due.

`Drain` claims and settles as a worker does, and yields each call of a handler; `Calls` and `AsyncCalls` make the calls.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from reliq.errors import ConfigurationError, UndecodableError
from reliq.handlers import settlement
from reliq.handlers.settlement import EXPIRED, burial, is_final
from reliq.lua import transitions
from reliq.lua.transitions import CallSequences
from reliq.message import Outcome
from reliq.receive.bodies import BodyReader
from reliq.receive.receiver import ClaimRound
from reliq.redis.commands import raise_first
from reliq.text import pluralize
from reliq.wire_format import from_handler
from reliq.worker.engine import live
from reliq.worker.runner import Runner
from reliq.worker.slots import HandlerCall, deliveries_of
from reliq.worker.upkeep import Ticker

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence

    from reliq.consumer import Consumer
    from reliq.handlers.handler import Handler, Job
    from reliq.handlers.registration import Periodic
    from reliq.handlers.settlement import HandlerOutcome
    from reliq.keys import Keys
    from reliq.message import Claimed
    from reliq.redis.client import Client
    from reliq.redis.commands import Request
    from reliq.worker.runner import Returned
    from reliq.worker.slots import HeldDelivery

#: Lease of a drain in ms; it is long, because a developer may stop in a debugger.
LONG_LEASE_MS = 3_600_000
#: HandlerOutcome -> its list in `DrainResult`.
_LISTED = {
    "ack": "acked",
    "nack": "nacked",
    "snooze": "snoozed",
    "rate_limited": "snoozed",
    "expired": "expired",
    "reject": "dead",
}


@dataclass(frozen=True, slots=True)
class DrainResult:
    """
    The message ids of a drain by outcome, in the order of delivery.

    Attributes:
        acked: ids of messages that their handlers finished.
        nacked: ids of failed deliveries; the messages are redelivered after their backoff.
        snoozed: ids of messages that a handler snoozed, or that waited for a rate limit.
        dead: ids of messages that became dead letters: rejected, or failed without a retry left.
        expired: ids of messages with a body that had expired before the delivery.
    """

    acked: list[str] = field(default_factory=list)
    nacked: list[str] = field(default_factory=list)
    snoozed: list[str] = field(default_factory=list)
    dead: list[str] = field(default_factory=list)
    expired: list[str] = field(default_factory=list)


class Calls:
    """Calls handlers in this thread; coroutine handlers run on an event loop of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.Runner()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.close()

    def run(self, runner: Runner, call: HandlerCall) -> Returned:
        """Make one call to its outcome; return the answer and the exception of the handler."""
        if not runner.begin(call):
            return None, None
        return self._await(runner.arun(call)) if call.handler.is_async else runner.run(call)

    @contextmanager
    def lifespan(self, consumer: Consumer, state: Any) -> Iterator[Any]:
        """Yield `state`, or the state of the consumer's lifespan; one task enters and leaves an async lifespan."""
        manager = consumer.lifespan() if state is None and consumer.lifespan is not None else nullcontext(state)
        if not hasattr(manager, "__aenter__") or isinstance(manager, nullcontext):
            with manager as yielded:
                yield yielded
            return
        loop = self._loop.get_loop()
        entered: asyncio.Future[Any] = loop.create_future()
        over = asyncio.Event()
        living = loop.create_task(live(manager, entered, over))
        try:
            yield self._await(asyncio.wait_for(entered, None))
        finally:
            over.set()
            self._await(asyncio.wait_for(living, None))

    def _await(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        try:
            return self._loop.run(coroutine)
        except RuntimeError as error:
            coroutine.close()
            if asyncio._get_running_loop() is None:  # noqa: SLF001
                raise
            raise ConfigurationError(
                "this thread runs an event loop already: `await reliq.adrain(…)`, or `await reliq.aperform(…)`"
            ) from error


class AsyncCalls:
    """Calls handlers on the running event loop; a plain handler blocks it."""

    async def run(self, runner: Runner, call: HandlerCall) -> Returned:
        """Make one call to its outcome; return the answer and the exception of the handler."""
        if not runner.begin(call):
            return None, None
        if not call.handler.is_async:
            return runner.run(call)
        answer, error = await runner.arun(call)
        if isinstance(error, asyncio.CancelledError):  # the test itself is cancelled
            raise error
        return answer, error

    @asynccontextmanager
    async def lifespan(self, consumer: Consumer, state: Any) -> AsyncIterator[Any]:
        """Yield `state`, or the state of the consumer's lifespan."""
        manager = consumer.lifespan() if state is None and consumer.lifespan is not None else nullcontext(state)
        if hasattr(manager, "__aenter__"):
            async with manager as yielded:
                yield yielded
        else:
            with manager as yielded:
                yield yielded


class HandlerCalls:
    """
    The calls of a consumer's handlers, as a worker makes them, and their first failure.

    Attributes:
        runner: makes the calls; its `state` is the state of the lifespan.
        failed: the first exception of a handler that is no answer, or the error of an undecodable body.
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
        """Return a call of `handler` that starts now."""
        for held in deliveries:
            held.started = True
        now = time.monotonic()
        timeout = handler.timeout_seconds
        return HandlerCall(deliveries, handler, now, None if timeout is None else now + timeout)

    def answer(self, returned: Returned) -> Any:
        """Return the answer of a handler; raise its exception, or the error of an undecodable body."""
        __tracebackhide__ = True
        answer, error = returned
        if error := error or self.failed:
            raise own_traceback(error)
        return answer

    def _note(self, _job: Job[Any], error: BaseException, _final: bool) -> None:
        if self.failed is None and not isinstance(error, Outcome):
            self.failed = error


class Ticks(Ticker):
    """The ticks of a consumer's periodic jobs; an error in the making of a body fails the test."""

    def _handle_body_failure(self, _entry: Periodic, _failures: int, error: BaseException) -> None:
        raise own_traceback(error)


class Drain:
    """
    A drain of the queues of a consumer.

    Args:
        client: makes the requests.
        began: a client with a clock that shows the start of the test, from which on periodic jobs tick.
        travel: moves the clock forward by a number of seconds, to the next due time; None ends the drain when nothing is due.
        fail_fast: raise the first failure.
        most: deliveries after which the drain fails.
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
        self._handlers = consumer.chosen(())
        self._client = client
        self._travel = travel
        self._fail_fast = fail_fast
        self._most = most
        self._call_number = CallSequences().take()
        self._by_queue: Counter[str] = Counter()
        self._ticks = Ticks(client, consumer.periodic)
        if consumer.periodic:
            Ticks(began, consumer.periodic).step()
        self._run_all(
            [
                transitions.limit(handler.queue.keys, limits.fields(), declared=limits.declaration)
                for handler in self._handlers
                if (limits := handler.queue.limits)
            ]
        )
        self.calls = HandlerCalls(consumer)
        self.done = DrainResult()

    def steps(self) -> Iterator[HandlerCall | None]:
        """
        Yield each call of a handler, which the caller makes before it continues; yield None where a round begins.

        Raises:
            AssertionError: the drain made more deliveries than `most`.
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
        """Claim the messages of one call and yield the calls; append to `waits` in how many ms another message comes due."""
        __tracebackhide__ = True
        settings = handler.queue.settings
        spread = 1 if handler.settings.batch_by_key else None
        claim = ClaimRound(keys, handler.batch, LONG_LEASE_MS, spread)
        self._call_number = self._call_number.next()
        claim.looked(self._run_all(claim.look(self._call_number)))
        self._bury(handler, keys, claim.buried)
        waits += claim.next_in_ms
        held = deliveries_of(claim.claimed, handler, time.monotonic())
        reader: BodyReader[HeldDelivery] = BodyReader({keys.name: settings.max_body})
        reader.add(keys, held)
        while reads := reader.next_reads():
            reader.take(reads, self._run_all([read.request for read in reads]))
        _settle(reader.gone, EXPIRED)
        self._run_all([call for call, _ in settlement.calls(keys, settings, reader.gone)])
        for ended in reader.gone:
            self._count(handler, ended.delivery.claimed, ended.outcome)
        held = [delivery for delivery in held if not delivery.settling]
        groups = [[delivery] for delivery in held if delivery.must_start]
        groups.append([delivery for delivery in held if not delivery.must_start])
        for group in filter(None, groups):
            yield self.calls.of(handler, group)
            self._run_all([call for call, _ in settlement.calls(keys, settings, group)])
            final = [ended.delivery.id for ended in group if is_final(ended.delivery.claimed, ended.outcome)]
            self._bury(handler, keys, final)
            for ended in group:
                self._count(handler, ended.delivery.claimed, ended.outcome)
            if self._fail_fast and self.calls.failed is not None:
                raise own_traceback(self.calls.failed)

    def _bury(self, handler: Handler, keys: Keys, ids: Sequence[str]) -> None:
        if ids:
            self._client.run(burial(keys, handler.queue.settings, ids))

    def _count(self, handler: Handler, claimed: Claimed, outcome: HandlerOutcome) -> None:
        if outcome.kind != "release":  # released unspent: no delivery
            end = "dead" if is_final(claimed, outcome) else _LISTED[outcome.kind]
            getattr(self.done, end).append(claimed.id)
        self._by_queue[handler.queue_name] += 1
        if self._by_queue.total() > self._most:
            queues = ", ".join(f"{count} of {name!r}" for name, count in self._by_queue.most_common())
            raise AssertionError(
                f"not drained after {pluralize(self._most, 'delivery', 'deliveries')} ({queues}): does a handler publish "
                "to itself, or snooze, without an end? Otherwise give drain(most=) a larger number"
            )

    def _run_all(self, requests: Sequence[Request[Any]]) -> list[Any]:
        """Make requests in one round trip; raise the first refusal."""
        return raise_first(self._client.run_all(requests))


def own_traceback(error: BaseException) -> BaseException:
    """Cut the traceback of an exception down to the part that begins in the user's code."""
    trace = from_handler(error.__traceback__)
    return error if trace is None or isinstance(error, UndecodableError) else error.with_traceback(trace)


def _settle(deliveries: Sequence[HeldDelivery], outcome: HandlerOutcome | None = None) -> None:
    """Set the outcome of deliveries, as a worker's settler does; the caller sends it to Redis."""
    for held in deliveries:
        held.settling = True
        held.outcome = held.outcome if outcome is None else outcome
