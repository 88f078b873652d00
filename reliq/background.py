"""A thread for work that may block, so that its caller does not: log lines, and calls to Redis of a supervisor."""

import queue
import threading
from collections.abc import Callable
from contextlib import suppress


class Background:
    """
    Calls functions one after another in a daemon thread of its own; each of them reports its own errors.

    The collector of garbage and signal handlers may log in the middle of any call here. So no call holds a lock that
    another call in the same thread would need: `SimpleQueue.put` may be entered again, `Queue.put` may not.

    Args:
        limit: how many functions may wait; 0 for any number.
    """

    def __init__(self, name: str, limit: int = 0) -> None:
        self._waiting: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._limit = limit
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def put(self, work: Callable[[], object]) -> bool:
        """Have `work` called later; return False, and forget it, when too much waits."""
        if self._limit and self._waiting.qsize() >= self._limit:
            return False
        self._waiting.put(work)
        return True

    def wait(self, seconds: float) -> bool:
        """Wait until all that waits now was called, for `seconds` at most; return whether it was."""
        called = threading.Lock()
        called.acquire()
        self._waiting.put(called.release)
        return called.acquire(timeout=seconds)

    def close(self) -> None:
        """End the thread when it has called everything that waits."""
        self._waiting.put(None)

    def _run(self) -> None:
        while (work := self._waiting.get()) is not None:
            with suppress(BaseException):
                work()
