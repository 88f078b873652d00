"""The block that isolates a test, with a Redis and a clock of its own, and the calls of the fixture `reliq`."""

from __future__ import annotations

import importlib
import math
import threading
import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, Unpack

from reliq import distribution
from reliq.errors import ConfigurationError
from reliq.message import Claimed, Delivery, Outgoing
from reliq.metrics.snapshot import registered
from reliq.publish import Writer
from reliq.redis.client import Client
from reliq.redis.commands import Command, drop_watch, push_wake_token
from reliq.redis.server import Connection, redirected
from reliq.redis.shards import shard_map
from reliq.settings import LONGEST_SECONDS, OUTBOX_PREFIX, check_int, check_is_one_of, seconds
from reliq.testing.drain import LONG_LEASE_MS, AsyncCalls, Calls, Drain, DrainResult, HandlerCalls
from reliq.testing.published import (
    ALIVE_STATES,
    Match,
    Published,
    amove,
    format_messages,
    keys_of,
    meets,
    messages,
    move,
)
from reliq.testing.server import EMBEDDED, clear, url_of
from reliq.text import check_keywords
from reliq.wire_format import ENVELOPE_START, open_envelope
from reliq.worker.slots import deliveries_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from uuid import UUID

    from reliq.consumer import Consumer
    from reliq.message import Duration, Priority
    from reliq.queue import Queue
    from reliq.worker.slots import HandlerCall


#: Other code has moved Python's clock when it differs by this much from the time that has passed.
MOVED_US = 5000
#: After a move, keys expire sooner by this: real time has passed between a script's clock and its write.
SOONER_MS = 50


def expiries(any_keys: Sequence[str]) -> list[Command[int]]:
    """Read in how many ms keys expire; below 0: never, or gone."""
    return [Command(("PTTL", key), int) for key in any_keys]


def expire(any_key: str, lasts_ms: int) -> Command[bool]:
    """Have a key expire in so many ms; below 1: at once."""
    return Command(("PEXPIRE", any_key, lasts_ms), bool)


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
            expiring = zip(keys, self._client.run_all(expiries(keys)), strict=True)
            left = [(key, ms - by_ms) for key, ms in expiring if ms >= 0]
            self._client.run_all([expire(key, ms if ms > SOONER_MS else 0) for key, ms in left])

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
    """Return by how much Python's clock is ahead of the monotonic clock."""
    return _now_us() - time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000


def _ticks() -> bool:
    """Say whether Python's clock goes on by itself: a test may hold it by time-machine."""
    if not _time_machine().escape_hatch.is_travelling():
        return True
    began = time.time_ns()
    real = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    while time.clock_gettime_ns(time.CLOCK_MONOTONIC) - real < 10_000:  # noqa: PLR2004  it counts microseconds
        pass
    return time.time_ns() > began


def _time_machine() -> Any:
    try:
        return importlib.import_module("time_machine")
    except ImportError:
        raise ConfigurationError(distribution.missing("time travel", "time-machine", "testing")) from None


B = TypeVar("B")

#: A reply is awaited for this many seconds.
KIT_REPLY_SECONDS = 5.0
#: A drain has at most this many deliveries, unless it is told another number.
MOST_DELIVERIES = 1000
_MATCH_KEYWORDS = ("body", *Match.__annotations__)
_open: list[Reliq] = []


class JobOptions(TypedDict, total=False):
    """The keyword arguments of `Reliq.perform` for type checkers, which describes each."""

    id: str | UUID | None
    attempt: int
    retries: int | None
    headers: Mapping[str, str] | None
    incarnation: int | None
    key: str | None
    priority: Priority


_JOB_KEYWORDS = frozenset({"state", *JobOptions.__annotations__})


@contextmanager
def isolated(server: str = EMBEDDED) -> Iterator[Reliq]:
    """
    Give a test a Redis that is empty, which every URL, client and RELIQ_URL means meanwhile, in this process and its forks.

    Args:
        server: `embedded`, a redis-server that this process starts once and stops at its end; or the URL of a single
            server's empty database.

    Raises:
        ConfigurationError: no redis-server is installed, the database holds keys, another block has not ended, or a
            worker that was started in this one still runs at its end.

    Example:
        class Orders(unittest.TestCase):
            def setUp(self):
                self.reliq = self.enterContext(isolated())
    """
    if _open:
        raise ConfigurationError(
            "one test has been isolated already, and its block has not ended: they cannot be nested"
        )
    url = url_of(server)
    upkeep = Client.to(Connection(url), KIT_REPLY_SECONDS)
    clear(upkeep, url)
    clock = TestClock(upkeep)
    before = _workers()
    reliq = Reliq(url, clock)
    _open.append(reliq)
    try:
        with redirected(reliq.connection):
            yield reliq
        if _workers() - before:
            raise ConfigurationError(
                "a worker that the test has started still runs, and would take the messages of the next test: end the "
                "test with consumer.stop()"
            )
    finally:
        _open.remove(reliq)
        clock.end()
        clear(upkeep, url)
        reliq.connection.close()


