"""Messages checked and encoded before anything is sent, and the calls that send them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from reliq import transitions
from reliq.client.lanes import Message
from reliq.errors import BodyError, ConfigurationError, LoginError, PublishFailed, ReliqError
from reliq.ids import check_id, made_at, new_id
from reliq.keywords import check_keywords
from reliq.message import Confirmed, Receipt
from reliq.outgoing import Copied, Outgoing, PublishOptions
from reliq.publish.options import check_bare, incarnation, line_of, when
from reliq.settings import milliseconds, seconds, whole
from reliq.wireformat import ENVELOPE_START, MAGIC, envelope_rest, open_envelope

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from reliq.call import Call
    from reliq.client.lanes import Messages
    from reliq.client.shards import Shards
    from reliq.codec.codec import Codec
    from reliq.keys import Keys
    from reliq.message import Header
    from reliq.settings import QueueSettings
    from reliq.shardmap import ShardMap

#: The keyword arguments of a publish.
PUBLISH_KEYWORDS = frozenset({"durability", *PublishOptions.__annotations__})
#: A publish that waits for no confirmation.
NOT_ASKED = Confirmed()


class CallTerms(NamedTuple):
    """The options that all messages of one call share (times in ms)."""

    at_ms: int | None
    delay_ms: int
    ttl_ms: int
    retries: int
    window_ms: int | None
    replace: bool


class Order(NamedTuple):
    """
    One message ready to be sent.

    Attributes:
        line: where it waits when it is due: its key, or what stands for its priority; empty: with all others.
    """

    id: str
    value: bytes
    terms: CallTerms
    line: str = ""

    @property
    def is_generated(self) -> bool:
        """Whether its id is nobody's choice: then any shard may have it."""
        return self.terms.window_ms is None


class ShardPart(NamedTuple):
    """
    Orders that go to one shard in one call.

    Attributes:
        places: which of the orders of a publish they are.
        keys: of the shard.
        map: by which it was found.
        old_home: the shard to ask first, which may have messages of these ids; None: there is none.
        may_detour: whether another shard may have them when this one cannot be reached.
    """

    orders: list[Order]
    places: Sequence[int]
    keys: Keys
    map: ShardMap
    old_home: Keys | None = None
    may_detour: bool = False


