"""
Runs the handlers of a worker: plain ones on threads, coroutines on one event loop.

`Runner` makes one call of a handler, hands its outcomes on, and reports the deliveries that failed.
`ThreadExecutor` and `AsyncExecutor` take calls that have a slot.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack, suppress
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from reliq.errors import ConfigurationError, UndecodableError
from reliq.events import Handled, Observer, Started, notify, wanting
from reliq.handlers.handler import Job
from reliq.handlers.settlement import (
    ACKED,
    OVERRAN,
    RELEASED,
    HandlerOutcome,
    answered,
    decoded,
    is_final,
    raised,
    undecodable,
)
from reliq.message import Nack
from reliq.text import class_name, format_duration, printable
from reliq.wire_format import described, placed, traceback_of
from reliq.worker.upkeep import thread_stack

if TYPE_CHECKING:
    from reliq.worker.slots import HandlerCall, HeldDelivery, Inflight


T = TypeVar("T")
ErrorHook = Callable[[Job[Any], BaseException, bool], Any]
#: A handler's answer, and what it raised.
Returned = tuple[Any, BaseException | None]
#: Notes which call takes a step in the event loop, None after the step; returns the call noted before.
NoteStep = Callable[["HandlerCall | None"], "HandlerCall | None"]

logger = logging.getLogger("reliq")

#: The first failure of a kind is logged with its traceback; this many kinds are remembered.
KINDS_LIMIT = 1000
TEXT_HINT = " (text hidden: see `reliq show QUEUE ID`, or use --log-error-text)"
#: A message is delivered again this long after its handler gave an answer that is not allowed.
NONSENSE_MS = 1000
#: A start counts as at most this late, because due times are written by publishers.
LONGEST_LAG_SECONDS = 7 * 86_400.0
#: The event loop wakes at least this often.
TICK_SECONDS = 1.0
#: An event loop that has not answered a ping after one look is late: no more is claimed for it.
LATE_LOOKS = 1
#: After ten looks it is blocked. Looks count, not seconds: while the machine stands still, no look is made.
BLOCKED_LOOKS = 10
#: The log names a blocked loop after this time.
REPORT_BLOCKED_SECONDS = 1.0

#: Iterables that compute nothing until they are iterated over.
_LAZY = (Generator, AsyncGenerator, map, filter, zip)
#: The forks between the first process and this one: a handler that forks returns in both.
_forks: list[None] = []
os.register_at_fork(after_in_child=lambda: _forks.append(None))
#: The call of the handler that runs, also in tasks that the handler makes.
_current: contextvars.ContextVar[HandlerCall | None] = contextvars.ContextVar("reliq_handler_call", default=None)


def is_failure(held: HeldDelivery, outcome: HandlerOutcome) -> bool:
    """Return whether the handler did not choose `outcome`, or it is a `Nack` after which no retry is left."""
    return outcome.failed or (outcome.kind == "nack" and is_final(held.delivery.claimed, outcome))


class Runner:
    """
    Runs one call of a handler where it is asked to: a plain one by `run`, a coroutine by `begin` and then `arun`.

    Nothing that a message, a handler or an observer brings raises here, so that no thread and no slot is lost. Failures are
    logged and reported to the hooks of `Consumer.on_error`.

    Args:
        error_text: log the texts of exceptions and the reasons of answers too, which may hold a part of a body.

    Attributes:
        state: what the lifespan yielded.
        before_call: notes a call, in the thread that begins it.
    """

    def __init__(
        self,
        settle: Callable[[list[HeldDelivery], HandlerOutcome | None], None],
        middleware: Sequence[Callable[[Job[Any]], Any]],
        observers: Sequence[Observer],
        stopping: threading.Event,
        *,
        on_error: Sequence[ErrorHook] = (),
        error_text: bool = False,
    ) -> None:
        self._middleware = middleware
        self.state: Any = None
        self.before_call: Callable[[HandlerCall], None] | None = None
        self._settle = settle
        self._stopping = stopping
        self._forks = len(_forks)
        self._error_hooks = on_error
        self._error_text = error_text
        self._failures_seen: set[tuple[str, str]] = set()
        self._start_observers = wanting(observers, Started)
        self._end_observers = wanting(observers, Handled)

    def run(self, run: HandlerCall) -> Returned:
        """Make a plain handler's call, which has begun; return its answer, and what it raised."""
        answer: Any = None
        error: BaseException | None = None
        try:
            if jobs := self._jobs(run):
                answer = contextvars.copy_context().run(self._call, run, jobs)
        except BaseException as raised_error:  # SystemExit too: a handler must not end the thread
            error = raised_error
        self.end(run, answer, error)
        return answer, error

    async def arun(self, run: HandlerCall) -> Returned:
        """As `run`, of a coroutine handler's call."""
        answer: Any = None
        error: BaseException | None = None
        try:
            if jobs := self._jobs(run):
                answer = await self._acall(run, jobs)
        except asyncio.CancelledError as cancelled:
            error = TimeoutError("the handler overran its timeout") if run.abandoned else cancelled
        except BaseException as raised_error:  # SystemExit too: a handler must not end the loop
            error = raised_error
        self.end(run, answer, error)
        return answer, error

    def begin(self, run: HandlerCall) -> bool:
        """Return whether the handler may start; a delivery without a lease goes back, unspent if it was not claimed again."""
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
                if self._start_observers:
                    notify(self._start_observers, map(_started, run.unanswered))
            except BaseException:  # noqa: S110  the work goes on; cheaper than `suppress`, for every message
                pass
        return run.began

    def _jobs(self, run: HandlerCall) -> list[Job[Any]]:
        """Return the jobs of `run`; what does not decode is answered for, and left out."""
        decode = run.handler.codec.decode
        jobs = []
        for held in run.unanswered:
            try:
                body = decoded(held.delivery, decode)
            except BaseException as decode_error:
                error = undecodable(decode_error, held.queue, held.delivery.id)
                self._answer(run, {held: _outcome(held, None, error)}, error)
            else:
                jobs.append(Job(held, run, body, self.state, self._stopping))
        return jobs

    def end(self, run: HandlerCall, answer: Any, error: BaseException | None) -> None:
        """Hand over what the handler has answered, or raised, for everything in `run` or for each."""
        if len(_forks) != self._forks:  # the handler has forked, and this is the copy
            os._exit(0)
        deliveries = run.unanswered
        outcomes = dict.fromkeys(deliveries, ACKED)
        if not (answer is None and error is None):
            try:
                outcomes = self._outcomes(run, deliveries, answer, error)
            except BaseException as answer_error:
                outcomes = {held: _nonsense(held, answer_error) for held in deliveries}
        self._answer(run, outcomes, answer if error is None else error)

    def _call(self, run: HandlerCall, jobs: list[Job[Any]]) -> Any:
        if not self._middleware:
            return _done(run.handler.function(*run.arguments(jobs)))
        with ExitStack() as stack:
            for around in self._middleware:
                for job in jobs:
                    stack.enter_context(around(job))
            return _done(run.handler.function(*run.arguments(jobs)))
        return None  # a middleware has dealt with the error

    async def _acall(self, run: HandlerCall, jobs: list[Job[Any]]) -> Any:
        if not self._middleware:
            return await run.handler.function(*run.arguments(jobs))
        async with AsyncExitStack() as stack:
            for around in self._middleware:
                for job in jobs:
                    manager = around(job)
                    if hasattr(manager, "__aenter__"):
                        await stack.enter_async_context(manager)
                    else:
                        stack.enter_context(manager)
            return await run.handler.function(*run.arguments(jobs))
        return None  # a middleware has dealt with the error

    def _outcomes(
        self, run: HandlerCall, deliveries: list[HeldDelivery], answer: Any, error: BaseException | None
    ) -> dict[HeldDelivery, HandlerOutcome]:
        if isinstance(error, asyncio.CancelledError) and self._stopping.is_set():
            # Cut off by the stop: no fault of the messages, and they run no more.
            return dict.fromkeys(deliveries, RELEASED)
        if error is None and run.handler.is_batch:
            if isinstance(answer, _LAZY):
                raise ConfigurationError(f"a batch's answers must be a list or a tuple, not a {class_name(answer)}")
            if isinstance(answer, list | tuple):
                if len(answer) != len(deliveries):
                    raise ConfigurationError(
                        f"a list of answers must be as long as the batch, {len(deliveries)}, not {len(answer)}"
                    )
                return {held: _outcome(held, each, None) for held, each in zip(deliveries, answer, strict=True)}
        return {held: _outcome(held, answer, error) for held in deliveries}

    def _answer(self, run: HandlerCall, outcomes: dict[HeldDelivery, HandlerOutcome], cause: Any) -> None:
        """Hand over `outcomes`; `cause` is what the handler answered or raised, None when it returned nothing."""
        seconds = (time.monotonic() - run.started_at) / len(run.deliveries)
        if run.handler.is_async or not run.abandoned:  # else that was done when it overran
            is_success = not run.abandoned and list(outcomes.values()).count(ACKED) == len(outcomes)
            observers = self._end_observers
            try:  # the work goes on when observers fail
                if observers and is_success:
                    observers = [observer for observer in observers if getattr(observer, "wants_success", True)]
                if observers:
                    notify(observers, [_handled(run, held, outcome, seconds) for held, outcome in outcomes.items()])
            except BaseException:  # noqa: S110  cheaper than `suppress`, for every message
                pass
            if not is_success:
                with suppress(BaseException):
                    self._report(run, outcomes, cause, seconds)
        took_ms = round(seconds * 1000)
        for held, outcome in outcomes.items():
            held.outcome = outcome
            held.took_ms = took_ms
        self._settle(list(outcomes), None)

    def _report(
        self, run: HandlerCall, outcomes: dict[HeldDelivery, HandlerOutcome], cause: Any, seconds: float
    ) -> None:
        """Report the deliveries that failed after `seconds`; `cause` was raised or answered, a list for a batch."""
        for held, outcome in outcomes.items():
            if not is_failure(held, outcome):
                continue
            # By its type alone: an answer may raise when it is asked for its class.
            error = cause if issubclass(type(cause), BaseException) else Nack(reason=outcome.error)
            with suppress(BaseException):  # an exception whose own code raises is not logged
                self._log(run, held, outcome, error, seconds)
            for hook in self._error_hooks:
                payload = held.delivery.payload
                body: Any = payload
                try:
                    with suppress(Exception):  # of a body that does not decode, the job has the bytes
                        body = run.handler.codec.decode(payload)
                    job = Job(held, run, body, self.state, self._stopping)
                    hook(job, error, is_final(held.delivery.claimed, outcome))
                except BaseException as hook_error:
                    name = getattr(hook, "__qualname__", hook)
                    logger.warning("on_error %s itself failed: %s", name, placed(hook_error))

    def report_overrun(self, run: HandlerCall, seconds: float) -> None:
        """Report a handler whose thread overran its time, and where it stands; a new thread calls the hooks."""
        frame = sys._current_frames().get(run.thread)  # noqa: SLF001  the documented way to see other threads
        traceback: TracebackType | None = None
        while frame is not None:
            traceback = TracebackType(traceback, frame, frame.f_lasti, frame.f_lineno)
            frame = frame.f_back
        error = TimeoutError("the handler overran its timeout").with_traceback(traceback)
        arguments = (run, dict.fromkeys(run.unanswered, OVERRAN), error, seconds)
        with suppress(RuntimeError):  # no thread to be had
            threading.Thread(target=self._report, args=arguments, name="reliq-overran", daemon=True).start()

    def _log(
        self, run: HandlerCall, held: HeldDelivery, outcome: HandlerOutcome, error: BaseException, seconds: float
    ) -> None:
        """
        Write a line: at ERROR, with the exception, when a message died; with its traceback when its kind is new.

        The traceback is formatted here, so that a handler of log records adds no text of an exception.
        """
        delivery = held.delivery
        final = is_final(delivery.claimed, outcome)
        level = logging.ERROR if final else logging.INFO
        if not logger.isEnabledFor(level):
            return
        kind = "timeout" if run.abandoned else outcome.kind
        verb = {"reject": "was rejected", "timeout": "overran its time"}.get(kind, "failed")
        attempt = "a delivery"
        if delivery.attempt is not None:
            attempt = f"attempt {delivery.attempt} of {delivery.attempt + max(0, delivery.claimed.left)}"
        if final:
            consequence = "now a dead letter"
        elif outcome is OVERRAN:
            consequence = "again when its lease ends"
        elif outcome.delay_ms:
            consequence = f"again in {format_duration(outcome.delay_ms / 1000)}"
        else:
            consequence = "again at once"
        text = f"{held.queue} {delivery.id} {attempt} {verb} after {seconds:.3f} s, {consequence}"
        place = outcome.raised
        error_type = place.partition(" ")[0]
        error_text = place
        if self._error_text:
            places = place.partition(" ")[2]  # of the exception and its causes
            error_text = f"{outcome.error} ({places})" if places else outcome.error
        failure = (held.queue, placed(error))
        with_trace = final or failure not in self._failures_seen
        if failure not in self._failures_seen and len(self._failures_seen) >= KINDS_LIMIT:
            self._failures_seen.clear()
        self._failures_seen.add(failure)
        hint = TEXT_HINT if with_trace and outcome.error != error_type and not self._error_text else ""
        fields = {
            "event": "handled",
            "queue": held.queue,
            "id": delivery.id,
            "attempt": delivery.attempt,
            "outcome": kind,
            "final": final,
            "seconds": round(seconds, 6),
            "error": error_text,
            "error_type": error_type,
            "place": place,
        }
        line = printable(f"{text}: {error_text}" if error_text else text) + hint
        exc_info = (type(error), error, error.__traceback__) if final else None
        record = logger.makeRecord(logger.name, level, __file__, 0, "%s", (line,), exc_info, extra={"reliq": fields})
        if with_trace and not isinstance(error, UndecodableError):  # its place is ours, its text names the field
            record.exc_text = traceback_of(error, with_text=self._error_text)
        elif final:
            record.exc_text = type(error).__name__
        logger.handle(record)


