"""The values of a queue. Values made for every message are `msgspec.Struct`s, ten times cheaper than dataclasses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence  # noqa: TC003  msgspec reads the annotations
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Generic, Literal, NamedTuple, TypedDict, TypeVar, get_args

import msgspec

from reliq.text import checking_keywords

if TYPE_CHECKING:
    from uuid import UUID


#: The highest number of retries.
RETRIES_LIMIT = 1000

Duration = float | timedelta
Priority = Literal["high", "normal", "low"]
#: The names of the key queues for priorities; no message key contains a control character.
PRIORITY_LINES: dict[Priority, str] = {"high": "\x01high", "low": "\x01low"}
#: Why a message became a dead letter; `lost` is a message that `reliq check --repair` could not restore.
DeathReason = Literal["failed", "rejected", "undecodable", "lease", "lost"]
DEATH_REASONS: tuple[DeathReason, ...] = get_args(DeathReason)
PublishStatus = Literal["published", "duplicate", "tombstoned"]
CancelStatus = Literal["cancelled", "running", "not_found"]
RescheduleStatus = Literal["rescheduled", "running", "not_found"]


@dataclass(frozen=True, slots=True)
class Receipt:
    """
    The result of one publish. It is true if the message was published.

    Attributes:
        id: the message id.
        status: `published`; `duplicate` if a message with this id exists or ended less than `dedup` ago; `tombstoned`
            if a message with this id was cancelled with a tombstone that has not expired.
        due: when the message is due, in unix seconds by Redis' clock.
        durable: whether everything that `durability` requires was confirmed in time; None if it requires nothing.
        replicas: how many replicas confirmed; None if `durability` requires none.
        on_disk: whether the server's append-only file on disk has the message; None if `durability` does not require
            it.

    Example: `if not queue.publish(order, id=order.id): log.info("already published")`
    """

    id: str
    status: PublishStatus
    due: float
    durable: bool | None = None
    replicas: int | None = None
    on_disk: bool | None = None

    def __bool__(self) -> bool:
        """Return whether the message was published, even if it is not durable."""
        return self.status == "published"


class Confirmed(NamedTuple):
    """The confirmations of a publish: the last fields of its `Receipt`."""

    durable: bool | None = None
    replicas: int | None = None
    on_disk: bool | None = None


@dataclass(frozen=True, slots=True)
class BulkResult:
    """
    How many messages `publish_many` published, and the ids of the others.

    Attributes:
        published: how many messages were published.
        duplicates: the ids with the status `duplicate`, see `Receipt`.
        tombstoned: the ids with the status `tombstoned`, see `Receipt`.
        durable: whether everything that `durability` requires was confirmed in time; None if it requires nothing.
        unconfirmed: the ids of published messages without these confirmations.
    """

    published: int
    duplicates: tuple[str, ...] = ()
    tombstoned: tuple[str, ...] = ()
    durable: bool | None = None
    unconfirmed: tuple[str, ...] = ()


class Claimed(msgspec.Struct, frozen=True, gc=False):
    """
    One message held under a lease; `nonce` and `left` are the receipt for settling it.

    Attributes:
        nonce: identifies the claim; ends in the lease in ms.
        left: retries left at the claim.
        deaths: how many deliveries in a row ended by an expired lease; from 1 on the message is a suspect.
        token: the fencing token, greater than the token of each earlier delivery of the message.
        key: the message key, empty without one; None if the claim did not use the rules for keys.
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
    rename={"due": "d", "retries": "r", "enqueued": "e", "window_ms": "w", "publication_id": "i", "headers": "h"}
    | {"line": "k", "origin": "o"},
):
    """
    The header of a message. Its JSON names are short, because every message has them. A bare body has `BARE`.

    Attributes:
        due: the due time in unix ms, or None.
        retries: the retries given by the publish, or None.
        enqueued: the publish time in unix ms; None for a generated id, which contains it.
        window_ms: how long the chosen id cannot be published again after the end; None for a generated id.
        publication_id: as given by the publish, or None.
        origin: queue and id of the first publication, if the message was copied from another queue.
        headers: the publisher's headers.
        line: the name of its key queue: its key, or a name for its priority; None for neither.
    """

    due: int | None = None
    retries: int | None = None
    enqueued: int | None = None
    window_ms: int | None = None
    publication_id: int | None = None
    headers: Mapping[str, str] = {}
    line: str | None = None
    origin: tuple[str, str] | None = None

    @property
    def key(self) -> str | None:
        """The message key."""
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
        value: the value from Redis; empty before it was read, and if the body is too large.
        refusal: why no handler gets the body; empty if its size is allowed.
    """

    claimed: Claimed
    value: bytes = b""
    header: Header = BARE
    payload: bytes = b""
    refusal: str = ""

    @property
    def id(self) -> str:
        """The message id."""
        return self.claimed.id

    @property
    def attempt(self) -> int | None:
        """The number of this delivery, 1 for the first, limited by the allowed retries; None for a bare body."""
        retries = self.header.retries
        return None if retries is None else min(max(1, retries - self.claimed.left + 1), RETRIES_LIMIT + 1)


@dataclass(frozen=True, slots=True)
class Counts:
    """
    The number of messages of a queue in each state, and its totals.

    Attributes:
        pending: scheduled for later.
        ready: due, waiting for a worker.
        unack: in flight, or waiting for a redelivery after a nack.
        retry: waiting for a worker for a redelivery.
        garbage: failed for good, not yet written as dead letters.
        dead: stored dead letters.
        paused: whether the queue is paused.
        totals: kind -> the number since the queue exists: published, acked, dead, expired, cancelled, purged, redriven,
            …
        waiting: due messages in key queues; 0 in a queue without keys.
        keyed: whether messages may have keys, or the queue has limits.
        away: the numbers of unavailable shards. If there are any, all other numbers do not include these shards.
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
        """Return the sum of the counts of a queue's shards; the queue is paused if one shard is."""
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
        """How many messages are due and wait for a worker or for the turn of their key."""
        return self.ready + self.retry + self.waiting

    @property
    def missing(self) -> int:
        """All messages that came in, minus all ends, minus all living messages; 0 unless another program interferes."""
        came = sum(self.totals.get(kind, 0) for kind in ("published", "redriven", "arrived"))
        ends = ("acked", "dead", "expired", "cancelled", "purged", "left")
        return came - sum(self.totals.get(kind, 0) for kind in ends) - self.alive


