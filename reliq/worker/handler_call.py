"""What one slot works on: the deliveries that a handler is called with, one, or a batch."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from reliq.handlers.handler import Handler
    from reliq.worker.delivery import HeldDelivery

#: A coroutine that was cancelled has so long to end before its slot counts as hung.
CANCEL_SECONDS = 5.0


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
