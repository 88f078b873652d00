"""Data classes of messages. Objects created for each message are `msgspec.Struct`s, ten times cheaper than dataclasses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence  # noqa: TC003  msgspec reads the annotations
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypedDict, TypeVar, get_args

import msgspec

from reliq.errors import ConfigurationError
from reliq.text import checking_keywords, whole_number

if TYPE_CHECKING:
    from uuid import UUID

    from reliq.queue import PublishedMessage

#: The header that names the task of a message in a queue of `Tasks`.
TASK_HEADER = "reliq-task"
#: The highest number of retries.
RETRIES_LIMIT = 1000
#: The highest cost of a message.
COST_LIMIT = 1_000_000_000

Duration = float | timedelta
Priority = Literal["high", "normal", "low"]
#: The names of the key queues for priorities. No message key has such a name, because keys have no control characters.
PRIORITY_LINES: dict[Priority, str] = {"high": "\x01high", "low": "\x01low"}
#: The separator between the name of a key queue and the cost of a message. No message key contains it.
COST_MARK = "\x03"
#: Why a message became a dead letter; `lost` means that `reliq check --repair` could not restore the message.
DeathReason = Literal["failed", "rejected", "undecodable", "lease", "lost"]
DEATH_REASONS: tuple[DeathReason, ...] = get_args(DeathReason)
PublishStatus = Literal["published", "replaced", "follows", "duplicate", "tombstoned", "ending"]
CancelStatus = Literal["cancelled", "running", "not_found"]
RescheduleStatus = Literal["rescheduled", "running", "not_found"]


StatusState = Literal[
    "pending", "ready", "running", "backoff", "acked", "dead", "expired", "cancelled", "purged", "gone"
]
STATUS_STATES: tuple[StatusState, ...] = get_args(StatusState)
R_co = TypeVar("R_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Status(Generic[R_co]):
    """
    The status of a message.

    Attributes:
        state: `pending`: scheduled for later. `ready`: waiting for a worker. `running`: leased to a worker. `backoff`:
            waiting after a failure. `acked`: finished, and the result is kept. `dead`, `expired`, `cancelled` or
            `purged`: ended in this way; only the last 1,000 such messages of a shard are remembered. `gone`: anything
            else, such as a message that was acked without a kept result.
        result: the return value of the handler; None if the state is not `acked`.
        error: the last failure; for an acked message, why its result is not kept; otherwise empty.
        progress: the last fraction that a job reported with `Job.progress`; None without a report or after the end.
        note: the text of the last report.
        attempt: the number of deliveries that count against the retries, including a running delivery; None if unknown.
    """

    state: StatusState
    result: R_co | None = None
    error: str = ""
    progress: float | None = None
    note: str = ""
    attempt: int | None = None

    @property
    def has_ended(self) -> bool:
        """Whether the message has ended."""
        return self.state not in ("pending", "ready", "running", "backoff")


class _Receipt:
    """Stores the message of a `Receipt` outside the dataclass fields, so that it is not compared, copied or pickled."""

    __slots__ = ("_message",)
    _message: PublishedMessage[Any]


@dataclass(frozen=True, slots=True)
class Receipt(_Receipt):
    """
    The result of one publish. A receipt is true if Redis has accepted the message.

    Attributes:
        id: the message id.
        status: `published`; `duplicate` if a message with this id exists or ended less than `dedup` ago; `tombstoned`
            if a message with this id was cancelled with a tombstone that has not expired. With `on_conflict` also
            `replaced`: a waiting message got this body; and `follows`: this message waits for the end of the running
            message with the same id.
        due: when the message is due, in unix seconds by Redis' clock.
        durable: whether everything that `durability` requires was confirmed in time; None if it requires nothing.
        replicas: how many replicas confirmed the message; None if `durability` requires no replicas.
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
        """Return whether Redis has accepted the message, even if it is not durable."""
        return self.status in ("published", "replaced", "follows")

    def state(self) -> Status[Any]:
        """
        Return the message's current status, see `Queue.status`. Results of other messages with the same id are ignored.

        Raises:
            ConfigurationError: this receipt is a copy, or is not from `publish`; call `Queue.status` with its id.
            ConfigurationError, RedisUnavailableError: see `Queue.status`.
        """
        return self._published.status()

    async def astate(self) -> Status[Any]:
        """Async version of `state`."""
        return await self._published.astatus()

    @property
    def _published(self) -> PublishedMessage[Any]:
        if not hasattr(self, "_message"):
            raise ConfigurationError(
                f"this receipt of message {self.id!r} is a copy without its queue: call Queue.status({self.id!r})"
            )
        return self._message


class Confirmed(NamedTuple):
    """Which replicas and disks confirmed a publish; its `Receipt` has the same fields."""

    durable: bool | None = None
    replicas: int | None = None
    on_disk: bool | None = None


