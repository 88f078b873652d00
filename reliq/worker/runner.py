"""Runs handlers: decodes the bodies of a call, calls its handler, hands its outcome to the settler; plain ones on threads."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
import os
import threading
import time
from collections.abc import AsyncGenerator, Generator
from contextlib import AsyncExitStack, ExitStack, suppress
from typing import TYPE_CHECKING, Any

from reliq.error_text import described, placed
from reliq.errors import ConfigurationError
from reliq.events import Handled, Started, notify, wanting
from reliq.handlers.job import Job
from reliq.settlement import ACKED, OVERRAN, RELEASED, Outcome, answered, decoded, raised, undecodable
from reliq.text import class_name
from reliq.worker.failures import Failures, is_failure

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reliq.events import Observer
    from reliq.worker.delivery import HandlerCall, HeldDelivery
    from reliq.worker.failures import ErrorHook
    from reliq.worker.inflight import Inflight

logger = logging.getLogger(__name__)

#: A handler's answer, and what it raised.
Returned = tuple[Any, BaseException | None]
#: A message is delivered again this long after its handler gave an answer that is not allowed.
NONSENSE_MS = 1000
#: A start counts as at most this late, because due times are written by publishers.
LONGEST_LAG_SECONDS = 7 * 86_400.0
#: The forks between the first process and this one: a handler that forks returns in both.
_forks: list[None] = []
os.register_at_fork(after_in_child=lambda: _forks.append(None))
#: Iterables that compute nothing until somebody iterates over them.
_LAZY = (Generator, AsyncGenerator, map, filter, zip)


class Runner:
    """
    Runs one call of a handler where it is asked to: a plain one by `run`, a coroutine by `begin` and then `arun`.

    Nothing that a message, a handler or an observer brings raises here, so that no thread and no slot is lost.

    Attributes:
        state: what the lifespan yielded.
        before_call: notes a call, in the thread that begins it.
    """

    def __init__(
        self,
        settle: Callable[[list[HeldDelivery], Outcome | None], None],
        middleware: Sequence[Callable[[Job[Any]], Any]],
        observers: Sequence[Observer],
        stopping: threading.Event,
        *,
        on_error: Sequence[ErrorHook] = (),
        error_text: bool = False,
    ) -> None:
        self.middleware = middleware
        self.state: Any = None
        self.before_call: Callable[[HandlerCall], None] | None = None
        self._settle, self._stopping, self._forks = settle, stopping, len(_forks)
        self._failures = Failures(on_error, error_text=error_text, job_of=self._job)
        self._told_starts, self._told_ends = wanting(observers, Started), wanting(observers, Handled)

    def run(self, run: HandlerCall) -> Returned:
        """Run a plain handler's call, from its messages' bodies to their outcomes; return its answer, and what it raised."""
        if not self.begin(run):
            return None, None
        answer: Any = None
        error: BaseException | None = None
        try:
            if jobs := self.jobs(run):
                answer = contextvars.copy_context().run(self._call, run, jobs)
        except BaseException as raised_error:  # SystemExit too: a handler must not end the thread
            error = raised_error
        self.end(run, answer, error)
        return answer, error

    async def arun(self, run: HandlerCall) -> Returned:
        """As `run`, of a coroutine handler's call, which has begun."""
        answer: Any = None
        error: BaseException | None = None
        try:
            if jobs := self.jobs(run):
                answer = await self._acall(run, jobs)
        except asyncio.CancelledError as cancelled:
            error = TimeoutError("the handler overran its timeout") if run.abandoned else cancelled
        except BaseException as raised_error:  # SystemExit too: a handler must not end the loop
            error = raised_error
        self.end(run, answer, error)
        return answer, error

    def begin(self, run: HandlerCall) -> bool:
        """Return whether the handler may start; a delivery without a lease goes back, unspent if nobody has taken it."""
        late = 0
        for held in run.deliveries:
            if held.lost or run.started_at >= held.lease_until:
                self._settle([held], RELEASED)
                late += 1
        run.began = late < len(run.deliveries)
        if run.began:
            try:
                if self.before_call is not None:
                    self.before_call(run)
                if self._told_starts:
                    notify(self._told_starts, map(_started, run.unanswered))
            except BaseException:  # noqa: S110  the work goes on; cheaper than `suppress`, for every message
                pass
        return run.began

    def jobs(self, run: HandlerCall) -> list[Job[Any]]:
        """Return the jobs of `run`; what does not decode is answered for, and left out."""
        decode, jobs = run.handler.codec.decode, []
        for held in run.unanswered:
            try:
                body = decoded(held.delivery, decode)
            except BaseException as error:
                why = undecodable(error, held.queue, held.delivery.id)
                self._answer(run, [held], [_outcome(held, None, why)], why)
            else:
                jobs.append(Job(held, run, body, self.state, self._stopping))
        return jobs

    def end(self, run: HandlerCall, answer: Any, error: BaseException | None) -> None:
        """Hand over what the handler has answered, or raised, for everything in `run` or for each."""
        if len(_forks) != self._forks:  # the handler has forked, and this is the copy
            os._exit(0)
        deliveries = run.unanswered
        try:
            outcomes = self._outcomes(run, deliveries, answer, error)
        except BaseException as nonsense:
            outcomes = [_nonsense(held, nonsense) for held in deliveries]
        self._answer(run, deliveries, outcomes, answer if error is None else error)

    def overran(self, run: HandlerCall, seconds: float) -> None:
        """Report that the handler of `run` overran its time in a thread, which nobody can stop."""
        self._failures.overran(run, OVERRAN, seconds)

    def _call(self, run: HandlerCall, jobs: list[Job[Any]]) -> Any:
        function = run.handler.function
        if not self.middleware:
            return _done(function(*run.arguments(jobs)))
        with ExitStack() as stack:
            for around in self.middleware:
                for job in jobs:
                    stack.enter_context(around(job))
            return _done(function(*run.arguments(jobs)))
        return None  # a middleware has dealt with the error

    async def _acall(self, run: HandlerCall, jobs: list[Job[Any]]) -> Any:
        function = run.handler.function
        if not self.middleware:
            return await function(*run.arguments(jobs))
        async with AsyncExitStack() as stack:
            for around in self.middleware:
                for job in jobs:
                    manager = around(job)
                    if hasattr(manager, "__aenter__"):
                        await stack.enter_async_context(manager)
                    else:
                        stack.enter_context(manager)
            return await function(*run.arguments(jobs))
        return None  # a middleware has dealt with the error

    def _job(self, held: HeldDelivery, run: HandlerCall, body: Any) -> Job[Any]:
        return Job(held, run, body, self.state, self._stopping)

    def _outcomes(
        self, run: HandlerCall, deliveries: list[HeldDelivery], answer: Any, error: BaseException | None
    ) -> list[Outcome]:
        if error is None and answer is None:
            return [ACKED] * len(deliveries)
        if isinstance(error, asyncio.CancelledError) and self._stopping.is_set():
            # Cut off by the stop: no fault of the messages, and they run no more.
            return [RELEASED] * len(deliveries)
        if error is None and run.handler.is_batch and isinstance(answer, list | tuple):
            return _of_each(deliveries, answer)
        if error is None and run.handler.is_batch and isinstance(answer, _LAZY):
            raise ConfigurationError(f"a batch's answers must be a list or a tuple, not a {class_name(answer)}")
        return [_outcome(held, answer, error) for held in deliveries]

    def _answer(self, run: HandlerCall, deliveries: list[HeldDelivery], outcomes: list[Outcome], cause: Any) -> None:
        """Hand over `outcomes`; `cause` is what the handler answered or raised, None when it returned nothing."""
        each = (time.monotonic() - run.started_at) / len(run.deliveries)
        if run.handler.is_async or not run.abandoned:  # else that was done when it overran
            self._tell(run, deliveries, outcomes, cause, each)
        took_ms = round(each * 1000)
        for at, held in enumerate(deliveries):
            held.outcome, held.took_ms = outcomes[at], took_ms
        self._settle(deliveries, None)

    def _tell(
        self, run: HandlerCall, deliveries: list[HeldDelivery], outcomes: list[Outcome], cause: Any, seconds: float
    ) -> None:
        """Notify observers, and report failures; the work goes on when that fails."""
        is_success = not run.abandoned and outcomes.count(ACKED) == len(outcomes)
        try:
            told = self._told_ends
            if is_success:
                told = [one for one in told if getattr(one, "hears_success", True)]
            if told:
                notify(told, [_handled(run, *end, seconds) for end in zip(deliveries, outcomes, strict=True)])
        except BaseException:  # noqa: S110  cheaper than `suppress`, for every message
            pass
        if not is_success:
            with suppress(BaseException):
                self._failures.tell(run, list(zip(deliveries, outcomes, strict=True)), cause, seconds)


