"""
Deliver due messages in the caller's thread or on its event loop, until no message is due.

`Drain` claims messages, yields a handler call for them, and then sends the outcome to Redis. `Calls` runs these handler
calls in sync tests, and `AsyncCalls` in async tests.
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
from reliq.handlers.settlement import EXPIRED, HandlerOutcome, burial, is_final
from reliq.lua import transitions
from reliq.lua.transitions import CallSequences
from reliq.message import Claimed, Outcome
from reliq.receive.bodies import BodyReader
from reliq.receive.receiver import poll
from reliq.redis.commands import Request, raise_first
from reliq.text import pluralize
from reliq.wire_format import from_handler
from reliq.worker.engine import live
from reliq.worker.runner import Returned, Runner
from reliq.worker.slots import HandlerCall, HeldDelivery, deliveries_of
from reliq.worker.upkeep import Ticker

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence

    from reliq.consumer import Consumer
    from reliq.handlers.handler import Handler, Job
    from reliq.handlers.registration import Periodic
    from reliq.keys import Keys
    from reliq.redis.client import Client

#: The lease in ms of the messages that a drain claims. It is long, so that it does not expire while a developer stops
#: the handler in a debugger.
LONG_LEASE_MS = 3_600_000
#: For each kind of `HandlerOutcome`, the attribute of `DrainResult` that lists the ids of messages with this outcome.
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
    The ids of the messages that a drain delivered, by outcome, in the order of delivery.

    Attributes:
        acked: ids of messages that a handler processed successfully.
        nacked: ids of failed deliveries; the messages are redelivered after their backoff.
        snoozed: ids of messages whose handler raised `Snooze` or `RateLimited`.
        dead: ids of messages that became dead letters: rejected, or failed without a retry left.
        expired: ids of messages whose body had expired before the delivery.
    """

    acked: list[str] = field(default_factory=list)
    nacked: list[str] = field(default_factory=list)
    snoozed: list[str] = field(default_factory=list)
    dead: list[str] = field(default_factory=list)
    expired: list[str] = field(default_factory=list)


class Calls:
    """Runs handlers in the thread of the test. Async handlers run on an event loop of this object."""

    def __init__(self) -> None:
        self._loop = asyncio.Runner()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.close()

    def run(self, runner: Runner, call: HandlerCall) -> Returned:
        """Run the handler of a call; return its result and exception. Both are None if the leases have expired."""
        if not runner.begin(call):
            return None, None
        return self._await(runner.arun(call)) if call.handler.is_async else runner.run(call)

    @contextmanager
    def lifespan(self, consumer: Consumer, state: Any) -> Iterator[Any]:
        """
        Enter the consumer's lifespan and yield its value for `job.state`.

        If `state` is not None, do not enter the lifespan, and yield `state`. The same asyncio task runs the start and
        the end of an async lifespan.
        """
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
                "this thread already runs an event loop: use `await reliq.adrain(…)` or `await reliq.aperform(…)`"
            ) from error


class AsyncCalls:
    """Runs handlers on the event loop of an async test. A sync handler blocks the event loop."""

    async def run(self, runner: Runner, call: HandlerCall) -> Returned:
        """Run the handler of a call; return its result and exception. Both are None if the leases have expired."""
        if not runner.begin(call):
            return None, None
        if not call.handler.is_async:
            return runner.run(call)
        answer, error = await runner.arun(call)
        if isinstance(error, asyncio.CancelledError):  # the asyncio task of the test was cancelled
            raise error
        return answer, error

    @asynccontextmanager
    async def lifespan(self, consumer: Consumer, state: Any) -> AsyncIterator[Any]:
        """
        Enter the consumer's lifespan and yield its value for `job.state`.

        If `state` is not None, do not enter the lifespan, and yield `state`.
        """
        manager = consumer.lifespan() if state is None and consumer.lifespan is not None else nullcontext(state)
        if hasattr(manager, "__aenter__"):
            async with manager as yielded:
                yield yielded
        else:
            with manager as yielded:
                yield yielded


