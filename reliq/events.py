"""
Events of messages and worker processes, and the function that calls observers with them.

The logs and the metrics of reliq are observers of these events. If an observer raises an exception, `notify` ignores
the exception and calls the next observer.
"""

from collections.abc import Iterable, Mapping
from typing import Literal, Protocol

import msgspec

TickOutcome = Literal["published", "paused", "overlap", "missed"]


class Event(msgspec.Struct, frozen=True, gc=False):
    """
    The base class of all events.

    Attributes:
        queue: the name of the queue; empty if the event does not belong to a queue.
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
    Messages were published, but the replicas or disks that `durability` requires did not confirm them in time.

    Attributes:
        why: which confirmations are missing, as text.
    """

    why: str


class PublishEnded(Event, frozen=True, gc=False):
    """
    A script call that publishes messages has ended, successfully or not.

    Attributes:
        seconds: how long the script call took.
        outcomes: the number of messages for each outcome. Outcomes are `published` and the other values of
            `Receipt.status`. If the script call failed, the outcome is `refused`, or `unknown` if Redis may have stored
            the messages.
    """

    seconds: float
    outcomes: Mapping[str, int]


class Promoted(Event, frozen=True, gc=False):
    """
    Scheduled messages have become due.

    Attributes:
        count: the number of messages.
    """

    count: int


class Claimed(OfMessages, frozen=True, gc=False):
    """This process has claimed messages, so it now has their leases."""


class Reclaimed(Event, frozen=True, gc=False):
    """
    A worker reclaimed messages in the state `unack`, because their lease had expired or their backoff had ended.

    Attributes:
        overdue: the ids of messages whose lease expired and that will be redelivered.
        again: the ids of messages whose backoff ended and that will be redelivered.
        buried: the ids of messages that have no retry left and will become dead letters.
    """

    overdue: tuple[str, ...]
    again: tuple[str, ...]
    buried: tuple[str, ...]


class Inconsistent(OfMessages, frozen=True, gc=False):
    """Messages cannot be retried, because their number of retries was missing in Redis or was not a number."""


class Acked(OfMessages, frozen=True, gc=False):
    """Messages were acked, because their handlers succeeded."""


class Expired(OfMessages, frozen=True, gc=False):
    """Messages expired before they were delivered, or Redis evicted them from memory."""


class Nacked(OfMessages, frozen=True, gc=False):
    """Messages were nacked or rejected, for example because their handlers failed."""


class Snoozed(OfMessages, frozen=True, gc=False):
    """Messages were postponed without using up a retry, for example because their handlers returned `Snooze`."""


class Throttled(OfMessages, frozen=True, gc=False):
    """
    Message keys were throttled, because handlers raised or returned `RateLimited`.

    The messages of these handlers were returned to their queue.

    Attributes:
        keys: the throttled message keys. An empty text means that the whole queue is throttled.
        seconds: how long the keys are throttled.
    """

    keys: tuple[str, ...]
    seconds: float


class Released(OfMessages, frozen=True, gc=False):
    """Messages were returned to the queue without using up a retry, for example during a shutdown."""


class LeaseLost(OfMessages, frozen=True, gc=False):
    """
    Redis refused to ack or nack messages or to renew their leases, because this process no longer has the leases.

    Attributes:
        verb: the refused operation, for example ack, nack or extend.
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
    An operator purged messages of the queue, which deleted them.

    Attributes:
        count: the number of messages.
    """

    count: int


class Ticked(Event, frozen=True, gc=False):
    """
    The message of a periodic job for one due time (tick) was published, or the tick was skipped or missed.

    This event is also sent when an operator runs a periodic job.

    Attributes:
        entry: the name of the periodic job.
        at: the planned time of the tick, in unix seconds.
        outcome: `published`: the message was published. `paused`: the tick was skipped, because the job is paused.
            `overlap`: the tick was skipped, because the previous message has not ended. `missed`: no process published
            the message in time.
        missed: how many ticks were missed since the last tick that was published or skipped. If `outcome` is `missed`,
            this tick is counted too. If `outcome` is `paused`, the number is 0.
    """

    entry: str
    at: int
    outcome: TickOutcome
    missed: int


class ScheduleReplaced(Event, frozen=True, gc=False):
    """
    A newer process has declared a different schedule for a periodic job of this process.

    This process no longer publishes messages of the job.

    Attributes:
        entry: the name of the periodic job.
    """

    entry: str


class Started(Event, frozen=True, gc=False):
    """
    A handler starts to process a message.

    Attributes:
        id: the message id.
        attempt: the number of the delivery; 1 for the first delivery, None for a message without reliq's header.
        lag: the time since the due time of the message, in seconds, by the clock of this host. None if the due time is
            not known.
    """

    id: str
    attempt: int | None
    lag: float | None


