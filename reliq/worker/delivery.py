"""One delivery in this process, from its claim until Redis has its outcome."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec

from reliq.message import BARE, Delivery
from reliq.settlement import RELEASED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reliq.handlers.handler import Handler
    from reliq.message import Claimed
    from reliq.settlement import Outcome


class HeldDelivery(msgspec.Struct, eq=False, gc=False):
    """
    One delivery in this process; a process can hold two of one message, so it is known by itself, not by its id.

    Attributes:
        queue: the name of its queue.
        delivery: without its body until that is read.
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
        abandoned: its handler overran its time and its lease is left to end.
        settling: its outcome is on the way to Redis.
        outcome: what that is; meaningless before.
        tried: its outcome may have reached Redis without our knowing.
    """

    delivery: Delivery
    handler: Handler
    queue: str
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

    def leased(self, at: float) -> None:
        """Note that a renewal sent at `at` was granted."""
        lease = self.handler.lease_seconds
        self.lease_until, self.renew_at = at + lease, at + lease / 3


def deliveries_of(claimed: Sequence[Claimed], handler: Handler, leased_at: float) -> list[HeldDelivery]:
    """Return a held for each of `claimed`, whose claim was sent at `leased_at`."""
    now, lease, name = time.monotonic(), handler.lease_seconds, handler.queue.name
    until, renew_at = leased_at + lease, leased_at + lease / 3
    return [
        HeldDelivery(
            Delivery(one, b"", BARE, b""),
            handler,
            name,
            now,
            now + lease,
            until,
            renew_at,
            one.suspect or one.left <= 0,
        )
        for one in claimed
    ]
