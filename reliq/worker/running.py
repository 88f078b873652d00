"""What both executors do with one flight, before and after the handler itself."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any

from reliq.events import Handled, Started, notify
from reliq.job import Job
from reliq.message import Nack, Reject, Snooze
from reliq.worker.outcome import ACKED, RELEASED, Outcome, answered, described, raised

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Sequence

    from reliq.events import Observer
    from reliq.worker.flight import Flight

logger = logging.getLogger(__name__)

#: Until the next delivery after an answer that is not allowed.
NONSENSE_MS = 1000


class Running:
    """What both executors do with one flight, before and after the handler itself."""

    def __init__(
        self,
        settle: Callable[[list[Flight], Outcome], None],
        middleware: Sequence[Callable[[Job[Any]], Any]],
        observers: Sequence[Observer],
        stopping: threading.Event,
    ) -> None:
        self.middleware = middleware
        self.state: Any = None
        self._settle, self._observers, self._stopping = settle, observers, stopping

    def begin(self, flight: Flight) -> bool:
        """Say whether the handler may start; one whose lease is over goes back, unspent if nobody has taken it."""
        if flight.lost or time.monotonic() >= flight.lease_until:
            flight.started_at = None
            flight.settling = True
            self._settle([flight], RELEASED)
            return False
        if self._observers:
            self._tell_start(flight)
        return True

    def job(self, flight: Flight) -> Job[Any]:
        """Return the job of `flight`; raise UndecodableError when its body does not decode."""
        body = flight.handler.codec.decode(flight.delivery.payload)
        return Job(flight, body, self.state, self._stopping)

    def end(self, flight: Flight, answer: Any, error: BaseException | None) -> None:
        """Hand the outcome over."""
        outcome = self._outcome(flight, answer, error)
        if self._observers:
            self._tell_end(flight, outcome)
        flight.settling = True
        self._settle([flight], outcome)

    def _outcome(self, flight: Flight, answer: Any, error: BaseException | None) -> Outcome:
        """Return what is to be done; an answer that makes no sense counts as a failure of the handler."""
        if error is None and not isinstance(answer, Nack | Reject | Snooze):
            return ACKED
        if isinstance(error, asyncio.CancelledError) and self._stopping.is_set():
            return RELEASED  # cut off by the stop: no fault of the message, and it runs no more
        settings, attempt = flight.handler.settings, flight.delivery.attempt
        try:
            return answered(answer, attempt, settings) if error is None else raised(error, attempt, settings)
        except Exception as nonsense:
            logger.warning("queue %s: handler's answer is not allowed: %s", flight.queue, nonsense)
            return Outcome("nack", NONSENSE_MS, error=described(nonsense))

    def _tell_start(self, flight: Flight) -> None:
        delivery = flight.delivery
        due = delivery.header.due
        lag = None if due is None else max(0.0, time.time() - due / 1000)
        notify(self._observers, [Started(flight.queue, delivery.id, delivery.attempt, lag)])

    def _tell_end(self, flight: Flight, outcome: Outcome) -> None:
        if flight.abandoned and not flight.handler.is_async:
            return  # told when it overran
        took = time.monotonic() - (flight.started_at or time.monotonic())
        kind: Any = "timeout" if flight.abandoned else outcome.kind
        delivery = flight.delivery
        handled = Handled(flight.queue, delivery.id, delivery.attempt, kind, took, outcome.error, outcome.raised)
        notify(self._observers, [handled])