class Handled(Event, frozen=True, gc=False):
    """
    A handler has ended or has exceeded its timeout.

    A handler of batches causes one event for each message of the batch.

    Attributes:
        id: the message id.
        attempt: the number of the delivery; 1 for the first delivery, None for a message without reliq's header.
        outcome: `ack`, `nack`, `reject`, `snooze`, `rate_limited` or `timeout`.
        seconds: how long the handler ran. For a batch, this time is divided by the number of messages.
        error: the reason for the outcome. For an exception, this is its class and text, which may contain parts of the
            body.
        raised: class and source lines of the exception, without parts of the body. Empty if no exception was raised.
        failed: whether the cause was an exception, a timeout, a body that cannot be decoded, or a `Nack` without
            retries left.
        trace_id: the OpenTelemetry trace id of the delivery, see `Job.trace_id`. Empty if there is no trace.
        task: the name of the task. `unknown` if this worker does not have the task; empty in a queue without tasks.
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
        seconds: how much later than planned.
        cause: `redis`: this process spent most of the delay waiting until Redis replied to the previous renewal.
            `process`: this process itself was delayed.
    """

    seconds: float
    cause: Literal["process", "redis"] = "process"


class CountersRegressed(Event, frozen=True, gc=False):
    """
    The counter of claimed messages in Redis has decreased, so Redis has lost data of the queue.

    Possible causes: Redis was flushed, it was restarted without its data, or a replica without the newest data became
    the primary.

    Attributes:
        before: the value of the counter when this process last read it.
        after: the current value of the counter.
    """

    before: int
    after: int


class RedisUnavailable(Event, frozen=True, gc=False):
    """
    A component of the worker could not reach Redis. It tries again.

    `queue` is empty if all Redis servers are unavailable. If only some servers are unavailable, `queue` is the name of
    a queue on such a server.

    Attributes:
        part: the component of the worker, for example `fetcher` or `settler`.
        error: the text of the error.
        refusal: if Redis replied with a temporary error, the error code, for example READONLY; otherwise empty.
    """

    part: str
    error: str
    refusal: str = ""


class RedisRecovered(Event, frozen=True, gc=False):
    """
    A component of the worker has reached Redis again. `queue` is the same as in its event `RedisUnavailable`.

    A worker that has started always sends this event, even without an event `RedisUnavailable` before.

    Attributes:
        part: the component of the worker.
    """

    part: str


class RedisRefused(Event, frozen=True, gc=False):
    """
    Redis refused a command of a component of the worker. The component tries again.

    `queue` may be empty.

    Attributes:
        part: the component of the worker.
        error: the text of the error.
    """

    part: str
    error: str


class OutboxSeen(Event, frozen=True, gc=False):
    """
    An outbox relay has counted the messages in its outbox table that are not published yet. `queue` is empty.

    While the database is unavailable, the relay repeats this event with the last number and an increasing age.

    Attributes:
        waiting: the number of these messages, at most 100,000.
        oldest_seconds: the age of the oldest of these messages, in seconds.
    """

    waiting: int
    oldest_seconds: float


class DatabaseUnavailable(Event, frozen=True, gc=False):
    """
    The database of an outbox relay is unavailable or refused an SQL statement. The relay tries again.

    `queue` is empty.

    Attributes:
        error: the text of the error.
    """

    error: str


class DatabaseRecovered(Event, frozen=True, gc=False):
    """The database of an outbox relay is available again. `queue` is empty."""


class WorkerReady(Event, frozen=True, gc=False):
    """
    This worker process has started to claim messages. `queue` is empty.

    Attributes:
        queues: the names of the queues from which it claims messages.
    """

    queues: tuple[str, ...]


class WorkerStopping(Event, frozen=True, gc=False):
    """
    This worker process is shutting down. The event is repeated every 5 s until the end. `queue` is empty.

    Attributes:
        running: the number of running handlers.
        grace: how many seconds these handlers still have to finish.
    """

    running: int
    grace: float


class ProcessEnded(Event, frozen=True, gc=False):
    """
    A worker process ended. `queue` is empty.

    Attributes:
        pid: the process id.
        reason: why a new process replaces this process, in one word; empty if no process replaces it.
    """

    pid: int
    reason: str


class Observer(Protocol):
    """
    A function or other callable that is called with every event.

    If the observer has an attribute `kinds`, a tuple of event classes, it is called only with events of these classes.
    If it has an attribute `wants_success` that is False, it is not called when a handler ends successfully. Both
    attributes save time, because a worker does not create events that no observer accepts, and creating an event for
    each message is expensive.

    Example: `Consumer(observers=[lambda event: print(event)])`
    """

    def __call__(self, event: Event, /) -> None:
        """Process an event. Return quickly, because the thread that caused the event waits for all observers."""


def wanting(observers: Iterable[Observer], kind: type[Event]) -> list[Observer]:
    """Return the observers that accept events of the class `kind`."""
    return [one for one in observers if issubclass(kind, getattr(one, "kinds", Event))]


def notify(observers: Iterable[Observer], events: Iterable[Event]) -> None:
    """
    Call every observer with every event.

    Exceptions that observers raise are ignored, even SystemExit, but not KeyboardInterrupt.
    """
    for event in events:
        for observer in observers:
            try:
                observer(event)
            except KeyboardInterrupt:
                raise
            except BaseException:  # noqa: S112  faster than `suppress`, and runs for every message
                continue
