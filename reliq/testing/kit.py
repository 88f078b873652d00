"""The class `Reliq`, which tests get from the fixture `reliq`, or without pytest from the function `isolated`."""

from __future__ import annotations

import math
import sqlite3
import threading
import time
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from importlib import import_module
from itertools import chain
from typing import TYPE_CHECKING, Any, Generic, Literal, ParamSpec, TypedDict, TypeVar, Unpack, get_args, overload

from reliq import distribution
from reliq.admin.calls import keys_scanned
from reliq.admin.filters import EVERYTHING
from reliq.admin.messages import parts_of, walk
from reliq.admin.session import REPLY_SECONDS, QueueSession
from reliq.errors import ConfigurationError, UndecodableError
from reliq.handlers.settlement import undecodable
from reliq.message import Claimed, Delivery, Duration, OutgoingMessage, Priority
from reliq.metrics.snapshot import registered
from reliq.outbox.relay import OutboxMover, Relay
from reliq.outbox.store import Database
from reliq.outbox.tables import check_dialect, percent
from reliq.outbox.transactions import wrong_kind
from reliq.publish import Writer
from reliq.redis import commands
from reliq.redis.client import Client
from reliq.redis.commands import Command, drop_watch, push_wake_token
from reliq.redis.server import Connection, redirected
from reliq.redis.session import Session
from reliq.redis.shards import shard_map
from reliq.settings import LONGEST_SECONDS, OUTBOX_PREFIX, check_int, check_is_one_of, seconds
from reliq.tasks import Task
from reliq.testing.drain import LONG_LEASE_MS, AsyncCalls, Calls, Drain, DrainResult, HandlerCalls
from reliq.testing.server import EMBEDDED, clear, url_of
from reliq.text import check_keywords
from reliq.wire_format import ENVELOPE_START, open_envelope
from reliq.worker.slots import HandlerCall, deliveries_of

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator, Mapping
    from uuid import UUID

    from reliq.consumer import Consumer
    from reliq.queue import Queue


#: A test has moved Python's clock if its distance to the monotonic clock has changed by at least this many µs.
MOVED_US = 5000
#: When a test moves the clock, delete each Redis key that would expire within this many ms afterwards. Scripts let
#: Redis keys live slightly longer than necessary, but a test expects that such a key no longer exists.
SOONER_MS = 50
#: The argument COUNT of each SCAN command: about how many Redis keys it examines.
SCANNED_KEYS = 1000

B = TypeVar("B")
P = ParamSpec("P")
R = TypeVar("R")


