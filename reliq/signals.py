"""Signals to this process: noted where next to nothing is safe, read where everything is."""

from __future__ import annotations

import queue
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import FrameType


class SignalNotes:
    """
    The signals that came, in their order.

    A signal handler may interrupt anything, a wait for its own notes and itself included: it must take no lock that
    the interrupted code may hold, as `threading.Event.set` does. `SimpleQueue.put` is made to be entered again.

    Attributes:
        numbers: every signal so far, oldest first; whoever has dealt with one may remove it.
    """

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self._came: queue.SimpleQueue[None] = queue.SimpleQueue()

    def note(self, number: int, _frame: FrameType | None = None) -> None:
        """Take note of a signal: to be given to `signal.signal`."""
        self.numbers.append(number)
        self._came.put(None)

    def wait(self, seconds_at_most: float | None = None) -> bool:
        """Wait for a signal that no wait has seen yet, None for ever; say whether there is one."""
        seen = False
        with suppress(queue.Empty):
            self._came.get(timeout=seconds_at_most)
            seen = True
            for _ in range(self._came.qsize()):  # one wait sees all there are
                self._came.get_nowait()
        return seen
