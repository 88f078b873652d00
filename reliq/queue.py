"""The public `Queue`: publish, receive and control messages and dead letters, in blocking or async code."""

from __future__ import annotations

import asyncio
import getpass
import re
import socket
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Generic, Never, TypeVar, Unpack, overload

import msgspec

from reliq.codec import Codec
from reliq.errors import ConfigurationError, PublishFailed, RedisUnavailableError
from reliq.keys import Keys, Layout, check_id, home
from reliq.limits import Limit, check_limits
from reliq.lua import transitions
from reliq.lua.transitions import CallSequences
from reliq.message import (
    RETRIES_LIMIT,
    BulkResult,
    CancelStatus,
    Counts,
    DeadLetter,
    Duration,
    OutgoingMessage,
    Pause,
    PublishOptions,
    R_co,
    Receipt,
    RescheduleStatus,
    Status,
)
from reliq.publish import PUBLISH_KEYWORDS, PreparedMessage, Sender, Writer, begun, when
from reliq.receive.receiver import ReceivedJob, Receiver, areceiving, receiving
from reliq.redis import commands
from reliq.redis.client import Clients
from reliq.redis.commands import Call, Command, Request, T, answered, of_every_shard, raise_first
from reliq.redis.connection import ASYNCIO, BLOCKING, Driver, run_blocking
from reliq.redis.server import PUBLISH_SECONDS, Connection, check_slots
from reliq.redis.shards import UNREAD, ShardMap, Shards
from reliq.redis.url import Target, check_target
from reliq.settings import (
    BATCH_LIMIT,
    MIB,
    OUTBOX_PREFIX,
    Durability,
    LimitOptions,
    Limits,
    QueueSettings,
    SettingsOptions,
    check_int,
    limits_in,
    milliseconds,
    seconds,
)
from reliq.text import check_keywords, chunked_by_size

if TYPE_CHECKING:
    from datetime import datetime
    from uuid import UUID

    from typing_extensions import TypeForm

    from reliq.events import Observer
    from reliq.outbox.transactions import AsyncTransaction, Transaction
    from reliq.schedules import ScheduleOptions, StoredSchedule, StoredSchedules


#: One script call of a redrive publishes bodies of at most this many bytes in total, unless a single body is larger.
#: The limit keeps scripts short, because Redis serves no other client while a script runs.
LETTER_BYTES = 8 * MIB

#: A pattern that finds the publish time in an encoded message. Only messages with a chosen id contain this time.
_LIFE = re.compile(rb',"r":\d+,"e":(\d+)')
_LETTER_NAME = re.compile(r"\d{1,20}-\d{1,20}")


def listing(keys: Keys, limit: int, after: str) -> Command[list[DeadLetter]]:
    """Return the command that reads dead letters; raise ConfigurationError if `limit` or `after` is not valid."""
    if not isinstance(after, str) or (after and _LETTER_NAME.fullmatch(after) is None):
        raise ConfigurationError("after must be the `letter` of a dead letter, such as '1700000000000-0', or empty")
    count = check_int("limit", limit, least=1, most=BATCH_LIMIT)
    first = f"({after}" if after else "-"
    return commands.letters_between(keys, first, "+", count=count)


def first_letters(all: Iterable[list[DeadLetter]], limit: int) -> list[DeadLetter]:
    """
    Return the `limit` oldest dead letters of all shards.

    If dead letters of other shards have the same stream id as the last of these, they are returned too.
    """
    letters = sorted((one for some in all for one in some), key=_place)
    last = _place(letters[limit - 1])[:2] if len(letters) > limit else None
    return [one for one in letters if last is None or _place(one)[:2] <= last]


def _place(letter: DeadLetter) -> tuple[int, int, int]:
    ms, _, number = letter.letter.partition("-")
    return int(ms), int(number), letter.shard


S = TypeVar("S")

#: The maximum length of the reason for a pause, in characters.
REASON_LIMIT = 200


def tombstone_ms(tombstone: Duration | None) -> int | None:
    """Convert the duration of a tombstone to ms; raise ConfigurationError if it is not above 0."""
    return None if tombstone is None else milliseconds(seconds("tombstone", tombstone, least=0.001))


def rescheduling(keys: Keys, id: str | UUID, delay: Duration, at: datetime | None) -> Call[list[RescheduleStatus]]:
    """Return the script call that changes a message's due time; raise ConfigurationError for an invalid time."""
    at_ms, delay_ms = when(delay, at)
    return transitions.reschedule(keys, [check_id(id)], at_ms=at_ms, delay_ms=delay_ms)


def pausing(keys: Keys, reason: str, for_: Duration | None, by: str = "") -> Command[None]:
    """
    Return the command that pauses a queue; raise ConfigurationError for an invalid reason or duration.

    Args:
        by: the name of the operator who pauses the queue. Default: user@host of this process.
    """
    for_seconds = None if for_ is None else seconds("for_", for_, least=0.001)
    pause = pause_by(by, reason, for_seconds)
    return commands.pause(keys, pause, None if for_seconds is None else milliseconds(for_seconds))


def pause_by(by: str, reason: str, for_seconds: float | None = None) -> Pause:
    """Return a `Pause` that starts now; raise ConfigurationError if `reason` is not valid."""
    if not isinstance(reason, str) or not reason.isprintable() or len(reason) > REASON_LIMIT:
        raise ConfigurationError(f"reason must be one line of at most {REASON_LIMIT} characters")
    now = round(time.time(), 3)
    return Pause(by or user_at_host(), now, reason, None if for_seconds is None else now + for_seconds)


