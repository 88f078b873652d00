"""
The class `Consumer`, which has the handlers of queues and runs a worker for them in this process.

This module also imports a consumer by its name, such as `shop.jobs:consumer`, and handles the signals of worker
processes. In these processes, `Consumer.run` runs in the main thread. It waits until a signal arrives, the queues are
empty (with `--burst`), or a new process must replace this process.
"""

from __future__ import annotations

import atexit
import importlib
import logging
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

logger = logging.getLogger("reliq")

#: Exit code of a worker process in which a handler did not end in time, or a component of the worker has failed.
EXIT_HUNG = 75
#: Exit code of a worker process that must be replaced by a new process, for example after `max_jobs`.
EXIT_REPLACE = 76
#: Exit code of a process that ended immediately because of a second stop signal.
EXIT_SECOND_SIGNAL = 130
#: The signals that stop a worker gracefully.
STOPS = (signal.SIGINT, signal.SIGTERM)
#: The value of `part` in the events `RedisUnavailable` and `RedisRecovered` while the worker is starting.
STARTING = "start"
#: How often the main thread checks whether the worker must end, in seconds. A signal wakes the thread immediately.
END_CHECK_SECONDS = 0.2
#: How often `drain` checks whether the queues are empty, in seconds.
DRAIN_SECONDS = 0.05
#: How often the waiting main thread wakes up so that Python runs the handlers of signals, in seconds. A signal that the
#: system delivers to another thread does not wake the main thread itself.
LOOK_SECONDS = 0.5
#: A second stop signal within this many seconds after the first is ignored, because both probably have the same cause.
#: For example, shell and kernel both send SIGHUP at the end of a session, and systemd sends SIGHUP after SIGTERM if
#: SendSIGHUP= is set.
ECHO_SECONDS = 1.0

_OURS = (f"{Path(__file__).parent}{os.sep}", f"{Path(importlib.__file__).parent}{os.sep}", "<frozen importlib")
_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


