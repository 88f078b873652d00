"""
Events of messages and processes. Observers are called with events.

Logs, metrics and the tests' recorder are observers of the same events. An observer that raises does no harm: `notify`
continues with the next observer.
"""

from collections.abc import Iterable, Mapping
from typing import Literal, Protocol

import msgspec

TickOutcome = Literal["published", "paused", "overlap", "missed"]


class Event(msgspec.Struct, frozen=True, gc=False):
    """Something happened to messages of `queue`."""

    queue: str


class OfMessages(Event, frozen=True, gc=False):
    """Something happened to the messages of these ids."""

    ids: tuple[str, ...]


class Published(OfMessages, frozen=True, gc=False):
    """Messages were accepted."""


class Unconfirmed(OfMessages, frozen=True, gc=False):
    """Messages were published, and the confirmations that their `durability` asks for did not come in time."""

    why: str


class PublishEnded(Event, frozen=True, gc=False):
    """
    A call that publishes messages ended after `seconds`.

    Attributes:
        outcomes: outcome -> number of messages: `published`, `duplicate` or `tombstoned`; for a failed call `refused`,
            or `unknown` when Redis may have the messages.
    """

    seconds: float
    outcomes: Mapping[str, int]


class Promoted(Event, frozen=True, gc=False):
    """Messages came due."""

    count: int


class Claimed(OfMessages, frozen=True, gc=False):
    """Messages were leased to this process."""


class Reclaimed(Event, frozen=True, gc=False):
    """Leases expired (`overdue`), nacked messages came due again (`again`), or had no retry left (`buried`)."""

    overdue: tuple[str, ...]
    again: tuple[str, ...]
    buried: tuple[str, ...]


class Inconsistent(OfMessages, frozen=True, gc=False):
    """The retry count of these messages was missing or no number, so it was read as 0."""


class Acked(OfMessages, frozen=True, gc=False):
    """Messages ended well."""


class Expired(OfMessages, frozen=True, gc=False):
    """Messages were gone before their delivery could start: their TTL passed, or they were evicted."""


class Nacked(OfMessages, frozen=True, gc=False):
    """Messages failed or were rejected."""


class Snoozed(OfMessages, frozen=True, gc=False):
    """A handler postponed messages."""


class Throttled(OfMessages, frozen=True, gc=False):
    """
    Messages were returned because their handler was rate limited, and their keys sleep for `seconds`.

    Attributes:
        keys: the keys that sleep; an empty text for the whole queue.
    """

    keys: tuple[str, ...]
    seconds: float


class Released(OfMessages, frozen=True, gc=False):
    """Messages that had not started were returned to the queue."""


class LeaseLost(OfMessages, frozen=True, gc=False):
    """The lease had expired before `verb` (ack, nack, extend, …), so the call changed nothing for these messages."""

    verb: str


class Cancelled(OfMessages, frozen=True, gc=False):
    """Messages were cancelled."""


class DeadLettered(OfMessages, frozen=True, gc=False):
    """Messages became dead letters."""


class Redriven(OfMessages, frozen=True, gc=False):
    """Dead letters were published again."""


class Purged(Event, frozen=True, gc=False):
    """Messages were deleted by an operator."""

    count: int


class Ticked(Event, frozen=True, gc=False):
    """
    The tick `at`, in unix seconds, of a periodic job is done, or an operator ran the job.

    Attributes:
        outcome: `published`; `paused` or `overlap` when the tick was skipped; `missed` when no process published it in
            time.
        missed: how many ticks were missed, this tick included.
    """

    entry: str
    at: int
    outcome: TickOutcome
    missed: int


class ScheduleReplaced(Event, frozen=True, gc=False):
    """A newer process has another schedule for a periodic job, so this process no longer publishes the job."""

    entry: str


class Started(Event, frozen=True, gc=False):
    """A handler starts message `id`, `lag` seconds after its due time by this machine's clock; None when unknown."""

    id: str
    attempt: int | None
    lag: float | None


