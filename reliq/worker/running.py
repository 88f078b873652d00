"""What both executors do with one run, before and after the handler itself."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncGenerator, Generator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from reliq.errors import ConfigurationError, UndecodableError
from reliq.events import Handled, Started, notify, wanting
from reliq.job import Job
from reliq.text import class_name
from reliq.worker.exceptions import described, placed
from reliq.worker.failures import Failures, is_failure
from reliq.worker.outcome import ACKED, OVERRAN, RELEASED, Outcome, answered, raised

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Sequence

    from reliq.events import Event, Observer
    from reliq.worker.failures import ErrorHook
    from reliq.worker.flight import Flight
    from reliq.worker.run import Run

logger = logging.getLogger(__name__)

#: Until the next delivery after an answer that is not allowed.
NONSENSE_MS = 1000
#: The most that is told of how late a handler starts: due times are what publishers write.
LONGEST_LAG_SECONDS = 7 * 86_400.0
#: What computes nothing before somebody asks it for the next.
_LAZY = (Generator, AsyncGenerator, map, filter, zip)


class Running:
    """
    What both executors do with one run, before and after the handler itself.

    Nothing that a message, a handler or an observer brings raises here: an executor's thread and slot outlast it.
    """

    def __init__(
        self,
        settle: Callable[[list[Flight], Outcome | None], None],
        middleware: Sequence[Callable[[Job[Any]], Any]],
        observers: Sequence[Observer],
        stopping: threading.Event,
        *,
        on_error: Sequence[ErrorHook] = (),
        error_text: bool = False,
    ) -> None:
        self.middleware = middleware
        self.state: Any = None
        self._settle, self._stopping, self._pid = settle, stopping, os.getpid()
        self._failures = Failures(on_error, error_text=error_text, job_of=self._job)
        self._told_starts, self._told_ends = wanting(observers, Started), wanting(observers, Handled)

    def begin(self, run: Run) -> bool:
        """Say whether the handler may start; what has no lease any more goes back, unspent if nobody has taken it."""
        over = [flight for flight in run.flights if flight.lost or run.started_at >= flight.lease_until]
        if over:
            self._settle(over, RELEASED)
            run.began = len(over) < len(run.flights)
        if self._told_starts and run.began:
            _tell(self._told_starts, _started, [(flight,) for flight in run.unanswered])
        return run.began

    def jobs(self, run: Run) -> list[Job[Any]]:
        """Return the jobs of `run`; what does not decode is answered for, and left out."""
        decode, jobs = run.handler.codec.decode, []
        for flight in run.unanswered:
            try:
                body = decode(flight.delivery.payload)
            except BaseException as error:
                why = _undecodable(error)
                self._answer(run, [flight], [_outcome(flight, None, why)], why)
            else:
                jobs.append(self._job(flight, run, body))
        return jobs

    def end(self, run: Run, answer: Any, error: BaseException | None) -> None:
        """Hand over what the handler has answered, or raised, for everything in `run` or for each."""
        if os.getpid() != self._pid:  # the handler has forked, and this is the copy
            os._exit(0)
        flights = run.unanswered
        try:
            outcomes = self._outcomes(run, flights, answer, error)
        except BaseException as nonsense:
            outcomes = [_nonsense(flight, nonsense) for flight in flights]
        self._answer(run, flights, outcomes, answer if error is None else error)

    def overran(self, run: Run, seconds: float) -> None:
        """Tell that the handler of `run` overran its time in a thread, which nobody can stop."""
        self._failures.overran(run, OVERRAN, seconds)

    def _job(self, flight: Flight, run: Run, body: Any) -> Job[Any]:
        return Job(flight, run, body, self.state, self._stopping)

    def _outcomes(self, run: Run, flights: list[Flight], answer: Any, error: BaseException | None) -> list[Outcome]:
        if error is None and answer is None:
            return [ACKED] * len(flights)
        if isinstance(error, asyncio.CancelledError) and self._stopping.is_set():
            # Cut off by the stop: no fault of the messages, and they run no more.
            return [RELEASED] * len(flights)
        if error is None and run.handler.is_batch and isinstance(answer, list | tuple):
            return _of_each(flights, answer)
        if error is None and run.handler.is_batch and isinstance(answer, _LAZY):
            raise ConfigurationError(f"a batch's answers must be a list or a tuple, not a {class_name(answer)}")
        return [_outcome(flight, answer, error) for flight in flights]

    def _answer(self, run: Run, flights: list[Flight], outcomes: list[Outcome], cause: Any) -> None:
        """Hand over `outcomes`; `cause` is what the handler answered or raised, None when it returned nothing."""
        each = (time.monotonic() - run.started_at) / len(run.flights)
        if run.handler.is_async or not run.abandoned:  # else told when it overran
            pairs = list(zip(flights, outcomes, strict=True))
            if self._told_ends:
                _tell(self._told_ends, _handled, [(run, flight, outcome, each) for flight, outcome in pairs])
            if cause is not None:
                with suppress(BaseException):  # whatever is told: the answer goes on its way
                    self._failures.tell(run, pairs, cause, each)
        took_ms = round(each * 1000)
        for flight, outcome in zip(flights, outcomes, strict=True):
            flight.outcome, flight.took_ms = outcome, took_ms
        self._settle(flights, None)


def _tell(observers: Sequence[Observer], make: Callable[..., Event], facts: Sequence[tuple[Any, ...]]) -> None:
    """Tell of what happened; the work goes on when that fails."""
    with suppress(BaseException):
        notify(observers, [make(*fact) for fact in facts])


def _of_each(flights: Sequence[Flight], answers: Sequence[Any]) -> list[Outcome]:
    """Return the outcomes of a batch whose handler has answered for each message."""
    if len(answers) == len(flights):
        return [_outcome(flight, answer, None) for flight, answer in zip(flights, answers, strict=True)]
    raise ConfigurationError(f"a list of answers must be as long as the batch, {len(flights)}, not {len(answers)}")


def _outcome(flight: Flight, answer: Any, error: BaseException | None) -> Outcome:
    """Return what is to be done; an answer that makes no sense counts as a failure of the handler."""
    settings, attempt = flight.handler.settings, flight.delivery.attempt
    try:
        return answered(answer, attempt, settings) if error is None else raised(error, attempt, settings)
    except BaseException as nonsense:
        return _nonsense(flight, nonsense)


def _undecodable(error: BaseException) -> UndecodableError:
    """Return what is told of a body that does not decode: of foreign code that ran for it no more than the class."""
    if isinstance(error, UndecodableError):
        return error
    return UndecodableError(f"decoding the body raised {class_name(error)}")


def _nonsense(flight: Flight, why: BaseException) -> Outcome:
    """Return the outcome of an answer that is not allowed; only a text of our own is told without being asked for."""
    text, place = "the handler's answer is not allowed", ""
    with suppress(BaseException):  # a class of errors may raise when it is asked for its name
        text, place = described(why), "" if isinstance(why, ConfigurationError) else placed(why)
        logger.warning("queue %s: handler's answer is not allowed: %s", flight.queue, place or text)
    return Outcome("nack", NONSENSE_MS, error=text, raised=place)


def _started(flight: Flight) -> Started:
    delivery = flight.delivery
    due = delivery.header.due
    lag = None if due is None else min(max(0.0, time.time() - due / 1000), LONGEST_LAG_SECONDS)
    return Started(flight.queue, delivery.claimed.id, delivery.attempt, lag)


def _handled(run: Run, flight: Flight, outcome: Outcome, seconds: float) -> Handled:
    kind: Any = "timeout" if run.abandoned else outcome.kind
    delivery = flight.delivery
    said = (outcome.error, outcome.raised, is_failure(flight, outcome))
    return Handled(flight.queue, delivery.claimed.id, delivery.attempt, kind, seconds, *said)