class Consumer(Registration):
    """
    The handlers of any number of queues, and a worker that runs them in this process.

    Args:
        url: a Redis URL or a redis-py client. Default: None, which means the Redis of the queues, or
            the environment variable RELIQ_URL.
        lifespan: a function that returns a context manager, either plain or async. Each worker process enters the
            context manager before it claims its first message, and exits it after its last handler has ended. Handlers
            get the value that the context manager yields as `job.state`. Default: None.
        observers: functions that are called with every event. Default: none.
        relay: an outbox relay, which publishes the messages of `publish_in`. It runs inside the worker. Default:
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
        #: With this lock, only one thread can stop the engine. It is reentrant, because a signal handler that calls
        #: `stop` may interrupt another call of `stop`.
        self._stop_lock = threading.RLock()
        #: The thread that continues the shutdown if a handler called `stop`.
        self._stop_for_handler: threading.Thread | None = None
        #: The thread that starts the worker as soon as Redis is available. The event below ends its wait.
        self._starter: threading.Thread | None = None
        self._is_start_over = threading.Event()
        #: The longest possible grace period in seconds, even if the settings allow more. It is reduced when the
        #: supervisor of this process has ended.
        self.longest_grace = math.inf
        self.before_call: Callable[[HandlerCall], None] | None = None
        self.note_step: NoteStep | None = None
        #: Whether this process must continue after `max_jobs`, because the new process cannot start yet.
        self.must_stay = False

    def include(self, *sources: Consumer | str) -> Self:
        """
        Add the handlers, middleware, error hooks and observers of other consumers.

        Args:
            sources: `Consumer` objects, or import paths of consumers, such as `shop.jobs` or `shop.jobs:consumer`.

        Raises:
            ConfigurationError: a module has no such consumer, a queue would have two handlers, or the other consumer
                has a lifespan or uses another Redis server.
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
        Start the worker in threads of this process, and return while it runs.

        If Redis is unavailable, a thread starts the worker as soon as Redis is available. If this later start fails,
        the thread logs the error. If the program does not call `stop`, the worker is shut down when the program ends.

        Args:
            settings: the worker's settings. Default: `WorkerSettings()`. The setting `max_jobs` is ignored.
            queues: names of the queues to work on. Default: all queues with handlers.

        Raises:
            ConfigurationError: the consumer has no handlers, a queue has no handler, the Redis URL is missing, or the
                Redis server is too old or may evict messages.
        """
        # Ignore `max_jobs`, because there is no supervisor that could replace this process.
        unlimited = replace(settings or WorkerSettings(), max_jobs=None)
        try:
            self._start(unlimited, queues)
        except RedisUnavailableError as error:
            logger.warning("worker: Redis is unavailable; starting the worker as soon as Redis answers: %s", error)
            self._is_start_over.clear()
            self._starter = threading.Thread(
                target=self._start_later, args=(unlimited, queues), name="reliq-start", daemon=True
            )
            self._starter.start()

    def _start_later(self, settings: WorkerSettings, queues: Sequence[str]) -> None:
        """Start the worker as soon as Redis is available, unless `stop` is called before."""

        def pause(seconds: float) -> None:
            if self._is_start_over.wait(seconds):
                raise StoppedEarly

        try:
            self._start_when_redis_answers(settings, queues, pause=pause)
        except StoppedEarly:
            logger.info("worker: stopped before Redis answered")
        except Exception:
            logger.exception("worker: the start failed; this process runs no handlers")

    def _start_when_redis_answers(
        self,
        settings: WorkerSettings,
        queues: Sequence[str],
        entered: Callable[[], None] = lambda: None,
        pause: Callable[[float], None] = time.sleep,
    ) -> Engine:
        failures = 0
        while True:
            try:
                return self._start(settings, queues, entered)
            except RedisUnavailableError as error:
                failures += 1
                notify(self.observers, [RedisUnavailable("", STARTING, str(error))])
                pause(seconds_after(RECONNECT, failures))

    def stop(self, grace: Duration = 25.0) -> bool:
        """
        Shut down gracefully: stop claiming, return prefetched messages to their queues, and let handlers finish.

        A handler may call this method too. In this case the method returns immediately, and a thread continues the
        shutdown, which also waits for that handler. Only the worker of this process stops: if the process belongs to
        `reliq worker`, a new process replaces it.

        Args:
            grace: the grace period for running handlers, in seconds or as a timedelta. Default: 25.

        Returns:
            True if all handlers have finished; False if not, or if a handler called this method.
        """
        grace_seconds = seconds("grace", grace)
        self._is_start_over.set()
        if self._starter and self._starter is not threading.current_thread():
            self._starter.join()
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
        """Stop the engine of the worker; return whether all handlers have finished."""
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
        Run the worker until the queues are empty, then stop it. This method is for tests.

        Args:
            settings: the worker's settings, see `start`.
            queues: names of the queues to work on, see `start`.
            delayed: whether to wait also for messages that are due later, and for messages in backoff. If False,
                `drain` waits only for messages that are due within a second. Default: False.
            raise_errors: whether to stop at the first failure and raise its exception. A failure is an exception in a
                handler, a timeout, or a body that cannot be decoded. If False, failed messages are retried or become
                dead letters as usual. Default: True.

        Raises:
            ConfigurationError: see `start`.
            RedisUnavailableError: Redis is unavailable.
            Exception: the exception of the first failure, if `raise_errors` is True.
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
        Run the worker until SIGTERM or SIGINT arrives, then shut down gracefully.

        A second signal during the shutdown ends the process immediately.

        Args:
            settings: the worker's settings. Default: `WorkerSettings()`.
            queues: names of the queues to work on. Default: all queues with handlers.
            patient: whether to ignore a second signal, because a supervisor will kill this process if necessary.
                Default: False.
            metrics_port: the port of an HTTP server for /metrics, /live and /ready. Default: None, which means no server.
            metrics_host: the address on which this server listens. Default: None, which means 127.0.0.1.
            metrics_registry: the registry of the Prometheus client to which the metrics are added. Default: None, which
                means a new registry.

        Returns:
            The exit code. 0: a signal arrived, or a worker with `burst` has finished. EXIT_REPLACE: a new process must
            replace this process, for example after `max_jobs`. EXIT_HUNG: a component of the worker has failed, or a
            handler still runs after the grace period or cannot be stopped after its timeout.

        Raises:
            ConfigurationError: the causes that are listed in `start`; or this thread is not the main thread.
        """
        if threading.current_thread() is not threading.main_thread():
            raise ConfigurationError(
                "consumer.run() handles signals, which is possible only in the main thread; in another thread use "
                "consumer.start() and consumer.stop()"
            )
        page: AbstractContextManager[Any] = nullcontext()
        if metrics_port is not None or metrics_registry is not None:
            handlers = self.chosen(queues)
            # Import `reliq.metrics.serving` only when needed, because it imports the Prometheus client.
            page = importlib.import_module("reliq.metrics.serving").of_one_process(
                self.observers,
                self.stats,
                self.connection(handlers),
                handlers,
                port=metrics_port,
                host=metrics_host,
                registry=metrics_registry,
            )
        with page, StopSignals(patient=patient) as signals:
            return self._run(settings or WorkerSettings(), queues, signals)

    def leave(self) -> None:
        """Make `run` stop claiming, let its handlers finish, and return, so that a new process can take over."""
        self._leave_asked = True

    @property
    def is_leaving(self) -> bool:
        """Whether the worker has stopped claiming messages, because another process will replace this process."""
        engine = self._engine
        return engine is not None and engine.inflight.closed and not engine.stopping.is_set()

    def deliveries(self) -> list[HeldDelivery]:
        """Return the deliveries of all messages that this process has claimed and not yet settled."""
        engine = self._engine or self._stopped  # read `_engine` only once, because `stop` may clear it
        return [] if engine is None else engine.inflight.deliveries()

    @property
    def is_stopping(self) -> bool:
        """Whether the shutdown of this worker has begun, or has already finished, since its last start."""
        return self._engine is None and self._stopped is not None

    @property
    def unfinished(self) -> list[HeldDelivery] | None:
        """
        The deliveries that the shutdown interrupted, or whose messages it could not return to their queues.

        None until the grace period of the shutdown has ended.
        """
        return None if self._stopped is None else self._stopped.unfinished

    def running(self) -> list[HandlerCall]:
        """Return the handler calls that are running in this process. This works during a shutdown too."""
        engine = self._engine or self._stopped
        return [] if engine is None else engine.inflight.runs()

    def stats(self) -> EngineStats | None:
        """Return statistics about the worker of this process; None before it is started and after it is stopped."""
        engine = self._engine
        return None if engine is None else engine.stats()

    def _start(
        self,
        settings: WorkerSettings,
        queues: Sequence[str],
        entered: Callable[[], None] = lambda: None,
        hooks: Sequence[ErrorHook] = (),
    ) -> Engine:
        starter = self._starter
        if self._engine is not None or (starter and starter.is_alive() and starter is not threading.current_thread()):
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
                locked.enter_context(self._stop_lock)  # a handler that calls `stop` waits until `start` has finished

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
        """Start the worker, wait until it must end, stop it, and return the exit code."""
        self._leave_asked = False
        try:
            # A lifespan may have set its own signal handlers. So after the lifespan has started, `only_note` sets
            # reliq's signal handlers again.
            engine = self._start_when_redis_answers(settings, queues, signals.only_note)
        except StoppedEarly:
            self.stop(0)
            return 0

        def is_over() -> bool:
            if signals.numbers or engine.stopping.is_set():  # a handler that calls `stop` sets `stopping`
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
            # Another process will replace this process. Let the running handlers finish first, within their timeouts.
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
    Import and return a consumer.

    Args:
        place: the consumer as `module:name`, or only `module` if the module has exactly one consumer.

    Raises:
        ConfigurationError: the module cannot be imported, or it does not have this consumer.
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
        wanted_consumer = f"a Consumer named {attribute!r}" if attribute else "exactly one Consumer"
        names = list(consumers)
        found_consumers = f": {join_first(names)} (write {module_name}:{names[0]})" if names else " none"
        raise ConfigurationError(f"module {module_name!r} must have {wanted_consumer}; it has{found_consumers}")
    return chosen[0]