def _done(answer: Any) -> Any:
    """Return a plain handler's answer; raise TypeError for an awaitable, whose work was never done."""
    if answer is not None and inspect.isawaitable(answer):
        if inspect.iscoroutine(answer):
            answer.close()
        raise TypeError("the handler returned an awaitable that nobody awaits; define it with async def")
    return answer


def _outcome(held: HeldDelivery, answer: Any, error: BaseException | None) -> HandlerOutcome:
    """Return what is to be done; an answer that makes no sense counts as a failure of the handler."""
    settings = held.handler.settings
    attempt = held.delivery.attempt
    try:
        return answered(answer, attempt, settings) if error is None else raised(error, attempt, settings)
    except BaseException as answer_error:
        return _nonsense(held, answer_error)


def _nonsense(held: HeldDelivery, error: BaseException) -> HandlerOutcome:
    """Return the outcome of an answer that is not allowed; of a foreign exception the log has class and place alone."""
    text = "the handler's answer is not allowed"
    place = ""
    with suppress(BaseException):  # a class of errors may raise when it is asked for its name
        text = described(error)
        place = "" if isinstance(error, ConfigurationError) else placed(error)
        logger.warning("queue %s: handler's answer is not allowed: %s", held.queue, place or text)
    return HandlerOutcome("nack", NONSENSE_MS, error=text, raised=place)


