"""
`Consumer`: handlers and their worker in this process. Also: loading consumers by name, and signals.

`Consumer.run` is the main thread of a worker process. It waits for a signal, for empty queues, or for its replacement.
"""

from __future__ import annotations

import atexit
import importlib
import math
import os
import queue
import re
import signal
import sys
import threading
import time
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from traceback import StackSummary, TracebackException, extract_tb
from typing import TYPE_CHECKING, Any, Self

from reliq.errors import ConfigurationError, RedisUnavailableError
from reliq.events import Observer, RedisRecovered, RedisUnavailable, WorkerReady, WorkerStopping, notify
from reliq.handlers.handler import Job, check_manager
from reliq.handlers.registration import Registration
from reliq.message import Duration, Outcome
from reliq.settings import RECONNECT, WorkerSettings, seconds, seconds_after
from reliq.text import join_first
from reliq.wire_format import placed
from reliq.worker.engine import Engine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from types import FrameType

    from reliq.metrics.serving import Registry
    from reliq.outbox.relay import Relay
    from reliq.redis.url import Target
    from reliq.worker.health import EngineStats
    from reliq.worker.runner import ErrorHook, NoteStep
    from reliq.worker.slots import HandlerCall, HeldDelivery


#: Exit code of a worker process after a handler exceeded its timeout and cannot be stopped, or a part has failed.
EXIT_HUNG = 75
#: Exit code of a worker process that must be replaced.
EXIT_REPLACE = 76
#: Exit code of a process that a second signal ended.
EXIT_SECOND_SIGNAL = 130
#: The signals that stop a worker gracefully.
STOPS = (signal.SIGINT, signal.SIGTERM)
#: The name of the part that reports an unavailable Redis during the start.
STARTING = "start"
#: How often the main thread checks whether the worker has finished, in seconds; a signal wakes it immediately.
END_CHECK_SECONDS = 0.2
#: How often a drain checks whether it has finished, in seconds.
DRAIN_SECONDS = 0.05
#: How often a wait checks for a signal, in seconds: a signal that the system delivers to another thread does not
#: interrupt the main thread.
LOOK_SECONDS = 0.5
#: A stop signal within 1 s may be an echo of the previous signal: shell and kernel both send SIGHUP at the end of a
#: session, and systemd sends SIGHUP after SIGTERM if SendSIGHUP= is set.
ECHO_SECONDS = 1.0

_OURS = (f"{Path(__file__).parent}{os.sep}", f"{Path(importlib.__file__).parent}{os.sep}", "<frozen importlib")
_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


