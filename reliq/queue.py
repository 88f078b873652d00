"""The public `Queue`: messages and dead letters are published, received and controlled, blocking or in async code."""

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
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Generic, Never, TypeVar, Unpack, overload

from reliq.codec import Codec
from reliq.errors import ConfigurationError, PublishFailed, RedisUnavailableError
from reliq.keys import Keys, Layout, check_id, home
from reliq.lua import transitions
from reliq.lua.transitions import CallSequences
from reliq.message import (
    RETRIES_LIMIT,
    BulkResult,
    CancelStatus,
    Counts,
    Duration,
    Letter,
    Outgoing,
    Pause,
    PublishOptions,
    Receipt,
    RescheduleStatus,
)
from reliq.publish import PUBLISH_KEYWORDS, PreparedMessage, Sender, Writer, begun, when
from reliq.receive.receiver import Received, Receiver, areceiving, receiving
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


#: One call of a redrive writes back at most this many bytes of bodies: a script holds all others up.
LETTER_BYTES = 8 * MIB

_LETTER_NAME = re.compile(r"\d{1,20}-\d{1,20}")


def listing(keys: Keys, limit: int, after: str) -> Command[list[Letter]]:
    """Return the command that reads dead letters; raise ConfigurationError for a limit or place not allowed."""
    if not isinstance(after, str) or (after and _LETTER_NAME.fullmatch(after) is None):
        raise ConfigurationError("after must be the `letter` of a dead letter, such as '1700000000000-0', or empty")
    count = check_int("limit", limit, least=1, most=BATCH_LIMIT)
    first = f"({after}" if after else "-"
    return commands.letters_between(keys, first, "+", count=count)


def first_letters(all: Iterable[list[Letter]], limit: int) -> list[Letter]:
    """Return the oldest of the letters of several shards: `limit`, and those that died at once with the last of them."""
    letters = sorted((one for some in all for one in some), key=_place)
    last = _place(letters[limit - 1])[:2] if len(letters) > limit else None
    return [one for one in letters if last is None or _place(one)[:2] <= last]


def _place(letter: Letter) -> tuple[int, int, int]:
    ms, _, number = letter.letter.partition("-")
    return int(ms), int(number), letter.shard


S = TypeVar("S")

#: A pause's reason has at most this many characters.
REASON_LIMIT = 200


def tombstone_ms(tombstone: Duration | None) -> int | None:
    """Return for how many ms a cancelled id is refused; raise ConfigurationError for a time that is not above 0."""
    return None if tombstone is None else milliseconds(seconds("tombstone", tombstone, least=0.001))


def rescheduling(keys: Keys, id: str | UUID, delay: Duration, at: datetime | None) -> Call[list[RescheduleStatus]]:
    """Return the call that gives a message another due time; raise ConfigurationError for one that is not allowed."""
    at_ms, delay_ms = when(delay, at)
    return transitions.reschedule(keys, [check_id(id)], at_ms=at_ms, delay_ms=delay_ms)


def pausing(keys: Keys, reason: str, for_: Duration | None, by: str = "") -> Command[None]:
    """
    Return the command that pauses a queue; raise ConfigurationError for a reason or time that is not allowed.

    Args:
        by: the name that is shown; by default user@host of this process.
    """
    for_seconds = None if for_ is None else seconds("for_", for_, least=0.001)
    pause = pause_by(by, reason, for_seconds)
    return commands.pause(keys, pause, None if for_seconds is None else milliseconds(for_seconds))


def pause_by(by: str, reason: str, for_seconds: float | None = None) -> Pause:
    """Return a pause that begins now; raise ConfigurationError for a reason that is not allowed."""
    if not isinstance(reason, str) or not reason.isprintable() or len(reason) > REASON_LIMIT:
        raise ConfigurationError(f"reason must be one line of at most {REASON_LIMIT} characters")
    now = round(time.time(), 3)
    return Pause(by or user_at_host(), now, reason, None if for_seconds is None else now + for_seconds)


