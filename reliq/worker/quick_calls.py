"""Which thread makes quick calls: one does as much as many, which only take the interpreter from each other."""

from __future__ import annotations

import time
from threading import get_ident
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from threading import Condition

    from reliq.worker.delivery import HandlerCall

#: A handler whose calls hold up what waits for their thread for less than this in the mean is quick.
QUICK_SECONDS = 5e-5
#: A call of a quick handler that lasts longer is stuck, and another thread goes on.
STUCK_SECONDS = 0.001
#: A call's duration has this weight in the mean: some that lost the interpreter do not make a quick handler a slow one.
_QUICKNESS_WEIGHT = 0.005


class QuickCalls:
    """
    Knows which thread leads: who took the latest call goes on with what waits while its calls are quick.

    Another looks on meanwhile, and takes over when a call does not end; the others rest. Every method is called under the
    lock of `work`.
    """

    def __init__(self, work: Condition) -> None:
        self._work = work
        self._latest: HandlerCall | None = None
        self._is_looked_on = False
        self._means: dict[str, float] = {}

    def ended(self, run: HandlerCall, now: float) -> float | None:
        """Learn from a call that has ended; return how long it took, None when its handler was not called."""
        if not run.began:
            return None
        queue, took = run.deliveries[0].queue, now - run.started_at
        mean = self._means.get(queue, 2 * QUICK_SECONDS)
        self._means[queue] = mean + (min(took, STUCK_SECONDS) - mean) * _QUICKNESS_WEIGHT
        return took

    def may_take(self) -> bool:
        """Return whether this thread takes the next call: it leads, or no other is at quick calls."""
        latest = self._latest
        if latest is None or latest.thread == get_ident() or not self._is_quick(latest):
            return True
        return time.monotonic() - latest.started_at > STUCK_SECONDS

    def took(self, run: HandlerCall) -> bool:
        """Note the latest call; return whether another thread is wanted, for the next calls or to look on."""
        leads = self._latest is not None and self._latest.thread == run.thread
        self._latest = run
        return not (leads and self._is_looked_on and self._is_quick(run))

    def wait(self, seconds: float | None, *, looks_on: bool) -> None:
        """Wait to be woken; one that `looks_on` while calls wait no longer than a quick call lasts, unless another does."""
        if self._latest is not None and self._latest.thread == get_ident():
            self._latest = None
        if not looks_on or self._is_looked_on:
            self._work.wait(seconds)
            return
        self._is_looked_on = True
        try:
            self._work.wait(STUCK_SECONDS)
        finally:
            self._is_looked_on = False

    def _is_quick(self, run: HandlerCall) -> bool:
        return self._means.get(run.deliveries[0].queue, STUCK_SECONDS) < QUICK_SECONDS
