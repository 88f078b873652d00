"""The threads of `asyncio.to_thread` in handlers: a program that ends does not wait for them."""

from __future__ import annotations

import os
import queue
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class DaemonThreads(ThreadPoolExecutor):
    """
    A default executor for event loops, on daemon threads of its own.

    Python waits at its end for the threads of an ordinary ThreadPoolExecutor, however long after a worker's grace.
    """

    def __init__(self) -> None:
        super().__init__()
        self._limit = min(32, (os.cpu_count() or 1) + 4)  # as of an ordinary one
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._count_lock = threading.Lock()
        self._busy = self._started = 0

    def submit(self, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Call `function` on an idle thread, on a new one, or, when there are as many as may be, on the first that is free."""
        future: Future[T] = Future()
        self._calls.put(lambda: _call(future, function, args, kwargs))
        with self._count_lock:
            self._busy += 1
            if self._started < min(self._busy, self._limit):
                threading.Thread(target=self._work, name=f"reliq-asyncio-{self._started + 1}", daemon=True).start()
                self._started += 1
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Do nothing: the threads end with the program."""

    def _work(self) -> None:
        while True:
            self._calls.get()()
            with self._count_lock:
                self._busy -= 1


def _call(future: Future[T], function: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Call `function` and have `future` say how that ended."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = function(*args, **kwargs)
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
