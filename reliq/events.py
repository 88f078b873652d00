"""
What happened, as values, and who may watch.

Logs, metrics and the tests' recorder are observers of the same events. An observer that raises
does no harm: `notify` goes on with the next.
"""

from collections.abc import Iterable, Mapping
from typing import Literal, Protocol

import msgspec


class Event(msgspec.Struct, frozen=True, gc=False):
    """Something happened to messages of `queue`."""

    queue: str


class Published(Event, frozen=True, gc=False):
    """Messages were accepted."""

    ids: tuple[str, ...]


class Unconfirmed(Event, frozen=True, gc=False):
    """Messages were published, and what their `durability` asks for was not confirmed in time."""

    ids: tuple[str, ...]
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


class Claimed(Event, frozen=True, gc=False):
    """Messages were leased to this process."""

    ids: tuple[str, ...]


class Reclaimed(Event, frozen=True, gc=False):
    """Leases ran out (`overdue`), nacked messages came due again (`again`), or had no retry left (`buried`)."""

    overdue: tuple[str, ...]
    again: tuple[str, ...]
    buried: tuple[str, ...]


class Inconsistent(Event, frozen=True, gc=False):
    """The retry count of these messages was missing or no number; it was taken as 0."""

    ids: tuple[str, ...]


class Acked(Event, frozen=True, gc=False):
    """Messages ended well."""

    ids: tuple[str, ...]


class Expired(Event, frozen=True, gc=False):
    """Messages were gone before their delivery could start: their TTL passed, or they were evicted."""

    ids: tuple[str, ...]


class Nacked(Event, frozen=True, gc=False):
    """Messages failed or were rejected."""

    ids: tuple[str, ...]


class Snoozed(Event, frozen=True, gc=False):
    """Messages were put off by their handler."""

    ids: tuple[str, ...]


class Released(Event, frozen=True, gc=False):
    """Messages that had not started went back."""

    ids: tuple[str, ...]


class Lost(Event, frozen=True, gc=False):
    """These receipts no longer held when `verb` came: the lease had run out and the message went on without us."""

    ids: tuple[str, ...]
    verb: str


class Cancelled(Event, frozen=True, gc=False):
    """Messages were cancelled."""

    ids: tuple[str, ...]


class Collected(Event, frozen=True, gc=False):
    """Messages became dead letters."""

    ids: tuple[str, ...]


class Redriven(Event, frozen=True, gc=False):
    """Dead letters were published again."""

    ids: tuple[str, ...]


class Purged(Event, frozen=True, gc=False):
    """Messages were deleted by an operator."""

    count: int


class Started(Event, frozen=True, gc=False):
    """A handler begins with `id`; `lag` is seconds since it was due, by this machine's clock, or None."""

    id: str
    attempt: int | None
    lag: float | None


class Handled(Event, frozen=True, gc=False):
    """
    A handler ended with `outcome` after `seconds`.

    Attributes:
        error: why; of an exception its class and text, and a text may hold a piece of the body.
        raised: class and place of an exception, which hold none; empty when `error` is no exception's.
        failed: an exception, a timeout, a body that does not decode, or a `Nack` after which no retry is left.
        trace_id: of the trace that the delivery is a part of, as `Job.trace_id` has it; empty without one.
    """

    id: str
    attempt: int | None
    outcome: Literal["ack", "nack", "reject", "snooze", "timeout"]
    seconds: float
    error: str = ""
    raised: str = ""
    failed: bool = False
    trace_id: str = ""


class RenewalLate(Event, frozen=True, gc=False):
    """
    A lease was renewed `seconds` later than planned.

    Attributes:
        cause: `redis` when most of that time Redis took to answer the renewal before, else `process`: something held
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
    """A part of the worker could not reach Redis; it tries again. `queue` is empty."""

    part: str
    error: str


class RedisBack(Event, frozen=True, gc=False):
    """A part of the worker that could not reach Redis has reached it. `queue` is empty."""

    part: str


class RedisRefused(Event, frozen=True, gc=False):
    """Redis refused a command of a part of the worker, which tries again; `queue` is empty when it was for none."""

    part: str
    error: str


class WorkerReady(Event, frozen=True, gc=False):
    """This process begins to work on `queues`. `queue` is empty."""

    queues: tuple[str, ...]


class WorkerStopping(Event, frozen=True, gc=False):
    """This process claims no more; `running` handlers have up to `grace` seconds to end. `queue` is empty."""

    running: int
    grace: float


class ProcessEnded(Event, frozen=True, gc=False):
    """A worker process ended; `reason` says why it is replaced, empty when it is not. `queue` is empty."""

    pid: int
    reason: str


class Observer(Protocol):
    """
    Whoever wants to know.

    One that has `kinds`, a tuple of classes of events, may be told of these alone: a worker does not even make what
    nobody wants, and the events of single messages are most of what watching costs.
    """

    def __call__(self, event: Event, /) -> None:
        """Take note of `event`; called in the thread where it happened, so be quick."""


def wanting(observers: Iterable[Observer], kind: type[Event]) -> list[Observer]:
    """Return those of `observers` that want events of `kind`."""
    return [one for one in observers if issubclass(kind, getattr(one, "kinds", Event))]


def notify(observers: Iterable[Observer], events: Iterable[Event]) -> None:
    """Tell every observer of every event; one that raises is passed over, also when it would end the thread."""
    for event in events:
        for observer in observers:
            try:
                observer(event)
            except KeyboardInterrupt:
                raise
            except BaseException:  # noqa: S112  cheaper than `suppress`, for every message that is worked
                continue
