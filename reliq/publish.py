"""
Publishing: bodies and options become prepared messages, which are sent in one call to each shard.

`Writer` checks options and encodes bodies. `Sender` sends the messages to their shards, combines the calls of async
tasks into shared round trips, and waits for the confirmations that the durability requires. Once a minute it writes the
queue to the queue registry after a publish; a failure of that write does not fail the publish.
"""

from __future__ import annotations

import asyncio
import math
import time
import weakref
from collections import Counter, deque
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

from reliq.errors import (
    BodyError,
    ConfigurationError,
    LoginError,
    PublishFailed,
    RedisRefusedError,
    RedisUnavailableError,
    ReliqError,
)
from reliq.events import Observer, PublishEnded, Unconfirmed, notify, wanting
from reliq.keys import Keys, check_id, home, made_at, new_id, of_shard
from reliq.lua import transitions
from reliq.lua.transitions import AskStatus, CallNumber, CallSequences, Message, Messages, PublishAnswer
from reliq.message import (
    PRIORITY_LINES,
    Confirmed,
    Copied,
    Duration,
    OutgoingMessage,
    Priority,
    PublishOptions,
    Receipt,
)
from reliq.redis import commands, server as transport
from reliq.redis.connection import ASYNCIO, Driver, ServerVersion
from reliq.redis.server import PUBLISH_SECONDS
from reliq.redis.shards import UNREAD, ShardMap, Shards
from reliq.settings import LONGEST_SECONDS, MIB, Durability, check_int, check_is_one_of, milliseconds, seconds
from reliq.text import check_keywords, pluralize, shell_command
from reliq.wire_format import ENVELOPE_START, MAGIC, NUMBER_LIMIT, check_key, envelope_rest, open_envelope

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from concurrent.futures import Executor

    from reliq.codec import Codec
    from reliq.message import Header
    from reliq.redis.client import AsyncClient, Clients
    from reliq.redis.commands import Call, Command, Request, T
    from reliq.settings import QueueSettings


#: The keyword arguments of a publish.
PUBLISH_KEYWORDS = frozenset({"durability", *PublishOptions.__annotations__})
#: The confirmations of a publish that requires none.
NOT_ASKED = Confirmed()


def line_of(outgoing: OutgoingMessage[Any]) -> str:
    """
    Return the name of a message's key queue: its key, a name for its priority, or an empty text.

    Raises:
        ConfigurationError: the key or the priority is not valid, or both are given.
    """
    if outgoing.key is None and outgoing.priority == "normal":
        return ""
    check_is_one_of("priority", outgoing.priority, get_args(Priority))
    if outgoing.key is None:
        return PRIORITY_LINES[outgoing.priority]
    if outgoing.priority != "normal":
        raise ConfigurationError(
            f"give key or priority, not both: the messages of key {outgoing.key!r:.40} take turns with those of other "
            "keys; give the key more turns with Queue(key_weights={…})"
        )
    return check_key(outgoing.key)


def when(delay: Duration, at: datetime | None) -> tuple[int | None, int]:
    """Return unix ms (or None) and a delay in ms; raise ConfigurationError if invalid or if both are given."""
    delay_ms = milliseconds(seconds("delay", delay))
    if at is not None and delay_ms:
        raise ConfigurationError("give delay or at, not both")
    return None if at is None else unix_ms(at), delay_ms


def unix_ms(at: datetime) -> int:
    """Return an aware datetime in unix ms; raise ConfigurationError for a naive datetime or one out of range."""
    if not isinstance(at, datetime) or at.utcoffset() is None:
        raise ConfigurationError("at must be an aware datetime, such as datetime.now(UTC) + timedelta(hours=1)")
    unix = at.timestamp()
    now = datetime.now(at.tzinfo).timestamp()
    if unix < 0 or unix - now > LONGEST_SECONDS:
        raise ConfigurationError(f"at must lie between 1970 and ten years from now, not {at.isoformat()}")
    return milliseconds(unix)


