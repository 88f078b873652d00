"""One delivery in this process, from its claim until Redis has its outcome."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from reliq.message import BARE, Claimed, Delivery

if TYPE_CHECKING:
    from reliq.handler import Handler


class Flight:
    """
    One delivery in this process.

    Attributes:
        queue: the name of its queue.
        delivery: without its body until that is read.
        receipt: what names this delivery; a process can hold two deliveries of one id.
        held_since: since when it could have started: not before its body is read, for which it has its lease.
        lease_until: until when no other consumer can have it, by the monotonic clock, counted from before the
            claim or renewal was sent.
        renew_at: when its lease is to be extended next.
        started_at: when its handler began, None while it is held.
        timeout_at: when its handler has had its time, None for no limit.
        lost: its receipt no longer holds.
        cancelled: its message was cancelled meanwhile.
        abandoned: its handler overran its time and its lease is left to end.
        settling: its outcome is on the way to Redis.
        thread, task: the thread its handler runs in; its asyncio task, if it is a coroutine.
    """

    __slots__ = (
        "abandoned",
        "cancelled",
        "delivery",
        "fetched_at",
        "handler",
        "held_since",
        "lease_until",
        "lost",
        "queue",
        "receipt",
        "renew_at",
        "settling",
        "started_at",
        "task",
        "thread",
        "timeout_at",
    )

    def __init__(self, claimed: Claimed, handler: Handler, leased_at: float) -> None:
        self.delivery = Delivery(claimed, b"", BARE, b"")
        self.receipt = (claimed.nonce, claimed.id)
        self.handler, self.queue = handler, handler.queue.name
        self.fetched_at = time.monotonic()
        self.held_since = self.fetched_at + handler.lease_seconds
        self.started_at: float | None = None
        self.timeout_at: float | None = None
        self.task: Any = None
        self.thread = 0
        self.lost = self.cancelled = self.abandoned = self.settling = False
        self.leased(leased_at)

    def leased(self, at: float) -> None:
        """Note that a claim or renewal sent at `at` was granted."""
        lease = self.handler.lease_seconds
        self.lease_until, self.renew_at = at + lease, at + lease / 3

    @property
    def took_ms(self) -> int:
        """For how long its handler has run by now, in ms."""
        return 0 if self.started_at is None else round((time.monotonic() - self.started_at) * 1000)

    @property
    def must_start(self) -> bool:
        """Whether it may not wait in a buffer: a suspect, or a message with no retry left."""
        claimed = self.delivery.claimed
        return claimed.suspect or claimed.left <= 0