def user_at_host() -> str:
    """Return user@host of this process; a container's user may have no name."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = "unknown"
    return f"{user}@{socket.gethostname()}"


B = TypeVar("B")

#: A `publish_many` that waits for the backlog looks at it every this many seconds.
BACKLOG_SECONDS = 0.1


#: The keyword arguments of `Queue.publish_many`.
_BULK_KEYWORDS = frozenset({"items", "chunk", "max_backlog", "durability"})
#: One call carries at most this many bytes of bodies, unless a single body has more.
CHUNK_BYTES = 8 * MIB


class ShardCalls:
    """The calls of a `publish_many` that fill up, one for each shard; together they hold at most `CHUNK_BYTES`."""

    def __init__(self, writer: Writer, size: int) -> None:
        self._writer = writer
        self._size = check_int("chunk", size, least=1, most=BATCH_LIMIT)
        self._bytes = 0
        self._held: dict[int, list[PreparedMessage]] = {}
        self._full: list[PreparedMessage] = []
        self._newest: list[PreparedMessage] = []

    @contextmanager
    def adding_rest(self) -> Iterator[None]:
        """Add to a PublishFailed all orders that were read and not sent."""
        try:
            yield
        except PublishFailed as failed:
            failed.orders = [*failed.orders, *self._full, *chain(*self._held.values()), *self._newest]
            raise

    def sent(self) -> None:
        """Note that the yielded call is being sent: from now on its own failure reports its orders."""
        self._full = []

    def read(self, items: Iterable[Any]) -> Iterator[list[PreparedMessage]]:
        """
        Yield the orders of `items` call by call; bodies that are no `Outgoing` go on the queue's terms.

        One call goes to one shard: generated ids take them in turn, chosen ids wait until the call of their shard is full.
        """
        if isinstance(items, str | bytes | Mapping | Outgoing) or not isinstance(items, Iterable):
            raise ConfigurationError(f"items must be an iterable of bodies or Outgoing, not {type(items).__name__}")
        writer = self._writer
        shards = writer.shards
        shard = shards.turn()
        for item in items:
            order = writer.special(item, shard) if isinstance(item, Outgoing) else writer.order(item, {}, shard)
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
        """Yield all that there are, full or not."""
        while self._held:
            yield self._take(next(iter(self._held)))

    def _take(self, shard: int) -> list[PreparedMessage]:
        self._bytes -= sum(len(order.value) for order in self._held[shard])
        self._full = self._held.pop(shard)
        return self._full


class BulkProgress:
    """The sum of the calls of a `publish_many`, and whether the next must wait for the backlog."""

    def __init__(self, max_backlog: int | None) -> None:
        self._most = None if max_backlog is None else check_int("max_backlog", max_backlog, least=1, most=10**9)
        self.confirmed = 0
        self._duplicates: list[str] = []
        self._tombstoned: list[str] = []
        self._unconfirmed: list[str] = []
        self._durable: bool | None = None

    @property
    def is_bounded(self) -> bool:
        """Whether the backlog is limited."""
        return self._most is not None

    def is_full(self, counts: Counts) -> bool:
        """Return whether `max_backlog` messages wait, so that the next call must wait too."""
        return self._most is not None and counts.pending + counts.due >= self._most

    def add(self, done: list[Receipt]) -> None:
        """Add the receipts of one call."""
        self._duplicates += [receipt.id for receipt in done if receipt.status == "duplicate"]
        self._tombstoned += [receipt.id for receipt in done if receipt.status == "tombstoned"]
        self.confirmed += sum(receipt.status == "published" for receipt in done)
        self._unconfirmed += [receipt.id for receipt in done if receipt.durable is False]
        if done and done[0].durable is not None:
            self._durable = not self._unconfirmed

    def result(self) -> BulkResult:
        """Return the sum."""
        refused = (tuple(self._duplicates), tuple(self._tombstoned))
        return BulkResult(self.confirmed, *refused, self._durable, tuple(self._unconfirmed))


def check_bulk(call: str, others: Mapping[str, Any]) -> None:
    """Raise TypeError when a `publish_many` was given any other keyword argument than its own."""
    of_messages = sorted(PUBLISH_KEYWORDS & others.keys())
    advice = f"It is for each message: Outgoing(body=…, {of_messages[0]}=…)" if of_messages else ""
    check_keywords(call, of_messages or others, () if of_messages else _BULK_KEYWORDS, advice)


class SettingsAndLimits(SettingsOptions, LimitOptions, total=False):
    """The keyword arguments of `Queue` that are settings or limits, for type checkers."""


class QueueOptions(SettingsAndLimits, total=False):
    """The keyword arguments of `Queue`, for type checkers."""

    validate: bool
    url: Target | None
    layout: Layout
    observers: Sequence[Observer]
    shards: int | None


#: The keyword arguments of `Queue`.
_KEYWORDS = frozenset({"body", *QueueOptions.__annotations__})


class Queue(Generic[B]):
    """
    A queue of bodies of one type. Making one does not connect to Redis.

    Args:
        name: 1 to 128 of A-Z a-z 0-9 _ . - ; in the layout of the Go original any 1 to 512 printable characters.
        body: the type of a body: dataclass, TypedDict, `msgspec.Struct`, pydantic model, a union of models, dict, list,
            scalar, `str` or `bytes`.
        retries: deliveries after the first.
        ttl: seconds or timedelta after the due time in which a delivery may start.
        max_body: the most bytes of an encoded body; a publish refuses a larger one, a worker does not read it.
        dedup: seconds or timedelta for which a chosen id stays taken after its end.
        letters_max, letters_ttl: how many dead letters are kept, and for how long (seconds or timedelta).
        history: how many of the last acked messages are remembered, with when and how long they ran.
        durability: the servers or disks that must have a message before its publish returns: `Durability.replicas(1)`, `Durability.aof()`.
        validate: whether a publish reads the body back and refuses one that a worker would not get as it was sent;
            False saves those microseconds.
        url: a Redis URL or a redis-py client; None means RELIQ_URL when it is first needed.
        layout: how keys are spelled; `Layout.hdt3213()` shares a queue with the Go original.
        observers: callables that are called with every event.
        shards: how many shards the queue must have, a power of two; None takes as many as it has.
        ordered: one message of a key at a time, in the order in which they were published.
        per_key: at most this many messages of a key at once, over all processes.
        rate, burst: how many messages may start, "100/s", "5/m" or "1000/h", and how many at once after a pause.
        key_rate, key_burst: the same of each key.
        concurrency: at most this many messages at once, over all processes.
        key_weights: key -> how many messages it has in the turn in which others have one.

    Attributes:
        limits: those that are declared here, None without any. A worker that starts writes them to Redis, where they
            hold for all workers.

    Raises:
        ConfigurationError: a name or setting is not allowed.

    Example:
        orders = Queue("orders", Order, retries=5)
        orders.publish(Order(42), delay=60)
    """

    @overload
    def __init__(self: Queue[dict[str, Any]], name: str, **options: Unpack[QueueOptions]) -> None: ...

    @overload
    def __init__(self, name: str, body: type[B], **options: Unpack[QueueOptions]) -> None: ...

    @overload  # a type that is no class, such as `Cat | Dog` or `Order | None`
    def __init__(self, name: str, body: TypeForm[B], **options: Unpack[QueueOptions]) -> None: ...

    def __init__(
        self,
        name: str,
        body: Any = dict,
        *,
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
        self.limits: Limits | None = limits_in(settings, keys, wanted)
        self.keys = keys
        self.layout = layout
        self.settings = QueueSettings(**settings)
        self.target = url
        self.observers = observers
        self._lanes = CallSequences()
        self._clients = Clients(url, observers)
        #: The shards as this process last read them.
        self.known_shards = Shards(keys, self._clients, wanted)
        self.codec: Codec[B] = Codec(body, validate=validate)
        self._writer = Writer(self.known_shards, self.codec, self.settings)
        self._receiver = Receiver(self.known_shards, self.codec, self.settings, self.limits)
        self._sender = Sender(self._writer, self.known_shards, self._lanes, self._clients, observers)

    def __repr__(self) -> str:
        return f"Queue({self.name!r})"

    @property
    def name(self) -> str:
        """The queue's name."""
        return self.keys.name

    def publish(self, body: B, *, durability: Durability | None = None, **options: Unpack[PublishOptions]) -> Receipt:
        """
        Publish one message and return its receipt, which is true when it was published.

        Args:
            body: a value of the queue's type.
            delay: seconds or timedelta until it is due.
            at: when it is due, as an aware datetime, instead of `delay`.
            id: an id of your own: it is not published again while its message lives, and for `dedup` after its end.
            retries: deliveries after the first, None for the queue's.
            ttl: seconds or timedelta after the due time in which a delivery may start, None for the queue's.
            headers: short texts that travel beside the body, name -> text.
            dedup: seconds or timedelta for which the chosen id stays taken after its end, None for the queue's.
            replace: publish although the id ended a short while ago or has a tombstone.
            incarnation: a number that distinguishes messages of a chosen id, for `Job.once`; None takes the time.
            key: its message key, such as a tenant, 1 to 128 bytes of text: keys take turns, and order and limits hold for each.
            priority: "high" or "low" instead of "normal", for a message without a key.
            durability: the servers or disks that must have the message before the publish returns, None for the queue's.

        Raises:
            ConfigurationError: an option is not allowed.
            BodyError: the body cannot be encoded or is too large.
            PublishFailed: Redis was away for 2 s (plus the wait of `durability`), or refused; publish again with its `id`
                to be sure.

        Example: `queue.publish({"order": 42}, id="order-42", delay=60, headers={"tenant": "a"})`
        """
        order = self._writer.order(body, options)
        return run_blocking(self._sender.send(BLOCKING, [order], 0, self._durability(durability)))[0]

    async def apublish(
        self, body: B, *, durability: Durability | None = None, **options: Unpack[PublishOptions]
    ) -> Receipt:
        """Publish one message in async code, see `publish`."""
        order = self._writer.order(body, options, call="apublish")
        return (await self._sender.send(ASYNCIO, [order], 0, self._durability(durability)))[0]

    def publish_many(
        self,
        items: Iterable[B | Outgoing[B]],
        *,
        chunk: int = 500,
        max_backlog: int | None = None,
        durability: Durability | None = None,
        **others: Never,
    ) -> BulkResult:
        """
        Publish bodies, or `Outgoing` with options of their own; return how many were published.

        The items are read as they are sent, never all at once.

        Args:
            items: bodies and `Outgoing`, mixed as you like.
            chunk: at most this many messages go in one call to Redis.
            max_backlog: each call waits until fewer messages than this are pending, ready or waiting for a retry.
            durability: the servers or disks that must have the messages of a call before the next call, None for the queue's.

        Raises:
            ConfigurationError, BodyError: an item is not allowed; the items of earlier calls are published.
            PublishFailed: Redis is away or refused; `confirmed` counts the messages published before, and `rest` has the
                others that were read: publish these and go on with `items`.

        Example: `queue.publish_many(Order(number) for number in range(10_000)).published`
        """
        check_bulk("Queue.publish_many", others)
        progress = BulkProgress(max_backlog)
        calls = ShardCalls(self._writer, chunk)
        durability = self._durability(durability)

        def send(orders: list[PreparedMessage], confirmed: int) -> list[Receipt]:
            return run_blocking(self._sender.send(BLOCKING, orders, confirmed, durability))

        # While Redis works on a call, the next one is made.
        with calls.adding_rest(), ThreadPoolExecutor(1, "reliq-publish") as sending:
            under_way: Callable[[], list[Receipt]] = list
            try:
                for orders in calls.read(items):
                    done = under_way
                    under_way = list
                    progress.add(done())
                    while progress.is_bounded and progress.is_full(self.counts()):
                        time.sleep(BACKLOG_SECONDS)
                    is_first = self.known_shards.is_due  # the next is made when it is known how many shards there are
                    calls.sent()
                    under_way = begun(sending, partial(send, orders, progress.confirmed))
                    if is_first:
                        progress.add(under_way())
                        under_way = list
            except Exception:
                under_way()  # when it has failed too, that came first
                raise
            progress.add(under_way())
        return progress.result()

    async def apublish_many(
        self,
        items: Iterable[B | Outgoing[B]],
        *,
        chunk: int = 500,
        max_backlog: int | None = None,
        durability: Durability | None = None,
        **others: Never,
    ) -> BulkResult:
        """Publish many messages in async code, see `publish_many`."""
        check_bulk("Queue.apublish_many", others)
        progress = BulkProgress(max_backlog)
        calls = ShardCalls(self._writer, chunk)
        durability = self._durability(durability)
        with calls.adding_rest():
            for orders in calls.read(items):
                while progress.is_bounded and progress.is_full(await self.acounts()):  # noqa: ASYNC110  the event is in Redis
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
        Write one message to the outbox in the transaction `tx`, and return its id; a relay publishes it after the commit.

        Args:
            tx: a Session or Connection of SQLAlchemy 2, a connection of Django, a Connection of psycopg 3 or sqlite3.
            body: a value of the queue's type.
            prefix: the beginning of the tables' names; `schema.prefix` names a schema too.
            durability: the servers or disks that must have the message before the relay notes it as sent, None for the queue's.
            options: as `publish` has them; a `delay` counts from now on, by the database's clock.

        Raises:
            ConfigurationError: an option is not allowed, `tx` is no transaction or would commit the row by itself, or
                the table is not there.
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
        """Write a message to the outbox in async code, see `publish_in`; `tx` is an AsyncSession or AsyncConnection, of SQLAlchemy or of psycopg 3."""
        from reliq.outbox import transactions as outbox  # noqa: PLC0415  a satellite

        message = self._writer.order(body, options, call="apublish_in")
        await outbox.awrite(tx, outbox.publish_statement(message, self.keys, self._durability(durability), prefix))
        return message.id

    @contextmanager
    def receive(self, *, limit: int = 1, wait: Duration = 0.0, lease: Duration = 30.0) -> Iterator[list[Received[B]]]:
        """
        Take up to `limit` messages, waiting up to `wait` for the first, and settle them when the block ends.

        Leases are renewed while the block runs. A message that was not answered (`job.nack()`, …) is acked at the
        end, or nacked with the default backoff when the block raises.

        Args:
            limit: the most messages to take.
            wait: seconds or timedelta to wait for the first; 0 returns at once.
            lease: seconds or timedelta after which another worker may have them, when this process dies.

        Raises:
            ConfigurationError: an argument is not allowed.
            RedisUnavailableError: Redis is away.

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
    ) -> AsyncIterator[list[Received[B]]]:
        """Receive messages in async code, see `receive`."""
        batch = self._receiver.batch(limit=limit, lease=lease)
        wait_seconds = seconds("wait", wait)
        with batch.noting_outages():
            await self.known_shards.refresh(ASYNCIO)
        async with areceiving(self._clients.asynchronous(), batch, wait_seconds) as jobs:
            yield jobs

    def shards(self) -> tuple[Keys, ...]:
        """
        Return the keys of every shard that may hold messages, as Redis has them now: a single one without sharding.

        While the Redis of the map is away, return the shards that this process read last.

        Raises:
            ConfigurationError: there are not as many as the queue was made with.
            RedisUnavailableError: Redis is away, and nothing is known.
        """
        return run_blocking(self._read_shards(BLOCKING))

    async def ashards(self) -> tuple[Keys, ...]:
        """Return the shards' keys in async code, see `shards`."""
        return await self._read_shards(ASYNCIO)

    def cancel(self, id: str | UUID, *, tombstone: Duration | None = None) -> CancelStatus:
        """
        Cancel a message, so that it does not start or, if it runs, is not retried.

        The id of a `cancelled` message is free at once, the id of a `running` message after its end and its `dedup`.

        Args:
            tombstone: seconds or timedelta for which a publish of this id is refused as `tombstoned`, also one that is
                still on its way.

        Returns:
            `cancelled`; `running`, then its handler sees it; `not_found`, it has ended or never was, or a first try
            with a lost reply has cancelled it.
        """
        return run_blocking(self._cancel(BLOCKING, id, tombstone))

    async def acancel(self, id: str | UUID, *, tombstone: Duration | None = None) -> CancelStatus:
        """Cancel a message in async code, see `cancel`."""
        return await self._cancel(ASYNCIO, id, tombstone)

    def reschedule(self, id: str | UUID, *, delay: Duration = 0.0, at: datetime | None = None) -> RescheduleStatus:
        """Give a waiting message another due time: `rescheduled`, or it is `running` or `not_found`."""
        return run_blocking(self._at_home(BLOCKING, check_id(id), lambda keys: rescheduling(keys, id, delay, at)))

    async def areschedule(
        self, id: str | UUID, *, delay: Duration = 0.0, at: datetime | None = None
    ) -> RescheduleStatus:
        """Give a message another due time in async code, see `reschedule`."""
        return await self._at_home(ASYNCIO, check_id(id), lambda keys: rescheduling(keys, id, delay, at))

    def counts(self) -> Counts:
        """
        Count the queue's messages by place, and every total; of one shard, or of each, at one moment.

        While the Redis of some shards is away, the others are counted: `away` names those.
        """
        return Counts.sum(*answered(run_blocking(self._of_shards(BLOCKING, transitions.counts, ever=True))))

    async def acounts(self) -> Counts:
        """Count messages in async code, see `counts`."""
        return Counts.sum(*answered(await self._of_shards(ASYNCIO, transitions.counts, ever=True)))

    def pause(self, *, reason: str = "", for_: Duration | None = None) -> None:
        """
        Have consumers stop claiming within a second, for a while or until `resume`; Redis keeps by whom, when and why.

        Raises:
            RedisUnavailableError: Redis is away; for a queue with several shards the error names the paused shards.
        """
        answers = run_blocking(self._of_shards(BLOCKING, lambda keys: pausing(keys, reason, for_)))
        of_every_shard(self.name, "paused", answers)

    async def apause(self, *, reason: str = "", for_: Duration | None = None) -> None:
        """Pause the queue in async code, see `pause`."""
        answers = await self._of_shards(ASYNCIO, lambda keys: pausing(keys, reason, for_))
        of_every_shard(self.name, "paused", answers)

    def resume(self) -> bool:
        """Have consumers claim again; return whether the queue was paused, or put to sleep by `RateLimited`."""
        return run_blocking(self._resume(BLOCKING))

    async def aresume(self) -> bool:
        """Resume the queue in async code, see `resume`."""
        return await self._resume(ASYNCIO)

    def letters(self, *, limit: int = 100, after: str = "") -> list[Letter]:
        """Return up to `limit` dead letters, oldest first, those after the letter named `after`."""
        return run_blocking(self._letters(BLOCKING, limit, after))

    async def aletters(self, *, limit: int = 100, after: str = "") -> list[Letter]:
        """Return dead letters in async code, see `letters`."""
        return await self._letters(ASYNCIO, limit, after)

    def redrive(self, letters: Sequence[Letter], *, delay: Duration = 0.0, retries: int | None = None) -> int:
        """
        Publish up to 500 dead letters again with fresh retries, by default as many as before; return how many.

        A letter stays while its id is alive, and while a change of the number of shards has not moved it. When a reply is
        lost the call is repeated, and letters that the first try has redriven are not counted: see
        `counts().totals["redriven"]`.
        """
        return run_blocking(self._redrive(BLOCKING, letters, delay, retries))

    async def aredrive(self, letters: Sequence[Letter], *, delay: Duration = 0.0, retries: int | None = None) -> int:
        """Publish dead letters again in async code, see `redrive`."""
        return await self._redrive(ASYNCIO, letters, delay, retries)

    def close(self) -> None:
        """Close the blocking connections of this queue's Redis; they come back when they are used again."""
        with suppress(ConfigurationError):  # no Redis was named: nothing was opened
            self._clients.close()

    async def aclose(self) -> None:
        """Close the running event loop's connections of this queue's Redis."""
        with suppress(ConfigurationError):
            await self._clients.aclose()

    def connection(self) -> Connection:
        """Return the connection to the queue's Redis; raise ConfigurationError when none was named."""
        return self._clients.connection()

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

    async def _resume(self, driver: Driver) -> bool:
        was = [await self._of_shards(driver, lambda keys: commands.resume_queue(keys)[at]) for at in range(4)]  # noqa: B023  called at once
        pauses, sleeps = (of_every_shard(self.name, "resumed", answers) for answers in was[:2])
        return any(pauses) or any(sleeps)

    async def _letters(self, driver: Driver, limit: int, after: str) -> list[Letter]:
        letters = raise_first(await self._of_shards(driver, lambda keys: listing(keys, limit, after)))
        return first_letters(letters, limit)

    async def _redrive(self, driver: Driver, letters: Sequence[Letter], delay: Duration, retries: int | None) -> int:
        if not isinstance(letters, list | tuple) or not all(isinstance(one, Letter) for one in letters):
            raise ConfigurationError(
                f"letters must be a list of dead letters, as `letters()` returns them, not {type(letters).__name__}"
            )
        check_int("number of letters", len(letters), most=BATCH_LIMIT)
        if retries is not None:
            check_int("retries", retries, most=RETRIES_LIMIT)
        delay_ms = milliseconds(seconds("delay", delay))
        shards = self.known_shards
        await shards.refresh(driver)
        if any(home(letter.id, shards.map.n) != letter.shard for letter in letters):
            await shards.read(driver, for_seconds=PUBLISH_SECONDS)

        def retries_of(letter: Letter) -> int:
            known = (retries, letter.header.retries, self.settings.retries)
            return next(number for number in known if number is not None)

        redriven = 0
        left = list(letters)
        while left:
            by_shard = defaultdict[int, list[Letter]](list)
            for letter in left:
                if home(letter.id, shards.map.n) == letter.shard:  # else the change of shards has not moved it yet
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
        """Make a call about a message in its home shard; while it is not found, in the earlier home, then by the newest map."""
        make(self.keys)  # bad arguments are refused before Redis is asked
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
        Make a request of every shard that there is now, in one round trip; one that fails has its exception as answer.

        Args:
            ever: also of the shards that are no more.
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
