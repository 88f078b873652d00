"""
Classes for messages, receipts, results of handlers and the status of messages and queues.

Classes with an object for each message are `msgspec.Struct`s, because these are ten times faster than dataclasses.
"""

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

#: In a queue of `Tasks`, the header of a message that contains the name of its task.
TASK_HEADER = "reliq-task"
#: The maximum number of retries of a message.
RETRIES_LIMIT = 1000
#: The maximum cost of a message.
COST_LIMIT = 1_000_000_000

Duration = float | timedelta
Priority = Literal["high", "normal", "low"]
#: The key queues for messages with high and low priority have these names. They differ from all message keys, because
#: message keys have no control characters.
PRIORITY_LINES: dict[Priority, str] = {"high": "\x01high", "low": "\x01low"}
#: The separator between the name of a key queue and the cost of a message, in the field `line` of the message header.
#: No message key contains it.
COST_MARK = "\x03"
#: The reasons why a message can become a dead letter. `lost`: `reliq check --repair` could not restore the message.
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
            waiting after a failure. `acked`: finished successfully, and its result is kept. `dead`, `expired`,
            `cancelled` or `purged`: ended in this way; Redis stores only the last 1,000 such messages of each shard.
            `gone`: no information about the message, for example because it was acked and its result is not kept.
        result: the return value of the handler; None if the state is not `acked`.
        error: the text of the last failure. For an acked message, the reason if its result could not be kept. Empty in
            all other cases.
        progress: the last fraction that the handler reported with `Job.progress`. None if it has not reported any, or
            if the message has ended.
        note: the last text that the handler reported with `Job.progress`.
        attempt: the number of deliveries that count against the retries, including a running delivery. None if this
            number is not known.
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
    """The base class of `Receipt`. It stores the message, which must not be compared, copied or pickled."""

    __slots__ = ("_message",)
    _message: PublishedMessage[Any]