def user_at_host() -> str:
    """Return user@host of this process, or unknown@host if the user has no name, as in some containers."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = "unknown"
    return f"{user}@{socket.gethostname()}"


B = TypeVar("B")

#: How often `publish_many` checks whether a full backlog has room again, in seconds.
BACKLOG_SECONDS = 0.1


#: The names of the keyword arguments of `Queue.publish_many`.
_BULK_KEYWORDS = frozenset({"items", "chunk", "max_backlog", "durability"})
#: `publish_many` keeps prepared messages of at most this many bytes in memory before it sends some of them, unless a
#: single message is larger.
CHUNK_BYTES = 8 * MIB


class ShardCalls:
    """
    Groups the messages of `publish_many` by shard, so that one script call publishes many messages of a shard.

    The groups that are not sent yet have at most `CHUNK_BYTES` together, unless a single message is larger.
    """

    def __init__(self, writer: Writer, size: int) -> None:
        self._writer = writer
        self._size = check_int("chunk", size, least=1, most=BATCH_LIMIT)
        self._bytes = 0
        self._held: dict[int, list[PreparedMessage]] = {}
        self._full: list[PreparedMessage] = []
        self._newest: list[PreparedMessage] = []

    @contextmanager
    def adding_rest(self) -> Iterator[None]:
        """If the block raises PublishFailed, add the messages that were read but not sent to its `rest`."""
        try:
            yield
        except PublishFailed as failed:
            failed.orders = [*failed.orders, *self._full, *chain(*self._held.values()), *self._newest]
            raise

    def sent(self) -> None:
        """
        Forget the last list of messages that `read` returned, because the caller is about to send it.

        If this send fails, the PublishFailed that it raises already contains the messages.
        """
        self._full = []

    def read(self, items: Iterable[Any]) -> Iterator[list[PreparedMessage]]:
        """
        Yield lists of messages; the caller sends each list to its shard in one script call.

        An item that is not an `OutgoingMessage` is a body and gets the queue's options. Messages with generated ids go
        to the shards in rotation. A message with a chosen id belongs to one shard. It waits until the list of this
        shard is full.
        """
        if isinstance(items, str | bytes | Mapping | OutgoingMessage) or not isinstance(items, Iterable):
            raise ConfigurationError(
                f"items must be an iterable of bodies or OutgoingMessage objects, not {type(items).__name__}"
            )
        writer = self._writer
        shards = writer.shards
        shard = shards.turn()
        for item in items:
            order = writer.special(item, shard) if isinstance(item, OutgoingMessage) else writer.order(item, {}, shard)
            place = shard if order.is_generated else home(order.id, shards.map.n)
            size = len(order.value)
            call = self._held.get(place)
            has_room = self._bytes + size <= CHUNK_BYTES
            if not has_room or (call and order.terms is not call[0].terms and order.terms != call[0].terms):
                self._newest = [order]
                yield from [self._take(place)] if has_room else self._rest()
                self._newest = []
                shard = shards.turn()
                call = None
            if call is None:
                call = self._held[place] = []
            call.append(order)
            self._bytes += size
            if len(call) == self._size:
                yield self._take(place)
                shard = shards.turn()
        yield from self._rest()

    def _rest(self) -> Iterator[list[PreparedMessage]]:
        """Yield all remaining lists of messages, even if the lists are not full."""
        while self._held:
            yield self._take(next(iter(self._held)))

    def _take(self, shard: int) -> list[PreparedMessage]:
        self._bytes -= sum(len(order.value) for order in self._held[shard])
        self._full = self._held.pop(shard)
        return self._full


class BulkProgress:
    """Adds up the results of a `publish_many`, and checks whether it must wait because the backlog is full."""

    def __init__(self, max_backlog: int | None) -> None:
        self._most = None if max_backlog is None else check_int("max_backlog", max_backlog, least=1, most=10**9)
        self.confirmed = 0
        self._duplicates: list[str] = []
        self._tombstoned: list[str] = []
        self._unconfirmed: list[str] = []
        self._durable: bool | None = None

    @property
    def is_bounded(self) -> bool:
        """Whether `publish_many` was called with `max_backlog`."""
        return self._most is not None

    def is_full(self, counts: Counts) -> bool:
        """Return whether the queue has `max_backlog` or more waiting messages, so that `publish_many` must wait."""
        return self._most is not None and counts.pending + counts.due >= self._most

    def add(self, done: list[Receipt]) -> None:
        """Add the receipts of one script call to the result."""
        self._duplicates += [receipt.id for receipt in done if receipt.status == "duplicate"]
        self._tombstoned += [receipt.id for receipt in done if receipt.status == "tombstoned"]
        self.confirmed += sum(map(bool, done))
        self._unconfirmed += [receipt.id for receipt in done if receipt.durable is False]
        if done and done[0].durable is not None:
            self._durable = not self._unconfirmed

    def result(self) -> BulkResult:
        """Return the result of the whole `publish_many`."""
        refused = (tuple(self._duplicates), tuple(self._tombstoned))
        return BulkResult(self.confirmed, *refused, self._durable, tuple(self._unconfirmed))


def check_bulk(call: str, others: Mapping[str, Any]) -> None:
    """Raise TypeError for an unknown keyword argument of `publish_many`."""
    of_messages = sorted(PUBLISH_KEYWORDS & others.keys())
    advice = f"It is for each message: OutgoingMessage(body=…, {of_messages[0]}=…)" if of_messages else ""
    check_keywords(call, of_messages or others, () if of_messages else _BULK_KEYWORDS, advice)


class SettingsAndLimits(SettingsOptions, LimitOptions, total=False):
    """For type checkers: the keyword arguments of `Queue` that are settings or limits."""


class QueueOptions(SettingsAndLimits, total=False):
    """For type checkers: all keyword arguments of `Queue`."""

    limits: Sequence[Limit]
    validate: bool
    url: Target | None
    layout: Layout
    observers: Sequence[Observer]
    shards: int | None


#: The names of the keyword arguments of `Queue`.
_KEYWORDS = frozenset({"body", *QueueOptions.__annotations__})


class Queue(Generic[B]):
    """
    A job queue with bodies of one type. Creating the object does not connect to Redis.

    Durations are seconds (int or float) or timedelta.

    Args:
        name: the queue's name, 1 to 128 characters of A-Z a-z 0-9 _ . - (with `Layout.hdt3213()` 1 to 512 printable
            characters).
        body: the type of the bodies: a dataclass, TypedDict, `msgspec.Struct` or pydantic model, a union of models,
            dict, list, a scalar, `str` or `bytes`. Default: dict.
        retries: how many times a failed message is delivered again, 0 to 1,000. Default: 12.
        ttl: how long after its due time a message may still start; after that it expires. Default: 7 days.
        max_body: the largest encoded body in bytes, up to 16 MiB. A publish refuses a larger body, and a worker does
            not load it. Default: 1 MiB.
        dedup: how long an id that you chose cannot be published again after its message has ended. Default: 10 minutes.
        dead_letter_limit: how many dead letters are kept; 0 keeps none. Default: 100,000.
        dead_letter_ttl: how long a dead letter is kept. Default: 7 days.
        keep_completed: how many of the last acked messages are kept for lookups, up to 100,000. Default: 0.
        durability: the replicas or disks that must confirm a message before its publish returns, for example
            `Durability.replicas(1)` or `Durability.aof()`. Default: `Durability.NONE`.
        validate: whether each publish decodes the encoded body, and refuses it if a worker would get a different
            value. False saves some microseconds per message. Default: True.
        url: a Redis URL or a redis-py client. Default: None, which means the environment variable RELIQ_URL. It is read
            when the queue is used for the first time.
        layout: the format of the Redis keys; `Layout.hdt3213()` shares a queue with HDT3213/delayqueue programs in Go.
            Default: `Layout.RELIQ`.
        observers: functions that are called with every event of this queue object. Default: none.
        shards: how many shards the queue must have, a power of two up to 256. Default: None, which means the number
            that is stored in Redis.
        ordered: True runs the messages of one key one at a time, in publish order. Default: False.
        per_key: how many messages of one key may run at the same time, over all workers. Default: None, no limit.
        rate: how many messages may start per second, minute or hour, for example "100/s", "5/m" or "1000/h". A rate
            by cost limits the sum of their costs instead, for example "100000/m by cost". A list may contain one rate
            of each kind. Default: None, no limit.
        burst: how many messages may start at the same time after a quiet time; for a rate by cost, the sum of their
            costs. Default: None, the number that `rate` allows in 0.1 s, at least 1; for a rate by cost, a tenth of the
            number in `rate`.
        key_rate: a rate like `rate`, but for the messages of each key separately. Default: None, no limit.
        key_burst: a burst like `burst`, but for `key_rate`. Default: None.
        concurrency: how many messages of the queue may run at the same time, over all workers. Default: None, no limit.
        key_weights: how many messages of a key start when it is the key's turn, for example `{"vip": 4}`. Keys that are
            not listed have 1. Default: none.
        limits: `Limit` objects that this queue shares with other queues. Each start of a message counts against all
            these limits. Workers can claim messages of such a queue, but `receive` cannot. Default: none.

    Attributes:
        own_limits: the limits of this queue alone, as a `Limits` object; None without limits. A starting worker writes
            them to Redis, and then they hold for all workers.
        limits: the `Limit` objects that this queue shares with other queues.

    Raises:
        ConfigurationError: the name, the body type or an option is not valid.

    Example:
        orders = Queue("orders", Order, retries=5)
        orders.publish(Order(42), delay=60)
    """

    @overload
    def __init__(self: Queue[dict[str, Any]], name: str, **options: Unpack[QueueOptions]) -> None: ...

    @overload
    def __init__(self, name: str, body: type[B], **options: Unpack[QueueOptions]) -> None: ...

    @overload  # for body types that are not classes, such as `Cat | Dog` or `Order | None`
    def __init__(self, name: str, body: TypeForm[B], **options: Unpack[QueueOptions]) -> None: ...

    def __init__(
        self,
        name: str,
        body: Any = dict,
        *,
        limits: Sequence[Limit] = (),
        validate: bool = True,
        url: Target | None = None,
        layout: Layout = Layout.RELIQ,
        observers: Sequence[Observer] = (),
        shards: int | None = None,
        **options: Unpack[SettingsAndLimits],
    ) -> None:
        check_keywords("Queue", options, _KEYWORDS)
        keys = Keys(name, layout)
        settings = dict[str, Any](options)
        wanted = None if shards is None else ShardMap.wanted(shards, layout)
        if url is not None:
            check_target(url)
            check_slots(url, layout)
        self.own_limits: Limits | None = limits_in(settings, keys, wanted)
        self.limits = check_limits(limits, keys)
        self.keys = keys
        self.layout = layout
        self.settings = QueueSettings(**settings)
        self.target = url
        self.observers = observers
        self._lanes = CallSequences()
        self._clients = Clients(url, observers)
        #: The shards of the queue, as this process last read them from the shard map in Redis.
        self.known_shards = Shards(keys, self._clients, wanted)
        self.codec: Codec[B] = Codec(body, validate=validate)
        own = self.own_limits.fields() if self.own_limits else {}
        costs = [int(own.get("cost_burst", 0)), *(limit.costs for limit in self.limits)]
        self._writer = Writer(self.known_shards, self.codec, self.settings, min(filter(None, costs), default=0))
        self._receiver = Receiver(self.known_shards, self.codec, self.settings, self.own_limits)
        self._receiver.is_shared = bool(limits)
        self._sender = Sender(self._writer, self.known_shards, self._lanes, self._clients, observers)

    def __repr__(self) -> str:
        return f"Queue({self.name!r})"

    @property
    def name(self) -> str:
        """The queue's name."""
        return self.keys.name

    def publish(self, body: B, *, durability: Durability | None = None, **options: Unpack[PublishOptions]) -> Receipt:
        """
        Publish one message. `bool(receipt)` is True if the message was published.

        Durations are seconds (int or float) or timedelta.

        Args:
            body: a value of the queue's type.
            delay: how long to wait until the message is due. Default: 0.
            at: when the message is due, as an aware datetime; use `delay` or `at`, not both. Default: None.
            id: your own message id, a str of 1 to 128 characters of A-Z a-z 0-9 _ . : - or a UUID. While a message with
                this id exists, and for the time `dedup` after its end, another publish of the id is refused as a
                duplicate. Default: a generated id.
            retries: how many times the message is delivered again after a failure, 0 to 1,000. Default: the queue's
                `retries`.
            ttl: how long after its due time the message may still start. Default: the queue's `ttl`.
            headers: dict of text to text that travels with the body, at most 8 KiB as JSON. Default: none.
            dedup: how long the chosen id cannot be published again after the message has ended. Default: the queue's
                `dedup`.
            ignore_dedup: True publishes the message even if the `dedup` of an earlier message or a tombstone still
                blocks the id. Default: False.
            on_conflict: what to do if a message with this `id` exists. "keep" refuses the new message as a duplicate.
                "replace" gives the new body, retries and due time to the existing message if it waits. If it runs, the
                new message starts after it, as its successor. "follow" also adds a successor to a running message, but
                is refused as a duplicate if the existing message waits. `Debounce` and `Throttle` work like "replace",
                and compute the due time. All values but "keep" imply `dedup=0`. Default: "keep".
            publication_id: an int by which `Job.once` distinguishes messages with the same id. Default: the publish
                time.
            key: the message key, such as the name of a tenant or an account: a text of 1 to 128 bytes. Workers take
                messages from all keys in turn, and the queue can order or limit the messages of each key. Default:
                None.
            priority: "high", "normal" or "low"; cannot be combined with `key`. Default: "normal".
            cost: how much of a rate by cost the message will probably use, for example a number of tokens; 1 to
                1,000,000,000. The handler can report the real cost with `Job.spent`. Default: 1.
            durability: a `Durability`: the replicas or disks that must confirm the message before `publish` returns.
                Default: the queue's `durability`.

        Raises:
            ConfigurationError: an option is not valid.
            BodyError: the body cannot be encoded or is too large.
            PublishFailed: Redis was unavailable for 2 s (plus the timeout of `durability`) or refused the message.
                Publish again with the same `id` to avoid a second message.
            TypeError: an option does not exist.

        Example: `queue.publish({"order": 42}, id="order-42", delay=60, headers={"tenant": "a"})`
        """
        order = self._writer.order(body, options)
        return self._with_status(
            order, run_blocking(self._sender.send(BLOCKING, [order], 0, self._durability(durability)))
        )

    async def apublish(
        self, body: B, *, durability: Durability | None = None, **options: Unpack[PublishOptions]
    ) -> Receipt:
        """Async version of `publish`."""
        order = self._writer.order(body, options, call="apublish")
        return self._with_status(order, await self._sender.send(ASYNCIO, [order], 0, self._durability(durability)))

    def publish_many(
        self,
        items: Iterable[B | OutgoingMessage[B]],
        *,
        chunk: int = 500,
        max_backlog: int | None = None,
        durability: Durability | None = None,
        **others: Never,
    ) -> BulkResult:
        """
        Publish many messages in few round trips to Redis.

        The items are read while earlier items are sent, so even a very long iterator needs little memory.

        Args:
            items: an iterable of bodies or `OutgoingMessage` objects. An `OutgoingMessage` has its own options.
            chunk: how many messages one script call to Redis publishes at most, 1 to 500. Default: 500.
            max_backlog: before each script call, wait until fewer messages than this number are pending, ready or to be
                redelivered. Default: None, which means do not wait.
            durability: a `Durability`: the replicas or disks that must confirm the messages of each script call before
                the next script call. Default: the queue's `durability`.

        Returns:
            A `BulkResult` with the number of published messages and the ids of the refused messages.

        Raises:
            ConfigurationError, BodyError: an item is not valid. The items of earlier script calls are published.
            PublishFailed: Redis was unavailable or refused a script call. The attribute `confirmed` is the number of
                messages that were published before. The attribute `rest` contains the messages that were read from
                `items` but not confirmed. Publish `rest`, then the items that are still in the iterator.

        Example: `queue.publish_many(Order(number) for number in range(10_000)).published`
        """
        check_bulk("Queue.publish_many", others)
        progress = BulkProgress(max_backlog)
        calls = ShardCalls(self._writer, chunk)
        durability = self._durability(durability)

        def send(orders: list[PreparedMessage], confirmed: int) -> list[Receipt]:
            return run_blocking(self._sender.send(BLOCKING, orders, confirmed, durability))

        # While Redis runs one script call, this thread already prepares the messages of the next script call.
        with calls.adding_rest(), ThreadPoolExecutor(1, "reliq-publish") as sending:
            under_way: Callable[[], list[Receipt]] = list
            try:
                for orders in calls.read(items):
                    done = under_way
                    under_way = list
                    progress.add(done())
                    while progress.is_bounded and progress.is_full(self.counts()):
                        time.sleep(BACKLOG_SECONDS)
                    is_first = self.known_shards.is_due  # if the first send also reads the shard map, wait for its end
                    calls.sent()
                    under_way = begun(sending, partial(send, orders, progress.confirmed))
                    if is_first:
                        progress.add(under_way())
                        under_way = list
            except Exception:
                under_way()  # wait for the last send; if it fails too, its error is raised instead
                raise
            progress.add(under_way())
        return progress.result()

    async def apublish_many(
        self,
        items: Iterable[B | OutgoingMessage[B]],
        *,
        chunk: int = 500,
        max_backlog: int | None = None,
        durability: Durability | None = None,
        **others: Never,
    ) -> BulkResult:
        """Async version of `publish_many`."""
        check_bulk("Queue.apublish_many", others)
        progress = BulkProgress(max_backlog)
        calls = ShardCalls(self._writer, chunk)
        durability = self._durability(durability)
        with calls.adding_rest():
            for orders in calls.read(items):
                while progress.is_bounded and progress.is_full(await self.acounts()):  # noqa: ASYNC110  a check in Redis
                    await asyncio.sleep(BACKLOG_SECONDS)
                calls.sent()
                progress.add(await self._sender.send(ASYNCIO, orders, progress.confirmed, durability))
        return progress.result()

    def publish_in(
        self,
        tx: Transaction,
        body: B,
        *,
        prefix: str = OUTBOX_PREFIX,
        durability: Durability | None = None,
        **options: Unpack[PublishOptions],
    ) -> str:
        """
        Write one message to the outbox in the transaction `tx`; a relay publishes it after the commit.

        Args:
            tx: a SQLAlchemy 2 Session or Connection, a Django connection, or a psycopg 3 or sqlite3 Connection.
            body: a value of the queue's type.
            prefix: the prefix of the names of the outbox tables, or `schema.prefix` for tables in a schema. Default:
                "reliq_".
            durability: a `Durability`: the replicas or disks that must confirm the message before the relay marks the
                row as sent. Default: the queue's `durability`.
            options: the other options of `publish`. A `delay` counts from now, by the clock of the database.

        Returns:
            The message id.

        Raises:
            ConfigurationError: an option is not valid, `tx` has a wrong type or would commit the row by itself
                (autocommit), or the outbox table does not exist.
            BodyError: the body cannot be encoded or is too large.

        Example:
            with Session(engine) as session, session.begin():
                session.add(order)
                orders.publish_in(session, Order(order.id))
        """
        from reliq.outbox import transactions as outbox  # noqa: PLC0415  a satellite

        message = self._writer.order(body, options, call="publish_in")
        outbox.write(tx, outbox.publish_statement(message, self.keys, self._durability(durability), prefix))
        return message.id

    async def apublish_in(
        self,
        tx: AsyncTransaction,
        body: B,
        *,
        prefix: str = OUTBOX_PREFIX,
        durability: Durability | None = None,
        **options: Unpack[PublishOptions],
    ) -> str:
        """Async version of `publish_in`; `tx` is a SQLAlchemy AsyncSession or AsyncConnection, or a psycopg 3 AsyncConnection."""
        from reliq.outbox import transactions as outbox  # noqa: PLC0415  a satellite

        message = self._writer.order(body, options, call="apublish_in")
        await outbox.awrite(tx, outbox.publish_statement(message, self.keys, self._durability(durability), prefix))
        return message.id

    @contextmanager
    def receive(
        self, *, limit: int = 1, wait: Duration = 0.0, lease: Duration = 30.0
    ) -> Iterator[list[ReceivedJob[B]]]:
        """
        Claim up to `limit` messages and settle them when the `with` block ends.

        While the block runs, the leases of the messages are renewed. Messages that the block has not settled itself,
        for example with `job.nack()`, are acked at its end. If the block raises, they are nacked instead, and retried
        after the default backoff.

        Args:
            limit: how many messages to claim at most. Default: 1.
            wait: how long to wait for the first message, in seconds or as a timedelta. Default: 0, do not wait.
            lease: the duration of the leases, in seconds or as a timedelta. If this process dies, another worker can
                claim the messages after this time. Default: 30.

        Raises:
            ConfigurationError: an argument is not valid.
            RedisUnavailableError: Redis is unavailable.

        Example:
            with orders.receive(limit=10, wait=5) as jobs:
                for job in jobs:
                    ship(job.body)
        """
        batch = self._receiver.batch(limit=limit, lease=lease)
        wait_seconds = seconds("wait", wait)
        with batch.noting_outages():
            run_blocking(self.known_shards.refresh(BLOCKING))
        with receiving(self._clients.blocking(), batch, wait_seconds) as jobs:
            yield jobs

    @asynccontextmanager
    async def areceive(
        self, *, limit: int = 1, wait: Duration = 0.0, lease: Duration = 30.0
    ) -> AsyncIterator[list[ReceivedJob[B]]]:
        """Async version of `receive`."""
        batch = self._receiver.batch(limit=limit, lease=lease)
        wait_seconds = seconds("wait", wait)
        with batch.noting_outages():
            await self.known_shards.refresh(ASYNCIO)
        async with areceiving(self._clients.asynchronous(), batch, wait_seconds) as jobs:
            yield jobs

    def shards(self) -> tuple[Keys, ...]:
        """
        Read from Redis which shards may contain messages; return a `Keys` object for each shard.

        A queue without sharding has one shard. If the Redis server with the shard map is unavailable, the shards that
        this process read last are returned.

        Raises:
            ConfigurationError: the number of shards in Redis is not the number given to `Queue(shards=...)`.
            RedisUnavailableError: Redis is unavailable, and this process has not read the shards before.
        """
        return run_blocking(self._read_shards(BLOCKING))

    async def ashards(self) -> tuple[Keys, ...]:
        """Async version of `shards`."""
        return await self._read_shards(ASYNCIO)

    def cancel(self, id: str | UUID, *, tombstone: Duration | None = None) -> CancelStatus:
        """
        Cancel a message: a waiting message never starts, and a running message is not retried.

        After the result `cancelled`, the id can be published again immediately. After the result `running`, the id can
        be published again when the handler has ended and the message's `dedup` has passed.

        Args:
            id: the message id, a str or UUID.
            tombstone: how long to refuse publishes of this id with the status `tombstoned`, in seconds or as a
                timedelta. A publish that was sent before the cancel but arrives later is refused too. Default: None,
                which means no tombstone.

        Returns:
            `cancelled` if the message was waiting; `running` if a worker has claimed it, and its handler can check
            `job.cancelled`; `not_found` if the message has ended or never existed. If the reply of Redis is lost, the
            cancel is repeated, so `not_found` can also mean that the first try cancelled the message while it ran.

        Raises:
            ConfigurationError: an argument is not valid.
            RedisUnavailableError: Redis is unavailable.
        """
        return run_blocking(self._cancel(BLOCKING, id, tombstone))

    async def acancel(self, id: str | UUID, *, tombstone: Duration | None = None) -> CancelStatus:
        """Async version of `cancel`."""
        return await self._cancel(ASYNCIO, id, tombstone)

    def reschedule(self, id: str | UUID, *, delay: Duration = 0.0, at: datetime | None = None) -> RescheduleStatus:
        """
        Change the due time of a waiting message.

        Args:
            id: the message id, a str or UUID.
            delay: the time from now until the message is due, in seconds or as a timedelta. Default: 0.
            at: the new due time, as an aware datetime, instead of `delay`. Default: None.

        Returns:
            `rescheduled` if the due time was changed, `running` if the message is already running, or `not_found`.

        Raises:
            ConfigurationError: an argument is not valid.
            RedisUnavailableError: Redis is unavailable.
        """
        return run_blocking(self._at_home(BLOCKING, check_id(id), lambda keys: rescheduling(keys, id, delay, at)))

    async def areschedule(
        self, id: str | UUID, *, delay: Duration = 0.0, at: datetime | None = None
    ) -> RescheduleStatus:
        """Async version of `reschedule`."""
        return await self._at_home(ASYNCIO, check_id(id), lambda keys: rescheduling(keys, id, delay, at))

    def status(self, id: str | UUID) -> Status[Any]:
        """
        Return the status of a message: its state, error and progress, and its result if the handler has `keep`.

        Args:
            id: the message id. If several messages had this id, and the last of them was acked without `keep`, the
                result may be from an earlier message. `Receipt.state` ignores such results.

        Raises:
            ConfigurationError: the id is not valid, or the queue has Go's layout.
            RedisUnavailableError: Redis is unavailable.

        Example: `queue.status(receipt.id).progress`
        """
        return PublishedMessage[Any](self, id).status()

    async def astatus(self, id: str | UUID) -> Status[Any]:
        """Async version of `status`."""
        return await PublishedMessage[Any](self, id).astatus()

    def counts(self) -> Counts:
        """
        Count the queue's messages by state, and read the totals of its counters, for example of acked messages.

        All counts of one shard are from the same moment. If some shards are unavailable, the result counts only the
        messages of the other shards, and its attribute `away` lists the unavailable shards.

        Raises:
            RedisUnavailableError: all shards are unavailable.
        """
        return Counts.sum(*answered(run_blocking(self._of_shards(BLOCKING, transitions.counts, ever=True))))

    async def acounts(self) -> Counts:
        """Async version of `counts`."""
        return Counts.sum(*answered(await self._of_shards(ASYNCIO, transitions.counts, ever=True)))

    def pause(self, *, reason: str = "", for_: Duration | None = None) -> None:
        """
        Pause the queue: consumers stop claiming within a second. Running handlers continue.

        Args:
            reason: a text of one line, up to 200 characters; commands and the web UI show it. Default: empty.
            for_: how long the pause lasts, in seconds or as a timedelta. Default: None, which means until `resume`.

        Raises:
            ConfigurationError: an argument is not valid.
            RedisUnavailableError: Redis is unavailable. If the queue has several shards, the error lists the shards
                that were paused nevertheless.
        """
        answers = run_blocking(self._of_shards(BLOCKING, lambda keys: pausing(keys, reason, for_)))
        of_every_shard(self.name, "paused", answers)

    async def apause(self, *, reason: str = "", for_: Duration | None = None) -> None:
        """Async version of `pause`."""
        answers = await self._of_shards(ASYNCIO, lambda keys: pausing(keys, reason, for_))
        of_every_shard(self.name, "paused", answers)

    def resume(self) -> bool:
        """Resume the queue; return whether `pause` had paused it or the exception `RateLimited` had throttled it."""
        return run_blocking(self._resume(BLOCKING))

    async def aresume(self) -> bool:
        """Async version of `resume`."""
        return await self._resume(ASYNCIO)

    def dead_letters(self, *, limit: int = 100, after: str = "") -> list[DeadLetter]:
        """
        Return dead letters, oldest first.

        Args:
            limit: how many dead letters to return at most, 1 to 500. With several shards, the result can have a few
                more. Default: 100.
            after: to get the next page, the attribute `letter` of the last dead letter on the previous page. Default:
                empty, which means the first page.

        Raises:
            ConfigurationError: an argument is not valid.
            RedisUnavailableError: Redis is unavailable.
        """
        return run_blocking(self._letters(BLOCKING, limit, after))

    async def adead_letters(self, *, limit: int = 100, after: str = "") -> list[DeadLetter]:
        """Async version of `dead_letters`."""
        return await self._letters(ASYNCIO, limit, after)

    def redrive(self, letters: Sequence[DeadLetter], *, delay: Duration = 0.0, retries: int | None = None) -> int:
        """
        Publish dead letters again, and return how many were published.

        A dead letter is not published if a message with its id exists, or if the number of shards was changed and the
        letter is not in its new shard yet. If a reply of Redis is lost, the redrive is repeated, and the result does
        not count the letters that the first try published. `counts().totals["redriven"]` counts all of them.

        Args:
            letters: up to 500 `DeadLetter` objects, as returned by `dead_letters`.
            delay: the time from now until the messages are due, in seconds or as a timedelta. Default: 0.
            retries: the number of retries of each message. Default: None, which means the number with which it was
                published.

        Raises:
            ConfigurationError: an argument is not valid.
            RedisUnavailableError: Redis is unavailable.
        """
        return run_blocking(self._redrive(BLOCKING, letters, delay, retries))

    async def aredrive(
        self, letters: Sequence[DeadLetter], *, delay: Duration = 0.0, retries: int | None = None
    ) -> int:
        """Async version of `redrive`."""
        return await self._redrive(ASYNCIO, letters, delay, retries)

    def schedule(self, name: str, *, body: B, **options: Unpack[ScheduleOptions]) -> None:
        """
        Store a schedule in Redis, or change it. The queue's workers publish `body` at each due time (tick).

        The id of a message is `plan.NAME.TICK`, where TICK is the due time in unix seconds. If you call this method
        again with the same arguments, nothing changes. With changed arguments, the next tick is computed from now. A
        paused schedule stays paused.

        Args:
            name: the name of the schedule in this queue, 1 to 100 characters of A-Z a-z 0-9 _ . -
            body: the body of each message; body and headers together at most 64 KiB.
            cron: a cron expression, such as "0 6 * * *". Give either `cron` or `every`.
            every: the time between two ticks, in whole seconds or as a timedelta. Default: None.
            tz: the time zone of `cron`, such as "Europe/Berlin". Default: "UTC".
            catch_up: which missed ticks of the last day to publish after a downtime: "skip" publishes none, "latest"
                only the last tick, "all" every tick. Default: "latest".
            options: `retries`, `ttl`, `headers`, `key` and `priority` of each message; see `publish`.

        Raises:
            ConfigurationError: an argument is not valid, or the queue has the Go layout.
            BodyError: the body cannot be encoded or is too large.
            RedisRefusedError: Redis refuses the command, for example at its memory limit.
            RedisUnavailableError: Redis is unavailable; call again.

        Example: `reports.schedule("tenant-7", cron="0 6 * * *", tz="Europe/Berlin", body=Report(7))`
        """
        run_blocking(self._stored().write(BLOCKING, name, body, options))

    async def aschedule(self, name: str, *, body: B, **options: Unpack[ScheduleOptions]) -> None:
        """Async version of `schedule`."""
        await self._stored().write(ASYNCIO, name, body, options)

    def unschedule(self, name: str) -> bool:
        """Delete a stored schedule; return whether it existed. Messages that it has published stay in the queue."""
        return run_blocking(self._stored().change(BLOCKING, "delete", name))

    async def aunschedule(self, name: str) -> bool:
        """Async version of `unschedule`."""
        return await self._stored().change(ASYNCIO, "delete", name)

    def pause_schedule(self, name: str, *, reason: str = "", by: str = "") -> bool:
        """
        Pause a stored schedule. Until `resume_schedule`, its ticks are skipped.

        Args:
            name: the name of the schedule.
            reason: the reason, a text of one line, up to 200 characters. Default: empty.
            by: the name of the operator who pauses the schedule. Default: user@host of this process.

        Returns:
            True if this call paused the schedule; False if the schedule was already paused or does not exist.
        """
        pause = msgspec.json.encode(pause_by(by, reason))
        return run_blocking(self._stored().change(BLOCKING, "pause", name, pause))

    async def apause_schedule(self, name: str, *, reason: str = "", by: str = "") -> bool:
        """Async version of `pause_schedule`."""
        pause = msgspec.json.encode(pause_by(by, reason))
        return await self._stored().change(ASYNCIO, "pause", name, pause)

    def resume_schedule(self, name: str) -> bool:
        """Resume a paused schedule from its next tick on; return whether it was paused."""
        return run_blocking(self._stored().resume(BLOCKING, name))

    async def aresume_schedule(self, name: str) -> bool:
        """Async version of `resume_schedule`."""
        return await self._stored().resume(ASYNCIO, name)

    def schedules(self, prefix: str = "", *, limit: int = 1000) -> list[StoredSchedule]:
        """
        Return the stored schedules of this queue, sorted by name.

        They are read from Redis in steps of about 100, so this does not block Redis for long.

        Args:
            prefix: return only schedules whose names begin with this text. Default: empty, which means all schedules.
            limit: how many schedules to return at most; if more exist, the selection is arbitrary. Default: 1,000.
        """
        return run_blocking(self._stored().read(BLOCKING, prefix, limit))

    async def aschedules(self, prefix: str = "", *, limit: int = 1000) -> list[StoredSchedule]:
        """Async version of `schedules`."""
        return await self._stored().read(ASYNCIO, prefix, limit)

    def close(self) -> None:
        """Close the blocking connections to this queue's Redis; the next use opens them again."""
        with suppress(ConfigurationError):  # without a Redis URL, no connection was opened
            self._clients.close()

    async def aclose(self) -> None:
        """Close the connections to this queue's Redis that the running event loop uses."""
        with suppress(ConfigurationError):
            await self._clients.aclose()

    def connection(self) -> Connection:
        """Return the connection to the queue's Redis; raise ConfigurationError if no Redis URL is set."""
        return self._clients.connection()

    def _stored(self) -> StoredSchedules:
        from reliq.schedules import StoredSchedules  # noqa: PLC0415  rarely needed

        return StoredSchedules(self.keys, self._writer, self._clients, self._ask)

    async def _read_shards(self, driver: Driver) -> tuple[Keys, ...]:
        try:
            await self.known_shards.read(driver, for_seconds=PUBLISH_SECONDS)
        except RedisUnavailableError:
            if self.known_shards.known is UNREAD:
                raise
        return self.known_shards.all

    async def _cancel(self, driver: Driver, id: str | UUID, tombstone: Duration | None) -> CancelStatus:
        id = check_id(id)
        for_ms = tombstone_ms(tombstone)
        self._lanes.end(id)
        return await self._at_home(driver, id, lambda keys: transitions.cancel(keys, [id], tombstone_ms=for_ms))

    def _with_status(self, order: PreparedMessage, receipts: list[Receipt]) -> Receipt:
        """Return the only receipt in `receipts`, after adding the `PublishedMessage` that `Receipt.state` needs."""
        [receipt] = receipts
        life = None if order.is_generated or not receipt else _LIFE.match(order.value)
        object.__setattr__(receipt, "_message", PublishedMessage(self, receipt.id, life and int(life[1])))
        return receipt

    async def _resume(self, driver: Driver) -> bool:
        was = [await self._of_shards(driver, lambda keys: commands.resume_queue(keys)[at]) for at in range(4)]  # noqa: B023  called at once
        pauses, sleeps = (of_every_shard(self.name, "resumed", answers) for answers in was[:2])
        return any(pauses) or any(sleeps)

    async def _letters(self, driver: Driver, limit: int, after: str) -> list[DeadLetter]:
        letters = raise_first(await self._of_shards(driver, lambda keys: listing(keys, limit, after)))
        return first_letters(letters, limit)

    async def _redrive(
        self, driver: Driver, letters: Sequence[DeadLetter], delay: Duration, retries: int | None
    ) -> int:
        if not isinstance(letters, list | tuple) or not all(isinstance(one, DeadLetter) for one in letters):
            raise ConfigurationError(
                f"letters must be a list of dead letters, as `dead_letters()` returns them, not {type(letters).__name__}"
            )
        check_int("number of letters", len(letters), most=BATCH_LIMIT)
        if retries is not None:
            check_int("retries", retries, most=RETRIES_LIMIT)
        delay_ms = milliseconds(seconds("delay", delay))
        shards = self.known_shards
        await shards.refresh(driver)
        if any(home(letter.id, shards.map.n) != letter.shard for letter in letters):
            await shards.read(driver, for_seconds=PUBLISH_SECONDS)

        def retries_of(letter: DeadLetter) -> int:
            known = (retries, letter.header.retries, self.settings.retries)
            return next(number for number in known if number is not None)

        redriven = 0
        left = list(letters)
        while left:
            by_shard = defaultdict[int, list[DeadLetter]](list)
            for letter in left:
                if home(letter.id, shards.map.n) == letter.shard:  # a resize has not moved other letters yet
                    by_shard[letter.shard].append(letter)
            left = []
            for shard, of_shard in by_shard.items():
                for some in chunked_by_size(of_shard, lambda one: len(one.payload), LETTER_BYTES, BATCH_LIMIT):
                    call = transitions.redrive(
                        shards.keys(shard),
                        [(letter.letter, letter.id, retries_of(letter)) for letter in some],
                        ttl_ms=milliseconds(self.settings.ttl),
                        delay_ms=delay_ms,
                        fence=shards.map.fence,
                    )
                    answers = await self._ask(driver, call)
                    redriven += answers.count("redriven")
                    left += [letter for letter, answer in zip(some, answers, strict=True) if answer == "stale"]
            if left:
                await shards.read(driver, for_seconds=PUBLISH_SECONDS)
        return redriven

    async def _at_home(self, driver: Driver, id: str, make: Callable[[Keys], Call[list[S]]]) -> S:
        """
        Run a script call in the shard of a message id.

        If the message is not there, run the script call in the shard that the id had before a resize.
        """
        make(self.keys)  # raises ConfigurationError before anything is sent
        await self.known_shards.refresh(driver)
        while True:
            known = self.known_shards.map
            for keys in self.known_shards.homes(id):
                [answer] = await self._ask(driver, make(keys))
                if answer != "not_found":
                    return answer
            await self.known_shards.read(driver, for_seconds=PUBLISH_SECONDS)
            if self.known_shards.map == known:
                return answer

    async def _of_shards(self, driver: Driver, make: Callable[[Keys], Request[T]], *, ever: bool = False) -> list[Any]:
        """
        Send a request to every shard in one round trip, and return the results in the order of the shards.

        If the queue has several shards, the result of a failed request is its exception.

        Args:
            make: creates the request for a shard.
            ever: whether to include the shards that a resize has removed.
        """
        first = make(self.keys)
        shards = await self._read_shards(driver)
        requests = [first, *map(make, (self.known_shards.ever if ever else shards)[1:])]
        if len(requests) == 1:
            return [await self._ask(driver, first)]
        return await self._clients.driven(driver).run_all(requests, for_seconds=PUBLISH_SECONDS)

    async def _ask(self, driver: Driver, request: Request[T]) -> T:
        return await self._clients.driven(driver).run(request, for_seconds=PUBLISH_SECONDS)

    def _durability(self, given: Durability | None) -> Durability:
        return self.settings.durability if given is None else Durability.checked(given)


