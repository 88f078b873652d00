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
    """
    The base class of all events.

    Attributes:
        queue: the queue's name; empty for events of a whole process.
    """

    queue: str


class OfMessages(Event, frozen=True, gc=False):
    """
    The base class of events about single messages.

    Attributes:
        ids: the ids of the messages.
    """

    ids: tuple[str, ...]


class Published(OfMessages, frozen=True, gc=False):
    """Messages were published."""


class Unconfirmed(OfMessages, frozen=True, gc=False):
    """
    Messages were published, but the confirmations required by their `durability` did not come in time.

    Attributes:
        why: the missing confirmations, as text.
    """

    why: str


class PublishEnded(Event, frozen=True, gc=False):
    """
    A call that publishes messages ended.

    Attributes:
        seconds: the duration of the call.
        outcomes: outcome -> number of messages: `published`, `duplicate` or `tombstoned`; for a failed call `refused`,
            or `unknown` if Redis may have the messages.
    """

    seconds: float
    outcomes: Mapping[str, int]


class Promoted(Event, frozen=True, gc=False):
    """
    Scheduled messages are due now.

    Attributes:
        count: the number of messages.
    """

    count: int


class Claimed(OfMessages, frozen=True, gc=False):
    """Messages were leased to this process."""


class Reclaimed(Event, frozen=True, gc=False):
    """
    Messages are to be delivered again, or have no retries left.

    Attributes:
        overdue: ids of messages with an expired lease.
        again: ids of nacked messages that are due again.
        buried: ids of messages without retries left, which become dead letters.
    """

    overdue: tuple[str, ...]
    again: tuple[str, ...]
    buried: tuple[str, ...]


class Inconsistent(OfMessages, frozen=True, gc=False):
    """The retry count of these messages was missing or not a number, so it counts as 0."""


class Acked(OfMessages, frozen=True, gc=False):
    """Messages ended successfully."""


class Expired(OfMessages, frozen=True, gc=False):
    """Messages disappeared before their delivery: their TTL expired, or Redis evicted them."""


class Nacked(OfMessages, frozen=True, gc=False):
    """Messages failed or were rejected."""


class Snoozed(OfMessages, frozen=True, gc=False):
    """A handler postponed messages."""


class Throttled(OfMessages, frozen=True, gc=False):
    """
    A handler raised or returned `RateLimited`, so its messages were returned and their keys sleep.

    Attributes:
        keys: the keys that sleep; an empty text means the whole queue.
        seconds: how long they sleep.
    """

    keys: tuple[str, ...]
    seconds: float


class Released(OfMessages, frozen=True, gc=False):
    """Messages that had not started were returned to the queue."""


class LeaseLost(OfMessages, frozen=True, gc=False):
    """
    The leases of these messages had expired before a call, which changed nothing.

    Attributes:
        verb: the call: ack, nack, extend, …
    """

    verb: str


class Cancelled(OfMessages, frozen=True, gc=False):
    """Messages were cancelled."""


class DeadLettered(OfMessages, frozen=True, gc=False):
    """Messages became dead letters."""


class Redriven(OfMessages, frozen=True, gc=False):
    """Dead letters were published again."""


class Purged(Event, frozen=True, gc=False):
    """
    An operator deleted messages.

    Attributes:
        count: the number of messages.
    """

    count: int


class Ticked(Event, frozen=True, gc=False):
    """
    A tick of a periodic job is settled, or an operator ran the job.

    Attributes:
        entry: the name of the periodic job.
        at: the tick, in unix seconds.
        outcome: `published`; `paused` or `overlap` if the tick was skipped; `missed` if no process published it in
            time.
        missed: how many ticks were missed, this tick included.
    """

    entry: str
    at: int
    outcome: TickOutcome
    missed: int


class ScheduleReplaced(Event, frozen=True, gc=False):
    """
    A newer process has another schedule for a periodic job, so this process no longer publishes the job.

    Attributes:
        entry: the name of the periodic job.
    """

    entry: str


