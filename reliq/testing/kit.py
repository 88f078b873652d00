"""The block that gives a test its own Redis and clock, and the methods of the fixture `reliq`."""

from __future__ import annotations

import importlib
import math
import threading
import time
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, Unpack

from reliq import distribution
from reliq.admin.calls import keys_scanned
from reliq.admin.session import REPLY_SECONDS
from reliq.errors import ConfigurationError
from reliq.message import Claimed, Delivery, OutgoingMessage
from reliq.metrics.snapshot import registered
from reliq.publish import Writer
from reliq.redis.client import Client
from reliq.redis.commands import Command, drop_watch, push_wake_token
from reliq.redis.server import Connection, redirected
from reliq.redis.session import Session
from reliq.redis.shards import shard_map
from reliq.settings import LONGEST_SECONDS, OUTBOX_PREFIX, check_int, check_is_one_of, seconds
from reliq.testing.drain import LONG_LEASE_MS, AsyncCalls, Calls, Drain, DrainResult, HandlerCalls
from reliq.testing.published import (
    ALIVE_STATES,
    Match,
    Published,
    amove,
    format_messages,
    meets,
    messages,
    move,
)
from reliq.testing.server import EMBEDDED, clear, url_of
from reliq.text import check_keywords
from reliq.wire_format import ENVELOPE_START, open_envelope
from reliq.worker.slots import deliveries_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from uuid import UUID

    from reliq.consumer import Consumer
    from reliq.message import Duration, Priority
    from reliq.queue import Queue
    from reliq.worker.slots import HandlerCall


#: Other code has moved Python's clock when its step differs by this much from the time that has passed.
MOVED_US = 5000
#: A key that has no more time left than this after a move expires: a script writes later than its clock shows.
SOONER_MS = 50
#: A step of the scan of all Redis keys looks at this many.
SCANNED_KEYS = 1000


