"""Calls observers in a thread of their own, so that a slow observer delays no part of the worker."""

from __future__ import annotations

import logging
import queue
import threading
from typing import TYPE_CHECKING

from reliq.events import Event, notify

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reliq.events import Observer

logger = logging.getLogger(__name__)

#: At most 10,000 events wait for slow observers; later events are dropped.
WAITING_LIMIT = 10_000
#: At a stop, observers have 2 s for the events that still wait.
CLOSE_SECONDS = 2.0


class Teller:
    """
    An observer that hands each event to other observers, in the order of the events, in one thread.

    The threads that renew leases and settle messages report their events here: they never wait for an observer.

    Attributes:
        kinds: the kinds of events that an observer wants.
    """

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = observers
        self.kinds = tuple({kind for one in observers for kind in getattr(one, "kinds", (Event,))})
        self._waiting: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._is_full = False
        self._thread = threading.Thread(target=self._run, name="reliq-observers", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def __call__(self, event: Event, /) -> None:
        """Queue `event` for the observers; drop it when too many events wait already."""
        if not isinstance(event, self.kinds):
            return
        if self._waiting.qsize() < WAITING_LIMIT:
            self._waiting.put(event)
            self._is_full = False
        elif not self._is_full:
            self._is_full = True
            logger.warning("observers are too slow: %d events wait, dropping events", WAITING_LIMIT)

    def close(self) -> None:
        """End the thread after the events that wait, or when an observer takes too long."""
        self._waiting.put(None)
        self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        while (event := self._waiting.get()) is not None:
            notify(self._observers, [event])