class CallTerms(NamedTuple):
    """The options that all messages of one call share; times are in ms."""

    at_ms: int | None
    delay_ms: int
    ttl_ms: int
    retries: int
    window_ms: int | None
    replace: bool


class PreparedMessage(NamedTuple):
    """
    One message ready to be sent.

    Attributes:
        line: the name of its key queue, as returned by `line_of`.
    """

    id: str
    value: bytes
    terms: CallTerms
    line: str = ""

    @property
    def is_generated(self) -> bool:
        """Whether its id was generated, so that any shard may store the message."""
        return self.terms.window_ms is None


class ShardBatch(NamedTuple):
    """
    Messages that go to one shard in one call, with the same options.

    Attributes:
        places: the indexes of the messages in their publish.
        keys: the keys of the shard.
        fence: the fence of the map that selected the shard; a shard with a later map refuses chosen ids.
        old_home: the shard to ask first, because it may have messages with these ids; None if there is none.
        may_detour: whether the messages may go to another shard if this shard cannot be reached.
    """

    orders: list[PreparedMessage]
    places: Sequence[int]
    keys: Keys
    fence: str
    old_home: Keys | None = None
    may_detour: bool = False

    def question(self) -> Call[list[AskStatus]]:
        """Return the call that asks the old home which of the ids are free."""
        ids = [order.id for order in self.orders]
        replace = self.orders[0].terms.replace
        return transitions.ask(self.old_home or self.keys, ids, fence=self.fence, replace=replace)

    def free(self, answers: Sequence[AskStatus]) -> ShardBatch:
        """Return the batch without the messages with an id that is not free at the old home."""
        free = [at for at, answer in enumerate(answers) if answer == "free"]
        return self._replace(orders=[self.orders[at] for at in free], places=[self.places[at] for at in free])

    def call(
        self, terms: CallTerms, call_number: transitions.CallNumber, *, remember_ms: int = transitions.REMEMBER_MS
    ) -> Call[transitions.PublishAnswer]:
        """Return the call that publishes the messages with these options."""
        lines = [order.line for order in self.orders]
        return transitions.publish(
            self.keys,
            [(order.id, order.value) for order in self.orders],
            call_number,
            at_ms=terms.at_ms,
            delay_ms=terms.delay_ms,
            ttl_ms=terms.ttl_ms,
            retries=terms.retries,
            window_ms=terms.window_ms,
            replace=terms.replace,
            bare=self.keys.bare,
            fence=self.fence,
            message_keys=lines if any(lines) else None,
            remember_ms=remember_ms,
        )


def by_shard(
    orders: Mapping[int, PreparedMessage], shards: Shards, map: ShardMap, *, may_detour: bool = False
) -> list[ShardBatch]:
    """
    Group messages by their shard in `map` and by the shard to ask first.

    Args:
        orders: the messages by their indexes.
        may_detour: whether a message with a generated id may go to another shard.
    """
    by_homes: dict[tuple[int, int], list[int]] = {}
    for place, order in orders.items():
        now = home(order.id, map.n)
        before = now if order.is_generated else home(order.id, map.was)  # the old home may have the chosen id
        by_homes.setdefault((now, before), []).append(place)
    return [
        ShardBatch(
            [orders[place] for place in places],
            places,
            shards.keys(now),
            map.fence,
            None if now == before else shards.keys(before),
            may_detour and orders[places[0]].is_generated,
        )
        for (now, before), places in by_homes.items()
    ]


