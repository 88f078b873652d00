"""The values of a queue; one made for every worked message is a `msgspec.Struct`, ten times cheaper than a dataclass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence  # noqa: TC003  msgspec reads the annotations
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Generic, Literal, NamedTuple, TypedDict, TypeVar, get_args

import msgspec

from reliq.text import checking_keywords

if TYPE_CHECKING:
    from uuid import UUID


#: At most this many deliveries may follow the first.
RETRIES_LIMIT = 1000

Duration = float | timedelta
Priority = Literal["high", "normal", "low"]
#: The lines of priorities among those of keys: no key has a control character.
PRIORITY_LINES: dict[Priority, str] = {"high": "\x01high", "low": "\x01low"}
#: Why a message is a dead letter; `lost` is what `reliq check --repair` could not put back.
DeathReason = Literal["failed", "rejected", "undecodable", "lease", "lost"]
DEATH_REASONS: tuple[DeathReason, ...] = get_args(DeathReason)
PublishStatus = Literal["published", "duplicate", "tombstoned"]
CancelStatus = Literal["cancelled", "running", "not_found"]
RescheduleStatus = Literal["rescheduled", "running", "not_found"]


@dataclass(frozen=True, slots=True)
class Receipt:
    """
    The result of one publish: true when it was published, false when not.

    Attributes:
        status: `published`; `duplicate`: a message of this id is alive or ended less than `dedup` ago; `tombstoned`:
            one was cancelled with a tombstone, which has not expired.
        due: when the message is due, in unix seconds by Redis' clock.
        durable: whether all that `durability` asks for was confirmed in time; None when it asks for nothing.
        replicas: how many replicas confirmed; None when `durability` asks for none.
        on_disk: whether the server has it in its append-only file on disk; None when `durability` does not ask.

    Example: `if not queue.publish(order, id=order.id): log.info("already published")`
    """

    id: str
    status: PublishStatus
    due: float
    durable: bool | None = None
    replicas: int | None = None
    on_disk: bool | None = None

    def __bool__(self) -> bool:
        """Return whether the message was published, durable or not."""
        return self.status == "published"


class Confirmed(NamedTuple):
    """The confirmations of a publish: the last fields of its `Receipt`."""

    durable: bool | None = None
    replicas: int | None = None
    on_disk: bool | None = None


@dataclass(frozen=True, slots=True)
class BulkResult:
    """
    How many messages of a `publish_many` were published, and the ids of those that were not.

    Attributes:
        durable: whether all that `durability` asks for was confirmed in time; None when it asks for nothing.
        unconfirmed: ids for which it was not, although Redis has them.
    """

    published: int
    duplicates: tuple[str, ...] = ()
    tombstoned: tuple[str, ...] = ()
    durable: bool | None = None
    unconfirmed: tuple[str, ...] = ()


class Claimed(msgspec.Struct, frozen=True, gc=False):
    """
    One message held under a lease; with `nonce` and `left` it is the receipt for settling it.

    Attributes:
        nonce: names the claim; it ends in the lease in ms.
        left: retries left, as claimed.
        deaths: how many deliveries in a row ended by their lease; after one the message is a suspect.
        token: greater than the token of each earlier delivery of the message.
        key: the message's key, empty without one; None when it was claimed by the rules of a queue without keys.
    """

    id: str
    nonce: str
    left: int
    deaths: int = 0
    token: int = 0
    key: str | None = None


class Header(
    msgspec.Struct,
    frozen=True,
    gc=False,
    rename={"due": "d", "retries": "r", "enqueued": "e", "window_ms": "w", "incarnation": "i", "headers": "h"}
    | {"line": "k", "origin": "o"},
):
    """
    The header of a message. In JSON its names are short, because every message carries them. A bare body has `BARE`.

    Attributes:
        due: unix ms, or None.
        retries: as published, or None.
        enqueued: when it was published, unix ms; None when the id is generated, for that holds it.
        window_ms: how long the chosen id stays taken after its end; None for a generated id.
        incarnation: as the publish said; None when it said none.
        origin: queue and id of the first publication, when the message was copied from another queue.
        headers: the publisher's texts.
        line: where it waits: its key, or what stands for its priority; None: with all others.
    """

    due: int | None = None
    retries: int | None = None
    enqueued: int | None = None
    window_ms: int | None = None
    incarnation: int | None = None
    headers: Mapping[str, str] = {}
    line: str | None = None
    origin: tuple[str, str] | None = None

    @property
    def key(self) -> str | None:
        """The message's key."""
        return None if self.line in (None, *PRIORITY_LINES.values()) else self.line

    @property
    def priority(self) -> Priority:
        """The message's priority."""
        return next((one for one, line in PRIORITY_LINES.items() if line == self.line), "normal")