class Consumer(Registration):
    """
    The handlers of any number of queues, and the worker that runs them.

    Args:
        url: a Redis URL or a redis-py client. Default: None, the Redis of the queues, or RELIQ_URL.
        lifespan: a function that returns a context manager, plain or async. Each worker process enters it before its
            first claim and exits it after its last handler; the value it yields is `job.state`. Default: None.
        observers: callables that get every event. Default: none.
        relay: an outbox relay that runs as a part of the worker and publishes the messages of `publish_in`. Default:
            None.
    """

    def __init__(
        self,
        url: Target | None = None,
        *,
        lifespan: Callable[[], Any] | None = None,
        observers: Iterable[Observer] = (),
        relay: Relay | None = None,
    ) -> None:
        super().__init__(url)
        if lifespan is not None:
            check_manager("lifespan", lifespan)
        self.lifespan = lifespan
        self.relay = relay
        self.observers: list[Observer] = list(observers)
        self._engine: Engine | None = None
        self._stopped: Engine | None = None
        #: Only one of two stopping threads does the work. Reentrant, because a signal handler may interrupt a stop.
        self._stop_lock = threading.RLock()
        #: The thread of a stop that a handler requested.
        self._stop_for_handler: threading.Thread | None = None
        #: The upper limit for the grace period, in seconds, whatever the settings are.
        self.longest_grace = math.inf
        self.before_call: Callable[[HandlerCall], None] | None = None
        self.note_step: NoteStep | None = None
        #: Whether to continue after `max_jobs`, because a replacement cannot start yet.
        self.must_stay = False

    def include(self, *sources: Consumer | str) -> Self:
        """
        Add the handlers, middleware, error hooks and observers of other consumers.

        Args:
            sources: `Consumer` objects, or import paths such as `module` or `module:name`.

        Raises:
            ConfigurationError: a module has no such consumer, a queue would have two handlers, or the other consumer
                has its own lifespan or Redis.
        """
        for source in sources:
            other = source if isinstance(source, Consumer) else load_consumer(source)
            if other.lifespan is not None:
                raise ConfigurationError(
                    "an included consumer cannot have a lifespan; give the lifespan to the consumer that includes it"
                )
            if other.target is not None and self.target not in (None, other.target):
                raise ConfigurationError(
                    "the consumer and an included consumer name different Redis servers; use one server"
                )
            for handler in other.handlers:
                self._check_is_new(handler)
            self._add(*other.periodic)
            self._handlers |= {handler.queue.name: handler for handler in other.handlers}
            self.around_calls += other.around_calls
            self.error_hooks += other.error_hooks
            self.observers += [observer for observer in other.observers if observer not in self.observers]
            self.target = self.target if other.target is None else other.target
        return self

    def start(self, settings: WorkerSettings | None = None, *, queues: Sequence[str] = ()) -> None:
        """
        Start the worker in this process and return.

        While Redis is unavailable, it waits. A consumer that still runs at the end of the program is stopped then.

        Args:
            settings: the worker's settings. Default: `WorkerSettings()`; `max_jobs` has no effect here.
            queues: names of the queues to work on. Default: all queues with handlers.

        Raises:
            ConfigurationError: there is no handler, no such queue or no Redis URL, or the server is not suitable.
        """
        unlimited = replace(settings or WorkerSettings(), max_jobs=None)  # no supervisor replaces this process
        self._start_when_redis_answers(unlimited, queues)

    def _start_when_redis_answers(
        self, settings: WorkerSettings, queues: Sequence[str], entered: Callable[[], None] = lambda: None
    ) -> Engine:
        failures = 0
        while True:
            try:
                return self._start(settings, queues, entered)
            except RedisUnavailableError as error:
                failures += 1
                notify(self.observers, [RedisUnavailable("", STARTING, str(error))])
                time.sleep(seconds_after(RECONNECT, failures))

    def stop(self, grace: Duration = 25.0) -> bool:
        """
        Stop claiming, return prefetched messages, and let handlers finish; return whether all handlers have finished.

        If a handler calls it, it returns False immediately. The stop continues in a thread and waits for that handler
        too. Only this process stops: `reliq worker` starts another process.

        Args:
            grace: the grace period for running handlers, in seconds or as a timedelta. Default: 25.
        """
        grace_seconds = seconds("grace", grace)
        with self._stop_lock:
            engine = self._engine
            self._engine = None
            if engine is not None:
                self._stopped = engine
                self._stop_for_handler = None
                if engine.is_in_handler():
                    self._stop_for_handler = threading.Thread(target=self._end, args=(engine, grace_seconds))
                    self._stop_for_handler.start()
                    return False
        if engine is not None:
            return self._end(engine, grace_seconds)
        stopped = self._stopped
        stop_for_handler = self._stop_for_handler
        if stopped is None or stop_for_handler is None:
            return True
        if stop_for_handler is not threading.current_thread() and not stopped.is_in_handler():
            stop_for_handler.join()
        return not stopped.unfinished

    def _end(self, engine: Engine, grace_seconds: float) -> bool:
        """Stop an engine; return whether every handler has ended."""
        atexit.unregister(self._stop_at_exit)
        notify(self.observers, [WorkerStopping("", len(engine.inflight.runs()), grace_seconds)])
        return not engine.stop(grace_seconds)

    def drain(
        self,
        settings: WorkerSettings | None = None,
        *,
        queues: Sequence[str] = (),
        delayed: bool = False,
        raise_errors: bool = True,
    ) -> None:
        """
        Work until the queues are empty, then stop; for tests.

        Args:
            delayed: whether to wait also for messages that are due later, including a backoff. Otherwise it waits only
                for messages that are due within a second.
            raise_errors: whether to stop at the first failure and raise it: an exception of a handler, a timeout, or a
                body that does not decode. Otherwise failed messages are retried or become dead letters as usual.

        Raises:
            ConfigurationError: see `start`.
            RedisUnavailableError: Redis is unavailable.
        """
        failed: list[BaseException] = []

        def note(_job: Job[Any], error: BaseException, _final: bool) -> None:
            if not isinstance(error, Outcome):
                failed.append(error)

        unlimited = replace(settings or WorkerSettings(), max_jobs=None)
        engine = self._start(unlimited, queues, hooks=[note] if raise_errors else [])
        try:
            while not (failed or engine.stopping.is_set() or engine.is_drained(delayed=delayed)):
                time.sleep(DRAIN_SECONDS)
        finally:
            self.stop()
        if failed and not isinstance(failed[0], Exception):
            raise RuntimeError(f"a handler raised {placed(failed[0])}") from failed[0]
        if failed:
            raise failed[0]

    def run(
        self,
        settings: WorkerSettings | None = None,
        *,
        queues: Sequence[str] = (),
        metrics_port: int | None = None,
        metrics_host: str | None = None,
        metrics_registry: Registry | None = None,
        patient: bool = False,
    ) -> int:
        """
        Work until SIGTERM or SIGINT, then stop gracefully; a second signal ends the process immediately.

        Args:
            settings: the worker's settings. Default: `WorkerSettings()`.
            queues: names of the queues to work on. Default: all queues with handlers.
            patient: whether to ignore a second signal, because a supervisor sends SIGKILL when needed. Default: False.
            metrics_port: serve /metrics, /live and /ready on this port of `metrics_host`. Default: None, no port.
            metrics_host: the address of that port. Default: None, 127.0.0.1.
            metrics_registry: a registry of the Prometheus client for the metrics. Default: None, a new registry.

        Returns:
            The exit code: 0; EXIT_REPLACE after `max_jobs`; EXIT_HUNG if handlers beyond their timeout can only be ended
            with the process, or if a part of the worker has failed.
        """
        if threading.current_thread() is not threading.main_thread():
            raise ConfigurationError(
                "consumer.run() handles signals, which only the main thread may; in another thread use consumer.start() and "
                "consumer.stop()"
            )
        page: AbstractContextManager[Any] = nullcontext()
        if metrics_port is not None or metrics_registry is not None:
            handlers = self.chosen(queues)
            # Imported here, because it imports the Prometheus client.
            page = importlib.import_module("reliq.metrics.serving").of_one_process(
                self.observers,
                self.stats,
                self.connection(handlers),
                [handler.queue.keys for handler in handlers],
                port=metrics_port,
                host=metrics_host,
                registry=metrics_registry,
            )
        with page, StopSignals(patient=patient) as signals:
            return self._run(settings or WorkerSettings(), queues, signals)

    def leave(self) -> None:
        """Make `run` stop claiming, let its handlers finish and return, so that another process can continue."""
        self._leave_asked = True

    @property
    def is_leaving(self) -> bool:
        """Whether it no longer claims and lets its handlers finish, without a stop."""
        engine = self._engine
        return engine is not None and engine.inflight.closed and not engine.stopping.is_set()

    def deliveries(self) -> list[HeldDelivery]:
        """Return all deliveries in flight in this process, running or prefetched."""
        engine = self._engine or self._stopped  # a stop in another thread clears `_engine`
        return [] if engine is None else engine.inflight.deliveries()

    @property
    def is_stopping(self) -> bool:
        """Whether a stop has begun or finished since the last start."""
        return self._engine is None and self._stopped is not None

    @property
    def unfinished(self) -> list[HeldDelivery] | None:
        """The deliveries that the last stop interrupted or could not return; None before the grace period has ended."""
        return None if self._stopped is None else self._stopped.unfinished

    def running(self) -> list[HandlerCall]:
        """Return the running handler calls of this process, also during a stop."""
        engine = self._engine or self._stopped
        return [] if engine is None else engine.inflight.runs()

    def stats(self) -> EngineStats | None:
        """Return the state of this process; None if it is not working."""
        engine = self._engine
        return None if engine is None else engine.stats()

    def _start(
        self,
        settings: WorkerSettings,
        queues: Sequence[str],
        entered: Callable[[], None] = lambda: None,
        hooks: Sequence[ErrorHook] = (),
    ) -> Engine:
        if self._engine is not None:
            raise ConfigurationError("this consumer has been started; stop it first")
        chosen = self.chosen(queues)
        relay = None
        if self.relay is not None:
            from reliq.outbox.relay import OutboxMover  # noqa: PLC0415  a satellite

            relay = OutboxMover(self.relay, self.redis(chosen), self.observers)
        engine = Engine(
            chosen,
            self.connection(chosen),
            settings,
            lifespan=self.lifespan,
            middleware=tuple(self.around_calls),
            observers=tuple(self.observers),
            on_error=(*self.error_hooks, *hooks),
            periodic=self.ticked_beside(chosen),
            relay=relay,
        )
        with ExitStack() as locked:

            def enter() -> None:
                entered()
                locked.enter_context(self._stop_lock)  # a handler may stop this consumer before `start` returns

            engine.start(enter, self.before_call, self.note_step)
            self._engine = engine
            self._pid = os.getpid()
            atexit.register(self._stop_at_exit)
        notify(
            self.observers,
            [RedisRecovered("", STARTING), WorkerReady("", tuple(handler.queue.name for handler in chosen))],
        )
        return engine

    def _run(self, settings: WorkerSettings, queues: Sequence[str], signals: StopSignals) -> int:
        """Start, work and stop; return the exit code."""
        self._leave_asked = False
        try:
            # A lifespan may have set signal handlers, so ours are set again after it, before the first message.
            engine = self._start_when_redis_answers(settings, queues, signals.only_note)
        except StoppedEarly:
            self.stop(0)
            return 0

        def is_over() -> bool:
            if signals.numbers or engine.stopping.is_set():  # a handler may stop its consumer
                return True
            return bool(settings.burst) and engine.is_drained(delayed=settings.burst == "delayed")

        def must_leave() -> bool:
            had_enough = settings.max_jobs is not None and engine.inflight.started >= settings.max_jobs
            if had_enough and self.must_stay:
                engine.inflight.max_jobs = math.inf
            return self._leave_asked or (had_enough and not self.must_stay)

        while not (is_over() or must_leave() or engine.must_be_replaced()):
            signals.wait(END_CHECK_SECONDS)
        is_replaced = not is_over()
        if is_replaced and not engine.dead_parts():
            # Handlers finish before the process is replaced, limited by their timeouts.
            engine.stop_claiming()
            while not (signals.numbers or engine.inflight.wait_until_none_runs(0.0)):
                signals.wait(END_CHECK_SECONDS)
        broken = engine.hung_slots > 0 or bool(engine.dead_parts())
        if not self.stop(min(seconds("grace", settings.grace), self.longest_grace)) or broken:
            return EXIT_HUNG
        return EXIT_REPLACE if is_replaced else 0

    def _stop_at_exit(self) -> None:
        if self._pid == os.getpid():
            self.stop()