class Writer:
    """
    Converts bodies and options to prepared messages, and these to calls.

    Attributes:
        shards: the shards of the queue, as last read.
    """

    def __init__(self, shards: Shards, codec: Codec[Any], settings: QueueSettings) -> None:
        self.keys = shards.first
        self.shards = shards
        self._codec = codec
        self._settings = settings
        self.bare = self.keys.bare
        self._usual = CallTerms(None, 0, milliseconds(settings.ttl), settings.retries, None, False)
        self._usual_start = b"" if self.bare else envelope_rest(settings.retries)

    def order(
        self, body: Any, options: PublishOptions, shard: int | None = None, *, call: str = "publish"
    ) -> PreparedMessage:
        """
        Check the options and encode `body`; without options the message has the queue's options and is due now.

        Args:
            shard: the shard for a generated id; None for the next shard in rotation.
            call: the name of the `Queue` method, for error messages.

        Raises:
            ConfigurationError: an option is not valid.
            BodyError: the body cannot be encoded or is too large.
            TypeError: there is no such option.
        """
        if shard is None:
            known = self.shards.clients.maps.get(self.shards.entry, UNREAD)
            shard = self.shards.turn() if self.shards.wanted or known.map.n > 1 else 0
        if options:
            check_keywords(f"Queue.{call}", options, PUBLISH_KEYWORDS)
            return self.special(OutgoingMessage(body=body, **options), shard)
        return PreparedMessage(new_id(shard), self._usual_start + self._payload(body), self._usual)

    def special(self, outgoing: OutgoingMessage[Any], shard: int = 0) -> PreparedMessage:
        """Check and encode a message with its own options; raise the same exceptions as `order`."""
        terms = self._terms(outgoing)
        id = new_id(shard) if outgoing.id is None else check_id(outgoing.id)
        payload = self._payload(outgoing.body)
        if self.bare:
            given = {
                "headers": outgoing.headers,
                "publication_id": outgoing.publication_id is not None,
                "key": outgoing.key is not None,
                "priority": outgoing.priority != "normal",
            }
            for name, is_given in given.items():
                if is_given:
                    raise ConfigurationError(
                        f"{name} cannot be sent on a queue in the hdt3213 layout: its bodies are bare"
                    )
            return PreparedMessage(id, payload, terms)
        enqueued = None if outgoing.id is None else made_at(new_id())
        number = outgoing.publication_id
        if number is not None:
            if outgoing.id is None:
                raise ConfigurationError(
                    "publication_id needs an id chosen by you: publish(..., id='order-7', publication_id=1)"
                )
            check_int("publication_id", number, most=NUMBER_LIMIT - 1)
        line = line_of(outgoing)
        origin = outgoing.origin if isinstance(outgoing, Copied) else None
        start = envelope_rest(terms.retries, enqueued, terms.window_ms, outgoing.headers, number, line, origin)
        return PreparedMessage(id, start + payload, terms, line)

    def known_by(self, orders: list[PreparedMessage]) -> Messages:
        """Return each message's id and a hash of the rest, which identify it if it is published again."""
        terms = orders[0].terms
        if terms.window_ms is None:  # published again, a generated id counts as a chosen id
            terms = terms._replace(window_ms=milliseconds(self._settings.dedup))
        known = []
        for order in orders:
            header, body = self._opened(order)
            rest = body, terms, header.publication_id, header.line, frozenset(header.headers.items())
            known.append(Message(order.id, hash(rest)))
        return tuple(known)

    def failed(
        self, orders: list[PreparedMessage], error: ReliqError, confirmed: int = 0, *, unsent: bool = False
    ) -> PublishFailed:
        """Return `error` as a PublishFailed; with `unsent`, Redis has certainly received nothing."""
        maybe_ran = getattr(error, "maybe_ran", False) and not unsent
        return PublishFailed(
            self.keys.name,
            tuple(order.id for order in orders),
            "unknown" if maybe_ran else "refused",
            str(error),
            confirmed,
            advised=not isinstance(error, LoginError),  # has its own advice
            orders=orders,
            again=lambda rest: tuple(map(self._outgoing, rest)),
        )

    def _outgoing(self, order: PreparedMessage) -> OutgoingMessage[Any]:
        header, payload = self._opened(order)
        terms = order.terms
        given: dict[str, Any] = {} if header.origin is None else {"origin": header.origin}
        return (Copied if given else OutgoingMessage)(
            body=self._codec.decode(payload),
            delay=terms.delay_ms / 1000,
            at=None if terms.at_ms is None else datetime.fromtimestamp(terms.at_ms / 1000, UTC),
            id=order.id,
            retries=terms.retries,
            ttl=terms.ttl_ms / 1000,
            headers=header.headers or None,
            dedup=None if terms.window_ms is None else terms.window_ms / 1000,
            replace=terms.replace,
            publication_id=header.publication_id,
            key=header.key,
            priority=header.priority,
            **given,
        )

    def _opened(self, order: PreparedMessage) -> tuple[Header, bytes]:
        start = b"" if self.bare else b"%b0" % ENVELOPE_START.encode()
        return open_envelope(start + order.value, bare=self.bare)

    def _payload(self, body: Any) -> bytes:
        payload = self._codec.encode(body)
        if len(payload) > self._settings.max_body:
            raise BodyError(f"body must be at most {self._settings.max_body} bytes (max_body), not {len(payload)}")
        if self.bare and payload.startswith(MAGIC):
            raise BodyError("body must not begin with 'RELIQ/1 ' on a queue in the hdt3213 layout")
        return payload

    def _terms(self, outgoing: OutgoingMessage[Any]) -> CallTerms:
        is_due_now = type(outgoing.delay) is float and not outgoing.delay and outgoing.at is None
        is_plain = outgoing.retries is None and outgoing.ttl is None and outgoing.id is None and outgoing.dedup is None
        if is_due_now and is_plain and not outgoing.replace:
            return self._usual  # already checked
        settings = self._settings
        ttl = seconds("ttl", settings.ttl if outgoing.ttl is None else outgoing.ttl, least=0.001)
        retries = settings.retries if outgoing.retries is None else check_int("retries", outgoing.retries, most=1000)
        window = None
        if outgoing.id is not None:
            window = milliseconds(seconds("dedup", settings.dedup if outgoing.dedup is None else outgoing.dedup))
        elif outgoing.dedup is not None:
            raise ConfigurationError("dedup needs an id chosen by you: publish(..., id='report-7', dedup=86400)")
        return CallTerms(*when(outgoing.delay, outgoing.at), milliseconds(ttl), retries, window, bool(outgoing.replace))