BARE = Header()


class Delivery(msgspec.Struct, frozen=True, gc=False):
    """
    One attempt at one message.

    Attributes:
        value: as read from Redis; empty before that, and when the body was too large to be read.
        refusal: why no handler gets the body; empty when it is small enough.
    """

    claimed: Claimed
    value: bytes = b""
    header: Header = BARE
    payload: bytes = b""
    refusal: str = ""

    @property
    def id(self) -> str:
        """The message's id."""
        return self.claimed.id

    @property
    def attempt(self) -> int | None:
        """The number of this delivery, 1 for the first, bounded by what retries allow; None for a bare body."""
        retries = self.header.retries
        return None if retries is None else min(max(1, retries - self.claimed.left + 1), RETRIES_LIMIT + 1)


@dataclass(frozen=True, slots=True)
class Counts:
    """
    How many messages a queue has at one moment, by state.

    Attributes:
        unack: leased, or waiting for a redelivery after a nack.
        garbage: about to become dead letters.
        dead: dead letters that are kept.
        paused: whether claims answer nothing.
        totals: kind -> how many ever: published, acked, dead, expired, cancelled, purged, redriven, …
        waiting: due, in the lines of their keys; 0 in a queue without keys.
        keyed: whether its messages may have keys, or it has limits.
        away: the shards whose Redis is away, which are not counted: then all figures are partial.
    """

    pending: int
    ready: int
    unack: int
    retry: int
    garbage: int
    dead: int
    paused: bool
    totals: Mapping[str, int]
    waiting: int = 0
    keyed: bool = False
    away: tuple[int, ...] = ()

    @classmethod
    def sum(cls, all: Sequence[Counts], away: tuple[int, ...] = ()) -> Counts:
        """Return the counts of a queue of its shards' counts; it is paused when one of them is."""
        states = ("pending", "ready", "unack", "retry", "garbage", "dead", "waiting")
        kinds = dict.fromkeys(kind for one in all for kind in one.totals)
        return cls(
            **{state: sum(getattr(one, state) for one in all) for state in states},
            paused=any(one.paused for one in all),
            totals={kind: sum(one.totals.get(kind, 0) for one in all) for kind in kinds},
            keyed=any(one.keyed for one in all),
            away=away,
        )

    @property
    def alive(self) -> int:
        """How many messages have not ended."""
        return self.pending + self.due + self.unack + self.garbage

    @property
    def due(self) -> int:
        """How many are due and wait for a worker, or for the turn of their key."""
        return self.ready + self.retry + self.waiting

    @property
    def missing(self) -> int:
        """All that came in - every end - alive: 0 in a queue that only reliq touches."""
        came = sum(self.totals.get(kind, 0) for kind in ("published", "redriven", "arrived"))
        ends = ("acked", "dead", "expired", "cancelled", "purged", "left")
        return came - sum(self.totals.get(kind, 0) for kind in ends) - self.alive


@dataclass(frozen=True, slots=True)
class Pause:
    """
    Why a queue is not claimed.

    Attributes:
        by: who paused it, as user@host; empty when another program did.
        at: since when, unix seconds by the clock of that host; None when unknown.
        reason: the text that they gave; empty without one.
        until: when it ends by itself, by the same clock; None when it lasts until `resume`.
    """

    by: str
    at: float | None
    reason: str
    until: float | None = None


@dataclass(frozen=True, slots=True)
class Letter:
    """
    A dead letter.

    Attributes:
        letter: the id of this letter; a message id can have several, for it can die more than once.
        reason: one of `DEATH_REASONS`, unless something else than reliq wrote it.
        attempts: how many deliveries there were, None when that is unknown.
        error: the last failure, as text; empty when none was kept.
        died: unix seconds by Redis' clock.
        raised: class and place of the last exception, without the text that `error` has; empty when there was none.
        shard: of the queue that has it.
    """

    letter: str
    id: str
    reason: str
    error: str
    attempts: int | None
    died: float
    header: Header
    payload: bytes
    raised: str = ""
    shard: int = 0