class Writer:
    """
    Turns what a user wants to publish into orders, and orders into calls.

    Attributes:
        shards: those of the queue, as they are known.
        has_lines: whether there ever was a message with a key or a priority; until then nobody need look for one.
    """

    def __init__(self, shards: Shards, codec: Codec[Any], settings: QueueSettings) -> None:
        self.has_lines = False
        self.keys, self.shards, self._codec, self._settings = shards.first, shards, codec, settings
        self.bare = bare = self.keys.bare
        self._usual = CallTerms(None, 0, milliseconds(settings.ttl), settings.retries, None, False)
        self._usual_start = b"" if bare else envelope_rest(settings.retries)

    def order(self, body: Any, options: PublishOptions, shard: int | None = None, *, call: str = "publish") -> Order:
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
        return Order(new_id(shard), self._usual_start + self._payload(body), self._usual)

    def special(self, outgoing: Outgoing[Any], shard: int = 0) -> Order:
        """Return a message with options of its own checked and encoded; raise as `order` does."""
        terms = self._terms(outgoing)
        id = new_id(shard) if outgoing.id is None else check_id(outgoing.id)
        payload = self._payload(outgoing.body)
        if self.bare:
            check_bare(outgoing)
            return Order(id, payload, terms)
        enqueued = None if outgoing.id is None else made_at(new_id())
        number, line = incarnation(outgoing), line_of(outgoing)
        self.has_lines = self.has_lines or bool(line)
        origin = outgoing.origin if isinstance(outgoing, Copied) else None
        start = envelope_rest(terms.retries, enqueued, terms.window_ms, outgoing.headers, number, line, origin)
        return Order(id, start + payload, terms, line)

    def known_by(self, orders: list[Order]) -> Messages:
        """Return by what `orders` are known when they are published again: ids, and a hash of all the rest."""
        terms = orders[0].terms
        if terms.window_ms is None:  # a generated id is a chosen one when it is published again
            terms = terms._replace(window_ms=milliseconds(self._settings.dedup))
        known = []
        for order in orders:
            header, body = self._opened(order)
            rest = body, terms, header.incarnation, header.line, frozenset(header.headers.items())
            known.append(Message(order.id, hash(rest)))
        return tuple(known)

    def call(self, part: ShardPart, call_number: transitions.CallNumber) -> Call[transitions.PublishAnswer]:
        """Return the call that sends orders to their shard, all on the same terms."""
        terms, orders = part.orders[0].terms, part.orders
        # In a queue with a rate, only the keyed script knows when there is nobody to wake.
        goes_keyed = self.shards.is_keyed or (self.has_lines and has_lines(orders))
        return transitions.publish(
            part.keys,
            [(order.id, order.value) for order in orders],
            call_number,
            at_ms=terms.at_ms,
            delay_ms=terms.delay_ms,
            ttl_ms=terms.ttl_ms,
            retries=terms.retries,
            window_ms=terms.window_ms,
            replace=terms.replace,
            bare=self.bare,
            fence=part.map.fence if part.keys.shard or terms.window_ms is not None else "",
            message_keys=[order.line for order in orders] if goes_keyed else None,
        )

    def failed(
        self, orders: list[Order], error: ReliqError, confirmed: int = 0, *, unsent: bool = False
    ) -> PublishFailed:
        """Return `error` as the end of a publish, of which nothing may have been sent."""
        maybe_ran = getattr(error, "maybe_ran", False) and not unsent
        outcome: Literal["refused", "unknown"] = "unknown" if maybe_ran else "refused"
        advised = not isinstance(error, LoginError)  # which says itself what to do first
        ids = tuple(order.id for order in orders)
        name, why = self.keys.name, str(error)
        return PublishFailed(name, ids, outcome, why, confirmed, advised=advised, orders=orders, again=self.again)

    def again(self, orders: Sequence[Order]) -> tuple[Outgoing[Any], ...]:
        """Return orders as what their publisher may publish again: the same messages, by their ids."""
        return tuple(map(self._outgoing, orders))

    def _outgoing(self, order: Order) -> Outgoing[Any]:
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

    def _opened(self, order: Order) -> tuple[Header, bytes]:
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
        if _is_usual(outgoing):
            return self._usual
        settings = self._settings
        ttl = seconds("ttl", settings.ttl if outgoing.ttl is None else outgoing.ttl, least=0.001)
        retries = settings.retries if outgoing.retries is None else whole("retries", outgoing.retries, most=1000)
        window = None
        if outgoing.id is not None:
            window = milliseconds(seconds("dedup", settings.dedup if outgoing.dedup is None else outgoing.dedup))
        elif outgoing.dedup is not None:
            raise ConfigurationError("dedup needs an id chosen by you: publish(..., id='report-7', dedup=86400)")
        return CallTerms(*when(outgoing.delay, outgoing.at), milliseconds(ttl), retries, window, bool(outgoing.replace))


def has_lines(orders: Iterable[Order]) -> bool:
    """Say whether one of the orders has a key or a priority."""
    return any(order.line for order in orders)


def _is_usual(outgoing: Outgoing[Any]) -> bool:
    """Say whether a message goes on the queue's terms, which are checked already."""
    at_once = type(outgoing.delay) is float and not outgoing.delay and outgoing.at is None
    plain = outgoing.retries is None and outgoing.ttl is None and outgoing.id is None and outgoing.dedup is None
    return at_once and plain and not outgoing.replace


def receipts(orders: list[Order], answer: transitions.PublishAnswer, confirmed: Confirmed = NOT_ASKED) -> list[Receipt]:
    """Return what became of each order; nothing of those that a shard has not taken by too early a map."""
    if answer.is_stale:
        return []
    due = answer.due_ms / 1000
    return [Receipt(order.id, answer.refused.get(at, "published"), due, *confirmed) for at, order in enumerate(orders)]