def traceback_of_module(error: BaseException) -> list[str]:
    """Return the lines of the traceback of a failed import, without the frames of reliq and the import system."""
    trace = TracebackException.from_exception(error)
    trace.stack = StackSummary.from_list([frame for frame in trace.stack if not frame.filename.startswith(_OURS)])
    return "".join(trace.format()).splitlines()


def _why(name: str, error: ImportError) -> str:
    """Explain a failed import: which module is missing, which source line imports it, and how to fix this."""
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
    Records the signals that this process receives, and lets code wait for them.

    A signal handler can interrupt any code of its thread, even `wait` or another run of the handler. If the handler
    needed a lock that this code has, it would wait forever. So it uses `SimpleQueue.put`, which is reentrant, and not
    `threading.Event.set`.

    Attributes:
        numbers: the numbers of the received signals, oldest first. The list does not contain a signal that repeats
            another signal within ECHO_SECONDS. Code that has processed a signal may remove its number.
    """

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self._last = (0, 0.0)
        self._came: queue.SimpleQueue[None] = queue.SimpleQueue()

    def note(self, number: int, _frame: FrameType | None = None) -> None:
        """Record a signal. This method can be passed to `signal.signal` as a signal handler."""
        now = time.monotonic()
        last, noted_at = self._last
        may_echo = number == last or (last, number) == (signal.SIGTERM, signal.SIGHUP)
        if number == signal.SIGUSR1 or not may_echo or now >= noted_at + ECHO_SECONDS:
            self._last = (number, now)
            self.numbers.append(number)
        self._came.put(None)

    def wait(self, seconds_at_most: float | None = None) -> bool:
        """
        Wait until a new signal arrives, and return True; return False after `seconds_at_most` without a signal.

        If `seconds_at_most` is None, wait without a time limit.
        """
        until = None if seconds_at_most is None else time.monotonic() + seconds_at_most
        while True:
            left = LOOK_SECONDS if until is None else min(until - time.monotonic(), LOOK_SECONDS)
            with suppress(queue.Empty):
                self._came.get(timeout=max(left, 0.0))
                # Discard the queue entries of signals that have already arrived, so that only later signals end the
                # next `wait`.
                for _ in range(self._came.qsize()):
                    self._came.get_nowait()
                return True
            if until is not None and time.monotonic() >= until and self._came.empty():
                return False


class StoppedEarly(BaseException):
    """Raised when a stop signal arrives while the worker is starting."""


class StopSignals(SignalNotes):
    """
    A context manager that handles SIGTERM and SIGINT for a worker that runs in the main thread.

    While the worker is starting, a signal raises StoppedEarly. Afterwards, the first signal is only recorded, and a
    second signal ends the process immediately. At the end of the `with` block, the previous signal handlers are
    restored.

    Args:
        patient: whether to ignore a second signal, because a supervisor will kill this process if necessary.
    """

    def __init__(self, *, patient: bool) -> None:
        super().__init__()
        self._patient = patient
        self._only_notes = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        """Install the signal handlers."""
        self._before = {number: handle_signal(number, self.take_note) for number in STOPS}
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the previous signal handlers."""
        for number, handler in self._before.items():
            signal.signal(number, handler or signal.SIG_DFL)

    def only_note(self) -> None:
        """
        Only record signals from now on; do not raise StoppedEarly.

        The signal handlers are installed again, because the `lifespan` of the consumer may have replaced them.
        """
        self._only_notes = True
        for number in STOPS:
            handle_signal(number, self.take_note)

    def take_note(self, number: int, _frame: FrameType | None) -> None:
        """
        Handle a signal: record it, and raise StoppedEarly if the worker is still starting.

        A second signal ends the process, unless `patient` is set.
        """
        self.note(number)
        if not self._only_notes:
            raise StoppedEarly
        if len(self.numbers) > 1 and not self._patient:
            os._exit(EXIT_SECOND_SIGNAL)  # `sys.exit` would wait for the threads of asyncio.to_thread


