"""Messages prepared for publishing: options checked, bodies encoded, and grouped into calls for one shard each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

from reliq.errors import BodyError, ConfigurationError, LoginError, PublishFailed, ReliqError
from reliq.keys import check_id, home, made_at, new_id
from reliq.lua import transitions
from reliq.lua.transitions import Message
from reliq.message import (
    PRIORITY_LINES,
    BulkResult,
    Confirmed,
    Copied,
    Duration,
    Outgoing,
    Priority,
    PublishOptions,
    Receipt,
)
from reliq.settings import BATCH_LIMIT, LONGEST_SECONDS, MIB, check_int, check_is_one_of, milliseconds, seconds
from reliq.text import check_keywords
from reliq.wire_format import ENVELOPE_START, MAGIC, NUMBER_LIMIT, check_key, envelope_rest, open_envelope

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from reliq.codec import Codec
    from reliq.keys import Keys
    from reliq.lua.transitions import AskStatus, Messages
    from reliq.message import Counts, Header
    from reliq.redis.commands import Call
    from reliq.redis.shards import ShardMap, Shards
    from reliq.settings import QueueSettings


#: The keyword arguments of a publish.
PUBLISH_KEYWORDS = frozenset({"durability", *PublishOptions.__annotations__})
#: The keyword arguments of `Queue.publish_many`.
_BULK_KEYWORDS = frozenset({"items", "chunk", "max_backlog", "durability"})
#: A publish that waits for no confirmation.
NOT_ASKED = Confirmed()
#: One call carries at most this many bytes of bodies, unless a single body has more.
CHUNK_BYTES = 8 * MIB


def line_of(outgoing: Outgoing[Any]) -> str:
    """
    Return the key queue of a message: its key, the name of its priority's, or empty text.

    Raises:
        ConfigurationError: the key or the priority is not allowed, or both are given.
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


def incarnation(outgoing: Outgoing[Any]) -> int | None:
    """Return the incarnation of a chosen id, None without one; raise ConfigurationError when it is not allowed."""
    if outgoing.incarnation is None:
        return None
    if outgoing.id is None:
        raise ConfigurationError("incarnation needs an id chosen by you: publish(..., id='order-7', incarnation=1)")
    return check_int("incarnation", outgoing.incarnation, most=NUMBER_LIMIT - 1)


def when(delay: Duration, at: datetime | None) -> tuple[int | None, int]:
    """Return unix ms, or None, and a delay in ms; raise ConfigurationError when either is not allowed, or both given."""
    delay_ms = milliseconds(seconds("delay", delay))
    if at is not None and delay_ms:
        raise ConfigurationError("give delay or at, not both")
    return None if at is None else unix_ms(at), delay_ms


def unix_ms(at: datetime) -> int:
    """Return an aware datetime in unix ms; raise ConfigurationError for a naive or far one."""
    if not isinstance(at, datetime) or at.utcoffset() is None:
        raise ConfigurationError("at must be an aware datetime, such as datetime.now(UTC) + timedelta(hours=1)")
    unix = at.timestamp()
    now = datetime.now(at.tzinfo).timestamp()
    if unix < 0 or unix - now > LONGEST_SECONDS:
        raise ConfigurationError(f"at must lie between 1970 and ten years from now, not {at.isoformat()}")
    return milliseconds(unix)


