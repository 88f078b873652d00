"""
Events of messages and worker processes, and how observers are called with them.

Logs, metrics and the test kit's recorder are observers of the same events. If an observer raises, `notify` continues
with the next observer.
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
    Messages were published, but too few replicas confirmed them in time.

    Attributes:
        why: which confirmations are missing, as text.
    """

    why: str


class PublishEnded(Event, frozen=True, gc=False):
    """
    A call that publishes messages has ended, successfully or not.

    Attributes:
        seconds: the duration of the call.
        outcomes: the number of messages by outcome: `published`, `duplicate` or `tombstoned`; after a failed call
            `refused`, or `unknown` if Redis may have stored the messages.
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
    """This process has claimed messages and has their leases."""


class Reclaimed(Event, frozen=True, gc=False):
    """
    A worker reclaimed messages from `unack`, because their lease or backoff was over.

    Attributes:
        overdue: ids of messages whose lease expired; they are redelivered.
        again: ids of nacked messages whose backoff is over; they are redelivered.
        buried: ids of messages without a retry left; they become dead letters.
    """

    overdue: tuple[str, ...]
    again: tuple[str, ...]
    buried: tuple[str, ...]


class Inconsistent(OfMessages, frozen=True, gc=False):
    """Messages get no retry, because their retry count was missing or not a number."""


class Acked(OfMessages, frozen=True, gc=False):
    """Messages were acked: their handlers ended successfully."""


class Expired(OfMessages, frozen=True, gc=False):
    """Messages expired before their delivery, or Redis evicted them."""


class Nacked(OfMessages, frozen=True, gc=False):
    """Messages failed or were rejected."""


class Snoozed(OfMessages, frozen=True, gc=False):
    """A handler postponed messages."""


class Throttled(OfMessages, frozen=True, gc=False):
    """
    A handler raised or returned `RateLimited`, so message keys are throttled.

    The messages of the handler were returned to their queue.

    Attributes:
        keys: the throttled message keys; an empty text means the whole queue.
        seconds: how long the keys are throttled.
    """

    keys: tuple[str, ...]
    seconds: float


class Released(OfMessages, frozen=True, gc=False):
    """Messages were returned to the queue without using a retry, for example before a shutdown."""


class LeaseLost(OfMessages, frozen=True, gc=False):
    """
    Redis refused to settle messages or renew their leases, because the leases had expired.

    Attributes:
        verb: the refused call: ack, nack, extend, …
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
    A tick (due run) of a periodic job was published or skipped, or an operator ran the job.

    Attributes:
        entry: the name of the periodic job.
        at: the planned time of the tick, in Unix seconds.
        outcome: `published`; `paused` or `overlap` if the tick was skipped; `missed` if no process published it in
            time.
        missed: how many ticks since the last published or skipped tick were missed; counts this tick too if `outcome`
            is `missed`. 0 if `outcome` is `paused`.
    """

    entry: str
    at: int
    outcome: TickOutcome
    missed: int


class ScheduleReplaced(Event, frozen=True, gc=False):
    """
    A newer process declares another schedule for a periodic job.

    This process no longer publishes the job.

    Attributes:
        entry: the name of the periodic job.
    """

    entry: str


class Started(Event, frozen=True, gc=False):
    """
    A handler starts to process a message.

    Attributes:
        id: the message id.
        attempt: the number of the delivery, 1 for the first; None for a body without reliq's envelope.
        lag: seconds since the due time, by this machine's clock; None if unknown.
    """

    id: str
    attempt: int | None
    lag: float | None


class Handled(Event, frozen=True, gc=False):
    """
    A handler has ended or exceeded its timeout.

    For a batch, there is an event for each message.

    Attributes:
        id: the message id.
        attempt: the number of the delivery, 1 for the first; None for a body without reliq's envelope.
        outcome: `ack`, `nack`, `reject`, `snooze`, `rate_limited` or `timeout`.
        seconds: how long the handler ran; for a batch divided by the number of messages.
        error: the reason of the outcome; for an exception its class and text, which may contain parts of the body.
        raised: class and source line of an exception, without parts of the body; empty without an exception.
        failed: whether the cause was an exception, a timeout, an undecodable body, or a `Nack` without retries left.
        trace_id: the OpenTelemetry trace id of the delivery, as in `Job.trace_id`; empty without a trace.
        task: the name of the task; `unknown` for a task that this worker does not have, empty in a queue without tasks.
    """

    id: str
    attempt: int | None
    outcome: Literal["ack", "nack", "reject", "snooze", "rate_limited", "timeout"]
    seconds: float
    error: str = ""
    raised: str = ""
    failed: bool = False
    trace_id: str = ""
    task: str = ""


class RenewalLate(Event, frozen=True, gc=False):
    """
    A lease was renewed later than planned.

    Attributes:
        seconds: the delay.
        cause: `redis` if this process spent most of the delay waiting for the reply to the previous renewal; otherwise
            `process`, because the process itself was delayed.
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

    `queue` is empty if no server answered. If only some servers are unavailable, `queue` is the name of a queue on an
    unavailable server.

    Attributes:
        part: the part of the worker, for example `fetcher` or `settler`.
        error: the error, as text.
        refusal: the code of a temporary error reply, for example READONLY; empty without a reply.
    """

    part: str
    error: str
    refusal: str = ""


class RedisRecovered(Event, frozen=True, gc=False):
    """
    A part of the worker reached Redis again.

    `queue` is the same as in the event `RedisUnavailable` of this part.

    Attributes:
        part: the part of the worker.
    """

    part: str


class RedisRefused(Event, frozen=True, gc=False):
    """
    Redis refused a command of a part of the worker; the part retries.

    `queue` may be empty.

    Attributes:
        part: the part of the worker.
        error: the error, as text.
    """

    part: str
    error: str


class OutboxSeen(Event, frozen=True, gc=False):
    """
    A relay counted the waiting rows of its outbox. `queue` is empty.

    While the database is unavailable, the relay repeats the event with the last count and an increasing age.

    Attributes:
        waiting: the number of waiting rows, at most 100,000.
        oldest_seconds: the age of the oldest waiting row, in seconds.
    """

    waiting: int
    oldest_seconds: float


class DatabaseUnavailable(Event, frozen=True, gc=False):
    """
    The database of a relay was unavailable or refused a statement; the relay retries.

    `queue` is empty.

    Attributes:
        error: the error, as text.
    """

    error: str


class DatabaseRecovered(Event, frozen=True, gc=False):
    """The database of a relay answers again. `queue` is empty."""


class WorkerReady(Event, frozen=True, gc=False):
    """
    This worker process has started to claim messages. `queue` is empty.

    Attributes:
        queues: the names of the queues that it serves.
    """

    queues: tuple[str, ...]


class WorkerStopping(Event, frozen=True, gc=False):
    """
    This worker process is shutting down; the event is repeated every 5 s. `queue` is empty.

    Attributes:
        running: the number of running handlers.
        grace: the seconds that are left for these handlers.
    """

    running: int
    grace: float


class ProcessEnded(Event, frozen=True, gc=False):
    """
    A worker process ended. `queue` is empty.

    Attributes:
        pid: the process id.
        reason: why the process is replaced, in one word; empty if it is not replaced.
    """

    pid: int
    reason: str


class Observer(Protocol):
    """
    A callable that is called with every event.

    If the observer has an attribute `kinds`, a tuple of event classes, it is called only with events of these classes.
    If it has an attribute `wants_success` that is false, it is not called for handlers that ended successfully. Use both
    attributes to save time: events of single messages are expensive, and a worker does not create events that no
    observer accepts.

    Example: `Consumer(observers=[lambda event: print(event)])`
    """

    def __call__(self, event: Event, /) -> None:
        """Handle `event`; return quickly, because the thread that caused the event waits for all observers."""


def wanting(observers: Iterable[Observer], kind: type[Event]) -> list[Observer]:
    """Return the observers that accept events of the class `kind`."""
    return [one for one in observers if issubclass(kind, getattr(one, "kinds", Event))]


def notify(observers: Iterable[Observer], events: Iterable[Event]) -> None:
    """
    Call every observer with every event.

    Exceptions of observers are ignored, even SystemExit, but not KeyboardInterrupt.
    """
    for event in events:
        for observer in observers:
            try:
                observer(event)
            except KeyboardInterrupt:
                raise
            except BaseException:  # noqa: S112  faster than `suppress`, and runs for every message
                continue