class TestClock:
    """
    Python's clock in place of the Redis clock: scripts get its time, and Redis keys expire by it.

    Args:
        session: the tests' Redis, with its own clock.
    """

    __test__ = False  # no test of pytest's

    def __init__(self, session: Session) -> None:
        self._session = session
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
        """Move the expiry of all Redis keys by as much as the clock was moved since the last call."""
        with self._lock:
            by_ms = (_ahead_us() - self._ahead) // 1000
            self._ahead += by_ms * 1000
            found = self._session.scan(partial(keys_scanned, "*", count=SCANNED_KEYS))
            keys = list(dict.fromkeys(chain.from_iterable(found)))  # a scan may return a key twice
            left_ms = self._session.run_all([Command(("PTTL", key), int) for key in keys])
            expiries = [(key, ms - by_ms) for key, ms in zip(keys, left_ms, strict=True) if ms >= 0]
            self._session.run_all(
                [Command(("PEXPIRE", key, ms if ms > SOONER_MS else 0), bool) for key, ms in expiries]
            )

    def travel(self, by: Duration) -> None:
        """
        Move the clock forward.

        Raises:
            ConfigurationError: `by` is negative, time-machine is not installed, or something else holds the clock.
        """
        by_us = round(seconds("travel", by, most=LONGEST_SECONDS) * 1_000_000)
        # Due times are rounded up to whole ms: so is the time that meets them.
        self._move_to(-(-(_now_us() + by_us) // 1000) * 1000, ticks=not self._is_held and _ticks())

    def hold(self) -> None:
        """Stop the clock, so that only `travel` moves it; raises as `travel` does."""
        self._is_held = True
        self._move_to(_now_us() // 1000 * 1000, ticks=False)  # due times and timeouts are whole ms

    def end(self) -> None:
        """Reset Python's clock."""
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
    """Return whether Python's clock runs; a test may have stopped it with time-machine."""
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

#: Default limit of deliveries in a drain.
MOST_DELIVERIES = 1000
_MATCH_KEYWORDS = ("body", *Match.__annotations__)
_open: list[Reliq] = []


class JobOptions(TypedDict, total=False):
    """Keyword arguments of `Reliq.perform` for type checkers; `Reliq.perform` describes them."""

    id: str | UUID | None
    attempt: int
    retries: int | None
    headers: Mapping[str, str] | None
    publication_id: int | None
    key: str | None
    priority: Priority


_JOB_KEYWORDS = frozenset({"state", *JobOptions.__annotations__})


@contextmanager
def isolated(server: str = EMBEDDED) -> Iterator[Reliq]:
    """
    Give a test an empty Redis, and redirect every URL, client and RELIQ_URL of this process and its forks to it.

    Args:
        server: `embedded` for a redis-server that this process starts once and stops at its end, or the URL of an empty
            database of a single server, such as `redis://127.0.0.1:6379/10`.

    Returns:
        A context manager that yields a `Reliq`.

    Raises:
        ConfigurationError: no redis-server is installed, the database has keys, the block is inside another one, or a worker
            that was started in the block still runs at its end.

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
    upkeep = Session(Connection(url).wire(REPLY_SECONDS))
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
    The Redis and the clock of one test.

    Attributes:
        url: URL of the test's Redis, for other processes: only this process and its forks are redirected.
        connection: the connection that every URL and client leads to during the test.
    """

    def __init__(self, url: str, clock: TestClock) -> None:
        self.url = url
        self._clock = clock
        self._began_us = time.time_ns() // 1000
        self.connection = Connection(url, clock)
        self._client = Client.to(self.connection, REPLY_SECONDS)

    def published(self, queue: Queue[B], body: B | None = None, **match: Unpack[Match]) -> list[Published[B]]:
        """
        Return the messages of a queue that have not ended, the next to be delivered first.

        Args:
            queue: the queue.
            body: return only messages with an equal body; None matches any, as in each argument.
            state: `ready`, `waiting`, `retry`, `pending` or `unack`.
            id: the message id.
            key: the message key.
            priority: `high`, `normal` or `low`.
            headers: headers that a message must have; it may have more.
            due: due time in unix seconds or as an aware datetime; a message may differ by one second.
        """
        check_keywords("Reliq.published", match, _MATCH_KEYWORDS)
        if (state := match.get("state")) is not None:
            check_is_one_of("state", state, ALIVE_STATES)
        return [message for message in messages(self.connection, queue) if meets(message, body, match)]

    def assert_published(self, queue: Queue[B], body: B | None = None, **match: Unpack[Match]) -> Published[B]:
        """Return the first message that `published` finds; raise AssertionError with the other messages when it finds none."""
        __tracebackhide__ = True
        check_keywords("Reliq.assert_published", match, _MATCH_KEYWORDS)
        if matching := self.published(queue, body, **match):
            return matching[0]
        asked = {"body": body, **match}
        wanted = ", ".join(f"{name}={asked[name]!r}" for name in _MATCH_KEYWORDS if asked.get(name) is not None)
        raise AssertionError(f"no message in {queue.name!r} with {wanted}: {format_messages(self.published(queue))}")

    def refute_published(self, queue: Queue[B], body: B | None = None, **match: Unpack[Match]) -> None:
        """Raise AssertionError with the messages that `published` finds, if there are any."""
        __tracebackhide__ = True
        check_keywords("Reliq.refute_published", match, _MATCH_KEYWORDS)
        if matching := self.published(queue, body, **match):
            raise AssertionError(f"expected no such message in {queue.name!r}, and {format_messages(matching)}")

    def perform(
        self, consumer: Consumer, queue: Queue[B], body: B, *, state: Any = None, **options: Unpack[JobOptions]
    ) -> Any:
        """
        Call the handler of a queue once in this thread, without Redis, and return its answer.

        The body goes through the queue's codec, the handler gets a real `Job`, and middleware, observers and error hooks
        run as in a worker. A batch handler gets a batch of one.

        Args:
            consumer: the consumer with the handler.
            queue: the queue of the handler.
            body: the body, of the queue's type.
            state: value of `job.state`; None enters the lifespan of the consumer.
            id: the message id; None makes one.
            attempt: number of the delivery, from 1.
            retries: how many retries the message has; None uses the queue's setting.
            headers: headers of the message.
            publication_id: publication_id of the message, which `job.once` stores with the id.
            key: the message key.
            priority: `high`, `normal` or `low`.

        Raises:
            ConfigurationError: the queue has no handler, or an argument is not allowed.
            BodyError: the codec cannot encode the body.
            Exception: any exception of the handler, also `Nack`, `Reject` and `Snooze`.
        """
        __tracebackhide__ = True
        handler_calls, call = _call("perform", consumer, queue, body, options)
        with Calls() as calls, calls.lifespan(consumer, state) as handler_calls.runner.state:
            return handler_calls.answer(calls.run(handler_calls.runner, call))

    async def aperform(
        self, consumer: Consumer, queue: Queue[B], body: B, *, state: Any = None, **options: Unpack[JobOptions]
    ) -> Any:
        """Call the handler of a queue once in async code; a plain handler blocks the event loop. See `perform`."""
        __tracebackhide__ = True
        handler_calls, call = _call("aperform", consumer, queue, body, options)
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
        Deliver the due messages of a consumer's queues in this thread, and the messages that they lead to.

        First publish the ticks of periodic jobs that passed since the test began, or since the last drain.

        Args:
            consumer: the consumer with the handlers.
            scheduled: travel to the next due time, also of a backoff, until no message is left.
            fail_fast: raise the first exception of a handler, with the handler's traceback, or the error of an undecodable
                body; with False such messages are retried, and become dead letters, as in a worker.
            most: deliveries after which the drain fails, because it seems to have no end.
            state: value of `job.state`; None enters the lifespan of the consumer.
            outbox: a transaction or a `Relay`; its rows move in each round, as by `relay`.

        Returns:
            The message ids by outcome.

        Raises:
            AssertionError: the drain made more deliveries than `most`.
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
        """Deliver the due messages of a consumer's queues in async code; plain handlers block the event loop. See `drain`."""
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
        Move the messages of `publish_in` to the test's Redis; return the number of messages.

        Args:
            outbox: the test's own transaction, as `publish_in` takes it, to move the rows that it sees without a commit; or
                a `Relay`, to move committed rows.
            prefix: prefix of the table names; a `Relay` has its own.

        Raises:
            ConfigurationError: `outbox` is neither, or its database has no such tables.
        """
        return move(outbox, prefix)

    async def arelay(self, outbox: Any, *, prefix: str = OUTBOX_PREFIX) -> int:
        """Move the messages of `publish_in` in async code, also of an AsyncSession or AsyncConnection. See `relay`."""
        return await amove(outbox, prefix)

    @property
    def now(self) -> float:
        """The time in this test, in unix seconds."""
        return time.time()

    def travel(self, by: Duration) -> None:
        """
        Move time forward for Python, for the scripts in Redis, and for all Redis keys that expire.

        Workers of this process wake for messages that come due; other processes keep their time.

        Args:
            by: seconds, or a timedelta.

        Raises:
            ConfigurationError: `by` is negative, time-machine is not installed, or freezegun holds the clock.
        """
        self._clock.travel(by)
        for keys in registered(self._client, list).queues:
            served = 1 if keys.bare else self._client.run(shard_map(keys)).served
            for number in range(served):
                shard = keys.of_shard(number)
                self._client.run_all([drop_watch(shard), *push_wake_token(shard)])

    def hold(self) -> None:
        """Stop the clock until the test ends, so that only `travel` moves it."""
        self._clock.hold()

    def _drain(self, consumer: Consumer, *, scheduled: bool, fail_fast: bool, most: int) -> Drain:
        client = Client.to(self.connection, REPLY_SECONDS, consumer.observers)
        travel = self.travel if scheduled else None
        self._began_us = min(self._began_us, time.time_ns() // 1000)  # a test may have moved the clock back since
        began = Client(self.connection.wire(REPLY_SECONDS), clock=lambda: self._began_us)
        return Drain(consumer, client, began, travel=travel, fail_fast=fail_fast, most=most)


def _call(
    method: str, consumer: Consumer, queue: Queue[Any], body: Any, options: JobOptions
) -> tuple[HandlerCalls, HandlerCall]:
    """Return the call of the queue's handler with one message, encoded as for a publish and due now."""
    check_keywords(f"Reliq.{method}", options, _JOB_KEYWORDS)
    calls = HandlerCalls(consumer)
    [handler] = consumer.chosen([queue.name])
    fields: dict[str, Any] = dict(options)
    attempt = fields.pop("attempt", 1)
    outgoing = OutgoingMessage(body=body, **fields)
    bare = queue.layout.bare
    order = Writer(queue.known_shards, queue.codec, queue.settings).special(outgoing)
    check_int("attempt", attempt, least=1, most=order.terms.retries + 1)
    value = (b"" if bare else f"{ENVELOPE_START}{round(time.time() * 1000)}".encode()) + order.value
    claimed = Claimed(order.id, f"performed:{LONG_LEASE_MS}", order.terms.retries - attempt + 1, token=attempt)
    [held] = deliveries_of([claimed], handler, time.monotonic())
    held.delivery = Delivery(claimed, value, *open_envelope(value, bare=bare))
    return calls, calls.of(handler, [held])