class Handled(Event, frozen=True, gc=False):
    """
    A handler ended with `outcome` after `seconds`.

    Attributes:
        attempt: 1 for the first delivery; None for a bare body.
        seconds: how long the handler ran; for a batch the share of one message.
        error: the reason; for an exception its class and text, which may hold a part of the body.
        raised: class and place of an exception, which never hold a part of the body; empty without an exception.
        failed: an exception, a timeout, a body that does not decode, or a `Nack` with no retry left.
        trace_id: the trace of the delivery, as in `Job.trace_id`; empty without a trace.
    """

    id: str
    attempt: int | None
    outcome: Literal["ack", "nack", "reject", "snooze", "rate_limited", "timeout"]
    seconds: float
    error: str = ""
    raised: str = ""
    failed: bool = False
    trace_id: str = ""


class RenewalLate(Event, frozen=True, gc=False):
    """
    A lease was renewed `seconds` later than planned.

    Attributes:
        cause: `redis` when Redis took most of the time to answer the previous renewal; otherwise `process`: something
            delayed this process.
    """

    seconds: float
    cause: Literal["process", "redis"] = "process"


class CountersRegressed(Event, frozen=True, gc=False):
    """
    The queue's count of claims decreased from `before` to `after`, so Redis has other data.

    Redis was flushed, restarted without its data, or a replica that lagged behind was promoted.
    """

    before: int
    after: int


class RedisUnavailable(Event, frozen=True, gc=False):
    """
    A part of the worker could not reach Redis; it tries again.

    `queue` is empty when no server answered. It names a queue when a server of the queue is away and others answer.
    `refusal` is the code of a temporary refusal by Redis, for example READONLY.
    """

    part: str
    error: str
    refusal: str = ""


class RedisRecovered(Event, frozen=True, gc=False):
    """A part of the worker reached Redis again; `queue` is the same as in its `RedisUnavailable`."""

    part: str


class RedisRefused(Event, frozen=True, gc=False):
    """Redis refused a command of a part of the worker, which tries again; `queue` may be empty."""

    part: str
    error: str


class OutboxSeen(Event, frozen=True, gc=False):
    """
    A relay counted the waiting rows, up to 100,000, and read the age of the oldest. `queue` is empty.

    While the database fails, the relay repeats the last count, and the seconds grow.
    """

    waiting: int
    oldest_seconds: float


class DatabaseUnavailable(Event, frozen=True, gc=False):
    """The database of a relay was away or refused a statement; the relay tries again. `queue` is empty."""

    error: str


class DatabaseRecovered(Event, frozen=True, gc=False):
    """The database of a relay answers again. `queue` is empty."""


class WorkerReady(Event, frozen=True, gc=False):
    """This process starts to work on `queues`. `queue` is empty."""

    queues: tuple[str, ...]


class WorkerStopping(Event, frozen=True, gc=False):
    """This process stops; `running` handlers have `grace` seconds left. Repeated every 5 s. `queue` is empty."""

    running: int
    grace: float


class ProcessEnded(Event, frozen=True, gc=False):
    """A worker process ended; `reason` is why it is replaced, empty when it is not. `queue` is empty."""

    pid: int
    reason: str


class Observer(Protocol):
    """
    A callable that is called with every event.

    An observer with an attribute `kinds`, a tuple of event classes, is called with these classes only. While its
    `wants_success` is false, it gets no events of handlers that ended well. A worker creates no events that no observer
    wants: events of single messages are most of the cost of observers.

    Example: `Consumer(observers=[lambda event: print(event)])`
    """

    def __call__(self, event: Event, /) -> None:
        """Handle `event`. The thread of the event calls it and waits, so it must be quick."""


def wanting(observers: Iterable[Observer], kind: type[Event]) -> list[Observer]:
    """Return the observers for events of `kind`."""
    return [one for one in observers if issubclass(kind, getattr(one, "kinds", Event))]


def notify(observers: Iterable[Observer], events: Iterable[Event]) -> None:
    """Call every observer with every event; continue after any exception, even one that would end the thread."""
    for event in events:
        for observer in observers:
            try:
                observer(event)
            except KeyboardInterrupt:
                raise
            except BaseException:  # noqa: S112  cheaper than `suppress`, for every message
                continue