@dataclass(frozen=True, slots=True)
class Pause:
    """
    The pause of a queue.

    Attributes:
        by: user@host of the person that paused it; empty if another program did.
        at: when the pause began, in unix seconds by the clock of that host; None if unknown.
        reason: the given reason; may be empty.
        until: when the pause ends automatically, by the same clock; None if it lasts until `resume`.
    """

    by: str
    at: float | None
    reason: str
    until: float | None = None


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """
    A dead letter: a message that failed for good.

    Attributes:
        letter: the id of this letter. A message id can have several letters, because a redriven message can fail again.
        id: the message id.
        reason: one of `DEATH_REASONS`, unless another program wrote the letter.
        error: the last failure as text; may be empty.
        attempts: the number of deliveries; None if unknown.
        died: when it became a dead letter, in unix seconds by Redis' clock.
        header: the message's header.
        payload: the encoded body.
        raised: class and place of the last exception, without its text; empty without an exception.
        shard: the number of the shard with the letter.
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
    """The options of a job's follow-up message; its id is derived from the job's id."""

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
    """The options of one message, for type checkers; see `Queue.publish` for their meaning."""

    id: str | UUID | None
    publication_id: int | None


@checking_keywords
@dataclass(frozen=True, slots=True, kw_only=True)
class OutgoingMessage(Generic[B]):
    """
    One message for `publish_many`, with its own options.

    Attributes:
        body: a value of the queue's type.
        delay, at, id, retries, ttl, headers, dedup, replace, publication_id, key, priority: see `Queue.publish`, which has
            the same defaults.

    Example: `queue.publish_many([OutgoingMessage(body=order, id=f"order-{order.id}", delay=60) for order in orders])`
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
    publication_id: int | None = None
    key: str | None = None
    priority: Priority = "normal"


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied(OutgoingMessage[B]):
    """A message copied from another queue; `origin` is the queue and id of its first publication, for `Job.once`."""

    origin: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Ack:
    """A handler's result: success. Any other return value, None included, means the same."""


class Outcome(Exception):  # noqa: N818  raised, but not an error
    """
    The base class of results that a handler may return or raise: `Nack`, `Reject`, `Snooze` and `RateLimited`.

    If your handler catches every exception, let these pass: `except Outcome: raise`.
    """

    reason: str

    def __repr__(self) -> str:
        told = ", ".join(f"{name}={value!r}" for name, value in vars(self).items() if value not in (None, ""))
        return f"{type(self).__name__}({told})"

    def __str__(self) -> str:
        return str(self.reason)


class Nack(Outcome):
    """
    A handler's result: failed, deliver again.

    It uses up a retry. Without retries left, the message becomes a dead letter.

    Args:
        delay: time until the next delivery, in seconds or as a timedelta. Default: None, the handler's backoff.
        reason: a text for the log and the dead letter. Default: empty.

    Example: `raise Nack(delay=60, reason="the bank is closed")`
    """

    def __init__(self, delay: Duration | None = None, reason: str = "") -> None:
        super().__init__(delay, reason)
        self.delay = delay
        self.reason = reason


class Reject(Outcome):
    """
    A handler's result: never deliver again. The message becomes a dead letter immediately.

    Args:
        reason: a text for the log and the dead letter. Default: empty.

    Example: `raise Reject("no such customer")`
    """

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason)
        self.reason = reason


class Snooze(Outcome):
    """
    A handler's result: not yet, deliver again later. It does not use up a retry.

    Args:
        delay: time until the next delivery, in seconds or as a timedelta.
        reason: a text for the log. Default: empty.

    Example: `return Snooze(delay=timedelta(minutes=5))`
    """

    def __init__(self, delay: Duration, reason: str = "") -> None:
        super().__init__(delay, reason)
        self.delay = delay
        self.reason = reason


class RateLimited(Outcome):
    """
    A handler's result: a called service is rate limited, for example it answered 429. It does not use up a retry.

    The message returns to its place, and its key sleeps: for the time of `delay`, no message with that key starts in
    any process. A message without a key puts the whole queue to sleep. In a queue without keys and limits only the
    message waits, as after `Snooze`.

    Args:
        delay: time until the next delivery, in seconds or as a timedelta.
        reason: a text for the log. Default: empty.
        max_delay: the longest allowed `delay`, in seconds or as a timedelta. A longer delay counts as a failure of the
            handler, so that a header in an unexpected unit does not stop a queue for days. Default: an hour.

    Example: `raise RateLimited(delay=float(response.headers["Retry-After"]))`
    """

    def __init__(self, delay: Duration, reason: str = "", max_delay: Duration = 3600.0) -> None:
        super().__init__(delay, reason, max_delay)
        self.delay = delay
        self.reason = reason
        self.max_delay = max_delay