@dataclass(frozen=True, slots=True)
class BulkResult:
    """
    How many messages `publish_many` published, and the ids of those that it did not publish.

    Attributes:
        published: how many messages were published, including the statuses `replaced` and `follows`, see `Receipt`.
        duplicates: the ids with the status `duplicate`, see `Receipt`.
        tombstoned: the ids with the status `tombstoned`, see `Receipt`.
        durable: whether everything that `durability` requires was confirmed in time; None if it requires nothing.
        unconfirmed: the ids of published messages that the replicas or disks required by `durability` did not confirm
            in time.
    """

    published: int
    duplicates: tuple[str, ...] = ()
    tombstoned: tuple[str, ...] = ()
    durable: bool | None = None
    unconfirmed: tuple[str, ...] = ()


class Claimed(msgspec.Struct, frozen=True, gc=False):
    """
    A message that this process has leased. To settle it, `nonce` and `left` are sent as its receipt.

    Attributes:
        nonce: identifies the claim; its last part is the lease in ms.
        left: retries left at the claim.
        deaths: how many deliveries in a row ended by an expired lease. From 1 on, the message is a suspect: it may have
            killed its process.
        token: the fencing token, greater than the token of each earlier delivery of the message.
        key: the message key, an empty text for a message without a key; None for a claim from a queue without keys and
            limits.
        spent: the real cost that the job reported, sent with its outcome; None without a report.
    """

    id: str
    nonce: str
    left: int
    deaths: int = 0
    token: int = 0
    key: str | None = None
    spent: int | None = None


def split_line(line: str) -> tuple[str, int]:
    """Split the field `line` of a header into the name of the key queue and the cost; a missing cost is 1."""
    name, _, cost = line.partition(COST_MARK)
    return name, max(1, min(whole_number(cost) or 1, COST_LIMIT))


class Header(
    msgspec.Struct,
    frozen=True,
    gc=False,
    rename={"due": "d", "retries": "r", "enqueued": "e", "window_ms": "w", "publication_id": "i", "headers": "h"}
    | {"line": "k", "origin": "o", "saved": "~"},
):
    """
    The header of a message. Its JSON names are short, because every message has them.

    For a body without reliq's envelope, the constant `BARE` is its header.

    Attributes:
        due: the due time in unix ms, or None.
        retries: the option `retries` of the publish, or None.
        enqueued: the publish time in unix ms; None for a generated id, because such an id contains the publish time.
        window_ms: for how many ms `dedup` blocks the chosen id after the message has ended; None for a generated id.
        publication_id: the option `publication_id` of the publish, or None.
        origin: queue and id of the first publication, if the message was copied from another queue.
        headers: the publisher's headers.
        line: the message key or a name for the priority, and the cost, see `split_line`; None without all three.
        saved: two lines of text: the last checkpoint (its number, the number of unnamed follow-ups, the cursor as JSON)
            and the last report of progress. None before the job has saved or reported anything.
    """

    due: int | None = None
    retries: int | None = None
    enqueued: int | None = None
    window_ms: int | None = None
    publication_id: int | None = None
    headers: Mapping[str, str] = {}
    line: str | None = None
    origin: tuple[str, str] | None = None
    saved: str | None = None

    @property
    def key(self) -> str | None:
        """The message key."""
        name = split_line(self.line or "")[0]
        return None if name in ("", *PRIORITY_LINES.values()) else name

    @property
    def cost(self) -> int:
        """How much the message is expected to take from a rate by cost."""
        return split_line(self.line or "")[1]

    @property
    def checkpoint(self) -> tuple[int, int, Any]:
        """The last checkpoint: its number, how many unnamed follow-ups were published before it, and its cursor."""
        try:
            number, published, cursor = (self.saved or "").partition("\n")[0].split(" ", 2)
            return int(number), int(published), msgspec.json.decode(cursor)
        except (ValueError, msgspec.DecodeError, RecursionError):  # another program wrote the header
            return 0, 0, None

    @property
    def report(self) -> str:
        """The last report of `Job.progress`: a fraction and a note; empty without a report."""
        return (self.saved or "").partition("\n")[2]

    @property
    def progress(self) -> tuple[float | None, str]:
        """The fraction and the note of the last report; None and an empty text without a report."""
        fraction, _, note = self.report.partition(" ")
        try:
            return float(fraction), note
        except ValueError:
            return None, ""

    @property
    def priority(self) -> Priority:
        """The message's priority."""
        name = split_line(self.line or "")[0]
        return next((one for one, line in PRIORITY_LINES.items() if line == name), "normal")


BARE = Header()