#: A process writes a queue to the registry at most once in this many seconds; only then can a queue be forgotten.
NAMING_SECONDS = 60.0
OLDEST_WITH_WAITAOF = (7, 2)
#: One round trip carries at most this many calls.
TOGETHER_LIMIT = 500
#: One round trip carries at most this many bytes of bodies, unless a single call is larger.
TOGETHER_BYTES = 8 * MIB
#: After this many seconds without a reply, the next round trip starts in parallel: Redis may be unavailable.
OVERLAP_SECONDS = 0.1
#: How many unreachable shards a message with a generated id tries before it waits for a shard.
DETOURS = 2
#: How often one publish reads the map at most because a shard has a later map.
LOOKS = 5

_SERVER_FACTS = (commands.server_facts("server"), commands.server_facts("persistence"))


def registration(keys: Keys, clients: Clients) -> Command[None] | None:
    """Return the command that writes a queue to the registry, which the caller must run; None if not due yet."""
    now = time.monotonic()
    named = clients.connection().named
    if named.get(keys.entry, 0.0) > now:
        return None
    named[keys.entry] = now + NAMING_SECONDS
    return commands.register([keys.entry], int(time.time()))


class Confirmer:
    """Publishes and waits for confirmations, with clients that wait longer than usual for a reply."""

    def __init__(self, clients: Clients) -> None:
        self._clients = clients
        self._has_waitaof = False

    async def run(
        self, driver: Driver, call: Call[PublishAnswer], part: ShardBatch, durability: Durability
    ) -> tuple[PublishAnswer, Confirmed]:
        """
        Publish a batch and wait for its confirmation; notify observers of missing confirmations.

        Raises:
            ConfigurationError: the server does not support the confirmation; nothing was published.
            RedisUnavailableError, RedisRefusedError: the call failed.
        """
        client = self._clients.driven(driver, longer_seconds(durability))
        if durability.kind == "aof" and not self._has_waitaof:
            self._check_server(await client.run_all(_SERVER_FACTS, for_seconds=PUBLISH_SECONDS), durability)
        confirmation = commands.confirmation(durability)
        answer, confirmed = await client.run_confirmed(call, confirmation, for_seconds=PUBLISH_SECONDS)
        if isinstance(confirmed, Exception):
            why = str(confirmed)
            confirmed = Confirmed(durable=False)
        else:
            disk = (
                "" if confirmed.on_disk is None else f", own file {'on disk' if confirmed.on_disk else 'not on disk'}"
            )
            replicas = f"{confirmed.replicas} of {pluralize(durability.count, 'replica')}"
            why = f"{replicas}{disk} within {durability.timeout:g} s"
        if not confirmed.durable:
            notify(client.observers, [Unconfirmed(part.keys.name, tuple(order.id for order in part.orders), why)])
        return answer, confirmed

    def _check_server(self, answers: Sequence[dict[str, str] | Exception], durability: Durability) -> None:
        """Raise ConfigurationError if the server has no WAITAOF; a server that hides its version passes."""
        server, persistence = ({} if isinstance(facts, Exception) else facts for facts in answers)
        version = ServerVersion.read(server)
        if version.is_before(OLDEST_WITH_WAITAOF):
            raise ConfigurationError(
                f"durability by aof needs Redis 7.2 or newer (WAITAOF), not {version.text}; "
                f"Durability.replicas(1) works with every version"
            )
        if durability.local and persistence.get("aof_enabled") == "0":
            raise ConfigurationError("durability by aof needs `appendonly yes` in the server's redis.conf")
        self._has_waitaof = True