@dataclass(frozen=True, slots=True)
class Receipt(_Receipt):
    """
    The result of the publish of one message. `bool(receipt)` is True if Redis has accepted the message.

    Attributes:
        id: the message id.
        status: `published`: Redis has stored the message. `duplicate`: it was refused, because a message with this id
            exists, or ended less than `dedup` ago. `tombstoned`: it was refused, because a message with this id was
            cancelled with a tombstone that has not expired yet. The next two are possible only with `on_conflict`.
            `replaced`: a waiting message with this id got the new body. `follows`: the message waits until the running
            message with the same id ends.
        due: when the message is due, in unix seconds by Redis' clock.
        durable: whether the replicas and disks that `durability` requires confirmed the message in time. None if
            `durability` requires no confirmation.
        replicas: how many replicas confirmed the message. None if `durability` requires no replicas.
        on_disk: whether the server has written the message to its append-only file on disk. None if `durability` does
            not require this.

    Example: `if not queue.publish(order, id=order.id): log.info("already published")`
    """

    id: str
    status: PublishStatus
    due: float
    durable: bool | None = None
    replicas: int | None = None
    on_disk: bool | None = None

    def __bool__(self) -> bool:
        """Return whether Redis has accepted the message, even if no replica or disk has confirmed it."""
        return self.status in ("published", "replaced", "follows")

    def state(self) -> Status[Any]:
        """
        Return the current status of the message, like `Queue.status`, but ignore results of other messages with its id.

        Raises:
            ConfigurationError: this receipt is a copy, or `publish` did not create it. Call `Queue.status` with its id.
            ConfigurationError, RedisUnavailableError: for the causes that are listed in `Queue.status`.
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
    """Which replicas and disks have confirmed a publish. The fields are explained in `Receipt`."""

    durable: bool | None = None
    replicas: int | None = None
    on_disk: bool | None = None


@dataclass(frozen=True, slots=True)
class BulkResult:
    """
    The result of `publish_many`: the number of published messages, and the ids of the refused messages.

    The statuses of messages are explained in `Receipt`.

    Attributes:
        published: how many messages have the status `published`, `replaced` or `follows`.
        duplicates: the ids of the messages with the status `duplicate`.
        tombstoned: the ids of the messages with the status `tombstoned`.
        durable: whether the replicas and disks that `durability` requires confirmed all messages in time. None if
            `durability` requires no confirmation.
        unconfirmed: the ids of the published messages that these replicas and disks did not confirm in time.
    """

    published: int
    duplicates: tuple[str, ...] = ()
    tombstoned: tuple[str, ...] = ()
    durable: bool | None = None
    unconfirmed: tuple[str, ...] = ()


class Claimed(msgspec.Struct, frozen=True, gc=False):
    """
    A message that this process has leased.

    To ack or nack the message, `nonce` and `left` are sent to Redis. They prove that this process has the lease.

    Attributes:
        nonce: identifies the claim of the message. It ends with the duration of the lease in ms.
        left: the number of retries that were left when the message was claimed.
        deaths: how many of the last deliveries in a row ended because their lease expired. If it is above 0, the
            message may have killed its worker process.
        token: the fencing token. It is greater than the tokens of all earlier deliveries of the message.
        key: the message key, or an empty text for a message without a key. None if the queue has no keys and limits.
        spent: the real cost that the handler reported with `Job.spent`; None if it reported none.
    """

    id: str
    nonce: str
    left: int
    deaths: int = 0
    token: int = 0
    key: str | None = None
    spent: int | None = None


def split_line(line: str) -> tuple[str, int]:
    """Split the field `line` of a message header into the name of the key queue and the cost; the default cost is 1."""
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
    The header that reliq stores in front of the body of a message.

    It is stored as JSON with names of one letter, to save memory. For a body that was stored without a header, `BARE`
    is used instead.

    Attributes:
        due: the due time in unix ms; None only in `BARE`.
        retries: the number of retries with which the message was published; None only in `BARE`.
        enqueued: the publish time in unix ms. None for a generated id, because such an id contains the publish time.
        window_ms: for how many ms `dedup` blocks the chosen id after the message has ended. None for a generated id.
        publication_id: the option `publication_id` of the publish; None if it was not given.
        origin: if the message was copied from another queue, the queue and the id of its first publication.
        headers: the headers of the message: the option `headers` of the publish, and headers that reliq has added.
        line: the name of the key queue and the cost of the message, see `split_line`. None for a message without a
            key, with normal priority and with a cost of 1.
        saved: a text of two lines. The first line is the last checkpoint: its number, the number of unnamed follow-up
            messages before it, and its cursor as JSON. The second line is the last progress that the handler reported.
            None if the handler has neither saved a checkpoint nor reported progress.
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
        """The message key; None for a message without a key."""
        name = split_line(self.line or "")[0]
        return None if name in ("", *PRIORITY_LINES.values()) else name

    @property
    def cost(self) -> int:
        """How much of a rate by cost the message will probably use."""
        return split_line(self.line or "")[1]

    @property
    def checkpoint(self) -> tuple[int, int, Any]:
        """The last checkpoint: its number, the number of unnamed follow-up messages before it, and its cursor."""
        try:
            number, published, cursor = (self.saved or "").partition("\n")[0].split(" ", 2)
            return int(number), int(published), msgspec.json.decode(cursor)
        except (ValueError, msgspec.DecodeError, RecursionError):  # the header was written by another program
            return 0, 0, None

    @property
    def report(self) -> str:
        """The last progress that the handler reported: a fraction and a note; empty if it reported none."""
        return (self.saved or "").partition("\n")[2]

    @property
    def progress(self) -> tuple[float | None, str]:
        """The fraction and the note of the last progress; None and an empty text if there is none."""
        fraction, _, note = self.report.partition(" ")
        try:
            return float(fraction), note
        except ValueError:
            return None, ""

    @property
    def priority(self) -> Priority:
        """The priority of the message."""
        name = split_line(self.line or "")[0]
        return next((one for one, line in PRIORITY_LINES.items() if line == name), "normal")


BARE = Header()


class Delivery(msgspec.Struct, frozen=True, gc=False):
    """
    One delivery of a message to this process.

    Attributes:
        claimed: the message id and the proof of the lease.
        value: header and body of the message, as stored in Redis. Empty if they have not been read yet, or if the body
            is too large.
        header: the header of the message.
        payload: the encoded body.
        refusal: the error text if the body is too large for the handler; otherwise empty.
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
        The number of this delivery; 1 for the first delivery, None for a message without reliq's header.

        The number is at most RETRIES_LIMIT + 1, even if another program has written wrong numbers to Redis.
        """
        retries = self.header.retries
        return None if retries is None else min(max(1, retries - self.claimed.left + 1), RETRIES_LIMIT + 1)


@dataclass(frozen=True, slots=True)
class Counts:
    """
    How many messages of a queue are in each state, and how many events it has had since it was created.

    Attributes:
        pending: messages that are scheduled for later.
        ready: messages that are due and wait for a worker.
        unack: messages in flight, and nacked messages that wait for the end of their backoff.
        retry: messages that wait for a worker to deliver them again.
        garbage: messages that have failed for good and are not written as dead letters yet.
        dead: dead letters.
        paused: whether the queue is paused.
        totals: for each event, such as published, acked, dead, expired, cancelled, purged or redriven, the number of
            messages that had this event since the queue was created.
        waiting: messages that are due and wait in key queues; 0 in a queue without keys.
        keyed: whether the queue uses message keys or limits.
        away: the numbers of the shards that are unavailable. The other attributes do not include these shards.
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
        """Add up the counts of all shards of a queue. The queue counts as paused if at least one shard is paused."""
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
        """
        How many messages are missing: all messages that were added, minus those that have ended or still exist.

        This is 0 unless another program changed the queue in Redis.
        """
        came = sum(self.totals.get(kind, 0) for kind in ("published", "redriven", "arrived"))
        ends = ("acked", "dead", "expired", "cancelled", "purged", "left")
        return came - sum(self.totals.get(kind, 0) for kind in ends) - self.alive