def load_consumer(place: str) -> Consumer:
    """
    Return the consumer at `module:name`, or the only consumer of `module`.

    Raises:
        ConfigurationError: the module cannot be imported, or it has no such consumer.
    """
    module_name, _, attribute = place.partition(":")
    if _MODULE.fullmatch(module_name) is None:
        as_module = ".".join(re.findall(r"[^\W\d]\w*", module_name.removesuffix(".py")))
        hint = f"; write {place.replace(module_name, as_module, 1)}" if as_module else ""
        raise ConfigurationError(f"a module is named like shop.jobs, not {module_name!r}{hint}")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigurationError(f"cannot import {module_name!r}: {_why(module_name, error)}") from error
    consumers = {name: value for name, value in vars(module).items() if isinstance(value, Consumer)}
    chosen = [value for name, value in consumers.items() if attribute in ("", name)]
    if len(set(map(id, chosen))) != 1:
        wanted = f"a Consumer named {attribute!r}" if attribute else "exactly one Consumer"
        names = list(consumers)
        has = f": {join_first(names)} (write {module_name}:{names[0]})" if names else " none"
        raise ConfigurationError(f"module {module_name!r} must have {wanted}; it has{has}")
    return chosen[0]


def traceback_of_module(error: BaseException) -> list[str]:
    """Return the traceback of an exception from the import of a module, starting at that module's first line."""
    trace = TracebackException.from_exception(error)
    trace.stack = StackSummary.from_list([frame for frame in trace.stack if not frame.filename.startswith(_OURS)])
    return "".join(trace.format()).splitlines()