class HandlerCalls:
    """
    Builds handler calls for a consumer, checks their results, and stores the first failure.

    Attributes:
        runner: runs the handlers, with middleware, observers and error hooks. Its `state` is the value of `job.state`.
        failed: the first exception of a handler, or the first error for a body that cannot be decoded. Exceptions that
            choose an outcome, such as `Nack`, do not count. None without a failure.
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
        """Return a new `HandlerCall` of `handler` with these deliveries. The timeout of the handler starts now."""
        for held in deliveries:
            held.started = True
        now = time.monotonic()
        timeout = handler.timeout_seconds
        return HandlerCall(deliveries, handler, now, None if timeout is None else now + timeout)

    def answer(self, returned: Returned) -> Any:
        """Return the result of a handler. If it raised, or its body cannot be decoded, raise the error."""
        __tracebackhide__ = True
        answer, error = returned
        if error := error or self.failed:
            raise own_traceback(error)
        return answer

    def _note(self, _job: Job[Any], error: BaseException, _final: bool) -> None:
        if self.failed is None and not isinstance(error, Outcome):
            self.failed = error


class Ticks(Ticker):
    """
    Publishes the due messages of periodic jobs.

    If the function that makes the body of a message raises, the exception fails the test.
    """

    def _handle_body_failure(self, _entry: Periodic, _failures: int, error: BaseException) -> None:
        raise own_traceback(error)


class Drain:
    """
    Delivers the messages in the queues of a consumer until no message is due.

    Args:
        client: the client that sends commands to the test's Redis.
        began: a client for the same Redis whose clock shows the start of the test. It registers the periodic jobs, so
            that the drain publishes all ticks since the start of the test.
        travel: a function that moves the clock forward by some seconds. If no message is due, the drain calls it to
            reach the next due time. With None, the drain ends instead.
        fail_fast: whether to raise the first failure of a handler.
        most: maximum number of deliveries. After more deliveries, the drain raises AssertionError.
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
                if (limits := handler.queue.own_limits)
            ]
        )
        self.calls = HandlerCalls(consumer)
        self.done = DrainResult()

    def steps(self) -> Iterator[HandlerCall | None]:
        """
        Yield the handler calls one after another; before each pass over all queues, yield None.

        The caller must run each handler call before it continues the iteration.

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
        """
        Claim messages of one shard for one handler, and yield the handler calls.

        Args:
            waits: a list. The method appends in how many ms the next pending message of the shard is due, and in how
                many ms the next lease or backoff in the shard ends.
        """
        __tracebackhide__ = True
        settings = handler.queue.settings
        spread = 1 if handler.settings.batch_by_key else None
        self._call_number = self._call_number.next()
        calls = poll(keys, self._call_number, limit=handler.batch, lease_ms=LONG_LEASE_MS, spread=spread)
        (_, next_promote_ms), reclaimed, claim = self._run_all(calls)
        self._bury(handler, keys, reclaimed.buried)
        waits += [wait_ms for wait_ms in (next_promote_ms, reclaimed.next_in_ms) if wait_ms > 0]
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
        for routed in held:
            routed.handler = handler.of(routed.delivery.header)
        groups = [[delivery] for delivery in held if delivery.must_start]
        groups.append([delivery for delivery in held if not delivery.must_start])
        for group in filter(None, groups):
            yield self.calls.of(group[0].handler, group)
            if unsaved := [held for held in group if held.checkpoint]:
                self._client.run(settlement.saving(keys, unsaved))
            unsettled = group
            while settling := settlement.calls(keys, settings, unsettled):
                answers = self._run_all([call for call, _ in settling])
                unsettled = [
                    held
                    for (_, piece), answer in zip(settling, answers, strict=True)
                    for held in settlement.unsettled(piece, answer)
                ]
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
        if outcome.kind != "release":  # a released message is in no list of `DrainResult`
            end = "dead" if is_final(claimed, outcome) else _LISTED[outcome.kind]
            getattr(self.done, end).append(claimed.id)
        self._by_queue[handler.queue_name] += 1
        if self._by_queue.total() > self._most:
            queues = ", ".join(f"{count} of {name!r}" for name, count in self._by_queue.most_common())
            raise AssertionError(
                f"not drained after {pluralize(self._most, 'delivery', 'deliveries')} ({queues}): perhaps a handler "
                "always publishes to its own queue, or always snoozes. Otherwise give drain(most=) a larger number"
            )

    def _run_all(self, requests: Sequence[Request[Any]]) -> list[Any]:
        """Send requests in one round trip and return the replies. If a reply is an error, raise the first error."""
        return raise_first(self._client.run_all(requests))


def own_traceback(error: BaseException) -> BaseException:
    """Return the exception with a traceback that begins in the user's code, not in reliq's code."""
    trace = from_handler(error.__traceback__)
    return error if trace is None or isinstance(error, UndecodableError) else error.with_traceback(trace)


def _settle(deliveries: Sequence[HeldDelivery], outcome: HandlerOutcome | None = None) -> None:
    """
    Store the outcome in each delivery, so that `Drain` can send it to Redis.

    None keeps the outcome that a delivery already has.
    """
    for held in deliveries:
        held.settling = True
        held.outcome = held.outcome if outcome is None else outcome
