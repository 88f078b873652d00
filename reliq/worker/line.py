"""The flights of one queue in this process, and how fast they go."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reliq.handler import Handler
    from reliq.worker.flight import Flight

#: What is held beyond what runs must start within this, or goes back.
HOLD_SECONDS = 0.1
HOLD_LIMIT = 500
#: How much one more duration counts in the running mean.
_PACE_WEIGHT = 0.2
_SHORTEST_SECONDS = 1e-5


class Line:
    """
    The flights of one queue.

    Attributes:
        slots: how many may run at once.
        waiting: those that wait for a slot, and some that were withdrawn meanwhile.
        taken: how many are claimed and not finished.
        pace: running mean of the handler's seconds, None before the first.
    """

    def __init__(self, handler: Handler, concurrency: int) -> None:
        cap = handler.settings.concurrency
        self.is_async = handler.is_async
        self.slots = concurrency if cap is None else min(cap, concurrency)
        self.waiting: deque[Flight] = deque()
        self.taken = self.running = 0
        self.pace: float | None = None

    def learn(self, took: float) -> None:
        """Take one more duration into the mean."""
        self.pace = took if self.pace is None else self.pace * (1 - _PACE_WEIGHT) + took * _PACE_WEIGHT

    def most_ahead(self, youngest: float) -> int:
        """Return how many would start within HOLD_SECONDS, when the `youngest` of all that runs is so old."""
        if self.pace is None:
            return 0
        pace = max(self.pace, youngest, _SHORTEST_SECONDS)
        return 0 if pace >= HOLD_SECONDS else min(HOLD_LIMIT, int(self.slots * HOLD_SECONDS / pace))
