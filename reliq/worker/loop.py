"""
Helpers for the threads of a worker process.

A worker process has several components, for example the fetcher and the settler. `Loop` calls the `step` of a component
again and again in a thread. A step does one round of work and returns the seconds until the next step. `QueueBackoff`
stores how long a component waits after an error of a queue. `EventQueue` calls observers in a thread.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from reliq.errors import LoginError, RedisRefusedError, RedisUnavailableError
from reliq.events import Event, Observer, RedisRecovered, RedisRefused, RedisUnavailable, notify
from reliq.settings import RECONNECT, seconds_after

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reliq.keys import Keys


logger = logging.getLogger(__name__)

#: The longest wait between two steps. A due time may be so far in the future that Python cannot wait for it at once.
LONGEST_SLEEP_SECONDS = 3600.0
#: Redis replies with the milliseconds until a due time. The worker counts them from the arrival of the reply, but at
#: the latest from this many seconds after it sent the command. So a slow reply does not delay messages. If the worker
#: computes a due time that is too early, this only causes an extra command.
REPLY_LAG_SECONDS = 0.005
#: At most this many events wait for slow observers. While so many wait, new events are dropped.
WAITING_LIMIT = 10_000
#: How long a shutdown waits for observers to process the waiting events.
CLOSE_SECONDS = 2.0


class Loop:
    """
    Call `step` repeatedly in a thread until `stop` is called; wait longer and longer while `step` raises exceptions.

    All exceptions are caught and the step is repeated, so that an error never stops a component of the worker.

    Args:
        name: the name of the component, for the log and the thread.
        step: does one round of work; returns the seconds until the next step.
        observers: called with events about the availability of Redis.
        away: called each time a step could not reach Redis.
    """

    def __init__(
        self,
        name: str,
        step: Callable[[], float],
        observers: Sequence[Observer] = (),
        away: Callable[[], None] = lambda: None,
    ) -> None:
        self._name = name
        self._step = step
        self._observers = observers
        self._away = away
        self._stopped = threading.Event()
        self._woken = threading.Event()
        #: End the wait for the next step, unless the loop waits because the last step raised an exception.
        self.wake = self._woken.set
        self._failures = 0
        self._is_away = False
        self._thread = threading.Thread(target=self._run, name=f"reliq-{name}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ask the thread to stop after the current step; return immediately."""
        self._stopped.set()
        self._woken.set()

    @property
    def is_running(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def join(self, timeout_seconds: float | None = None) -> bool:
        """Wait for the thread to end; return whether it has ended or was never started."""
        if self._thread.ident is not None:
            self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                wait_seconds = self._step()
                self._failures = 0
                if self._is_away:
                    self._is_away = False
                    notify(self._observers, [RedisRecovered("", self._name)])
                if wait_seconds > 0:
                    self._woken.wait(min(wait_seconds, LONGEST_SLEEP_SECONDS))
                self._woken.clear()
            except BaseException as error:
                self._failures += 1
                with suppress(BaseException):  # observers and log handlers may raise too
                    self._report(error)
                self._stopped.wait(seconds_after(RECONNECT, self._failures))

    def _report(self, error: BaseException) -> None:
        if isinstance(error, RedisUnavailableError):
            self._away()
            self._is_away = True
            notify(self._observers, [RedisUnavailable("", self._name, str(error), error.refusal)])
            return
        if isinstance(error, RedisRefusedError):
            notify(self._observers, [RedisRefused("", self._name, str(error))])
        is_login = isinstance(error, LoginError)
        if not is_login or self._failures & (self._failures - 1) == 0:  # log only the 1st, 2nd, 4th, … failure
            trace = None if is_login else error
            logger.error("worker: the %s failed; retrying: %s", self._name, error, exc_info=trace)


class QueueBackoff:
    """
    Store when a component of the worker, for example the fetcher, may send commands to a failing shard again.

    A shard fails if Redis refuses a command for the shard, or if the Redis node with the shard is unavailable. A
    failing shard does not delay the other shards.

    Attributes:
        until: the monotonic time of the next attempt, for each failing shard.
        last_error: the text of the last error.
    """

    def __init__(self, part: str, observers: Sequence[Observer] = ()) -> None:
        self._part = part
        self._observers = observers
        self._failures: dict[Keys, int] = {}
        self._away: set[Keys] = set()
        self.until: dict[Keys, float] = {}
        self.last_error = ""

    def note(self, keys: Keys, error: Exception) -> None:
        """Record a failed attempt with a shard, log it, and delay the next attempt."""
        failures = self._failures[keys] = self._failures.get(keys, 0) + 1
        self.last_error = str(error)
        self.until[keys] = time.monotonic() + seconds_after(RECONNECT, failures)
        if isinstance(error, RedisUnavailableError):
            self._away.add(keys)
            notify(self._observers, [RedisUnavailable(keys.name, self._part, str(error), error.refusal)])
            return
        self._is_back(keys)
        if isinstance(error, RedisRefusedError):
            notify(self._observers, [RedisRefused(keys.name, self._part, str(error))])
        if failures & (failures - 1) == 0:  # log only the 1st, 2nd, 4th, … failure
            logger.error("queue %s: the %s failed (attempt %d); retrying: %s", keys.name, self._part, failures, error)

    def over(self, keys: Keys) -> None:
        """End the backoff of a shard after a success."""
        if self._failures:
            self._failures.pop(keys, None)
            self.until.pop(keys, None)
            self._is_back(keys)

    def refuses(self, keys: Keys) -> bool:
        """Return whether the last attempt with a shard failed, but not because its Redis node is unavailable."""
        return keys in self._failures and keys not in self._away

    def has(self, keys: Keys) -> bool:
        """Return whether the last attempt with a shard failed."""
        return keys in self._failures

    def waits(self, keys: Keys) -> bool:
        """Return whether it is too early for the next attempt with a shard."""
        return self.until.get(keys, 0.0) > time.monotonic()

    def seconds_of(self, keys: Keys) -> float:
        """Return the seconds until the next attempt with a shard; 0 if the shard does not fail."""
        return max(0.0, self.until.get(keys, 0.0) - time.monotonic())

    def seconds(self) -> float:
        """Return the seconds until the next attempt with any failing shard; 0 if no shard fails."""
        return max(0.0, min(self.until.values(), default=0.0) - time.monotonic())

    def _is_back(self, keys: Keys) -> None:
        """
        Note that the Redis node of a shard has replied.

        If no other shard of the queue is unavailable, notify observers that Redis is available again.
        """
        if keys in self._away:
            self._away.discard(keys)
            if not any(shard.name == keys.name for shard in self._away):
                notify(self._observers, [RedisRecovered(keys.name, self._part)])


class EventQueue:
    """
    An observer that passes events to other observers in a separate thread, in order.

    So the threads that renew leases and settle messages never wait for a slow observer.

    Attributes:
        kinds: the event classes that at least one observer accepts.
    """

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = observers
        self.kinds = tuple({kind for observer in observers for kind in getattr(observer, "kinds", (Event,))})
        self._waiting: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._is_full = False
        self._thread = threading.Thread(target=self._run, name="reliq-observers", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def __call__(self, event: Event, /) -> None:
        """Queue `event` for the observers; drop it if too many events are waiting."""
        if not isinstance(event, self.kinds):
            return
        if self._waiting.qsize() < WAITING_LIMIT:
            self._waiting.put(event)
            self._is_full = False
        elif not self._is_full:
            self._is_full = True
            logger.warning(
                "worker: observers are too slow: %d events are waiting; dropping new events until they catch up",
                WAITING_LIMIT,
            )

    def close(self) -> None:
        """Let the thread process the waiting events and end; wait for this at most CLOSE_SECONDS."""
        self._waiting.put(None)
        self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        while (event := self._waiting.get()) is not None:
            notify(self._observers, [event])