@dataclass(frozen=True, slots=True)
class Pause:
    """
    The pause of a queue.

    Attributes:
        by: user@host of the operator who paused the queue. Empty if another program paused it.
        at: when the pause began, in unix seconds by the clock of the operator's host. None if this is not known.
        reason: the reason that the operator gave; may be empty.
        until: when the pause ends automatically, in unix seconds by the clock of the operator's host. None if the pause
            lasts until `resume`.
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
        letter: the id of this dead letter. One message id can have several dead letters, because a message that was
            published again can fail again.
        id: the message id.
        reason: one of `DEATH_REASONS`, unless another program wrote the dead letter.
        error: the text of the last failure; may be empty.
        attempts: the number of deliveries of the message; None if this is not known.
        died: when the message became a dead letter, in unix seconds by Redis' clock.
        header: the header of the message.
        payload: the encoded body of the message.
        raised: class and source line of the last exception, without its text. Empty if no exception was raised.
        shard: the number of the shard that stores the dead letter.
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
    A value for `on_conflict`: start the message when no message with its id has been published for some time.

    The message starts with the body of the last publish.

    Attributes:
        seconds: how long the message waits after the last publish of its id, in seconds or as a timedelta.
        max_wait: how long the message waits at most after the first publish. Default: ten times `seconds`.
    """

    seconds: Duration
    max_wait: Duration | None = None


@dataclass(frozen=True, slots=True)
class Throttle:
    """
    A value for `on_conflict`: start messages with the same id at most once in `seconds`.

    The first message starts immediately. Later messages start with the body of the last publish.

    Attributes:
        seconds: the time between two due times, in seconds or as a timedelta.
    """

    seconds: Duration


