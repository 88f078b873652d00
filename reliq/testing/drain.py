"""Calls of handlers in the caller's own thread, and the lifespan around them: one twin for blocking code, one for async."""

from __future__ import annotations

import asyncio
import importlib
import math
import threading
import time
from collections import Counter
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from reliq import distribution
from reliq.errors import ConfigurationError, UndecodableError
from reliq.handlers.settlement import burial, is_final
from reliq.lua import transitions
from reliq.lua.transitions import CallSequences
from reliq.message import Answer
from reliq.receive.receiver import ClaimRound
from reliq.redis.commands import raise_first
from reliq.settings import LONGEST_SECONDS, seconds
from reliq.testing import published
from reliq.testing.published import keys_of
from reliq.text import pluralize
from reliq.wire_format import from_handler
from reliq.worker.engine import live
from reliq.worker.runner import Runner
from reliq.worker.scheduler import Ticker
from reliq.worker.slots import HandlerCall, deliveries_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence

    from reliq.consumer import Consumer
    from reliq.handlers.handler import Handler, Job
    from reliq.handlers.registration import Periodic
    from reliq.handlers.settlement import Outcome
    from reliq.keys import Keys
    from reliq.message import Claimed, Duration
    from reliq.redis.client import Client
    from reliq.redis.commands import Call, Request
    from reliq.worker.runner import Returned
    from reliq.worker.slots import HeldDelivery


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
        if not call.handler.is_async:
            return runner.run(call)
        if not runner.begin(call):
            return None, None
        return self._await(runner.arun(call))  # type: ignore[no-any-return]

    @contextmanager
    def lifespan(self, make: Callable[[], Any] | None) -> Iterator[Any]:
        """Enter a lifespan, an async one within one task, and leave it at the end; give what it yields."""
        manager = None if make is None else make()
        if manager is None:
            yield None
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
            with manager as state:
                yield state

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
    """Makes calls on the running event loop; a plain handler holds it up."""

    async def run(self, runner: Runner, call: HandlerCall) -> Returned:
        """As `Calls.run`."""
        if not call.handler.is_async:
            return runner.run(call)
        if not runner.begin(call):
            return None, None
        answer, error = await runner.arun(call)
        if isinstance(error, asyncio.CancelledError):  # the test itself is cancelled
            raise error
        return answer, error

    @asynccontextmanager
    async def lifespan(self, make: Callable[[], Any] | None) -> AsyncIterator[Any]:
        """As `Calls.lifespan`."""
        manager = None if make is None else make()
        if manager is None:
            yield None
        elif hasattr(manager, "__aenter__"):
            async with manager as state:
                yield state
        else:
            with manager as state:
                yield state


async def _result(future: asyncio.Future[Any]) -> Any:
    return await future


#: Somebody else has moved Python's clock when it has gone further, or less far, than the time that passed, by this.
MOVED_US = 5000
#: After a move, keys expire sooner by this: real time has passed between a script's clock and its write.
SOONER_MS = 50


class TestClock:
    """
    Python's clock as Redis' own: scripts are told it, and what expires does so when it says.

    Args:
        client: of the tests' Redis, by its own clock.
    """

    __test__ = False  # no test of pytest's

    def __init__(self, client: Client) -> None:
        self._client = client
        self._lock = threading.RLock()
        self._ahead = _ahead_us()
        self._moves = ExitStack()
        self._is_held = False

    def __call__(self) -> int:
        """Return the time in unix microseconds."""
        if abs(_ahead_us() - self._ahead) >= MOVED_US:
            self.follow()
        return _now_us()

    def follow(self) -> None:
        """Have keys expire as much sooner, or later, as the clock was moved since the last time."""
        with self._lock:
            by_ms = (_ahead_us() - self._ahead) // 1000
            self._ahead += by_ms * 1000
            keys = keys_of(self._client)
            left = zip(keys, self._client.run_all(published.expiries(keys)), strict=True)
            expiring = [(key, ms - by_ms) for key, ms in left if ms >= 0]
            self._client.run_all([published.expire(key, ms if ms > SOONER_MS else 0) for key, ms in expiring])

    def travel(self, by: Duration) -> None:
        """
        Move the clock on.

        Raises:
            ConfigurationError: time would go backwards, time-machine is not installed, or something else holds the clock.
        """
        by_us = round(seconds("travel", by, most=LONGEST_SECONDS) * 1_000_000)
        # Due times are rounded up to whole ms: so is the time that meets them.
        self._move_to(-(-(_now_us() + by_us) // 1000) * 1000, ticks=not self._is_held and _ticks())

    def hold(self) -> None:
        """Have time pass by `travel` alone; raise as that does."""
        self._is_held = True
        self._move_to(_now_us() // 1000 * 1000, ticks=False)  # due times and time outs are whole ms

    def end(self) -> None:
        """Give Python its clock back."""
        self._moves.close()

    def _move_to(self, to_us: int, *, ticks: bool) -> None:
        to = to_us / 1_000_000
        if int(to * 1e9) < to_us * 1000:  # a float is exact to a quarter of a microsecond
            to = math.nextafter(to, math.inf)
        traveller = _time_machine().travel(to, tick=ticks)
        try:
            traveller.start()
        except RuntimeError as error:
            raise ConfigurationError(f"Python's clock cannot be moved: {error}") from error
        if _now_us() < to_us:
            traveller.stop()
            raise ConfigurationError(
                "something else holds Python's clock, such as freezegun: move it by that, and Redis goes by it"
            )
        self._moves.callback(traveller.stop)
        self.follow()


def _now_us() -> int:
    return time.time_ns() // 1000


def _ahead_us() -> int:
    """Return by how much Python's clock is ahead of one that nobody moves."""
    return _now_us() - time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000


def _ticks() -> bool:
    """Say whether Python's clock goes on by itself: a test may hold it by time-machine."""
    if not _time_machine().escape_hatch.is_travelling():
        return True
    began, real = time.time_ns(), time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    while time.clock_gettime_ns(time.CLOCK_MONOTONIC) - real < 10_000:  # noqa: PLR2004  it counts microseconds
        pass
    return time.time_ns() > began


def _time_machine() -> Any:
    try:
        return importlib.import_module("time_machine")
    except ImportError:
        raise ConfigurationError(distribution.missing("time travel", "time-machine", "testing")) from None


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
        self._lane, _ = CallSequences().take()
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
        take = ClaimRound(keys, settings, limit=handler.batch, lease_ms=LONG_LEASE_MS, keyed=is_keyed, spread=spread)
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
                f"not drained after {pluralize(self._most, 'delivery', 'deliveries')} ({queues}): does a handler publish "
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
