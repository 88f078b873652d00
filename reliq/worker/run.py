"""What one slot works on: the flights that a handler is called with, one, or a batch."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from reliq.handler import Handler
    from reliq.worker.flight import Flight

#: A coroutine that was cancelled has so long to end before its slot counts as hung.
CANCEL_SECONDS = 5.0


class Run(msgspec.Struct, eq=False):
    """
    One call of a handler.

    Attributes:
        flights: one, or what a batch handler takes at once.
        started_at: by the monotonic clock.
        timeout_at: when the handler has had its time, None for no limit.
        began: the handler was called.
        abandoned: it overran its time.
        thread, task: the thread it runs in; its asyncio task, if it is a coroutine.
    """

    flights: list[Flight]
    handler: Handler
    started_at: float
    timeout_at: float | None
    began: bool = True
    abandoned: bool = False
    thread: int = 0
    task: Any = None

    @property
    def unanswered(self) -> list[Flight]:
        """The flights whose outcome is not on its way."""
        for flight in self.flights:
            if flight.settling:
                return [flight for flight in self.flights if not flight.settling]
        return self.flights

    @property
    def hangs(self) -> bool:
        """Whether it overran its time and only the end of the process ends it."""
        if not self.handler.is_async:
            return self.abandoned
        now = time.monotonic()
        return self.abandoned and now > (self.timeout_at or now) + CANCEL_SECONDS
