"""Deliveries of this process, from their claim until Redis has their outcome, and the calls of handlers with them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import msgspec

from reliq.message import BARE, Delivery
from reliq.outbox.effects import inbox_keep_ms
from reliq.settlement import RELEASED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reliq.handlers.handler import Handler
    from reliq.handlers.job import Job
    from reliq.keys import Keys
    from reliq.message import Claimed
    from reliq.settlement import Outcome

#: A cancelled coroutine has this long to end before its slot counts as hung.
CANCEL_SECONDS = 5.0


class HeldDelivery(msgspec.Struct, eq=False, gc=False):
    """
    One delivery in this process.

    Two deliveries of one message have the same id and can be here at once, so objects are compared, never ids.

    Attributes:
        queue: the name of its queue.
        keys: those of the queue's shard that it was claimed from.
        delivery: without its body until that is read.
        size: of its value, when that is too large to be read unasked.
        fetched_at: when it was claimed.
        held_since: since when it could have started: not before its body is read, for which it has its lease.
        lease_until: until when no other consumer can have it, by the monotonic clock, counted from before the
            claim or renewal was sent.
        renew_at: when its lease is to be extended next.
        must_start: it may not wait in a buffer: a suspect, or a message with no retry left.
        started: its handler has begun.
        took_ms: how long its handler took for it.
        lost: its receipt no longer holds.
        cancelled: its message was cancelled meanwhile.
        abandoned: its handler overran its time, goes on all the same, and its lease is left to end.
        settling: its outcome is on the way to Redis.
        outcome: what that is; meaningless before.
        tried: its outcome may have reached Redis without our knowing.
        trace_id: of the trace that its handling is a part of; empty without one.
    """

    delivery: Delivery
    handler: Handler
    queue: str
    keys: Keys
    fetched_at: float
    held_since: float
    lease_until: float
    renew_at: float
    must_start: bool
    started: bool = False
    took_ms: int = 0
    lost: bool = False
    cancelled: bool = False
    abandoned: bool = False
    settling: bool = False
    outcome: Outcome = RELEASED
    tried: bool = False
    trace_id: str = ""
    size: int = 0

    @property
    def inbox_keep_ms(self) -> int:
        """For how long after its first delivery its message may be delivered again."""
        return inbox_keep_ms(self.handler.queue.settings, self.handler.settings)

    def leased(self, at: float) -> None:
        """Move the lease on: a renewal sent at `at` was granted."""
        lease = self.handler.lease_seconds
        self.lease_until, self.renew_at = at + lease, at + lease / 3


def deliveries_of(
    claimed: Sequence[Claimed], handler: Handler, leased_at: float, keys: Keys | None = None
) -> list[HeldDelivery]:
    """Return a delivery for each of `claimed`, whose claim from the shard `keys`, or the first, was sent at `leased_at`."""
    keys = keys or handler.queue.keys
    now, lease, queue = time.monotonic(), handler.lease_seconds, handler.queue_name
    until, renew_at = leased_at + lease, leased_at + lease / 3
    return [
        HeldDelivery(
            Delivery(one, b"", BARE, b""),
            handler,
            queue,
            keys,
            now,
            now + lease,
            until,
            renew_at,
            one.deaths > 0 or one.left <= 0,
        )
        for one in claimed
    ]


class HandlerCall(msgspec.Struct, eq=False):
    """
    One call of a handler.

    Attributes:
        deliveries: one, or what a batch handler takes at once.
        started_at: by the monotonic clock.
        timeout_at: when the handler has had its time, None for no limit.
        began: the handler was called.
        abandoned: it overran its time.
        thread, task: the thread it runs in; its asyncio task, if it is a coroutine.
    """

    deliveries: list[HeldDelivery]
    handler: Handler
    started_at: float
    timeout_at: float | None
    began: bool = True
    abandoned: bool = False
    thread: int = 0
    task: Any = None

    def abandon(self) -> None:
        """Note that the handler overran its time; a coroutine is cancelled, a thread cannot be ended."""
        self.abandoned = True
        if not self.handler.is_async:
            self.leave_leases()

    def leave_leases(self) -> None:
        """Leave the leases to end: only the end of the process ends the handler."""
        for held in self.deliveries:
            held.abandoned = True

    def arguments(self, jobs: list[Job[Any]]) -> tuple[Any, ...]:
        """Return what the handler is called with for `jobs`."""
        handler = self.handler
        if handler.is_batch:
            bodies = [job.body for job in jobs]
            return (bodies, jobs) if handler.takes_job else (bodies,)
        (job,) = jobs
        return (job.body, job) if handler.takes_job else (job.body,)

    @property
    def unanswered(self) -> list[HeldDelivery]:
        """The deliveries whose outcome is not on its way."""
        for held in self.deliveries:
            if held.settling:
                return [held for held in self.deliveries if not held.settling]
        return self.deliveries

    @property
    def hangs(self) -> bool:
        """Whether it overran its time and only the end of the process ends it."""
        if not self.handler.is_async:
            return self.abandoned
        now = time.monotonic()
        return self.abandoned and now > (self.timeout_at or now) + CANCEL_SECONDS