OnConflict = Literal["keep", "follow", "replace"] | Debounce | Throttle


class MessageOptions(TypedDict, total=False):
    """For type checkers: the message options of `Queue.schedule`. `Queue.publish` explains them."""

    retries: int | None
    ttl: Duration | None
    headers: Mapping[str, str] | None
    key: str | None
    priority: Priority


class FollowUpOptions(MessageOptions, total=False):
    """The options of a follow-up message that a handler publishes. reliq computes its id from the id of the job."""

    delay: Duration
    at: datetime | None
    dedup: Duration | None
    ignore_dedup: bool
    cost: int


class PublishOptions(FollowUpOptions, total=False):
    """For type checkers: the options of one message. `Queue.publish` explains them."""

    id: str | UUID | None
    on_conflict: OnConflict
    publication_id: int | None


@checking_keywords
@dataclass(frozen=True, slots=True, kw_only=True)
class OutgoingMessage(Generic[B]):
    """
    A message for `publish_many` with its own options.

    Attributes:
        body: a value of the queue's type.
        delay, at, id, retries, ttl, headers, dedup, ignore_dedup, on_conflict, publication_id, key, priority, cost: the
            options of the message. `Queue.publish` explains them and has the same defaults.

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
    """
    A message that is copied from another queue.

    Attributes:
        origin: the queue and the id of its first publication, for `Job.once`.
    """

    origin: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Ack:
    """The result of a handler that succeeded. Any returned value that is not an `Outcome` means success too."""


class Outcome(Exception):  # noqa: N818  raised, but not an error
    """
    The base class of the results `Nack`, `Reject`, `Snooze` and `RateLimited`, which a handler may return or raise.

    If your handler catches all exceptions, it must raise these again: `except Outcome: raise`.
    """

    reason: str

    def __repr__(self) -> str:
        told = ", ".join(f"{name}={value!r}" for name, value in vars(self).items() if value not in (None, ""))
        return f"{type(self).__name__}({told})"

    def __str__(self) -> str:
        return str(self.reason)


class Nack(Outcome):
    """
    The result of a handler that failed: the message is delivered again.

    This uses up a retry. If no retry is left, the message becomes a dead letter.

    Args:
        delay: time until the next delivery, in seconds or as a timedelta. Default: None, which means the backoff of the
            handler.
        reason: a text for the log and the dead letter. Default: empty.

    Example: `raise Nack(delay=60, reason="the bank is closed")`
    """

    def __init__(self, delay: Duration | None = None, reason: str = "") -> None:
        super().__init__(delay, reason)
        self.delay = delay
        self.reason = reason


class Reject(Outcome):
    """
    The result of a handler that failed for good: the message becomes a dead letter immediately.

    Args:
        reason: a text for the log and the dead letter. Default: empty.

    Example: `raise Reject("no such customer")`
    """

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason)
        self.reason = reason


class Snooze(Outcome):
    """
    The result of a handler that postpones the message: it is delivered again later, and no retry is used up.

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
    The result of a handler that has reached the rate limit of a service, for example after the HTTP status 429.

    The message returns to the head of its queue, and no retry is used up. Its message key is throttled: for the time
    `delay`, no worker starts a message with this key. A message without a key throttles the whole queue. In a queue
    without keys and limits, only this message waits, as after `Snooze`.

    Args:
        delay: time until the next delivery, in seconds or as a timedelta.
        reason: a text for the log. Default: empty.
        max_delay: the longest allowed `delay`, in seconds or as a timedelta. A longer `delay` counts as a failure of
            the handler. So a `Retry-After` header in an unexpected unit cannot stop a queue for days. Default: an hour.

    Example: `raise RateLimited(delay=float(response.headers["Retry-After"]))`
    """

    def __init__(self, delay: Duration, reason: str = "", max_delay: Duration = 3600.0) -> None:
        super().__init__(delay, reason, max_delay)
        self.delay = delay
        self.reason = reason
        self.max_delay = max_delay