class ThreadExecutor:
    """Plain handlers, one on each of at most `slots` threads."""

    def __init__(self, runner: Runner, inflight: Inflight, slots: int) -> None:
        self._runner, self._inflight, self._slots = runner, inflight, slots
        self._threads: list[threading.Thread] = []

    def submit(self, deliveries: list[HeldDelivery]) -> None:
        """Queue `deliveries` for slots, with as many threads as plain calls and slots need."""
        wanted = self._inflight.hold(deliveries)
        while len(self._threads) < min(wanted, self._slots):
            name = f"reliq-handler-{len(self._threads) + 1}"
            thread = threading.Thread(target=self._work, name=name, daemon=True)
            thread.start()  # one that cannot start is not counted, and tried again
            self._threads.append(thread)
        time.sleep(0)  # a thread of a handler has the interpreter now, not when the caller waits for Redis

    @property
    def is_running(self) -> bool:
        """Whether every thread that was started still takes work."""
        return all(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        run: HandlerCall | None = None
        while True:
            done, run = run, None  # its slot is freed once, whatever raises
            try:
                run = self._inflight.next_plain(done)
                if run is None:
                    return
                self._runner.run(run)
            except BaseException:
                logger.exception("a thread of the handlers failed and goes on")


def _done(answer: Any) -> Any:
    """Return a plain handler's answer, unless it is work that nobody has done."""
    if answer is not None and inspect.isawaitable(answer):
        if inspect.iscoroutine(answer):
            answer.close()
        raise TypeError("the handler returned an awaitable that nobody awaits; define it with async def")
    return answer


def _of_each(deliveries: Sequence[HeldDelivery], answers: Sequence[Any]) -> list[Outcome]:
    """Return the outcomes of a batch whose handler has answered for each message."""
    if len(answers) == len(deliveries):
        return [_outcome(held, answer, None) for held, answer in zip(deliveries, answers, strict=True)]
    raise ConfigurationError(f"a list of answers must be as long as the batch, {len(deliveries)}, not {len(answers)}")


def _outcome(held: HeldDelivery, answer: Any, error: BaseException | None) -> Outcome:
    """Return what is to be done; an answer that makes no sense counts as a failure of the handler."""
    settings, attempt = held.handler.settings, held.delivery.attempt
    try:
        return answered(answer, attempt, settings) if error is None else raised(error, attempt, settings)
    except BaseException as nonsense:
        return _nonsense(held, nonsense)


def _nonsense(held: HeldDelivery, why: BaseException) -> Outcome:
    """Return the outcome of an answer that is not allowed; of a foreign exception the log has class and place alone."""
    text, place = "the handler's answer is not allowed", ""
    with suppress(BaseException):  # a class of errors may raise when it is asked for its name
        text, place = described(why), "" if isinstance(why, ConfigurationError) else placed(why)
        logger.warning("queue %s: handler's answer is not allowed: %s", held.queue, place or text)
    return Outcome("nack", NONSENSE_MS, error=text, raised=place)


def _started(held: HeldDelivery) -> Started:
    delivery = held.delivery
    due = delivery.header.due
    lag = None if due is None else min(max(0.0, time.time() - due / 1000), LONGEST_LAG_SECONDS)
    return Started(held.queue, delivery.claimed.id, delivery.attempt, lag)


def _handled(run: HandlerCall, held: HeldDelivery, outcome: Outcome, seconds: float) -> Handled:
    kind: Any = "timeout" if run.abandoned else outcome.kind
    delivery = held.delivery
    said = (outcome.error, outcome.raised, is_failure(held, outcome), held.trace_id)
    return Handled(held.queue, delivery.claimed.id, delivery.attempt, kind, seconds, *said)