@dataclass(frozen=True)
class PublishedMessage(Generic[R_co]):
    """
    A published message, for reading its status.

    Attributes:
        life: the publish time in unix ms, by which results of other messages with the same id are ignored. None accepts
            these results too.
        decode: a function that decodes the result of the handler.
    """

    queue: Queue[Any]
    id: str | UUID
    life: int | None = None
    decode: Callable[[bytes], R_co] = msgspec.json.decode

    def status(self) -> Status[R_co]:
        """Return the status of the message; see `Queue.status`."""
        return run_blocking(self._status(BLOCKING))

    async def astatus(self) -> Status[R_co]:
        """Async version of `status`."""
        return await self._status(ASYNCIO)

    async def _status(self, driver: Driver) -> Status[R_co]:
        id, queue, shards = check_id(self.id), self.queue, self.queue.known_shards
        if queue.layout.bare:
            raise ConfigurationError(
                f"queue {queue.name!r} in the layout {queue.layout} has no status of a message: its bodies have no header"
            )
        found = await queue._at_home(driver, id, lambda keys: transitions.status(keys, id, life=self.life))  # noqa: SLF001
        # A resize does not move the results of ended messages. So also ask the shards that the id had with other
        # numbers of shards.
        count = 2 * shards.map.ever if shards.map.ever > 1 else 0
        while found == "not_found" and (count := count // 2):
            keys = shards.keys(home(id, count))
            [found] = await queue._ask(driver, transitions.status(keys, id, life=self.life))  # noqa: SLF001
        if found == "not_found":
            return Status("gone")
        return found if found.result is None else replace(found, result=self.decode(found.result))
