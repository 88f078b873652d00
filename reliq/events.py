"""
What happened, as values, and who may watch.

Logs, metrics and the tests' recorder are observers of the same events. An observer that raises
does no harm: `notify` goes on with the next.
"""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, Protocol


@dataclass(frozen=True, slots=True)
class Event:
    """Something happened to messages of `queue`."""

    queue: str


@dataclass(frozen=True, slots=True)
class Published(Event):
    """Messages were accepted."""

    ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Unconfirmed(Event):
    """Messages were published, and what their `durability` asks for was not confirmed in time."""

    ids: tuple[str, ...]
    why: str


@dataclass(frozen=True, slots=True)
class Promoted(Event):
    """Messages came due."""

    count: int


@dataclass(frozen=True, slots=True)
class Claimed(Event):
    """Messages were leased to this process."""

    ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Reclaimed(Event):
    """Leases ran out (`overdue`), nacked messages came due again (`again`), or had no retry left (`buried`)."""

    overdue: tuple[str, ...]
    again: tuple[str, ...]
    buried: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Inconsistent(Event):
    """The retry count of these messages was missing or no number; it was taken as 0."""

    ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Acked(Event):
    """Messages ended well."""

    ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Expired(Event):
    """Messages were gone before their delivery could start: their TTL passed, or they were evicted."""

    ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Nacked(Event):
    """Messages failed or were rejected."""

    ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Snoozed(Event):
    """Messages were put off by their handler."""

    ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Released(Event):
    """Messages that had not started went back."""

    ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Lost(Event):
    """These receipts no longer held when `verb` came: the lease had run out and the message went on without us."""

    ids: tuple[str, ...]
    verb: str


@dataclass(frozen=True, slots=True)
class Cancelled(Event):
    """Messages were cancelled."""

    ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Collected(Event):
    """Messages became dead letters."""

    ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Redriven(Event):
    """Dead letters were published again."""

    ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Purged(Event):
    """Messages were deleted by an operator."""

    count: int


@dataclass(frozen=True, slots=True)
class Started(Event):
    """A handler begins with `id`; `lag` is seconds since it was due, by this machine's clock, or None."""

    id: str
    attempt: int | None
    lag: float | None


@dataclass(frozen=True, slots=True)
class Handled(Event):
    """
    A handler ended with `outcome` after `seconds`.

    Attributes:
        error: why; of an exception its class and text, and a text may hold a piece of the body.
        raised: class and place of an exception, which hold none; empty when `error` is no exception's.
    """

    id: str
    attempt: int | None
    outcome: Literal["ack", "nack", "reject", "snooze", "timeout"]
    seconds: float
    error: str = ""
    raised: str = ""


@dataclass(frozen=True, slots=True)
class RenewalLate(Event):
    """A renewal came `seconds` later than it should: something held this process up."""

    seconds: float


@dataclass(frozen=True, slots=True)
class WentBack(Event):
    """
    The queue's account went back, from `before` claims to `after`: it is another data set.

    Redis was flushed, came back without its data, or a replica that lagged behind was promoted.
    """

    before: int
    after: int


@dataclass(frozen=True, slots=True)
class RedisAway(Event):
    """A part of the worker could not reach Redis; it tries again. `queue` is empty."""

    part: str
    error: str


@dataclass(frozen=True, slots=True)
class ProcessEnded(Event):
    """A worker process ended; `reason` says why it is replaced, empty when it is not. `queue` is empty."""

    pid: int
    reason: str


class Observer(Protocol):
    """Whoever wants to know."""

    def __call__(self, event: Event, /) -> None:
        """Take note of `event`; called in the thread where it happened, so be quick."""


def notify(observers: Iterable[Observer], events: Iterable[Event]) -> None:
    """Tell every observer of every event; one that raises is passed over."""
    for event in events:
        for observer in observers:
            with suppress(Exception):
                observer(event)
