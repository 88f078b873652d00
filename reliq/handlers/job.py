"""`Job`: the message as its handler sees it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from reliq.errors import Stopped
from reliq.ids import first_published, made_at
from reliq.outbox.effects import Effects
from reliq.settings import seconds

if TYPE_CHECKING:
    import threading
    from collections.abc import Mapping

    from reliq.message import Delivery, Duration

B = TypeVar("B")


class DeliveryState(Protocol):
    """
    The delivery behind a job, as the worker keeps it.

    Attributes:
        cancelled: its message was cancelled meanwhile.
        lost: its receipt no longer holds.
        lease_until: monotonic seconds until which no other worker can have the message.
        trace_id: of the trace that its handling is a part of; empty without one.
        inbox_keep_ms: for how long after its first delivery its message may be delivered again.
    """

    queue: str
    delivery: Delivery
    cancelled: bool
    lost: bool
    lease_until: float
    trace_id: str

    @property
    def inbox_keep_ms(self) -> int:
        """See above."""


class Deadline(Protocol):
    """
    When the call of a handler must have ended.

    Attributes:
        timeout_at: monotonic seconds at which the handler has had its time, None for no limit.
    """

    timeout_at: float | None


class Job(Effects, Generic[B]):
    """
    One delivery, as its handler sees it.

    Attributes:
        id: the message's id.
        queue: the queue's name.
        body: the decoded body.
        state: what the consumer's `lifespan` yielded, None without one. A type checker takes it for anything: annotate what
            you take from it, as in `gateway: Gateway = job.state`.

    Example:
        for page in pages:
            job.check()  # ends here when the worker stops, or the message was cancelled or lost
            fetch(page)
    """

    __slots__ = ("_deadline", "_held", "_published", "_stopping", "body", "id", "queue", "state")

    def __init__(self, held: DeliveryState, deadline: Deadline, body: B, state: Any, stopping: threading.Event) -> None:
        self.id = held.delivery.claimed.id
        self.queue = held.queue
        self.body = body
        self.state = state
        self._held, self._deadline = held, deadline
        self._stopping = stopping
        self._published = 0

    def __repr__(self) -> str:
        return f"Job(queue={self.queue!r}, id={self.id!r}, attempt={self.attempt})"

    @property
    def attempt(self) -> int | None:
        """The number of this delivery, 1 for the first; None for a bare body."""
        return self._held.delivery.attempt

    @property
    def token(self) -> int:
        """
        A number above that of every earlier delivery of this message, for stores that refuse what comes late.

        In an ordered queue it is also above that of every earlier message of its key.

        Example: `UPDATE stock SET left = :left, token = :token WHERE item = :item AND token < :token`
        """
        return self._held.delivery.claimed.token

    @property
    def key(self) -> str | None:
        """The key of the message; None without one."""
        return self._held.delivery.header.key

    @property
    def _first(self) -> tuple[str, str, int]:
        return first_published(self.queue, self.id, self._held.delivery.header)

    @property
    def retries_left(self) -> int:
        """How many deliveries may follow this one."""
        return self._held.delivery.claimed.left

    @property
    def due(self) -> float | None:
        """When this delivery was due, in unix seconds by Redis' clock; None for a bare body."""
        due = self._held.delivery.header.due
        return None if due is None else due / 1000

    @property
    def enqueued(self) -> float | None:
        """When the message was published, in unix seconds by its publisher's clock; None for a bare body."""
        header = self._held.delivery.header
        if header.due is None:
            return None
        ms = header.enqueued if header.enqueued is not None else made_at(self.id)
        return None if ms is None else ms / 1000

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers given at the publish."""
        return self._held.delivery.header.headers

    @property
    def trace_id(self) -> str:
        """The trace that this delivery is a part of, 32 hexadecimal digits; empty where `reliq.tracing` records none."""
        return self._held.trace_id

    @trace_id.setter
    def trace_id(self, trace_id: str) -> None:
        self._held.trace_id = trace_id

    @property
    def stopping(self) -> bool:
        """Whether the worker is stopping: put off what can be put off."""
        return self._stopping.is_set()

    @property
    def cancelled(self) -> bool:
        """Whether the message was cancelled while it ran; known at the next renewal of its lease."""
        return self._held.cancelled

    @property
    def lost(self) -> bool:
        """Whether the lease ran out, so that another worker may have the message."""
        return self._held.lost or time.monotonic() >= self._held.lease_until

    def _ordinal(self) -> int:
        self._published += 1
        return self._published

    @property
    def _inbox_keep_ms(self) -> int:
        return self._held.inbox_keep_ms

    def check(self) -> None:
        """Raise Stopped when the worker is stopping or the message was cancelled or lost."""
        for name in ("cancelled", "lost", "stopping"):
            if getattr(self, name):
                raise Stopped(f"job {self.id} of queue {self.queue!r}: {name}")

    def extend_timeout(self, by: Duration) -> None:
        """Give the handler `by` seconds more than it would have had; a batch has one timeout for all its jobs."""
        if self._deadline.timeout_at is not None:
            self._deadline.timeout_at += seconds("by", by)