B = TypeVar("B")


class FollowUpOptions(TypedDict, total=False):
    """The options of a job's next step, whose id is made of the job's."""

    delay: Duration
    at: datetime | None
    retries: int | None
    ttl: Duration | None
    headers: Mapping[str, str] | None
    dedup: Duration | None
    replace: bool
    key: str | None
    priority: Priority


class PublishOptions(FollowUpOptions, total=False):
    """The options of one message, for type checkers; the docstring of `Queue.publish` describes each."""

    id: str | UUID | None
    incarnation: int | None


@checking_keywords
@dataclass(frozen=True, slots=True, kw_only=True)
class Outgoing(Generic[B]):
    """
    One message for `publish_many`, with its own options; `Queue.publish` describes them.

    Example: `queue.publish_many([Outgoing(body=order, id=f"order-{order.id}", delay=60) for order in orders])`
    """

    body: B
    delay: Duration = 0.0
    at: datetime | None = None
    id: str | UUID | None = None
    retries: int | None = None
    ttl: Duration | None = None
    headers: Mapping[str, str] | None = None
    dedup: Duration | None = None
    replace: bool = False
    incarnation: int | None = None
    key: str | None = None
    priority: Priority = "normal"


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied(Outgoing[B]):
    """A message copied from another queue; `origin` is the queue and id of its first publication, for `Job.once`."""

    origin: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Ack:
    """A handler's answer: done. Any other value that it returns, None too, means the same."""


class Answer(Exception):  # noqa: N818  answers are raised, but they are not errors
    """
    The base class of what a handler may return or raise as its answer: `Nack`, `Reject`, `Snooze`, `RateLimited`.

    A handler that catches every exception lets it pass with `except Answer: raise`.
    """

    reason: str

    def __repr__(self) -> str:
        told = ", ".join(f"{name}={value!r}" for name, value in vars(self).items() if value not in (None, ""))
        return f"{type(self).__name__}({told})"

    def __str__(self) -> str:
        return str(self.reason)


class Nack(Answer):
    """
    A handler's answer: failed, deliver again. It spends a retry; without one left the message becomes a dead letter.

    Args:
        delay: seconds or timedelta until the next delivery; None for the handler's backoff.
        reason: a text for logs and the dead letter.

    Example: `raise Nack(delay=60, reason="the bank is closed")`
    """

    def __init__(self, delay: Duration | None = None, reason: str = "") -> None:
        super().__init__(delay, reason)
        self.delay = delay
        self.reason = reason


class Reject(Answer):
    """
    A handler's answer: never deliver again. The message becomes a dead letter at once.

    Example: `raise Reject("no such customer")`
    """

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason)
        self.reason = reason


class Snooze(Answer):
    """
    A handler's answer: not yet. It spends no retry.

    Args:
        delay: seconds or timedelta until the next delivery.
        reason: a text for logs.

    Example: `return Snooze(delay=timedelta(minutes=5))`
    """

    def __init__(self, delay: Duration, reason: str = "") -> None:
        super().__init__(delay, reason)
        self.delay = delay
        self.reason = reason


class RateLimited(Answer):
    """
    A handler's answer: whoever it calls takes no more for now, such as a server that answered 429. It spends no retry.

    The message goes back to where it was, and its key sleeps: no message of that key starts before `delay` is over, in
    any process. A message without a key puts its queue to sleep. Where a queue has neither keys nor limits the message
    alone waits, as after `Snooze`.

    Args:
        delay: seconds or timedelta until the next delivery.
        reason: a text for logs.
        max_delay: the longest `delay` that is allowed, an hour by default: a header in other units must not stop a
            queue for days. A longer delay is an error of the handler.

    Example: `raise RateLimited(delay=float(response.headers["Retry-After"]))`
    """

    def __init__(self, delay: Duration, reason: str = "", max_delay: Duration = 3600.0) -> None:
        super().__init__(delay, reason, max_delay)
        self.delay = delay
        self.reason = reason
        self.max_delay = max_delay
