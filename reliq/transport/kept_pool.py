"""A pool of blocking connections that is cheaper to use than redis-py's."""

import select
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import redis


class KeptPool:
    """
    A pool over redis-py's blocking pool that keeps idle connections itself.

    redis-py's bookkeeping for each use takes as long as sending a command. An idle connection counts as in use there,
    so the limit of that pool holds; while a thread waits for a connection, those given back go to that pool.
    """

    def __init__(self, pool: redis.BlockingConnectionPool) -> None:
        self.beneath = pool
        self._pool: Any = pool
        self._lock = threading.Lock()
        self._idle: list[Any] = []
        self._waiting = 0
        #: Connection -> its socket, and the function that says whether there is something to read from it.
        self._polls: dict[Any, tuple[Any, Callable[[], Any]]] = {}

    def get_connection(self) -> Any:
        """Return a connection that is ready to send; raise as redis-py does when there is none."""
        while True:
            with self._lock:
                if not self._idle:
                    self._waiting += 1
                    break
                kept = self._idle.pop()
            if self._is_ready(kept):
                return kept
            kept.disconnect()
            self._pool.release(kept)
        try:
            return self._pool.get_connection()
        finally:
            with self._lock:
                self._waiting -= 1

    def release(self, connection: Any) -> None:
        """Take a connection back, with every reply read; one that is disconnected goes to the pool, to be made anew."""
        with self._lock:
            if connection._sock and not self._waiting:  # noqa: SLF001  `is_connected` came with redis-py 7
                self._idle.append(connection)
                return
        self._pool.release(connection)

    def disconnect(self) -> None:
        """Close every connection; they come back when they are used again."""
        for kept in self._take_idle():
            self._pool.release(kept)
        self._pool.disconnect()

    def close_idle(self) -> None:
        """Close the connections that nobody uses."""
        for kept in self._take_idle():
            kept.disconnect()
            self._pool.release(kept)

    def _take_idle(self) -> list[Any]:
        with self._lock:
            idle, self._idle = self._idle, []
            return idle

    def _is_ready(self, connection: Any) -> bool:
        """Say whether a connection is open with nothing to read: the server closes those that are idle for long."""
        socket = connection._sock  # noqa: SLF001  redis-py's own `can_read` makes and fills a poll object at each call
        if socket is None:
            return False
        known, poll = self._polls.get(connection, (None, None))
        if poll is None or known is not socket:
            poll = partial(_poll_of(socket), 0)
            self._polls[connection] = socket, poll
        return not poll()


def await_reply(connection: Any, within_seconds: float) -> None:
    """Wait until there is something to read from a connection; raise redis.TimeoutError when it does not come."""
    if not _poll_of(connection._sock)(1000 * within_seconds):  # noqa: SLF001  it has no public name
        raise redis.TimeoutError("no reply came in time")


def _poll_of(socket: Any) -> Callable[[float], Any]:
    """Return a function whose answer is true when there is something to read from `socket` within so many ms."""
    if not hasattr(select, "poll"):  # eventlet takes it away; Windows has none
        return lambda ms: select.select([socket], [], [], ms / 1000)[0]
    poll = select.poll()
    poll.register(socket, select.POLLIN)
    return poll.poll
