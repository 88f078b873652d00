"""
Run handlers: plain functions on threads, and coroutine functions on one event loop.

`Runner` calls a handler, passes the outcomes of its messages to the settler, and reports failures. `ThreadExecutor` and
`AsyncExecutor` start the handler calls that have a slot.
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
    kept,
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
#: The return value of a handler, and the exception that it raised; at least one of them is None.
Returned = tuple[Any, BaseException | None]
#: A function that stores which handler call runs in the event loop now (None: no call), and returns the previous value.
NoteStep = Callable[["HandlerCall | None"], "HandlerCall | None"]

logger = logging.getLogger("reliq")

#: The first failure of each kind (queue and source line) is logged with its traceback. At most this many kinds are
#: remembered.
KINDS_LIMIT = 1000
TEXT_HINT = " (text hidden: see `reliq show QUEUE ID`, or use --log-error-text)"
#: The delay of the retry after a handler has returned a value that is not allowed.
NONSENSE_MS = 1000
#: The largest delay between due time and start that is reported. Publishers may write any due time, even decades ago.
LONGEST_LAG_SECONDS = 7 * 86_400.0
#: The event loop wakes up at least this often.
TICK_SECONDS = 1.0
#: If the event loop has not answered a ping after this many checks, it is late. The worker then claims no more messages
#: for coroutine handlers.
LATE_LOOKS = 1
#: If the event loop has not answered a ping after this many checks, it is blocked.
#: Count checks and not seconds, so that the loop does not seem blocked after the machine was suspended.
BLOCKED_LOOKS = 10
#: Log a blocked event loop only if the block lasts this long.
REPORT_BLOCKED_SECONDS = 1.0

#: Types of lazy iterables. A batch handler must not return them, because they compute the results of the messages only
#: after the handler has ended.
_LAZY = (Generator, AsyncGenerator, map, filter, zip)
#: Each forked process adds an entry. A handler may fork the process; then only the parent process may settle messages.
_forks: list[None] = []
os.register_at_fork(after_in_child=lambda: _forks.append(None))
#: The current handler call. Tasks that the handler creates inherit it.
_current: contextvars.ContextVar[HandlerCall | None] = contextvars.ContextVar("reliq_handler_call", default=None)


def is_failure(held: HeldDelivery, outcome: HandlerOutcome) -> bool:
    """Return whether `outcome` comes from an error, or is a nack of a message that has no retry left."""
    return outcome.failed or (outcome.kind == "nack" and is_final(held.delivery.claimed, outcome))


class Runner:
    """
    Call handlers and settle their messages.

    For each handler call, first call `begin`, then `run` for a plain handler or `arun` for a coroutine handler.

    All exceptions of decoders, handlers and observers are caught, so that no thread and no slot is lost. Failures are
    logged and passed to the hooks of `Consumer.on_error`.

    Args:
        settle: called with deliveries and their outcome. The outcome is None if each delivery already has its own.
        middleware: the middleware of the consumer, the outermost first.
        observers: the observers of the consumer.
        stopping: an event that is set when the shutdown begins.
        on_error: the hooks of `Consumer.on_error`.
        error_text: whether to log the texts of exceptions and of nacks, which may contain parts of bodies.

    Attributes:
        state: the value that the lifespan yielded.
        before_call: called before each handler call, in the thread that runs the handler.
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
        """Call a plain handler and settle its messages; return its return value and its exception."""
        answer: Any = None
        error: BaseException | None = None
        try:
            if jobs := self._jobs(run):
                answer = contextvars.copy_context().run(self._call, run, jobs)
        except BaseException as raised_error:  # SystemExit too, because a handler must not end the thread
            error = raised_error
        self.end(run, answer, error)
        return answer, error

    async def arun(self, run: HandlerCall) -> Returned:
        """Call a coroutine handler and settle its messages; return its return value and its exception."""
        answer: Any = None
        error: BaseException | None = None
        try:
            if jobs := self._jobs(run):
                answer = await self._acall(run, jobs)
        except asyncio.CancelledError as cancelled:
            error = TimeoutError("the handler exceeded its timeout") if run.abandoned else cancelled
        except BaseException as raised_error:  # SystemExit too, because a handler must not end the event loop
            error = raised_error
        self.end(run, answer, error)
        return answer, error

    def begin(self, run: HandlerCall) -> bool:
        """
        Prepare a handler call; return False if none of its messages may start.

        Messages whose lease has expired or was lost are not passed to the handler, but settled as released.
        """
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
            except BaseException:  # noqa: S110  ignore errors of observers; faster than `suppress`
                pass
        return run.began

    def _jobs(self, run: HandlerCall) -> list[Job[Any]]:
        """
        Decode the bodies of the messages, and return a job for each message.

        Messages whose bodies cannot be decoded get no job. They are settled at once.
        """
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
        """
        Settle the messages of the handler call `run`.

        Args:
            answer: the return value of the handler.
            error: the exception that the handler raised; None if it raised none.
        """
        if len(_forks) != self._forks:  # the handler has forked; this is the child process, which must not settle
            os._exit(0)
        deliveries = run.unanswered
        outcomes = dict.fromkeys(deliveries, ACKED)
        if not (answer is None and error is None) or run.handler.keep_ms:
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
        return None  # a middleware has suppressed the exception

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
        return None  # a middleware has suppressed the exception

    def _outcomes(
        self, run: HandlerCall, deliveries: list[HeldDelivery], answer: Any, error: BaseException | None
    ) -> dict[HeldDelivery, HandlerOutcome]:
        if isinstance(error, asyncio.CancelledError) and self._stopping.is_set():
            # The shutdown has cancelled the handler. Release the messages, so that they do not lose a retry.
            return dict.fromkeys(deliveries, RELEASED)
        if error is None and run.handler.is_batch:
            if isinstance(answer, _LAZY):
                raise ConfigurationError(f"a batch's answers must be a list or a tuple, not a {class_name(answer)}")
            if isinstance(answer, list | tuple):
                if len(answer) != len(deliveries):
                    raise ConfigurationError(
                        f"a batch handler must return an answer for each message, {len(deliveries)}, not {len(answer)}"
                    )
                return {held: _outcome(held, each, None) for held, each in zip(deliveries, answer, strict=True)}
        return {held: _outcome(held, answer, error) for held in deliveries}

    def _answer(self, run: HandlerCall, outcomes: dict[HeldDelivery, HandlerOutcome], cause: Any) -> None:
        """
        Settle each delivery with its outcome in `outcomes`, and report failures.

        `cause` is the exception that the handler raised, or else its return value.
        """
        seconds = (time.monotonic() - run.started_at) / len(run.deliveries)
        if run.handler.is_async or not run.abandoned:  # the renewer reports the timeout of a plain handler
            is_success = not run.abandoned and {outcome.kind for outcome in outcomes.values()} == {"ack"}
            observers = self._end_observers
            try:
                if observers and is_success:
                    observers = [observer for observer in observers if getattr(observer, "wants_success", True)]
                if observers:
                    notify(observers, [_handled(run, held, outcome, seconds) for held, outcome in outcomes.items()])
            except BaseException:  # noqa: S110  faster than `suppress`, and runs for every message
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
        """
        Log failed deliveries and call the hooks of `Consumer.on_error`.

        `cause` is the exception that the handler raised, or else its return value.
        """
        for held, outcome in outcomes.items():
            if not is_failure(held, outcome):
                continue
            # `isinstance` reads `__class__`. The return value of a handler may define it as a property that raises.
            error = cause if issubclass(type(cause), BaseException) else Nack(reason=outcome.error)
            with suppress(BaseException):  # exceptions may have methods that raise
                self._log(run, held, outcome, error, seconds)
            for hook in self._error_hooks:
                payload = held.delivery.payload
                body: Any = payload
                try:
                    with suppress(Exception):  # error hooks get an undecodable body as bytes
                        body = run.handler.codec.decode(payload)
                    job = Job(held, run, body, self.state, self._stopping)
                    hook(job, error, is_final(held.delivery.claimed, outcome))
                except BaseException as hook_error:
                    name = getattr(hook, "__qualname__", hook)
                    logger.warning(
                        "worker: on_error hook %s raised an exception, which is ignored: %s", name, placed(hook_error)
                    )

    def report_overrun(self, run: HandlerCall, seconds: float) -> None:
        """
        Report that a plain handler exceeded its timeout, with the handler's current stack.

        Write the log and call the hooks of `Consumer.on_error` in a new thread, so that the caller is not delayed.
        """
        frame = sys._current_frames().get(run.thread)  # noqa: SLF001  the documented way to see other threads
        traceback: TracebackType | None = None
        while frame is not None:
            traceback = TracebackType(traceback, frame, frame.f_lasti, frame.f_lineno)
            frame = frame.f_back
        error = TimeoutError("the handler exceeded its timeout").with_traceback(traceback)
        arguments = (run, dict.fromkeys(run.unanswered, OVERRAN), error, seconds)
        with suppress(RuntimeError):  # `start` raises it if the system permits no more threads
            threading.Thread(target=self._report, args=arguments, name="reliq-overran", daemon=True).start()

    def _log(
        self, run: HandlerCall, held: HeldDelivery, outcome: HandlerOutcome, error: BaseException, seconds: float
    ) -> None:
        """
        Log a failed delivery, at ERROR if the message becomes a dead letter, else at INFO.

        Dead letters and the first failure of each kind (queue and source line) are logged with a traceback. This method
        formats the traceback itself, because the logging module would add the text of the exception, which may contain
        parts of the body.
        """
        delivery = held.delivery
        final = is_final(delivery.claimed, outcome)
        level = logging.ERROR if final else logging.INFO
        if not logger.isEnabledFor(level):
            return
        kind = "timeout" if run.abandoned else outcome.kind
        verb = {"reject": "was rejected", "timeout": "exceeded its timeout"}.get(kind, "failed")
        attempt = "attempt"
        if delivery.attempt is not None:
            attempt = f"attempt {delivery.attempt} of {delivery.attempt + max(0, delivery.claimed.left)}"
        if final:
            consequence = "now a dead letter"
        elif outcome is OVERRAN:
            consequence = "retrying when its lease expires"
        elif outcome.delay_ms:
            consequence = f"retrying in {format_duration(outcome.delay_ms / 1000)}"
        else:
            consequence = "retrying immediately"
        text = f"queue {held.queue}: message {delivery.id}: {attempt} {verb} after {seconds:.3f} s, {consequence}"
        place = outcome.raised
        error_type = place.partition(" ")[0]
        error_text = place
        if self._error_text:
            places = place.partition(" ")[2]  # the source lines of the exception and its causes
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
        # An UndecodableError needs no traceback: its text names the invalid field, and its stack has only reliq's code.
        if with_trace and not isinstance(error, UndecodableError):
            record.exc_text = traceback_of(error, with_text=self._error_text)
        elif final:
            record.exc_text = type(error).__name__
        logger.handle(record)