def end_at_once(number: int, _frame: FrameType | None) -> None:
    """End the process immediately. This is the signal handler for the time before a worker runs."""
    os._exit(EXIT_SECOND_SIGNAL if number == signal.SIGINT else 0)


def ignore_stops() -> None:
    """
    Ignore stop signals from now on, because the process is about to end by itself.

    Otherwise Python would restore the default signal handlers at its exit. A signal could then kill the process
    although it has finished its work, and its exit code would be wrong.
    """
    for number in STOPS:
        signal.signal(number, signal.SIG_IGN)


_handled_signals: set[int] = set()


def handle_signal(number: int, handler: Callable[[int, FrameType | None], Any]) -> Any:
    """
    Set the signal handler for a signal, and return the previous signal handler.

    Processes that are forked from this process do not get the signal handler. SIGINT and SIGHUP stay ignored if they
    were ignored when the process started: `command &` in a script starts a process that ignores SIGINT, and nohup
    starts a process that ignores SIGHUP.
    """
    if number in (signal.SIGINT, signal.SIGHUP) and signal.getsignal(number) == signal.SIG_IGN:
        return signal.SIG_IGN
    _handled_signals.add(number)
    return signal.signal(number, handler)


_forking = threading.local()


def _hold_signals_back() -> None:
    """
    Block the signals that reliq handles while this process forks.

    Without this, the forked process would lose a signal that arrives before `_give_up_signals` has restored its default
    signal handlers.
    """
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _handled_signals)


def _let_signals_come() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _give_up_signals() -> None:
    """
    Restore the default signal handlers in a forked process.

    With reliq's signal handlers, a forked process would not end when its parent process sends SIGTERM.
    """
    for number in _handled_signals:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    _handled_signals.clear()
    _let_signals_come()


os.register_at_fork(before=_hold_signals_back, after_in_parent=_let_signals_come, after_in_child=_give_up_signals)