def _started(held: HeldDelivery) -> Started:
    delivery = held.delivery
    due = delivery.header.due
    lag = None if due is None else min(max(0.0, time.time() - due / 1000), LONGEST_LAG_SECONDS)
    return Started(held.queue, delivery.claimed.id, delivery.attempt, lag)


def _handled(run: HandlerCall, held: HeldDelivery, outcome: HandlerOutcome, seconds: float) -> Handled:
    kind: Any = "timeout" if run.abandoned else outcome.kind
    id = held.delivery.claimed.id
    failed = is_failure(held, outcome)
    return Handled(
        held.queue, id, held.delivery.attempt, kind, seconds, outcome.error, outcome.raised, failed, held.trace_id
    )


class ThreadExecutor:
    """Plain handlers, one on each of as many threads as there are slots, at most."""

    def __init__(self, runner: Runner, inflight: Inflight) -> None:
        self._runner = runner
        self._inflight = inflight
        self._threads: list[threading.Thread] = []

    def submit(self, deliveries: list[HeldDelivery]) -> None:
        """Queue `deliveries` for slots, with as many threads as plain calls and slots need."""
        wanted = self._inflight.enqueue(deliveries)
        while len(self._threads) < wanted:
            name = f"reliq-handler-{len(self._threads) + 1}"
            thread = threading.Thread(target=self._work, name=name, daemon=True)
            thread.start()  # a thread that cannot start is not counted, and tried again
            self._threads.append(thread)
        time.sleep(0)  # a thread of a handler has the interpreter now, not when the caller waits for Redis

    @property
    def is_running(self) -> bool:
        """Whether every thread that was started still takes work."""
        return all(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        run: HandlerCall | None = None
        while True:
            done = run
            run = None  # the slot of `done` is freed once, whatever raises
            try:
                run = self._inflight.next_plain(done)
                if run is None:
                    return
                if self._runner.begin(run):
                    self._runner.run(run)
            except BaseException:
                logger.exception("a thread of the handlers failed and goes on")


class Steps(Coroutine[Any, Any, Any]):
    """
    A coroutine of a handler call, which notes each step before it runs.

    A step that holds the interpreter lets no other thread run, so the note must come first. Code that inspects the
    task finds the attributes of the coroutine itself.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, Any], run: HandlerCall, note: NoteStep) -> None:
        self._coroutine = coroutine
        self._run = run
        self._note = note

    def __getattr__(self, name: str) -> Any:
        return getattr(self._coroutine, name)

    def __await__(self) -> Any:
        return self._coroutine.__await__()

    def send(self, value: Any) -> Any:
        """Run the next step."""
        # A task that outlives its handler call is no longer the call's.
        is_over = self._run.task is not None and self._run.task.done()
        before = self._note(None if is_over else self._run)
        try:
            return self._coroutine.send(value)
        finally:
            self._note(before)

    def throw(self, *error: Any) -> Any:
        """Run the next step, in which an error is raised first."""
        is_over = self._run.task is not None and self._run.task.done()
        before = self._note(None if is_over else self._run)
        try:
            return self._coroutine.throw(*error)
        finally:
            self._note(before)

    def close(self) -> None:
        """Close the coroutine."""
        self._coroutine.close()


class DaemonThreads(ThreadPoolExecutor):
    """
    The threads of `asyncio.to_thread` in handlers, as daemons.

    At its end Python waits for the threads of an ordinary ThreadPoolExecutor, however long after a worker's grace.
    """

    def __init__(self) -> None:
        super().__init__()
        self._limit = min(32, (os.cpu_count() or 1) + 4)  # as of an ordinary executor
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._started = 0

    def submit(self, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Call `function` on an idle thread, on a new thread, or, at the limit, on the first thread that is free."""
        future: Future[T] = Future()
        self._calls.put((future, partial(function, *args, **kwargs)))
        if not self._idle.acquire(blocking=False) and self._started < self._limit:
            threading.Thread(target=self._work, name=f"reliq-asyncio-{self._started + 1}", daemon=True).start()
            self._started += 1
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Do nothing: the threads end with the program."""

    def _work(self) -> None:
        while True:
            future, call = self._calls.get()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:
                    future.set_exception(error)
            del future, call  # an idle thread keeps no result alive
            self._idle.release()


class AsyncExecutor:
    """
    Coroutine handlers, each a task of its own on one event loop, which is pinged while it has any.

    Attributes:
        note_step: notes the call whose coroutine, or task, takes a step; None when nothing reads the notes.
    """

    note_step: NoteStep | None = None

    def __init__(self, runner: Runner, inflight: Inflight) -> None:
        self._runner = runner
        self._inflight = inflight
        self._done: list[HandlerCall] = []  # calls whose slots are to be freed
        self._filling = False  # whether the loop will call `fill`
        self._timer: asyncio.TimerHandle | None = None  # for a batch that lingers
        self._thread = threading.Thread(target=self._serve, name="reliq-asyncio", daemon=True)
        self._context = contextvars.copy_context()  # of the consumer's start; each handler gets a copy
        self._closing = False
        self._ping_lock = threading.Lock()
        self._pinged_at: float | None = None  # None: it has answered
        self._missed = 0  # looks since then without an answer
        self._is_block_logged = False

    def start(self) -> None:
        """Start the event loop's thread."""
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(DaemonThreads())
        self._loop.set_task_factory(self._make_task)
        self._tick()
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether the event loop's thread has not ended."""
        return self._thread.is_alive()

    def call(self, function: Callable[..., Any], *args: Any) -> None:
        """Schedule a call on the loop, unless that is closed; other threads call this."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *args)

    @property
    def thread_id(self) -> int:
        """The loop's thread."""
        return self._thread.ident or 0

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Run a coroutine on this loop, and return its future."""
        try:
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError:
            coroutine.close()  # the loop is closed
            raise

    def cancel_all(self, timeout_seconds: float = 5.0) -> None:
        """Cancel what still runs and wait a while for it to end, unless the loop's thread has ended."""
        runs = [run for run in self._inflight.runs() if run.task is not None and self.is_running]
        for run in runs:
            self.call(run.task.cancel)
        self._inflight.wait_until_ended(runs, timeout_seconds)

    def close(self, timeout_seconds: float = 5.0) -> None:
        """End the thread."""
        self._closing = True
        self.call(self._loop.stop)
        self._thread.join(timeout_seconds)

    def _serve(self) -> None:
        loop = self._loop
        asyncio.set_event_loop(loop)
        try:
            while not self._closing:
                try:
                    loop.run_forever()
                except Exception:
                    # The loop's own, such as that its selector is closed; what callbacks raise besides stays in the loop.
                    # It would come again at once: the thread ends, and the process is replaced.
                    logger.exception("the event loop of the handlers is broken")
                    return
                except BaseException as error:  # SystemExit of a task that a handler has made
                    logger.error("a task tried to end the event loop of the handlers: %s", placed(error))  # noqa: TRY400  no text
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            loop.close()

    def _tick(self) -> None:
        """Wake the loop each second: after a handler has closed its selector, only the next wait fails."""
        self._loop.call_later(TICK_SECONDS, self._tick)

    def fill(self) -> None:
        """Free the slots of what has ended, and start what may start, until nothing more may; the loop calls this."""
        self._filling = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while True:
            done = self._done
            self._done = []
            runs, linger = self._inflight.next_async(done)
            for run in runs:
                if not (self._runner.begin(run) and self._start(run)):
                    self._done.append(run)
            if not self._done:
                break
        if linger is not None:
            self._timer = self._loop.call_later(linger, self.fill)

    def _start(self, run: HandlerCall) -> bool:
        """Make a task of `run`; return whether that worked: a task factory is the application's."""
        coroutine: Coroutine[Any, Any, None] = self._run(run)
        if self.note_step is not None:
            coroutine = Steps(coroutine, run, self.note_step)
        context = self._context.copy()
        context.run(_current.set, run)
        try:
            # Not by the argument `context`, which not every task factory takes.
            run.task = context.run(self._loop.create_task, coroutine)
        except BaseException as error:
            coroutine.close()
            self._runner.end(run, None, error)
        return run.task is not None

    def _make_task(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        """Make a task; the steps of a task that a handler makes are noted as steps of the handler's call."""
        run = _current.get()
        if run is not None and self.note_step is not None and inspect.iscoroutine(coroutine):
            coroutine = Steps(coroutine, run, self.note_step)
        return asyncio.Task(coroutine, loop=loop, **options)

    async def _run(self, run: HandlerCall) -> None:
        try:
            await self._runner.arun(run)
        finally:
            self._free(run)

    def _free(self, run: HandlerCall) -> None:
        """Have the slot of `run` freed."""
        self._done.append(run)
        if not self._filling:
            self._filling = True
            self._loop.call_soon(self.fill)

    def _end_unbegun(self, run: HandlerCall) -> None:
        if run.unanswered:  # it was not ended before
            try:
                self._runner.end(run, None, asyncio.CancelledError())
            finally:
                self._free(run)

    def watch(self, now: float) -> list[HeldDelivery]:
        """
        Ping the loop again if it answered the latest ping, else count one more look without an answer.

        It also ends calls whose tasks were cancelled before their first steps: no code of such a task does.

        Returns:
            what was held for a loop that is blocked by now: it goes back to Redis, and plain handlers use the slots.
        """
        for run in self._inflight.runs():
            if run.task is not None and run.task.done() and run.unanswered:
                self.call(self._end_unbegun, run)
        with self._ping_lock:
            if self._pinged_at is None:
                if self._inflight.loop_is_used:
                    self._pinged_at = now
                    self.call(self._answer)
                return []
            self._missed += 1
            if self._missed == LATE_LOOKS:
                self._inflight.note_loop(is_late=True)
            seconds = now - self._pinged_at
            if self._missed >= BLOCKED_LOOKS and not self._is_block_logged and seconds >= REPORT_BLOCKED_SECONDS:
                self._is_block_logged = True
                logger.warning(
                    "the event loop has not run for %.1f s: a coroutine blocks it, and async messages stay in Redis "
                    "until it runs again; await what takes long, or call it by asyncio.to_thread. It is at:\n%s",
                    seconds,
                    "\n".join(f"  {place}" for place in thread_stack(self.thread_id)),
                )
            if self._missed != BLOCKED_LOOKS:
                return []
            self._inflight.note_loop(is_late=True, is_blocked=True)
            return self._inflight.withdraw([held for held in self._inflight.deliveries() if held.handler.is_async])

    def _answer(self) -> None:
        """Record that the loop runs; the loop calls this."""
        with self._ping_lock:
            if self._missed:
                self._inflight.note_loop()
            if self._is_block_logged:
                logger.warning("the event loop runs again")
            self._pinged_at = None
            self._missed = 0
            self._is_block_logged = False