def _workers() -> set[threading.Thread]:
    """Return the threads that claim messages, one for each worker in this process."""
    return {thread for thread in threading.enumerate() if thread.name == "reliq-fetcher"}


class Reliq:
    """
    A Redis for one test, and time in it.

    Attributes:
        url: of that Redis; other processes need it, for only this process and its forks are redirected.
        connection: what every target means meanwhile.
    """

    def __init__(self, url: str, clock: TestClock) -> None:
        self.url = url
        self._clock = clock
        self._began_us = time.time_ns() // 1000
        self.connection = Connection(url, clock)
        self._client = Client.to(self.connection, KIT_REPLY_SECONDS)

    def published(self, queue: Queue[B], body: B | None = None, **match: Unpack[Match]) -> list[Published[B]]:
        """
        Return the messages of `queue` that have not ended, those first that are delivered first.

        Args:
            body, state, id, key, priority: what they must have; None is any.
            headers: those that they must have; there may be more.
            due: unix seconds or an aware datetime, met within a second.
        """
        check_keywords("Reliq.published", match, _MATCH_KEYWORDS)
        if (state := match.get("state")) is not None:
            check_is_one_of("state", state, ALIVE_STATES)
        return [message for message in messages(self._client, queue) if meets(message, body, match)]

    def assert_published(self, queue: Queue[B], body: B | None = None, **match: Unpack[Match]) -> Published[B]:
        """Return the first message that `published` finds; raise AssertionError, which shows the others, for none."""
        __tracebackhide__ = True
        check_keywords("Reliq.assert_published", match, _MATCH_KEYWORDS)
        if matching := self.published(queue, body, **match):
            return matching[0]
        asked = {"body": body, **match}
        wanted = ", ".join(f"{name}={asked[name]!r}" for name in _MATCH_KEYWORDS if asked.get(name) is not None)
        raise AssertionError(f"no message in {queue.name!r} with {wanted}: {format_messages(self.published(queue))}")

    def refute_published(self, queue: Queue[B], body: B | None = None, **match: Unpack[Match]) -> None:
        """Raise AssertionError, which shows them, when `published` finds messages."""
        __tracebackhide__ = True
        check_keywords("Reliq.refute_published", match, _MATCH_KEYWORDS)
        if matching := self.published(queue, body, **match):
            raise AssertionError(f"expected no such message in {queue.name!r}, and {format_messages(matching)}")

    def perform(
        self, consumer: Consumer, queue: Queue[B], body: B, *, state: Any = None, **options: Unpack[JobOptions]
    ) -> Any:
        """
        Call the handler of `queue` with `body` here and now, and return its answer; Redis is not asked.

        The body goes through the queue's codec, the handler gets a real `Job`, and middleware, observers and error hooks
        are called as in a worker. A batch handler gets a batch of one.

        Args:
            state: `job.state`; None enters the consumer's lifespan.
            id: the message's id.
            attempt: the number of the delivery, 1 for the first.
            retries: deliveries after the first, None for the queue's.
            headers, incarnation, key, priority: those of its publish.

        Raises:
            ConfigurationError, BodyError: as `publish`, or there is no handler.
            Exception: whatever the handler raised, `Nack`, `Reject` and `Snooze` too.
        """
        __tracebackhide__ = True
        check_keywords("Reliq.perform", options, _JOB_KEYWORDS)
        handler_calls = HandlerCalls(consumer)
        call = _call(consumer, handler_calls, queue, body, options)
        with Calls() as calls, calls.lifespan(consumer, state) as handler_calls.runner.state:
            return handler_calls.answer(calls.run(handler_calls.runner, call))

    async def aperform(
        self, consumer: Consumer, queue: Queue[B], body: B, *, state: Any = None, **options: Unpack[JobOptions]
    ) -> Any:
        """As `perform`, in async code; a plain handler is called on the event loop."""
        __tracebackhide__ = True
        check_keywords("Reliq.aperform", options, _JOB_KEYWORDS)
        handler_calls = HandlerCalls(consumer)
        call = _call(consumer, handler_calls, queue, body, options)
        async with AsyncCalls().lifespan(consumer, state) as handler_calls.runner.state:
            return handler_calls.answer(await AsyncCalls().run(handler_calls.runner, call))

    def drain(
        self,
        consumer: Consumer,
        *,
        scheduled: bool = False,
        fail_fast: bool = True,
        most: int = MOST_DELIVERIES,
        state: Any = None,
        outbox: Any = None,
    ) -> DrainResult:
        """
        Deliver what is due in the queues of `consumer`, and what comes of it, in this thread, until nothing is due.

        Ticks of periodic jobs that have passed since the test began, or the last drain, are published first.

        Args:
            scheduled: travel to the next due time, a backoff's included, until nothing is left.
            fail_fast: raise the first failure here, with the handler's own traceback: an exception that is no answer, or
                a body that does not decode. Without it a message is retried, and dies, as ever.
            most: deliveries after which a drain that does not end is given up.
            state: `job.state`; None enters the consumer's lifespan.
            outbox: moved in each round, as `relay` does.

        Raises:
            AssertionError: there were more deliveries than `most`.
        """
        __tracebackhide__ = True
        drain = self._drain(consumer, scheduled=scheduled, fail_fast=fail_fast, most=most)
        runner = drain.calls.runner
        with Calls() as calls, calls.lifespan(consumer, state) as runner.state:
            for call in drain.steps():
                if call is not None:
                    calls.run(runner, call)
                elif outbox is not None:
                    self.relay(outbox)
        return drain.done

    async def adrain(
        self,
        consumer: Consumer,
        *,
        scheduled: bool = False,
        fail_fast: bool = True,
        most: int = MOST_DELIVERIES,
        state: Any = None,
        outbox: Any = None,
    ) -> DrainResult:
        """As `drain`, in async code; plain handlers are called on the event loop."""
        __tracebackhide__ = True
        drain = self._drain(consumer, scheduled=scheduled, fail_fast=fail_fast, most=most)
        runner = drain.calls.runner
        async with AsyncCalls().lifespan(consumer, state) as runner.state:
            for call in drain.steps():
                if call is not None:
                    await AsyncCalls().run(runner, call)
                elif outbox is not None:
                    await self.arelay(outbox)
        return drain.done

    def relay(self, outbox: Any, *, prefix: str = OUTBOX_PREFIX) -> int:
        """
        Move the messages of `publish_in` to the test's Redis, and return how many.

        Args:
            outbox: the test's own transaction, as `publish_in` takes it: what it sees is moved, and nothing committed;
                or a `Relay`, which moves what is committed.
            prefix: of the tables' names; a `Relay` has its own.

        Raises:
            ConfigurationError: it is neither, or its database has no such tables.
        """
        return move(outbox, prefix)

    async def arelay(self, outbox: Any, *, prefix: str = OUTBOX_PREFIX) -> int:
        """As `relay`, in async code, with an AsyncSession or AsyncConnection of SQLAlchemy too."""
        return await amove(outbox, prefix)

    @property
    def now(self) -> float:
        """The time in this test, in unix seconds: Python's, and that of its Redis."""
        return time.time()

    def travel(self, by: Duration) -> None:
        """
        Move time on, in seconds or a timedelta: in Python, in Redis' scripts, and for all that expires there.

        What comes due wakes workers of this process; other processes do not see it.

        Raises:
            ConfigurationError: time would go backwards, time-machine is not installed, or freezegun holds the clock.
        """
        self._clock.travel(by)
        for keys in registered(self._client, list).queues:
            served = 1 if keys.bare else self._client.run(shard_map(keys)).served
            for number in range(served):
                shard = keys.of_shard(number)
                self._client.run_all([drop_watch(shard), *push_wake_token(shard)])

    def hold(self) -> None:
        """Hold the clock: from now on time passes by `travel` alone."""
        self._clock.hold()

    def _drain(self, consumer: Consumer, *, scheduled: bool, fail_fast: bool, most: int) -> Drain:
        client = Client.to(self.connection, KIT_REPLY_SECONDS, consumer.observers)
        travel = self.travel if scheduled else None
        self._began_us = min(self._began_us, time.time_ns() // 1000)  # a test may have moved the clock back since
        began = Client(self.connection.wire(KIT_REPLY_SECONDS), clock=lambda: self._began_us)
        return Drain(consumer, client, began, travel=travel, fail_fast=fail_fast, most=most)


def _call(consumer: Consumer, calls: HandlerCalls, queue: Queue[Any], body: Any, options: JobOptions) -> HandlerCall:
    """Return a call of the queue's handler with one message, which is encoded as for a publish and due now."""
    [handler] = consumer.chosen([queue.name])
    fields: dict[str, Any] = dict(options)
    attempt = fields.pop("attempt", 1)
    outgoing = Outgoing(body=body, **fields)
    bare = queue.layout.bare
    order = Writer(queue.known_shards, queue.codec, queue.settings).special(outgoing)
    check_int("attempt", attempt, least=1, most=order.terms.retries + 1)
    due = b"" if bare else f"{ENVELOPE_START}{round(time.time() * 1000)}".encode()
    value = due + order.value
    claimed = Claimed(order.id, f"performed:{LONG_LEASE_MS}", order.terms.retries - attempt + 1, token=attempt)
    [held] = deliveries_of([claimed], handler, time.monotonic())
    held.delivery = Delivery(claimed, value, *open_envelope(value, bare=bare))
    return calls.of(handler, [held])