def longer_seconds(durability: Durability) -> float:
    """
    Return for how many seconds longer than usual to wait for a reply.

    The number is rounded up to a power of two, because each different number needs its own connections.
    """
    return float(2 ** math.ceil(math.log2(max(1.0, seconds("timeout", durability.timeout)))))


class Waiting(NamedTuple):
    """A request, its size in bytes, and the future of its answer."""

    request: Request[Any]
    weight: int
    answer: asyncio.Future[Any]


class Batcher:
    """
    Combines the calls of many tasks into shared round trips.

    A single call is sent immediately. During a round trip, further calls are collected for the next.
    """

    def __init__(self, client: Callable[[], AsyncClient], *, for_seconds: float) -> None:
        self._client = client
        self._for_seconds = for_seconds
        self._waiting: deque[Waiting] = deque()
        self._task: asyncio.Task[None] | None = None
        self._rounds: set[asyncio.Task[None]] = set()  # the event loop has only weak references to tasks

    async def run(self, request: Request[T], weight: int, *, once_sent: bool = False) -> T:
        """
        Make `request`, which carries `weight` bytes, and return its answer, as `AsyncClient.run` does.

        With `once_sent`, a request that could not be sent is not retried, as in `Client.run_once_sent`. Cancelling the
        caller does not cancel its request.
        """
        future = asyncio.get_running_loop().create_future()
        self._waiting.append(Waiting(request, weight, future))
        if self._task is None:
            self._start()
        answer = await future
        if isinstance(answer, RedisUnavailableError):  # Redis answered the other requests: retry
            if once_sent and not answer.maybe_ran:
                raise answer
            return await self._client().run(request, for_seconds=self._for_seconds)
        if isinstance(answer, BaseException):
            raise answer
        result: T = answer
        return result

    def _start(self) -> None:
        self._task = asyncio.create_task(self._run_all())
        self._task.add_done_callback(self._ended)

    def _ended(self, _task: asyncio.Task[None]) -> None:
        """Start again for callers that still wait: the end of an event loop cancels this task like any other."""
        self._task = None
        self._waiting = deque(call for call in self._waiting if not call.answer.done())
        if self._waiting:
            self._start()

    async def _run_all(self) -> None:
        while self._waiting:
            together = [self._waiting.popleft()]
            weight = together[0].weight
            while self._waiting and len(together) < TOGETHER_LIMIT:
                weight += self._waiting[0].weight
                if weight > TOGETHER_BYTES:
                    break
                together.append(self._waiting.popleft())
            trip = asyncio.create_task(self._make(together))
            self._rounds.add(trip)
            trip.add_done_callback(self._rounds.discard)
            await asyncio.wait([trip], timeout=OVERLAP_SECONDS)

    async def _make(self, together: list[Waiting]) -> None:
        """Make the calls in one round trip, and answer each caller that still waits."""
        try:
            answers = await self._client().run_all([call.request for call in together], for_seconds=self._for_seconds)
        except asyncio.CancelledError:
            for call in together:
                call.answer.cancel()
            raise
        except Exception as error:
            for call in together:
                if not call.answer.done():
                    call.answer.set_exception(error)
            return
        for call, answer in zip(together, answers, strict=True):
            if not call.answer.done():
                call.answer.set_result(answer)