def _why(name: str, error: ImportError) -> str:
    """Describe a failed import: the missing name, the line that imports it, and the fix."""
    missing = error.name or ""
    if isinstance(error, ModuleNotFoundError) and (name == missing or name.startswith(f"{missing}.")):
        return f"{error.msg} in this folder, on PYTHONPATH or installed"
    frames = [frame for frame in extract_tb(error.__traceback__) if not frame.filename.startswith("<frozen")]
    where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "its first line"
    if "partially initialized module" in str(error.msg):
        return f"a circular import at {where}: {error.msg}; move what both modules need into a third one"
    if isinstance(error, ModuleNotFoundError):
        return f"{error.msg}, which {where} imports; install it for {sys.executable}"
    return f"{error.msg}, at {where}"


class SignalNotes:
    """
    The received signals, in order.

    A signal handler may interrupt any code, even a wait for these notes or itself. So it must not take a lock that the
    interrupted code may hold, as `threading.Event.set` does. `SimpleQueue.put` is reentrant.

    Attributes:
        numbers: every signal so far except echoes, oldest first; code that has handled a signal may remove it.
    """

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self._last = (0, 0.0)
        self._came: queue.SimpleQueue[None] = queue.SimpleQueue()

    def note(self, number: int, _frame: FrameType | None = None) -> None:
        """Note a signal; a handler for `signal.signal`."""
        now = time.monotonic()
        last, noted_at = self._last
        may_echo = number == last or (last, number) == (signal.SIGTERM, signal.SIGHUP)
        if number == signal.SIGUSR1 or not may_echo or now >= noted_at + ECHO_SECONDS:
            self._last = (number, now)
            self.numbers.append(number)
        self._came.put(None)

    def wait(self, seconds_at_most: float | None = None) -> bool:
        """Wait for a new signal, without a time limit for None; return whether there was one."""
        until = None if seconds_at_most is None else time.monotonic() + seconds_at_most
        while True:
            left = LOOK_SECONDS if until is None else min(until - time.monotonic(), LOOK_SECONDS)
            with suppress(queue.Empty):
                self._came.get(timeout=max(left, 0.0))
                for _ in range(self._came.qsize()):  # one wait consumes all signals
                    self._came.get_nowait()
                return True
            if until is not None and time.monotonic() >= until and self._came.empty():
                return False