class CallTerms(NamedTuple):
    """The options that all messages of one call share (times in ms)."""

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
        line: its key queue when it is due, as `line_of` returns it.
    """

    id: str
    value: bytes
    terms: CallTerms
    line: str = ""

    @property
    def is_generated(self) -> bool:
        """Whether its id was generated: then any shard may have it."""
        return self.terms.window_ms is None


class ShardBatch(NamedTuple):
    """
    Messages that go to one shard in one call, all on the same terms.

    Attributes:
        places: which of the messages of a publish they are.
        keys: of the shard.
        fence: of the map by which it was found; a shard that knows a later map refuses a chosen id.
        old_home: the shard to ask first, which may have messages of these ids; None: there is none.
        may_detour: whether another shard may have them when this one cannot be reached.
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
        """Return the batch without the messages whose ids are not free at the old home."""
        free = [at for at, answer in enumerate(answers) if answer == "free"]
        return self._replace(orders=[self.orders[at] for at in free], places=[self.places[at] for at in free])

    def call(
        self,
        terms: CallTerms,
        call_number: transitions.CallNumber,
        *,
        remember_ms: int = transitions.REMEMBER_MS,
    ) -> Call[transitions.PublishAnswer]:
        """Return the call that publishes the messages on these terms."""
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
    Return messages by the shard that they go to by `map`, and by the shard to ask first.

    Args:
        orders: by their places.
        may_detour: whether another shard may have a message whose id was generated.
    """
    by_homes: dict[tuple[int, int], list[int]] = {}
    for place, order in orders.items():
        now = home(order.id, map.n)
        before = now if order.is_generated else home(order.id, map.was)  # which may have a chosen id already
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
    Turns bodies and options into prepared messages, and these into calls.

    Attributes:
        shards: the shards of the queue, as they are known.
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
        Return `body` checked and encoded; without options it goes on the queue's terms, due now.

        Args:
            shard: for a generated id; None: the one whose turn it is.
            call: the method of `Queue` that was called.

        Raises:
            ConfigurationError: an option is not allowed.
            BodyError: the body cannot be encoded or is too large.
            TypeError: there is no such option.
        """
        if shard is None:
            shard = self.shards.turn() if self.shards.wanted or self.shards.map.n > 1 else 0
        if options:
            check_keywords(f"Queue.{call}", options, PUBLISH_KEYWORDS)
            return self.special(Outgoing(body=body, **options), shard)
        return PreparedMessage(new_id(shard), self._usual_start + self._payload(body), self._usual)

    def special(self, outgoing: Outgoing[Any], shard: int = 0) -> PreparedMessage:
        """Return a message with options of its own checked and encoded; raise as `order` does."""
        terms = self._terms(outgoing)
        id = new_id(shard) if outgoing.id is None else check_id(outgoing.id)
        payload = self._payload(outgoing.body)
        if self.bare:
            given = {
                "headers": outgoing.headers,
                "incarnation": outgoing.incarnation is not None,
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
        number = incarnation(outgoing)
        line = line_of(outgoing)
        origin = outgoing.origin if isinstance(outgoing, Copied) else None
        start = envelope_rest(terms.retries, enqueued, terms.window_ms, outgoing.headers, number, line, origin)
        return PreparedMessage(id, start + payload, terms, line)

    def known_by(self, orders: list[PreparedMessage]) -> Messages:
        """Return each order's id and a hash of all the rest, by which it is recognized when it is published again."""
        terms = orders[0].terms
        if terms.window_ms is None:  # a generated id is a chosen one when it is published again
            terms = terms._replace(window_ms=milliseconds(self._settings.dedup))
        known = []
        for order in orders:
            header, body = self._opened(order)
            rest = body, terms, header.incarnation, header.line, frozenset(header.headers.items())
            known.append(Message(order.id, hash(rest)))
        return tuple(known)

    def failed(
        self, orders: list[PreparedMessage], error: ReliqError, confirmed: int = 0, *, unsent: bool = False
    ) -> PublishFailed:
        """Return `error` as the end of a publish; with `unsent` Redis has certainly got nothing of it."""
        maybe_ran = getattr(error, "maybe_ran", False) and not unsent
        return PublishFailed(
            self.keys.name,
            tuple(order.id for order in orders),
            "unknown" if maybe_ran else "refused",
            str(error),
            confirmed,
            advised=not isinstance(error, LoginError),  # which advises itself
            orders=orders,
            again=lambda rest: tuple(map(self._outgoing, rest)),
        )

    def _outgoing(self, order: PreparedMessage) -> Outgoing[Any]:
        header, payload = self._opened(order)
        terms = order.terms
        given: dict[str, Any] = {} if header.origin is None else {"origin": header.origin}
        return (Copied if given else Outgoing)(
            body=self._codec.decode(payload),
            delay=terms.delay_ms / 1000,
            at=None if terms.at_ms is None else datetime.fromtimestamp(terms.at_ms / 1000, UTC),
            id=order.id,
            retries=terms.retries,
            ttl=terms.ttl_ms / 1000,
            headers=header.headers or None,
            dedup=None if terms.window_ms is None else terms.window_ms / 1000,
            replace=terms.replace,
            incarnation=header.incarnation,
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

    def _terms(self, outgoing: Outgoing[Any]) -> CallTerms:
        is_due_now = type(outgoing.delay) is float and not outgoing.delay and outgoing.at is None
        is_plain = outgoing.retries is None and outgoing.ttl is None and outgoing.id is None and outgoing.dedup is None
        if is_due_now and is_plain and not outgoing.replace:
            return self._usual  # which is checked already
        settings = self._settings
        ttl = seconds("ttl", settings.ttl if outgoing.ttl is None else outgoing.ttl, least=0.001)
        retries = settings.retries if outgoing.retries is None else check_int("retries", outgoing.retries, most=1000)
        window = None
        if outgoing.id is not None:
            window = milliseconds(seconds("dedup", settings.dedup if outgoing.dedup is None else outgoing.dedup))
        elif outgoing.dedup is not None:
            raise ConfigurationError("dedup needs an id chosen by you: publish(..., id='report-7', dedup=86400)")
        return CallTerms(*when(outgoing.delay, outgoing.at), milliseconds(ttl), retries, window, bool(outgoing.replace))


def receipts(
    orders: list[PreparedMessage], answer: transitions.PublishAnswer, confirmed: Confirmed = NOT_ASKED
) -> list[Receipt]:
    """Return the receipt of each order; none when the shard refused the call because a later map binds."""
    if answer.is_stale:
        return []
    due = answer.due_ms / 1000
    return [Receipt(order.id, answer.refused.get(at, "published"), due, *confirmed) for at, order in enumerate(orders)]


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

        One call goes to one shard: generated ids take them in turn, chosen ones wait until their shard's call is full.
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
            has_room = call and len(call) < self._size - 1 and self._bytes + size <= CHUNK_BYTES
            if call and has_room and order.terms is call[0].terms:
                call.append(order)  # as nearly all: its call has room, and is not filled by it
                self._bytes += size
                continue
            for full in self._add(place, order):
                yield full
                shard = shards.turn()
        yield from self._rest()

    def _add(self, shard: int, order: PreparedMessage) -> Iterator[list[PreparedMessage]]:
        """Add an order to its shard's call; yield calls that are full, or have no room for it."""
        self._newest = [order]
        if self._bytes + len(order.value) > CHUNK_BYTES:
            yield from self._rest()
        if shard in self._held and order.terms != self._held[shard][0].terms:
            yield self._take(shard)
        call = self._held.setdefault(shard, [])
        call.append(order)
        self._newest = []
        self._bytes += len(order.value)
        if len(call) == self._size:
            yield self._take(shard)

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
