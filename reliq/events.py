"""
Events: values that say what happened, and the observers that are called with them.

Logs, metrics and the tests' recorder are observers of the same events. An observer that raises does no harm: `notify`
goes on with the next.
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
        outcomes: what became of the messages -> of how many: `published`, `duplicate`, `tombstoned`; of a call that
            failed `refused`, or `unknown` when Redis may have them.
    """

    seconds: float
    outcomes: Mapping[str, int]


class Promoted(Event, frozen=True, gc=False):
    """Messages came due."""

    count: int


class Claimed(OfMessages, frozen=True, gc=False):
    """Messages were leased to this process."""


class Reclaimed(Event, frozen=True, gc=False):
    """Leases ran out (`overdue`), nacked messages came due again (`again`), or had no retry left (`buried`)."""

    overdue: tuple[str, ...]
    again: tuple[str, ...]
    buried: tuple[str, ...]


class Inconsistent(OfMessages, frozen=True, gc=False):
    """The retry count of these messages was missing or no number; it was taken as 0."""


class Acked(OfMessages, frozen=True, gc=False):
    """Messages ended well."""


class Expired(OfMessages, frozen=True, gc=False):
    """Messages were gone before their delivery could start: their TTL passed, or they were evicted."""


class Nacked(OfMessages, frozen=True, gc=False):
    """Messages failed or were rejected."""


class Snoozed(OfMessages, frozen=True, gc=False):
    """Messages were put off by their handler."""


class Throttled(OfMessages, frozen=True, gc=False):
    """
    Messages went back because their handler was rate limited, and their keys sleep for `seconds`.

    Attributes:
        keys: those that sleep; an empty text for the queue.
    """

    keys: tuple[str, ...]
    seconds: float


class Released(OfMessages, frozen=True, gc=False):
    """Messages that had not started went back."""


class Lost(OfMessages, frozen=True, gc=False):
    """The leases of these messages had run out when `verb` (ack, nack, extend, …) came: it changed nothing."""

    verb: str


class Cancelled(OfMessages, frozen=True, gc=False):
    """Messages were cancelled."""


class Collected(OfMessages, frozen=True, gc=False):
    """Messages became dead letters."""


class Redriven(OfMessages, frozen=True, gc=False):
    """Dead letters were published again."""


class Purged(Event, frozen=True, gc=False):
    """Messages were deleted by an operator."""

    count: int


class Ticked(Event, frozen=True, gc=False):
    """
    A periodic entry went on to its tick `at`, in unix seconds, or was run because somebody asked for it.

    Attributes:
        outcome: `published`; `paused` or `overlap` when the tick was skipped; `missed` when nobody was there in time.
        missed: how many ticks before it were missed, itself included when it was.
    """

    entry: str
    at: int
    outcome: TickOutcome
    missed: int


class Superseded(Event, frozen=True, gc=False):
    """Another schedule of a periodic entry is in force: this process lets the entry be, for a newer one has it."""

    entry: str


class Started(Event, frozen=True, gc=False):
    """A handler begins with message `id`; `lag`: seconds since it was due, by this machine's clock, None when unknown."""

    id: str
    attempt: int | None
    lag: float | None


class Handled(Event, frozen=True, gc=False):
    """
    A handler ended with `outcome` after `seconds`.

    Attributes:
        attempt: 1 for the first delivery; None for a bare body.
        seconds: how long the handler ran; of a batch, the share of one message.
        error: the reason; for an exception its class and text, which may hold a piece of the body.
        raised: class and place of an exception, which never hold a piece of the body; empty without one.
        failed: an exception, a timeout, a body that does not decode, or a `Nack` with no retry left.
        trace_id: of the trace that the delivery is a part of, as `Job.trace_id` has it; empty without one.
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
        cause: `redis` when Redis took most of that time to answer the renewal before; else `process`: something held
            this process up.
    """

    seconds: float
    cause: Literal["process", "redis"] = "process"


class WentBack(Event, frozen=True, gc=False):
    """
    The queue's account went back, from `before` claims to `after`: it is another data set.

    Redis was flushed, came back without its data, or a replica that lagged behind was promoted.
    """

    before: int
    after: int


class RedisAway(Event, frozen=True, gc=False):
    """
    A part of the worker could not reach Redis; it tries again.

    `queue` is empty when nobody answered, and names a queue of which a server is away while others answer. `refusal` is
    the code of an answer by which Redis refused for now, for example READONLY.
    """

    part: str
    error: str
    refusal: str = ""


class RedisBack(Event, frozen=True, gc=False):
    """A part of the worker that could not reach Redis has reached it; `queue` is the same as in its `RedisAway`."""

    part: str


class RedisRefused(Event, frozen=True, gc=False):
    """Redis refused a command of a part of the worker, which tries again; `queue` is empty when it was for none."""

    part: str
    error: str


class OutboxSeen(Event, frozen=True, gc=False):
    """
    A relay counted the rows that wait, up to 100,000, and the seconds since the oldest. `queue` is empty.

    While the database fails, the relay repeats the last count, and the seconds grow.
    """

    waiting: int
    oldest_seconds: float


class DatabaseAway(Event, frozen=True, gc=False):
    """The database of a relay was away or refused a statement; the relay tries again. `queue` is empty."""

    error: str


class DatabaseBack(Event, frozen=True, gc=False):
    """The database of a relay answers again. `queue` is empty."""


class WorkerReady(Event, frozen=True, gc=False):
    """This process begins to work on `queues`. `queue` is empty."""

    queues: tuple[str, ...]


class WorkerStopping(Event, frozen=True, gc=False):
    """No more is claimed; `running` handlers have `grace` seconds: told at first and every 5 s. `queue` is empty."""

    running: int
    grace: float


class ProcessEnded(Event, frozen=True, gc=False):
    """A worker process ended; `reason` says why it is replaced, empty when it is not. `queue` is empty."""

    pid: int
    reason: str


class Observer(Protocol):
    """
    A callable that is called with every event.

    An observer with an attribute `kinds`, a tuple of event classes, may be called with these alone, and one whose
    `hears_success` is false at the moment is not told of handlers that ended well. A worker does not make events that no
    observer wants: those of single messages are most of the cost of watching.

    Example: `Consumer(observers=[lambda event: print(event)])`
    """

    def __call__(self, event: Event, /) -> None:
        """Take note of `event`. It is called in the thread where that happened, which waits: be quick."""


def wanting(observers: Iterable[Observer], kind: type[Event]) -> list[Observer]:
    """Return the observers that want events of `kind`."""
    return [one for one in observers if issubclass(kind, getattr(one, "kinds", Event))]


def notify(observers: Iterable[Observer], events: Iterable[Event]) -> None:
    """Call every observer with every event; go on with the next when one raises, even what would end the thread."""
    for event in events:
        for observer in observers:
            try:
                observer(event)
            except KeyboardInterrupt:
                raise
            except BaseException:  # noqa: S112  cheaper than `suppress`, for every message that is worked
                continue