class Delivery(msgspec.Struct, frozen=True, gc=False):
    """
    One attempt at one message.

    Attributes:
        value: header and body as stored in Redis; empty before they were read, or if the body is too large.
        refusal: the error text for a body that is too large for a handler; otherwise empty.
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
        """
        The number of this delivery, 1 for the first; None for a body without reliq's envelope.

        It is at most RETRIES_LIMIT + 1, even if another program wrote wrong numbers to Redis.
        """
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
        totals: the number of messages since the queue was created, for each event: published, acked, dead, expired,
            cancelled, purged, redriven, …
        waiting: due messages in key queues; 0 in a queue without keys.
        keyed: whether messages may have keys, or the queue has limits.
        away: the numbers of unavailable shards. All other figures leave out these shards.
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
        """Return the sum of the counts of shards; the queue is paused if any shard is paused."""
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
        """Published and redriven messages, minus ended and living messages; 0 unless another program interferes."""
        came = sum(self.totals.get(kind, 0) for kind in ("published", "redriven", "arrived"))
        ends = ("acked", "dead", "expired", "cancelled", "purged", "left")
        return came - sum(self.totals.get(kind, 0) for kind in ends) - self.alive


@dataclass(frozen=True, slots=True)
class Pause:
    """
    The pause of a queue.

    Attributes:
        by: user@host of the person who paused the queue; empty if another program paused it.
        at: when the pause began, in unix seconds by the clock of that host; None if unknown.
        reason: the given reason; may be empty.
        until: when the pause ends automatically, in unix seconds by the clock of that host; None if it lasts until
            `resume`.
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
        raised: class and source line of the last exception, without its text; empty without an exception.
        shard: the number of the shard that stores the letter.
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


@dataclass(frozen=True, slots=True)
class Debounce:
    """
    For `on_conflict`: start the message, with the newest body, when its id has not been published for some time.

    Attributes:
        seconds: how long the message waits after its last publish, in seconds or as a timedelta.
        max_wait: how long it waits at most after its first publish. Default: ten times `seconds`.
    """

    seconds: Duration
    max_wait: Duration | None = None


@dataclass(frozen=True, slots=True)
class Throttle:
    """
    For `on_conflict`: start the first message immediately, then the newest body at most once in `seconds`.

    Attributes:
        seconds: how far apart the due times are, in seconds or as a timedelta.
    """

    seconds: Duration


OnConflict = Literal["keep", "follow", "replace"] | Debounce | Throttle


class MessageOptions(TypedDict, total=False):
    """The message options of `Queue.schedule`, for type checkers; see `Queue.publish` for their meaning."""

    retries: int | None
    ttl: Duration | None
    headers: Mapping[str, str] | None
    key: str | None
    priority: Priority


class FollowUpOptions(MessageOptions, total=False):
    """The options of a job's follow-up message, whose id reliq derives from the job's id."""

    delay: Duration
    at: datetime | None
    dedup: Duration | None
    ignore_dedup: bool
    cost: int


class PublishOptions(FollowUpOptions, total=False):
    """The options of one message, for type checkers; see `Queue.publish` for their meaning."""

    id: str | UUID | None
    on_conflict: OnConflict
    publication_id: int | None


@checking_keywords
@dataclass(frozen=True, slots=True, kw_only=True)
class OutgoingMessage(Generic[B]):
    """
    One message for `publish_many`, with its own options.

    Attributes:
        body: a value of the queue's type.
        delay, at, id, retries, ttl, headers, dedup, ignore_dedup, on_conflict, publication_id, key, priority, cost: see
            `Queue.publish`, which has the same defaults.

    Example: `queue.publish_many(OutgoingMessage(body=one, id=f"order-{one.id}") for one in orders)`
    """

    body: B
    delay: Duration = 0.0
    at: datetime | None = None
    id: str | UUID | None = None
    retries: int | None = None
    ttl: Duration | None = None
    headers: Mapping[str, str] | None = None
    dedup: Duration | None = None
    ignore_dedup: bool = False
    on_conflict: OnConflict = "keep"
    publication_id: int | None = None
    key: str | None = None
    priority: Priority = "normal"
    cost: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied(OutgoingMessage[B]):
    """A message copied from another queue; `origin` is the queue and id of its first publication, for `Job.once`."""

    origin: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Ack:
    """A handler's result: success. None, or any other value that is not an `Outcome`, means success too."""


class Outcome(Exception):  # noqa: N818  raised, but not an error
    """
    The base class of the results `Nack`, `Reject`, `Snooze` and `RateLimited`.

    A handler may return or raise these results.

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
    A handler's result: deliver again later, without using up a retry.

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
    A handler's result: a called service is rate limited, for example it answered 429.

    This result does not use up a retry.

    The message returns to the head of its queue, and its key is throttled: for the time of `delay`, no message with
    this key starts in any process. A message without a key throttles the whole queue. In a queue without keys and
    limits, only the message waits, as after `Snooze`.

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