class TestClock:
    """
    The clock of a test: Redis scripts use the time of Python's clock, and Redis keys expire by Python's clock too.

    Args:
        session: sends commands to the test's Redis.
    """

    __test__ = False  # pytest must not collect this class as a test

    def __init__(self, session: Session) -> None:
        self._session = session
        self._lock = threading.RLock()
        self._ahead = _ahead_us()
        self._moves = ExitStack()
        self._is_held = False

    def __call__(self) -> int:
        """
        Return the time of Python's clock in unix microseconds.

        If the test has moved Python's clock, first shift the expiry of the Redis keys.
        """
        if abs(_ahead_us() - self._ahead) >= MOVED_US:
            self.follow()
        return _now_us()

    def follow(self) -> None:
        """Shift the expiry of all Redis keys by the time by which the test moved Python's clock since the last call."""
        with self._lock:
            by_ms = (_ahead_us() - self._ahead) // 1000
            self._ahead += by_ms * 1000
            found = self._session.scan(partial(keys_scanned, "*", count=SCANNED_KEYS))
            keys = list(dict.fromkeys(chain.from_iterable(found)))  # SCAN may return a key twice
            left_ms = self._session.run_all([Command(("PTTL", key), int) for key in keys])
            expiries = [(key, ms - by_ms) for key, ms in zip(keys, left_ms, strict=True) if ms >= 0]
            self._session.run_all(
                [Command(("PEXPIRE", key, ms if ms > SOONER_MS else 0), bool) for key, ms in expiries]
            )

    def travel(self, by: Duration) -> None:
        """
        Move the clock forward.

        Raises:
            ConfigurationError: `by` is negative, time-machine is not installed, or another library controls the clock.
        """
        by_us = round(seconds("travel", by, most=LONGEST_SECONDS) * 1_000_000)
        # Due times are rounded up to whole ms. Round the new time up too: otherwise, a message that should become due
        # now would become due up to 1 ms later.
        self._move_to(-(-(_now_us() + by_us) // 1000) * 1000, ticks=not self._is_held and _ticks())

    def hold(self) -> None:
        """Stop the clock, so that only `travel` moves it; raises the same errors as `travel`."""
        self._is_held = True
        self._move_to(_now_us() // 1000 * 1000, ticks=False)  # due times and timeouts are whole ms too

    def end(self) -> None:
        """Set Python's clock back to the real time."""
        self._moves.close()

    def _move_to(self, to_us: int, *, ticks: bool) -> None:
        to = to_us / 1_000_000
        if int(to * 1e9) < to_us * 1000:  # `to` is below `to_us`, because a float is exact only to 0.25 µs
            to = math.nextafter(to, math.inf)
        traveller = _time_machine().travel(to, tick=ticks)
        try:
            traveller.start()
        except RuntimeError as error:
            raise ConfigurationError(f"Python's clock cannot be moved: {error}") from error
        if _now_us() < to_us:
            traveller.stop()
            raise ConfigurationError(
                "another library, such as freezegun, controls Python's clock: move the clock with it; Redis follows"
            )
        self._moves.callback(traveller.stop)
        self.follow()


def _now_us() -> int:
    return time.time_ns() // 1000


def _ahead_us() -> int:
    """Return how many microseconds Python's clock is ahead of the monotonic clock."""
    return _now_us() - time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000


def _ticks() -> bool:
    """Return whether Python's clock runs. A test can stop the clock with the library time-machine."""
    if not _time_machine().escape_hatch.is_travelling():
        return True
    began = time.time_ns()
    real = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    while time.clock_gettime_ns(time.CLOCK_MONOTONIC) - real < 10_000:  # noqa: PLR2004  it counts microseconds
        pass
    return time.time_ns() > began


def _time_machine() -> Any:
    try:
        return import_module("time_machine")
    except ImportError:
        raise ConfigurationError(distribution.missing("time travel", "time-machine", "testing")) from None


class TransactionDatabase(Database):
    """
    A database that runs all SQL statements in an open transaction of the test, and never commits.

    Args:
        tx: a transaction of any type that `Queue.publish_in` takes in sync code.
    """

    def __init__(self, tx: Any) -> None:
        super().__init__()
        self._tx = tx
        if isinstance(tx, sqlite3.Connection):
            dialect = "sqlite"
        elif hasattr(tx, "in_atomic_block"):
            dialect = tx.vendor
        elif hasattr(tx, "pgconn") and not hasattr(tx, "__aenter__"):
            dialect = "postgresql"
        elif (hasattr(tx, "get_bind") or hasattr(tx, "dialect")) and not hasattr(tx, "run_sync"):
            dialect = (tx if hasattr(tx, "dialect") else tx.get_bind()).dialect.name
        else:
            raise wrong_kind(
                "a Relay, or a transaction for publish_in; in async code `await reliq.arelay(session)`", tx
            )
        self.dialect = check_dialect(dialect)

    def query(self, sql: str, values: Mapping[str, Any] | None = None) -> list[tuple[Any, ...]]:
        """Run an SQL statement and return its rows; return an empty list if it has no rows."""
        tx = self._tx
        if isinstance(tx, sqlite3.Connection):
            cursor: Any = tx.cursor()
            cursor.row_factory = None  # return tuples, even if the test's connection has a row factory
            return list(cursor.execute(sql, values or {}))
        if hasattr(tx, "in_atomic_block"):
            cursor = tx.cursor()
        elif hasattr(tx, "pgconn"):
            psycopg = import_module("psycopg")
            cursor = psycopg.Cursor(tx, row_factory=psycopg.rows.tuple_row)
        else:
            result = tx.execute(import_module("sqlalchemy").text(sql), values or {})
            return [tuple(row) for row in result] if result.returns_rows else []
        with cursor:
            cursor.execute(percent(sql), values or {})
            return list(cursor.fetchall()) if cursor.description else []


State = Literal["ready", "waiting", "retry", "pending", "unack"]
ALIVE_STATES: tuple[State, ...] = get_args(State)
#: `Reliq.published` finds a message if its due time differs by at most this many seconds from the argument `due`.
DUE_SECONDS = 1.0
#: The text of a failed assertion shows at most this many messages.
SHOWN = 20


@dataclass(frozen=True, slots=True)
class Published(Generic[B]):
    """
    A message that has not ended.

    Attributes:
        id: the message id.
        body: the decoded body.
        headers: the headers that the message was published with.
        due: when the message is due, in unix seconds; None for a body that a program in Go published.
        state: `ready` or `retry` (can be claimed), `waiting` (in the queue of its key or priority), `pending` (due
            later) or `unack` (in flight, or waiting for its backoff).
        key: the message key; None without a key.
        priority: `high`, `normal` or `low`.
    """

    id: str
    body: B
    headers: Mapping[str, str]
    due: float | None
    state: State
    key: str | None = None
    priority: Priority = "normal"


class Match(TypedDict, total=False):
    """Keyword arguments of `Reliq.published` for type checkers; `Reliq.published` describes them."""

    state: State | None
    id: str | None
    headers: Mapping[str, str] | None
    due: float | datetime | None
    key: str | None
    priority: Priority | None


def meets(message: Published[Any], body: Any, match: Match) -> bool:
    """Return whether a message has this body, and the attributes in `match`. None matches any value."""
    due = match.get("due")
    if isinstance(due, datetime):
        due = due.timestamp()
    return (
        body in (None, message.body)
        and all(match.get(name) in (None, getattr(message, name)) for name in ("state", "id", "key", "priority"))
        and (match.get("headers") or {}).items() <= message.headers.items()
        and (due is None or (message.due is not None and abs(message.due - due) <= DUE_SECONDS))
    )


def messages(connection: Connection, queue: Queue[B]) -> Iterator[Published[B]]:
    """
    Yield the messages of a queue that have not ended.

    The messages are sorted by shard, then by state, then by order of delivery.
    """
    for keys in queue.shards():
        shard = QueueSession(connection.wire(REPLY_SECONDS), keys, connection.clock)
        for state in ALIVE_STATES:
            for part in sorted(parts_of(shard, state, EVERYTHING), key=lambda part: str(part.spot)):
                for step in walk(part):
                    ids = [id for _, id in step.rows]
                    values = shard.run(commands.bodies(keys, ids)) if ids else []
                    for id, value in zip(ids, values, strict=True):
                        if value is None:  # the body of the message has expired
                            continue
                        header, payload = open_envelope(value, bare=keys.bare)
                        due = None if header.due is None else header.due / 1000
                        try:
                            body = queue.codec.decode(payload)
                        except UndecodableError as error:
                            raise undecodable(error, queue.name, id) from None
                        yield Published(id, body, dict(header.headers), due, state, header.key, header.priority)


def format_messages(published: list[Published[Any]]) -> str:
    """Return lines that describe messages, for the text of a failed assertion."""
    if not published:
        return "there is none"
    more = [f"… and {len(published) - SHOWN} more"] if len(published) > SHOWN else []
    return "\n  ".join([f"there are {len(published)}:", *map(str, published[:SHOWN]), *more])


#: The default of the argument `most` of `Reliq.drain`: the maximum number of deliveries.
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


_JOB_KEYWORDS = frozenset({"body", "state", *JobOptions.__annotations__})


@contextmanager
def isolated(server: str = EMBEDDED) -> Iterator[Reliq]:
    """
    Give a test an empty Redis, which all queues and consumers use within the `with` block.

    This holds in this process and its forks. Queues and consumers use this Redis instead of their own URL or redis-py
    client, and instead of RELIQ_URL.

    Args:
        server: `embedded` for a redis-server that this process starts once and stops at its end, or the URL of an empty
            database of a single server, such as `redis://127.0.0.1:6379/10`.

    Returns:
        A context manager that yields a `Reliq`.

    Raises:
        ConfigurationError: no redis-server is installed, the database has keys, the block is inside another `isolated`
            block, or a worker that was started in the block still runs at the end of the block.

    Example:
        class Orders(unittest.TestCase):
            def setUp(self):
                self.reliq = self.enterContext(isolated())
    """
    if _open:
        raise ConfigurationError("isolated() cannot be nested, and the block of an earlier isolated() has not ended")
    url = url_of(server)
    with closing(Connection(url)) as own:
        upkeep = Session(own.wire(REPLY_SECONDS))
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
                    "a worker that the test has started still runs, and would take the messages of the next test: end "
                    "the test with consumer.stop()"
                )
        finally:
            _open.remove(reliq)
            clock.end()
            clear(upkeep, url)
            reliq.connection.close()


def _workers() -> set[threading.Thread]:
    """Return the threads of this process that claim messages. Each running worker has one such thread."""
    return {thread for thread in threading.enumerate() if thread.name == "reliq-fetcher"}


class Reliq:
    """
    The test kit of one test: it finds published messages, runs handlers, and moves the clock.

    Attributes:
        url: URL of the test's Redis. Pass it to other programs, because only this process and its forks use this Redis
            automatically.
        connection: the connection to the test's Redis, which replaces all other connections during the test.
    """

    def __init__(self, url: str, clock: TestClock) -> None:
        self.url = url
        self._clock = clock
        self._began_us = time.time_ns() // 1000
        self.connection = Connection(url, clock)
        self._client = Client.to(self.connection, REPLY_SECONDS)

    def published(self, queue: Queue[B], body: B | None = None, **match: Unpack[Match]) -> list[Published[B]]:
        """
        Return the messages of a queue that have not ended, in order of delivery.

        Args:
            queue: the queue.
            body: return only messages with an equal body. Here and in all other arguments, None matches any value.
            state: `ready`, `waiting`, `retry`, `pending` or `unack`.
            id: the message id.
            key: the message key.
            priority: `high`, `normal` or `low`.
            headers: headers that a message must have; it may have other headers too.
            due: due time in unix seconds or as an aware datetime; the message's due time may differ by one second.
        """
        check_keywords("Reliq.published", match, _MATCH_KEYWORDS)
        if (state := match.get("state")) is not None:
            check_is_one_of("state", state, ALIVE_STATES)
        return [message for message in messages(self.connection, queue) if meets(message, body, match)]

    def assert_published(self, queue: Queue[B], body: B | None = None, **match: Unpack[Match]) -> Published[B]:
        """
        Check that a matching message is in the queue, and return the first of these messages.

        The arguments are the same as those of `published`.

        Raises:
            AssertionError: `published` finds no message; the text lists the messages of the queue.
        """
        __tracebackhide__ = True
        check_keywords("Reliq.assert_published", match, _MATCH_KEYWORDS)
        if matching := self.published(queue, body, **match):
            return matching[0]
        asked = {"body": body, **match}
        wanted = ", ".join(f"{name}={asked[name]!r}" for name in _MATCH_KEYWORDS if asked.get(name) is not None)
        raise AssertionError(f"no message in {queue.name!r} with {wanted}: {format_messages(self.published(queue))}")

    def refute_published(self, queue: Queue[B], body: B | None = None, **match: Unpack[Match]) -> None:
        """
        Check that no matching message is in the queue.

        The arguments are the same as those of `published`.

        Raises:
            AssertionError: a message matches; the text lists the matching messages.
        """
        __tracebackhide__ = True
        check_keywords("Reliq.refute_published", match, _MATCH_KEYWORDS)
        if matching := self.published(queue, body, **match):
            raise AssertionError(f"expected no matching message in {queue.name!r}, but {format_messages(matching)}")

    @overload
    def perform(
        self, consumer: Consumer, queue: Queue[B], body: B, *, state: Any = None, **options: Unpack[JobOptions]
    ) -> Any: ...

    @overload
    def perform(
        self, consumer: Consumer, task: Task[P, Coroutine[Any, Any, R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> R: ...

    @overload
    def perform(self, consumer: Consumer, task: Task[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R: ...

    def perform(self, consumer: Consumer, queue: Any, *body: Any, **options: Any) -> Any:  # type: ignore[misc]  # tasks have any parameters
        """
        Call the handler of a queue, or a task, once in this thread, without Redis, and return its result.

        The queue's codec encodes and decodes the body. The handler gets a real `Job`. Middleware, observers and error
        hooks run as in a worker. A handler with `batch` gets a batch of one message.

        For a task, give its arguments, for example `reliq.perform(app, send, "a@example.org")`. Set other options, such
        as the message id, with `task.options(…)`.

        Args:
            consumer: the consumer with the handler.
            queue: the queue of the handler, or a task.
            body: the body, of the queue's type; or the arguments of the task.
            state: value of `job.state`; None enters the consumer's lifespan and uses the value it yields.
            id: the message id; None generates an id.
            attempt: number of the delivery, from 1.
            retries: how many retries the message has; None uses the queue's setting.
            headers: headers of the message.
            publication_id: number of the publication, which `job.once` stores with the message id.
            key: the message key.
            priority: `high`, `normal` or `low`.

        Raises:
            ConfigurationError: the queue has no handler, or an argument is invalid.
            BodyError: the codec cannot encode the body.
            Exception: any exception of the handler, including `Nack`, `Reject` and `Snooze`.
        """
        __tracebackhide__ = True
        handler_calls, call, state = _call("perform", consumer, queue, body, options)
        with Calls() as calls, calls.lifespan(consumer, state) as handler_calls.runner.state:
            return handler_calls.answer(calls.run(handler_calls.runner, call))

    @overload
    async def aperform(
        self, consumer: Consumer, queue: Queue[B], body: B, *, state: Any = None, **options: Unpack[JobOptions]
    ) -> Any: ...

    @overload
    async def aperform(
        self, consumer: Consumer, task: Task[P, Coroutine[Any, Any, R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> R: ...

    @overload
    async def aperform(self, consumer: Consumer, task: Task[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R: ...

    async def aperform(  # type: ignore[misc]  # tasks have any parameters
        self, consumer: Consumer, queue: Any, *body: Any, **options: Any
    ) -> Any:
        """
        Call the handler of a queue, or a task, once in async code, and return its result.

        The arguments are the same as those of `perform`. A sync handler blocks the event loop.
        """
        __tracebackhide__ = True
        handler_calls, call, state = _call("aperform", consumer, queue, body, options)
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
        Deliver the due messages of a consumer's queues in this thread, until no message is due.

        First, the consumer's periodic jobs publish the messages of all ticks since the test began, or since the last
        drain. Messages that handlers publish during the drain are delivered too.

        Args:
            consumer: the consumer with the handlers.
            scheduled: also deliver messages that are due later or wait for a backoff. The drain moves the clock to each
                due time until no message is left.
            fail_fast: raise the first exception of a handler, or the error for a body that cannot be decoded. With
                False, such messages are retried and become dead letters, as in a worker.
            most: maximum number of deliveries. After more, the drain fails, because it would probably never end.
            state: value of `job.state`; None enters the consumer's lifespan and uses the value it yields.
            outbox: a transaction or a `Relay`, as for the method `relay`. Its messages are moved to Redis before each
                pass over the queues.

        Returns:
            The ids of the delivered messages by outcome.

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
        """
        Deliver the due messages of a consumer's queues in async code.

        The arguments are the same as those of `drain`. Sync handlers block the event loop.
        """
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
        Move messages that `publish_in` stored in an outbox to the test's Redis; return their number.

        Args:
            outbox: an open transaction of the test, of any type that `publish_in` accepts, to move messages without a
                commit; or a `Relay`, to move committed messages.
            prefix: prefix of the outbox tables, if `outbox` is a transaction; a `Relay` has its own prefix.

        Raises:
            ConfigurationError: `outbox` is neither a transaction nor a `Relay`, or the database has no outbox tables
                with this prefix.
        """
        relay = outbox if isinstance(outbox, Relay) else Relay(TransactionDatabase(outbox), prefix=prefix)
        with closing(OutboxMover(relay)) as mover:
            return mover.move_all()

    async def arelay(self, outbox: Any, *, prefix: str = OUTBOX_PREFIX) -> int:
        """
        Move messages from an outbox to the test's Redis in async code; return their number.

        The arguments are the same as those of `relay`; `outbox` may also be an AsyncSession or AsyncConnection.
        """
        if not hasattr(outbox, "run_sync"):
            return self.relay(outbox, prefix=prefix)
        moved: int = await outbox.run_sync(partial(self.relay, prefix=prefix))
        return moved

    @property
    def now(self) -> float:
        """The time of the test's clock in unix seconds."""
        return time.time()

    def travel(self, by: Duration) -> None:
        """
        Move the time forward for Python, for scripts in Redis, and for the expiry of Redis keys.

        Workers in this process then deliver messages that became due. The clocks of other processes do not change.

        Args:
            by: seconds, or a timedelta.

        Raises:
            ConfigurationError: `by` is negative, time-machine is not installed, or freezegun controls the clock.
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
        # the test may have moved the clock back to before its start
        self._began_us = min(self._began_us, time.time_ns() // 1000)
        began = Client(self.connection.wire(REPLY_SECONDS), clock=lambda: self._began_us)
        return Drain(consumer, client, began, travel=travel, fail_fast=fail_fast, most=most)


def _call(
    method: str, consumer: Consumer, queue: Any, arguments: tuple[Any, ...], options: dict[str, Any]
) -> tuple[HandlerCalls, HandlerCall, Any]:
    """Build a handler call with one encoded message; return its `HandlerCalls`, the call, and the argument `state`."""
    attempt, state = 1, None
    if isinstance(queue, Task):
        outgoing, queue = queue.outgoing(*arguments, **options), queue.queue
    else:
        check_keywords(f"Reliq.{method}", options, _JOB_KEYWORDS)
        if arguments:
            (options["body"],) = arguments
        attempt, state = options.pop("attempt", 1), options.pop("state", None)
        outgoing = OutgoingMessage(**options)
    calls = HandlerCalls(consumer)
    [handler] = consumer.chosen([queue.name])
    bare = queue.layout.bare
    order = Writer(queue.known_shards, queue.codec, queue.settings).special(outgoing)
    check_int("attempt", attempt, least=1, most=order.terms.retries + 1)
    value = (b"" if bare else f"{ENVELOPE_START}{round(time.time() * 1000)}".encode()) + order.value
    claimed = Claimed(order.id, f"performed:{LONG_LEASE_MS}", order.terms.retries - attempt + 1, token=attempt)
    [held] = deliveries_of([claimed], handler, time.monotonic())
    held.delivery = Delivery(claimed, value, *open_envelope(value, bare=bare))
    held.handler = handler.of(held.delivery.header)
    return calls, calls.of(held.handler, [held]), state