class Router:
    """
    The shards for `orders`, by the current map.

    Attributes:
        is_stale: whether a shard has a later map, so that the map must be read.
        left: how many messages have no receipt yet.
    """

    def __init__(
        self, shards: Shards, orders: list[PreparedMessage], confirmed: int = 0, *, is_stale: bool = False
    ) -> None:
        self._shards = shards
        self._map = shards.map
        self._orders = orders
        self._receipts: dict[int, Receipt] = {}
        self._confirmed = confirmed
        self._looks = 0
        self._detours = DETOURS
        self.is_stale = is_stale
        self.left = len(orders)

    @property
    def receipts(self) -> list[Receipt]:
        """The receipts, in the order of the messages."""
        return [self._receipts[at] for at in range(len(self._orders))]

    @property
    def unsent(self) -> list[PreparedMessage]:
        """The messages without a receipt."""
        return [order for at, order in enumerate(self._orders) if at not in self._receipts]

    @property
    def confirmed(self) -> int:
        """How many messages are published, in this and earlier calls."""
        return self._confirmed + sum(receipt.status == "published" for receipt in self._receipts.values())

    def looked(self) -> None:
        """
        Use the map that was read.

        Raises:
            RedisRefusedError: a shard still has a later map after `LOOKS` reads.
        """
        self._looks += self.is_stale
        if self._looks > LOOKS:
            name = self._shards.first.name
            raise RedisRefusedError(
                f"a shard of queue {name!r} has a later shard map than {self._shards.first.map!r}, which has epoch "
                f"{self._map.epoch}: a failover may have lost the later map; restore it with: "
                + shell_command("check", name, options=["--repair"])
            )
        if self._map.n == 1 < self._shards.map.n:  # the ids were generated before the map was read
            self._move([at for at, order in enumerate(self._orders) if order.is_generated], self._shards.turn())
        self._map = self._shards.map
        self.is_stale = False

    def parts(self) -> list[ShardBatch]:
        """
        Return the messages without a receipt, grouped by their shard.

        Raises:
            ConfigurationError: the queue has several shards, and a message has a key.
        """
        map = self._map
        if map.served > 1 and any(order.line for order in self._orders):
            check_one_shard(self._shards)
        unsent = {at: order for at, order in enumerate(self._orders) if at not in self._receipts}
        return by_shard(unsent, self._shards, map, may_detour=map.n > 1 and self._detours > 0)

    def asked(self, part: ShardBatch, answers: Sequence[AskStatus]) -> ShardBatch:
        """Store the answers of an old home; return the batch without the messages that must not be published."""
        self.is_stale = self.is_stale or "stale" in answers
        terms = part.orders[0].terms
        due = (time.time() * 1000 + terms.delay_ms if terms.at_ms is None else terms.at_ms) / 1000
        for place, order, answer in zip(part.places, part.orders, answers, strict=True):
            if answer != "free" and answer != "stale":  # noqa: PLR1714  mypy does not narrow a tuple
                self._receipts[place] = Receipt(order.id, answer, due)
                self.left -= 1
        return part.free(answers)

    def answered(self, part: ShardBatch, done: list[Receipt] | None) -> None:
        """
        Store the receipts of a shard.

        Args:
            done: the receipts of the whole batch; empty if the shard has a later map; None if the shard could not be
                reached. Then the next shard in rotation gets the messages, with new ids for that shard.
        """
        if done is None:
            self._detours -= 1
            shard = self._shards.turn()
            self._move(part.places, self._shards.turn() if shard == part.keys.shard else shard)
            return
        self._receipts.update(zip(part.places, done, strict=False))
        self.left -= len(done)
        self.is_stale = self.is_stale or not done

    def _move(self, places: Sequence[int], shard: int) -> None:
        for at in places:
            self._orders[at] = self._orders[at]._replace(id=of_shard(self._orders[at].id, shard))


