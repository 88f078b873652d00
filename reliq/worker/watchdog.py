"""Finds out whether the event loop of the handlers runs; while it does not, only coroutines wait for it."""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from typing import TYPE_CHECKING

from reliq.foreign import printable
from reliq.settlement import RELEASED

if TYPE_CHECKING:
    from collections.abc import Callable

    from reliq.settlement import Outcome
    from reliq.worker.delivery import HeldDelivery
    from reliq.worker.event_loop import AsyncExecutor
    from reliq.worker.inflight import Inflight

logger = logging.getLogger(__name__)

#: An event loop that has not answered a ping after one look is late: no more is claimed for it.
LATE_LOOKS = 1
#: After ten looks it is blocked. Looks count, not seconds, because a machine that stands still blames nobody.
BLOCKED_LOOKS = 10
#: The log names a blocked loop after this time.
REPORT_BLOCKED_SECONDS = 1.0
#: The log shows this many innermost frames of the loop's thread.
LOOP_FRAMES_LIMIT = 20


class LoopWatchdog:
    """
    Pings the event loop while coroutines have slots.

    While it does not answer, they have none: what is held for them goes back to Redis and stays there, and plain
    handlers use the slots.
    """

    def __init__(
        self, executor: AsyncExecutor, inflight: Inflight, settle: Callable[[list[HeldDelivery], Outcome], None]
    ) -> None:
        self._executor, self._inflight, self._settle = executor, inflight, settle
        self._lock = threading.Lock()
        self._pinged_at: float | None = None  # None: it has answered
        self._missed = 0
        self._told = False

    def look(self, now: float) -> None:
        """Ping the loop again if it answered the latest ping, else count one more look without an answer."""
        with self._lock:
            if self._pinged_at is None:
                if self._inflight.loop_is_used:
                    self._pinged_at = now
                    self._executor.ping(self._answer)
                return
            self._missed += 1
            if self._missed == LATE_LOOKS:
                self._inflight.loop_is_late()
            if self._missed == BLOCKED_LOOKS:
                self._settle(self._inflight.loop_is_blocked(), RELEASED)
            if self._missed >= BLOCKED_LOOKS and not self._told and now - self._pinged_at >= REPORT_BLOCKED_SECONDS:
                self._told = True
                self._tell(now - self._pinged_at)

    def _answer(self) -> None:
        """Record that the loop runs; the loop calls this."""
        with self._lock:
            if self._missed:
                self._inflight.loop_runs()
            if self._told:
                logger.warning("the event loop runs again")
            self._pinged_at, self._missed, self._told = None, 0, False

    def _tell(self, seconds: float) -> None:
        """Write where the loop's thread is, without lines of code: they may hold what texts do."""
        frame = sys._current_frames().get(self._executor.thread_id)  # noqa: SLF001  the documented way to see others
        frames = traceback.extract_stack(frame, limit=LOOP_FRAMES_LIMIT) if frame is not None else []
        logger.warning(
            "the event loop has not run for %.1f s: a coroutine blocks it, and async messages stay in Redis until it "
            "runs again; await what takes long, or call it by asyncio.to_thread. It is at:\n%s",
            seconds,
            "\n".join(printable(f'  File "{one.filename}", line {one.lineno}, in {one.name}') for one in frames),
        )