def _done(answer: Any) -> Any:
    """
    Return `answer`, the return value of a plain handler.

    Raises:
        TypeError: it is an awaitable. A thread of a plain handler does not await it.
    """
    if answer is not None and inspect.isawaitable(answer):
        if inspect.iscoroutine(answer):
            answer.close()
        raise TypeError(
            "a plain handler returned an awaitable, which is not awaited; define the handler with async def"
        )
    return answer


def _outcome(held: HeldDelivery, answer: Any, error: BaseException | None) -> HandlerOutcome:
    """
    Return the outcome of a message.

    A return value that is not allowed counts as a failure.

    Args:
        held: the delivery of the message.
        answer: the handler's return value; if a batch handler returned a list or tuple, its item for this message.
        error: the exception that the handler raised; None if it raised none.
    """
    settings = held.handler.settings
    attempt = held.delivery.attempt
    try:
        outcome = answered(answer, attempt, settings) if error is None else raised(error, attempt, settings)
        keep_ms = held.handler.keep_ms
        return kept(answer, held.delivery, keep_ms) if keep_ms and outcome is ACKED else outcome
    except BaseException as answer_error:
        return _nonsense(held, answer_error)


def _nonsense(held: HeldDelivery, error: BaseException) -> HandlerOutcome:
    """
    Log that the handler returned a value that is not allowed, and return the outcome `nack`.

    Log the text of `error` only if it is a ConfigurationError, because other texts may contain parts of the body.
    """
    text = "the handler's answer is not allowed"
    place = ""
    with suppress(BaseException):  # exceptions may have methods that raise
        text = described(error)
        place = "" if isinstance(error, ConfigurationError) else placed(error)
        logger.warning(
            "queue %s: handler %s returned a result that is not allowed; retrying: %s",
            *(held.queue, held.handler.name, place or text),
        )
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
        *(held.queue, id, held.delivery.attempt, kind, seconds, outcome.error, outcome.raised),
        *(failed, held.trace_id, held.handler.task),
    )