def check_one_shard(shards: Shards) -> None:
    """Raise ConfigurationError if a queue has several shards; messages with keys need a single shard."""
    if (count := max(shards.map.served, shards.wanted or 1)) > 1:
        raise ConfigurationError(
            f"queue {shards.first.name!r} has {count} shards: keys, priorities and limits need a queue of one shard"
        )


class Sender:
    """Sends messages through the blocking or the async client."""

    def __init__(
        self, writer: Writer, shards: Shards, lanes: CallSequences, clients: Clients, observers: Sequence[Observer] = ()
    ) -> None:
        self._writer = writer
        self._shards = shards
        self._lanes = lanes
        self._clients = clients
        self._confirmer = Confirmer(clients)
        self._watching = wanting(observers, PublishEnded)
        self._batchers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Batcher] = weakref.WeakKeyDictionary()

    async def send(
        self,
        driver: Driver,
        orders: list[PreparedMessage],
        confirmed: int = 0,
        durability: Durability = Durability.NONE,
    ) -> list[Receipt]:
        """
        Send `orders`; in async code the calls of many tasks share round trips.

        Raises:
            PublishFailed: Redis is unavailable or refuses; includes the number of messages `confirmed` before.
        """
        clients = self._clients
        known = clients.maps.get(self._shards.entry, UNREAD)
        map = known.map
        done = None
        # With a fresh map and a single batch, the messages are sent without routing, until the shard has a later map.
        is_whole = (
            (map.n == map.was == 1 and self._shards.wanted in (None, 1))
            and time.monotonic() < known.until
            and clients.epoch is transport.epoch
        )
        if is_whole:
            fence = "" if orders[0].terms.window_ms is None else map.fence
            part = ShardBatch(orders, range(len(orders)), self._shards.first, fence)
            done = await self._call(driver, part, confirmed, durability)
        if not done:
            done = await self._by_route(driver, Router(self._shards, orders, confirmed, is_stale=is_whole), durability)
        if time.monotonic() >= clients.named.get(self._shards.entry, 0.0):
            entry = registration(self._writer.keys, clients)
            with suppress(ReliqError):
                if entry:
                    await clients.driven(driver).run(entry)
        return done

    async def _by_route(self, driver: Driver, route: Router, durability: Durability) -> list[Receipt]:
        """Send messages to their shards; retry those that a shard did not take, by a later map or at another shard."""
        while route.left:
            try:
                if route.is_stale:
                    await self._shards.read(driver, for_seconds=PUBLISH_SECONDS)
                    route.looked()
                else:
                    await self._shards.refresh(driver)
                    route.looked()
                parts = route.parts()
            except ReliqError as error:
                self._unsent(route.unsent, error, route.confirmed)
                raise
            for part in parts:
                if part.old_home is not None:
                    try:
                        answers = await self._clients.driven(driver).run(part.question(), for_seconds=PUBLISH_SECONDS)
                    except ReliqError as error:
                        self._unsent(part.orders, error, route.confirmed)
                        raise
                    part = route.asked(part, answers)  # noqa: PLW2901  continue with the free ids
                if part.orders:
                    try:
                        done = await self._call(driver, part, route.confirmed, durability)
                    except PublishFailed as failed:
                        failed.orders = route.unsent
                        raise
                    route.answered(part, done)
        return route.receipts

    async def _call(
        self, driver: Driver, part: ShardBatch, confirmed: int, durability: Durability
    ) -> list[Receipt] | None:
        """
        Send a batch to its shard.

        Returns:
            Its receipts, empty if the shard has a later map; None if the batch may go to another shard.
        """
        call_number = self._lanes.take(self._writer.known_by(part.orders) if self._lanes.parked else ())
        call = part.call(part.orders[0].terms, call_number)
        confirmations = NOT_ASKED
        began = time.monotonic()
        try:
            if durability.kind != "none":
                answer, confirmations = await self._confirmer.run(driver, call, part, durability)
            elif driver is ASYNCIO:
                weight = sum(len(order.value) for order in part.orders)
                answer = await self._batcher().run(call, weight, once_sent=part.may_detour)
            elif part.may_detour:
                answer = await self._clients.blocking().driven.run_once_sent(call, for_seconds=PUBLISH_SECONDS)
            else:
                answer = await self._clients.blocking().driven.run(call, for_seconds=PUBLISH_SECONDS)
        except BaseException as error:
            if self._failed(part, call_number, error, confirmed, began):
                return None
            raise
        self._lanes.give_back(call_number)
        due = answer.due_ms / 1000
        done = [
            Receipt(order.id, answer.refused.get(at, "published"), due, *confirmations)
            for at, order in enumerate(() if answer.is_stale else part.orders)
        ]
        if self._watching and done:
            self._notify_ended(began, Counter(receipt.status for receipt in done))
        return done

    def _batcher(self) -> Batcher:
        """Return the batcher of the running event loop."""
        loop = asyncio.get_running_loop()
        if loop not in self._batchers:
            for closed in [known for known in self._batchers if known.is_closed()]:  # its last task may keep it alive
                del self._batchers[closed]
            self._batchers[loop] = Batcher(self._clients.asynchronous, for_seconds=PUBLISH_SECONDS)
        return self._batchers[loop]

    def _notify_ended(self, began: float, outcomes: Mapping[str, int]) -> None:
        """Notify the observers of the end of a call that began at `began`."""
        notify(self._watching, [PublishEnded(self._writer.keys.name, time.monotonic() - began, outcomes)])

    def _unsent(self, orders: list[PreparedMessage], error: ReliqError, confirmed: int) -> None:
        """Raise PublishFailed for an error before anything was sent; a ConfigurationError is left to the caller."""
        self._notify_ended(time.monotonic(), {"refused": len(orders)})
        if not isinstance(error, ConfigurationError):
            raise self._writer.failed(orders, error, confirmed, unsent=True) from error

    def _failed(
        self, part: ShardBatch, call_number: CallNumber, error: BaseException, confirmed: int, began: float
    ) -> bool:
        """
        Return whether a batch may go to another shard because its own shard could not be reached.

        Otherwise keep the number of a call with an unknown outcome, and raise PublishFailed for an error from Redis.
        The caller raises any other error.
        """
        orders = part.orders
        failure = self._writer.failed(orders, error, confirmed) if isinstance(error, ReliqError) else None
        is_refused = isinstance(error, ConfigurationError) or (failure and failure.outcome == "refused")
        if is_refused and isinstance(error, RedisUnavailableError) and part.may_detour:
            self._lanes.give_back(call_number)
            return True
        self._notify_ended(began, {"refused" if is_refused else "unknown": len(orders)})
        if is_refused:
            self._lanes.give_back(call_number)
        elif not orders[0].terms.replace:  # a replacing publish does not depend on earlier calls
            self._lanes.park(call_number, self._writer.known_by(orders))
        if failure and not isinstance(error, ConfigurationError):
            raise failure from error
        return False


def begun(executor: Executor, call: Callable[[], T]) -> Callable[[], T]:
    """
    Start `call` in a thread and return a function that waits for its result.

    After the end of the main thread, Python starts no threads; the returned function then makes the call itself.
    """
    try:
        return executor.submit(call).result
    except RuntimeError:
        return call
