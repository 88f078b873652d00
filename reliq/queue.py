"""`Queue`: publishes messages and receives them, in blocking and in async code."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Never, TypeVar, Unpack, overload

from reliq.client.moves import Moves
from reliq.codec.codec import Codec
from reliq.control import Control
from reliq.declared import LimitOptions, limits_in
from reliq.keys import Keys, Layout
from reliq.keywords import check_keywords
from reliq.publish.orders import Writer
from reliq.publish.sender import Sender, begun
from reliq.publish.shard_calls import ShardCalls
from reliq.publish.tally import BulkTally, check_bulk
from reliq.publish.transactional import TransactionalPublishes
from reliq.receive.batch import Receiver
from reliq.receive.receive import areceiving, receiving
from reliq.settings import Durability, QueueSettings, SettingsOptions, seconds
from reliq.shardmap import ShardMap
from reliq.transport.connection import check_slots
from reliq.transport.target import check_target

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence

    from typing_extensions import TypeForm

    from reliq.events import Observer
    from reliq.limits import Limits
    from reliq.message import BulkResult, Duration, Receipt
    from reliq.outgoing import Outgoing, PublishOptions
    from reliq.receive.received import Received
    from reliq.transport.target import Target

B = TypeVar("B")

#: A `publish_many` that waits for the backlog looks at it every this many seconds.
BACKLOG_SECONDS = 0.1


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


class Queue(Control, TransactionalPublishes[B], Generic[B]):
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
        durability: who must have a message before its publish returns: `Durability.replicas(1)`, `Durability.aof()`.
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

    @overload  # what is no class, such as `Cat | Dog` or `Order | None`
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
        keys, settings = Keys(name, layout), dict[str, Any](options)
        wanted = None if shards is None else ShardMap.wanted(shards, layout)
        if url is not None:
            check_target(url)
            check_slots(url, layout)
        self.limits: Limits | None = limits_in(settings, keys, wanted)
        super().__init__(keys, QueueSettings(**settings), url, observers, wanted)
        self.codec: Codec[B] = Codec(body, validate=validate)
        self.moves = Moves(self.keys, self._clients.blocking)
        self._writer = Writer(self.known_shards, self.codec, self.settings)
        self._receiver = Receiver(self.known_shards, self.codec, self.settings, self.limits)
        self._sender = Sender(self._writer, self.known_shards, self._lanes, self._clients, observers)

    def __repr__(self) -> str:
        return f"Queue({self.name!r})"

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
            incarnation: a number that tells it from other messages of its chosen id, for `Job.once`; None: its time.
            key: whose message it is, 1 to 128 bytes of text: keys take turns, and order and limits hold for each.
            priority: "high" or "low" instead of "normal", for a message without a key.
            durability: who must have the message before the publish returns, None for the queue's.

        Raises:
            ConfigurationError: an option is not allowed.
            BodyError: the body cannot be encoded or is too large.
            PublishFailed: Redis was away for 2 s (and what `durability` waits), or refused; publish again with its `id`
                to be sure.

        Example: `queue.publish({"order": 42}, id="order-42", delay=60, headers={"tenant": "a"})`
        """
        order = self._writer.order(body, options)
        return self._sender.send([order], durability=self._durability(durability))[0]

    async def apublish(
        self, body: B, *, durability: Durability | None = None, **options: Unpack[PublishOptions]
    ) -> Receipt:
        """As `publish`, in async code."""
        order = self._writer.order(body, options, call="apublish")
        return (await self._sender.asend([order], durability=self._durability(durability)))[0]

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
            durability: who must have the messages of a call before the next is made, None for the queue's.

        Raises:
            ConfigurationError, BodyError: an item is not allowed; those of earlier calls are published.
            PublishFailed: Redis is away or refused; `confirmed` says how many were published before, and `rest` has the
                others that were read: publish these and go on with `items`.

        Example: `queue.publish_many(Order(number) for number in range(10_000)).published`
        """
        check_bulk("Queue.publish_many", others)
        tally, calls, durability = BulkTally(max_backlog), ShardCalls(self._writer, chunk), self._durability(durability)
        # While Redis works on a call, the next one is made.
        with calls.telling_rest(), ThreadPoolExecutor(1, "reliq-publish") as sending:
            under_way: Callable[[], list[Receipt]] = list
            try:
                for orders in calls.read(items):
                    done, under_way = under_way, list
                    tally.add(done())
                    while tally.is_bounded and tally.is_full(self.counts()):
                        time.sleep(BACKLOG_SECONDS)
                    is_first = self.known_shards.is_due  # the next is made when it is known how many shards there are
                    calls.sent()
                    under_way = begun(sending, partial(self._sender.send, orders, tally.confirmed, durability))
                    if is_first:
                        tally.add(under_way())
                        under_way = list
            except Exception:
                under_way()  # when it has failed too, that came first
                raise
            tally.add(under_way())
        return tally.result()

    async def apublish_many(
        self,
        items: Iterable[B | Outgoing[B]],
        *,
        chunk: int = 500,
        max_backlog: int | None = None,
        durability: Durability | None = None,
        **others: Never,
    ) -> BulkResult:
        """As `publish_many`, in async code."""
        check_bulk("Queue.apublish_many", others)
        tally, calls, durability = BulkTally(max_backlog), ShardCalls(self._writer, chunk), self._durability(durability)
        with calls.telling_rest():
            for orders in calls.read(items):
                while tally.is_bounded and tally.is_full(await self.acounts()):  # noqa: ASYNC110  the event is in Redis
                    await asyncio.sleep(BACKLOG_SECONDS)
                calls.sent()
                tally.add(await self._sender.asend(orders, tally.confirmed, durability))
        return tally.result()

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
        batch, wait_seconds = self._receiver.batch(limit=limit, lease=lease), seconds("wait", wait)
        with batch.noting_outages():
            self.known_shards.refresh()
        with receiving(self._clients.blocking(), batch, wait_seconds, self.connection().places_to_wait) as jobs:
            yield jobs

    @asynccontextmanager
    async def areceive(
        self, *, limit: int = 1, wait: Duration = 0.0, lease: Duration = 30.0
    ) -> AsyncIterator[list[Received[B]]]:
        """As `receive`, in async code."""
        batch, wait_seconds = self._receiver.batch(limit=limit, lease=lease), seconds("wait", wait)
        with batch.noting_outages():
            await self.known_shards.arefresh()
        places_to_wait = self.connection().async_places_to_wait()
        async with areceiving(self._clients.asynchronous(), batch, wait_seconds, places_to_wait) as jobs:
            yield jobs

    def _durability(self, given: Durability | None) -> Durability:
        return self.settings.durability if given is None else Durability.checked(given)