class ThreadExecutor:
    """Run plain handlers on threads, at most one thread for each slot."""

    def __init__(self, runner: Runner, inflight: Inflight) -> None:
        self._runner = runner
        self._inflight = inflight
        self._threads: list[threading.Thread] = []

    def submit(self, deliveries: list[HeldDelivery]) -> None:
        """Let `deliveries` wait for slots, and start more threads if plain handlers can use more."""
        wanted = self._inflight.enqueue(deliveries)
        while len(self._threads) < wanted:
            name = f"reliq-handler-{len(self._threads) + 1}"
            thread = threading.Thread(target=self._work, name=name, daemon=True)
            thread.start()  # if no thread can be started, the next `submit` tries again
            self._threads.append(thread)
        time.sleep(0)  # give up the GIL, so that a handler thread starts before the caller waits for Redis

    @property
    def is_running(self) -> bool:
        """Whether all started threads are alive."""
        return all(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        run: HandlerCall | None = None
        while True:
            done = run
            run = None  # if `next_plain` raises, the next iteration must not free the slot of `done` again
            try:
                run = self._inflight.next_plain(done)
                if run is None:
                    return
                if self._runner.begin(run):
                    self._runner.run(run)
            except BaseException:
                logger.exception("worker: internal error in a handler thread; the thread continues")


class Steps(Coroutine[Any, Any, Any]):
    """
    A wrapper of a handler's coroutine that calls `note` before and after each step.

    A step is the code that runs between two suspensions of the coroutine. If a step holds the GIL, no other thread of
    the process can run. So `note` stores the handler call before each step, and the supervisor can report it.

    All other attributes are delegated to the wrapped coroutine.
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
        """Run the next step of the coroutine."""
        # A task may still run after the handler call that created it has ended. Then `note` gets None.
        is_over = self._run.task is not None and self._run.task.done()
        before = self._note(None if is_over else self._run)
        try:
            return self._coroutine.send(value)
        finally:
            self._note(before)

    def throw(self, *error: Any) -> Any:
        """Raise an exception in the coroutine and run its next step."""
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
    Daemon threads for `asyncio.to_thread` in handlers.

    When a process exits, Python waits for all threads of a plain ThreadPoolExecutor, however long they run. With daemon
    threads, a worker process exits after its grace period.
    """

    def __init__(self) -> None:
        super().__init__()
        self._limit = min(32, (os.cpu_count() or 1) + 4)  # the same limit as in ThreadPoolExecutor
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._started = 0

    def submit(self, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """
        Call `function` in an idle thread or in a new thread.

        If no thread is idle and no new thread may be started, the next idle thread calls it.
        """
        future: Future[T] = Future()
        self._calls.put((future, partial(function, *args, **kwargs)))
        if not self._idle.acquire(blocking=False) and self._started < self._limit:
            threading.Thread(target=self._work, name=f"reliq-asyncio-{self._started + 1}", daemon=True).start()
            self._started += 1
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Do nothing, because daemon threads end with the process."""

    def _work(self) -> None:
        while True:
            future, call = self._calls.get()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:
                    future.set_exception(error)
            del future, call  # an idle thread must not keep the result alive
            self._idle.release()


class AsyncExecutor:
    """
    Run coroutine handlers as tasks on one event loop, which runs in its own thread.

    The renewer pings the loop with `watch`, to detect a handler that blocks it.

    Attributes:
        note_step: called before and after each step of a task, to store the handler call that runs in the event loop
            now (see `NoteStep`); None if this is not stored.
    """

    note_step: NoteStep | None = None

    def __init__(self, runner: Runner, inflight: Inflight) -> None:
        self._runner = runner
        self._inflight = inflight
        self._done: list[HandlerCall] = []  # handler calls that have ended, but whose slots are not free yet
        self._filling = False  # whether the event loop will soon call `fill`
        self._timer: asyncio.TimerHandle | None = None  # calls `fill` when the linger time of a batch is over
        self._thread = threading.Thread(target=self._serve, name="reliq-asyncio", daemon=True)
        self._context = contextvars.copy_context()  # each handler call gets a copy of these context variables
        self._closing = False
        self._ping_lock = threading.Lock()
        self._pinged_at: float | None = None  # when the last ping was sent; None after the loop has answered it
        self._missed = 0  # the number of checks since the last ping, while the loop has not answered it
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
        """Whether the thread of the event loop is alive."""
        return self._thread.is_alive()

    def call(self, function: Callable[..., Any], *args: Any) -> None:
        """Let the event loop call `function`. Other threads may use this. If the loop is closed, do nothing."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *args)

    @property
    def thread_id(self) -> int:
        """The id of the event loop's thread."""
        return self._thread.ident or 0

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Run a coroutine on the event loop from another thread; return its future."""
        try:
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError:
            coroutine.close()  # the loop is closed and will not run the coroutine
            raise

    def cancel_all(self, timeout_seconds: float = 5.0) -> None:
        """Cancel all running coroutine handlers and wait for them to end, at most `timeout_seconds`."""
        runs = [run for run in self._inflight.runs() if run.task is not None and self.is_running]
        for run in runs:
            self.call(run.task.cancel)
        self._inflight.wait_until_ended(runs, timeout_seconds)

    def close(self, timeout_seconds: float = 5.0) -> None:
        """Stop the event loop and its thread."""
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
                    # The loop itself failed, for example because its selector is closed. A new run would fail too.
                    logger.exception(
                        "worker: the event loop of async handlers is broken; this process will be replaced"
                    )
                    return
                except BaseException as error:  # for example SystemExit in a task that a handler created
                    logger.error("worker: a task tried to end the event loop; ignored: %s", placed(error))  # noqa: TRY400  a traceback would contain texts of the application
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            loop.close()

    def _tick(self) -> None:
        """
        Wake the event loop each second.

        If a handler has closed the selector of the loop, the loop then raises an error.
        """
        self._loop.call_later(TICK_SECONDS, self._tick)

    def fill(self) -> None:
        """Free the slots of ended handler calls and start the next calls. Only the event loop may call this."""
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
        """
        Create a task that runs the handler call; return whether the task was created.

        If the application's task factory raises an exception, settle the messages as if the handler had raised it.
        """
        coroutine: Coroutine[Any, Any, None] = self._run(run)
        if self.note_step is not None:
            coroutine = Steps(coroutine, run, self.note_step)
        context = self._context.copy()
        context.run(_current.set, run)
        try:
            # Do not use the argument `context` of `create_task`, because some task factories do not accept it.
            run.task = context.run(self._loop.create_task, coroutine)
        except BaseException as error:
            coroutine.close()
            self._runner.end(run, None, error)
        return run.task is not None

    def _make_task(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        """
        Create a task; the event loop calls this for each new task.

        If a handler creates the task, the steps of the task count as steps of the handler call.
        """
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
        self._done.append(run)
        if not self._filling:
            self._filling = True
            self._loop.call_soon(self.fill)

    def _end_unbegun(self, run: HandlerCall) -> None:
        if run.unanswered:  # the cancelled task has not settled its messages
            try:
                self._runner.end(run, None, asyncio.CancelledError())
            finally:
                self._free(run)

    def watch(self, now: float) -> list[HeldDelivery]:
        """
        Ping the event loop, or count a check if the loop has not answered the last ping.

        Also settle the messages of handler calls whose tasks were cancelled before their first step. Such a task runs
        no code, so it cannot settle them.

        Args:
            now: the monotonic time.

        Returns:
            The deliveries to return to Redis: the prefetched messages of coroutine handlers if the loop has just become
            blocked, otherwise an empty list.
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
                    "worker: the event loop has not run for %.1f s, because a coroutine blocks it. Messages of async "
                    "handlers stay in Redis until it runs again. Await slow calls, or run them with asyncio.to_thread. It is blocked at:\n%s",
                    seconds,
                    "\n".join(f"  {place}" for place in thread_stack(self.thread_id)),
                )
            if self._missed != BLOCKED_LOOKS:
                return []
            self._inflight.note_loop(is_late=True, is_blocked=True)
            return self._inflight.withdraw([held for held in self._inflight.deliveries() if held.handler.is_async])

    def _answer(self) -> None:
        """Record that the event loop has answered the last ping. The event loop itself calls this."""
        with self._ping_lock:
            if self._missed:
                self._inflight.note_loop()
            if self._is_block_logged:
                logger.warning("worker: the event loop runs again; async handlers get messages again")
            self._pinged_at = None
            self._missed = 0
            self._is_block_logged = False