class Started(Event, frozen=True, gc=False):
    """
    A handler starts a message.

    Attributes:
        id: the message id.
        attempt: 1 for the first delivery; None for a bare body.
        lag: seconds since the due time, by this machine's clock; None if unknown.
    """

    id: str
    attempt: int | None
    lag: float | None


class Handled(Event, frozen=True, gc=False):
    """
    A handler ended.

    Attributes:
        id: the message id.
        attempt: 1 for the first delivery; None for a bare body.
        outcome: `ack`, `nack`, `reject`, `snooze`, `rate_limited` or `timeout`.
        seconds: how long the handler ran; for a batch divided by the number of messages.
        error: the reason; for an exception its class and text, which may contain parts of the body.
        raised: class and place of an exception, which never contain parts of the body; empty without an exception.
        failed: whether it was an exception, a timeout, a body that does not decode, or a `Nack` without retries left.
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
    A lease was renewed later than planned.

    Attributes:
        seconds: the delay.
        cause: `redis` if most of the delay was the reply to the previous renewal; otherwise `process`, which means that
            this process was delayed.
    """

    seconds: float
    cause: Literal["process", "redis"] = "process"


class CountersRegressed(Event, frozen=True, gc=False):
    """
    The queue's count of claims decreased, so Redis has lost data.

    Redis was flushed or restarted without its data, or a replica without the newest data was promoted.

    Attributes:
        before: the last known count of claims.
        after: the count of claims now.
    """

    before: int
    after: int


class RedisUnavailable(Event, frozen=True, gc=False):
    """
    A part of the worker could not reach Redis and retries.

    `queue` is empty if no server answered. If only some servers are unavailable, `queue` names a queue on such a
    server.

    Attributes:
        part: the part of the worker.
        error: the error, as text.
        refusal: the code of a temporary error reply, for example READONLY; empty without a reply.
    """

    part: str
    error: str
    refusal: str = ""


class RedisRecovered(Event, frozen=True, gc=False):
    """
    A part of the worker reached Redis again; `queue` is the same as in its `RedisUnavailable`.

    Attributes:
        part: the part of the worker.
    """

    part: str


class RedisRefused(Event, frozen=True, gc=False):
    """
    Redis refused a command of a part of the worker, which retries; `queue` may be empty.

    Attributes:
        part: the part of the worker.
        error: the error, as text.
    """

    part: str
    error: str


class OutboxSeen(Event, frozen=True, gc=False):
    """
    A relay counted the waiting rows of its outbox. `queue` is empty.

    While the database is unavailable, the relay repeats the last count, and the age increases.

    Attributes:
        waiting: the number of waiting rows, counted up to 100,000.
        oldest_seconds: the age of the oldest row, in seconds.
    """

    waiting: int
    oldest_seconds: float


class DatabaseUnavailable(Event, frozen=True, gc=False):
    """
    The database of a relay was unavailable or refused a statement; the relay retries. `queue` is empty.

    Attributes:
        error: the error, as text.
    """

    error: str


class DatabaseRecovered(Event, frozen=True, gc=False):
    """The database of a relay answers again. `queue` is empty."""


class WorkerReady(Event, frozen=True, gc=False):
    """
    This worker process starts claiming. `queue` is empty.

    Attributes:
        queues: the names of its queues.
    """

    queues: tuple[str, ...]


class WorkerStopping(Event, frozen=True, gc=False):
    """
    This worker process is stopping; repeated every 5 s. `queue` is empty.

    Attributes:
        running: how many handlers are running.
        grace: seconds left for them.
    """

    running: int
    grace: float


class ProcessEnded(Event, frozen=True, gc=False):
    """
    A worker process ended. `queue` is empty.

    Attributes:
        pid: its process id.
        reason: why it is replaced; empty if it is not replaced.
    """

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