class StoppedEarly(BaseException):
    """A stop signal has come while a worker was starting."""


class StopSignals(SignalNotes):
    """
    A context manager with the handlers of SIGTERM and SIGINT for a worker in the main thread.

    During the start of the worker, a signal raises StoppedEarly. Afterwards the first signal is noted, and the second
    ends the process immediately, unless a supervisor does that. At its end, the earlier handlers are restored.

    Args:
        patient: whether to ignore a second signal.
    """

    def __init__(self, *, patient: bool) -> None:
        super().__init__()
        self._patient = patient
        self._only_notes = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        """Install the handlers."""
        self._before = {number: handle_signal(number, self.take_note) for number in STOPS}
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the earlier handlers."""
        for number, handler in self._before.items():
            signal.signal(number, handler or signal.SIG_DFL)

    def only_note(self) -> None:
        """Only note signals from now on; install the handlers again, because a lifespan may have replaced them."""
        self._only_notes = True
        for number in STOPS:
            handle_signal(number, self.take_note)

    def take_note(self, number: int, _frame: FrameType | None) -> None:
        """Note a signal; during the start raise StoppedEarly, and end the process at a second signal."""
        self.note(number)
        if not self._only_notes:
            raise StoppedEarly
        if len(self.numbers) > 1 and not self._patient:
            os._exit(EXIT_SECOND_SIGNAL)  # a normal exit waits for the threads of asyncio.to_thread


def end_at_once(number: int, _frame: FrameType | None) -> None:
    """End the process before anything needs a graceful stop; a handler for `handle_signal`."""
    os._exit(EXIT_SECOND_SIGNAL if number == signal.SIGINT else 0)


def ignore_stops() -> None:
    """
    Ignore stop signals from now on, because the process is about to end.

    Python restores the default handlers at its end. Then a signal would kill the process although its work is done.
    """
    for number in STOPS:
        signal.signal(number, signal.SIG_IGN)


_handled_signals: set[int] = set()


def handle_signal(number: int, handler: Callable[[int, FrameType | None], Any]) -> Any:
    """
    Set `handler` for a signal, but not in forked processes; return the previous handler.

    SIGINT and SIGHUP stay ignored if the process was started that way, as in a script's `command &` or with nohup.
    """
    if number in (signal.SIGINT, signal.SIGHUP) and signal.getsignal(number) == signal.SIG_IGN:
        return signal.SIG_IGN
    _handled_signals.add(number)
    return signal.signal(number, handler)


_forking = threading.local()


def _hold_signals_back() -> None:
    """Block the handled signals during a fork: the child would lose a signal before its handler is reset."""
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _handled_signals)


def _let_signals_come() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _give_up_signals() -> None:
    """Restore the default handlers in a forked process, so that its parent can end it with a signal."""
    for number in _handled_signals:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    _handled_signals.clear()
    _let_signals_come()


os.register_at_fork(before=_hold_signals_back, after_in_parent=_let_signals_come, after_in_child=_give_up_signals)
