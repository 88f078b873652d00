"""
A drain: what is due is delivered in the caller's own thread, or on its event loop, until nothing is due.

`Drain` claims and settles as a worker does, and yields each call of a handler; `Calls` and `AsyncCalls` make it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from reliq.errors import ConfigurationError, UndecodableError
from reliq.handlers import settlement
from reliq.handlers.settlement import EXPIRED, burial, is_final
from reliq.lua import transitions
from reliq.lua.transitions import CallSequences
from reliq.message import Answer
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
    from reliq.handlers.settlement import Outcome
    from reliq.keys import Keys
    from reliq.message import Claimed
    from reliq.redis.client import Client
    from reliq.redis.commands import Request
    from reliq.worker.runner import Returned
    from reliq.worker.slots import HeldDelivery

#: The lease of a drain: a developer may stop in a debugger.
LONG_LEASE_MS = 3_600_000
#: Outcome -> where it is listed.
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


class Calls:
    """Makes calls in this thread, those of coroutine handlers on an event loop that is made for them."""

    def __init__(self) -> None:
        self._loop = asyncio.Runner()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.close()

    def run(self, runner: Runner, call: HandlerCall) -> Returned:
        """Make one call, to its outcome; return what its handler returned, and what it raised."""
        if not runner.begin(call):
            return None, None
        if not call.handler.is_async:
            return runner.run(call)
        return self._await(runner.arun(call))  # type: ignore[no-any-return]

    @contextmanager
    def lifespan(self, consumer: Consumer, state: Any) -> Iterator[Any]:
        """Give `state`, or what the consumer's lifespan yields; an async lifespan is entered and left within one task."""
        manager = consumer.lifespan() if state is None and consumer.lifespan is not None else None
        if manager is None:
            yield state
        elif hasattr(manager, "__aenter__"):
            entered: asyncio.Future[Any] = self._loop.get_loop().create_future()
            over = asyncio.Event()
            living = self._loop.get_loop().create_task(live(manager, entered, over))
            try:
                yield self._await(_result(entered))
            finally:
                over.set()
                self._await(_result(living))
        else:
            with manager as yielded:
                yield yielded

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


async def _result(future: asyncio.Future[Any]) -> Any:
    return await future


class AsyncCalls:
    """Makes calls on the running event loop; a plain handler holds it up."""

    async def run(self, runner: Runner, call: HandlerCall) -> Returned:
        """As `Calls.run`."""
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
        """As `Calls.lifespan`."""
        manager = consumer.lifespan() if state is None and consumer.lifespan is not None else None
        if manager is None:
            yield state
        elif hasattr(manager, "__aenter__"):
            async with manager as yielded:
                yield yielded
        else:
            with manager as yielded:
                yield yielded


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

    def answer(self, returned: Returned) -> Any:
        """Return what a handler has returned; raise what it has raised, or why the body does not decode."""
        __tracebackhide__ = True
        answer, error = returned
        if error := error or self.failed:
            raise own_traceback(error)
        return answer

    def _note(self, _job: Job[Any], error: BaseException, _final: bool) -> None:
        if self.failed is None and not isinstance(error, Answer):
            self.failed = error


class Ticks(Ticker):
    """The ticks of a consumer's periodic entries; a body that cannot be made fails the test."""

    def _handle_body_failure(self, _entry: Periodic, _failures: int, error: BaseException) -> None:
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
        alone = [[delivery] for delivery in held if delivery.must_start]
        together = [delivery for delivery in held if not delivery.must_start]
        for group in [*alone, *([together] if together else [])]:
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

    def _count(self, handler: Handler, claimed: Claimed, outcome: Outcome) -> None:
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
    """Return an exception with the part of its traceback that begins in the user's code."""
    trace = from_handler(error.__traceback__)
    return error if trace is None or isinstance(error, UndecodableError) else error.with_traceback(trace)


def _settle(deliveries: Sequence[HeldDelivery], outcome: Outcome | None = None) -> None:
    """Note the outcome of deliveries, as a worker's settler does; the caller tells Redis."""
    for held in deliveries:
        held.settling = True
        held.outcome = held.outcome if outcome is None else outcome
