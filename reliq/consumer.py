"""
`Consumer`: handlers and how their worker runs in this process; consumers are loaded by name, and signals stop them.

`Consumer.run` is the main thread of a worker process: it waits for a signal, for drained queues, or for its replacement.
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


#: Exit code of a worker process whose handlers overran their time, or of which a part has died.
EXIT_HUNG = 75
#: Exit code of a worker process that another one is to replace.
EXIT_REPLACE = 76
#: Exit code of a process that a second signal ended.
EXIT_SECOND_SIGNAL = 130
#: The signals that stop a worker gracefully.
STOPS = (signal.SIGINT, signal.SIGTERM)
#: The name under which a start reports that Redis is away.
STARTING = "start"
#: The main thread checks five times a second whether the work is over; a signal wakes it at once.
END_CHECK_SECONDS = 0.2
#: A drain checks twenty times a second whether it is done.
DRAIN_SECONDS = 0.05
#: A wait checks for a signal this often: a signal that the system gives to another thread does not interrupt the main
#: thread.
LOOK_SECONDS = 0.5
#: A stop within 1 s may be an echo of the one before: shell and kernel both send SIGHUP at the end of a session, and
#: systemd sends SIGHUP after SIGTERM where SendSIGHUP= is set.
ECHO_SECONDS = 1.0

_OURS = (f"{Path(__file__).parent}{os.sep}", f"{Path(importlib.__file__).parent}{os.sep}", "<frozen importlib")
_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


class Consumer(Registration):
    """
    Handlers of any number of queues, and how their worker runs.

    Args:
        url: a Redis URL or a redis-py client; None means the Redis of the queues, else RELIQ_URL.
        lifespan: returns a context manager, plain or async, entered once for each worker process before the first
            claim and left after the last handler; what it yields is `job.state`.
        observers: callables that get every event.
        relay: moves messages of `publish_in` to Redis, as one more part of the worker.
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
        #: Of two threads that stop at once, one does the work; a signal handler may interrupt it and stop, too.
        self._stop_lock = threading.RLock()
        #: The thread of a stop that a handler asked for.
        self._stop_for_handler: threading.Thread | None = None
        #: The most seconds for running handlers after a stop, whatever the settings say.
        self.longest_grace = math.inf
        self.before_call: Callable[[HandlerCall], None] | None = None
        self.note_step: NoteStep | None = None
        #: There is no room for a successor yet: claim on after `max_jobs`.
        self.must_stay = False

    def include(self, *sources: Consumer | str) -> Self:
        """
        Add the handlers, middleware, error hooks and observers of other consumers.

        Args:
            sources: consumers, or texts as `module` or `module:name`.

        Raises:
            ConfigurationError: a module has no such consumer, a queue would have two handlers, or the other one has
                a lifespan or a Redis of its own.
        """
        for source in sources:
            other = source if isinstance(source, Consumer) else load_consumer(source)
            if other.lifespan is not None:
                raise ConfigurationError(
                    "an included consumer's lifespan is not entered; give it to the one that includes"
                )
            if other.target is not None and self.target not in (None, other.target):
                raise ConfigurationError("the consumer and an included one name different Redis servers; name one")
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
        Start working in this process and return; `queues` names some of the handlers' queues, none means all.

        It waits while Redis is away. A consumer that still runs at the end of the program is stopped there.

        Raises:
            ConfigurationError: there is no handler, no such queue, no Redis named, or the server is not fit.
        """
        unlimited = replace(settings or WorkerSettings(), max_jobs=None)  # nothing replaces this process
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
        Stop claiming, return prefetched messages, and let handlers finish within `grace`; return whether all did.

        A handler that calls it gets False at once; the stop goes on in a thread and waits for that handler too. It stops
        this process alone: `reliq worker` starts another process.
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
        """Stop an engine; return whether every handler ended."""
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
        Work until the queues are empty, and stop; for tests.

        Args:
            delayed: wait for messages that are due later, too, a backoff included; else only for the next second's.
            raise_errors: end the drain at the first failure (an exception of a handler, a timeout, or a body that does
                not decode) and raise it here; else failed messages are retried and buried as ever.

        Raises:
            ConfigurationError: as `start`.
            RedisUnavailableError: Redis is away.
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
        Work until SIGTERM or SIGINT, then stop gracefully; a second signal ends the process at once.

        Args:
            patient: ignore a second signal, for a supervisor ends the process at once by SIGKILL.
            metrics_port: serve /metrics, /live and /ready there, on `metrics_host` or 127.0.0.1.
            metrics_registry: a registry of Prometheus' client that gets the figures, instead of a new one.

        Returns:
            The exit code: 0; EXIT_REPLACE after `max_jobs`; EXIT_HUNG when only the end of the process ends handlers
            that overran their time, or when a part of it has ended by itself.
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
        """Make `run` stop claiming and return when its handlers have finished: another process is to go on."""
        self._leave_asked = True

    @property
    def is_leaving(self) -> bool:
        """Whether it claims no more and only lets its handlers finish, without a stop."""
        engine = self._engine
        return engine is not None and engine.inflight.closed and not engine.stopping.is_set()

    def deliveries(self) -> list[HeldDelivery]:
        """Return all deliveries in flight in this process, running or prefetched."""
        engine = self._engine or self._stopped  # a stop in another thread takes it away
        return [] if engine is None else engine.inflight.deliveries()

    @property
    def is_stopping(self) -> bool:
        """Whether a stop has begun, or ended, since the last start."""
        return self._engine is None and self._stopped is not None

    @property
    def unfinished(self) -> list[HeldDelivery] | None:
        """The deliveries that the last stop cut off or could not return; None before the end of its grace period."""
        return None if self._stopped is None else self._stopped.unfinished

    def running(self) -> list[HandlerCall]:
        """Return the calls of handlers that are under way in this process, also during a stop."""
        engine = self._engine or self._stopped
        return [] if engine is None else engine.inflight.runs()

    def stats(self) -> EngineStats | None:
        """Return the state of this process; None when nothing runs."""
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
            # A lifespan may have set signal handlers: ours are set again after it, before the first message.
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
            # Handlers finish before the process is replaced; their timeouts are the limit.
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
    Return the consumer at `module:name`, or the only one of `module`.

    Raises:
        ConfigurationError: the module cannot be imported or has no such consumer.
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
    """Return the traceback of an exception from the import of a module, from that module's first line on."""
    trace = TracebackException.from_exception(error)
    trace.stack = StackSummary.from_list([frame for frame in trace.stack if not frame.filename.startswith(_OURS)])
    return "".join(trace.format()).splitlines()


def _why(name: str, error: ImportError) -> str:
    """Describe a failed import: the missing name, the line that imports it, and the remedy."""
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
    The received signals, in their order.

    A signal handler may interrupt any code, a wait for its own notes and itself included. It must take no lock that
    the interrupted code may hold, as `threading.Event.set` does; `SimpleQueue.put` may be entered again.

    Attributes:
        numbers: every signal so far but for echoes, oldest first; code that has handled a signal may remove it.
    """

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self._last = (0, 0.0)
        self._came: queue.SimpleQueue[None] = queue.SimpleQueue()

    def note(self, number: int, _frame: FrameType | None = None) -> None:
        """Note a signal; this is a handler for `signal.signal`."""
        now = time.monotonic()
        last, noted_at = self._last
        may_echo = number == last or (last, number) == (signal.SIGTERM, signal.SIGHUP)
        if number == signal.SIGUSR1 or not may_echo or now >= noted_at + ECHO_SECONDS:
            self._last = (number, now)
            self.numbers.append(number)
        self._came.put(None)

    def wait(self, seconds_at_most: float | None = None) -> bool:
        """Wait for a signal that no wait has seen yet, without a limit for None; return whether there was one."""
        until = None if seconds_at_most is None else time.monotonic() + seconds_at_most
        while True:
            left = LOOK_SECONDS if until is None else min(until - time.monotonic(), LOOK_SECONDS)
            with suppress(queue.Empty):
                self._came.get(timeout=max(left, 0.0))
                for _ in range(self._came.qsize()):  # one wait sees all there are
                    self._came.get_nowait()
                return True
            if until is not None and time.monotonic() >= until and self._came.empty():
                return False


class StoppedEarly(BaseException):
    """A signal to stop has come while a worker was still starting."""


class StopSignals(SignalNotes):
    """
    The handlers of SIGTERM and SIGINT for a worker in the main thread, within a `with` block; then they are as before.

    While the worker starts, a signal ends the start by StoppedEarly. While it works, the first signal is noted, and the
    second ends the process at once, unless a supervisor is to do that.

    Args:
        patient: a second signal changes nothing.
    """

    def __init__(self, *, patient: bool) -> None:
        super().__init__()
        self._patient = patient
        self._only_notes = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        """Take the signals."""
        self._before = {number: handle_signal(number, self.take_note) for number in STOPS}
        return self

    def __exit__(self, *_: object) -> None:
        """Give them back."""
        for number, handler in self._before.items():
            signal.signal(number, handler or signal.SIG_DFL)

    def only_note(self) -> None:
        """Only note signals from now on; set the handlers again, for a lifespan may have set its own."""
        self._only_notes = True
        for number in STOPS:
            handle_signal(number, self.take_note)

    def take_note(self, number: int, _frame: FrameType | None) -> None:
        """Note a signal; end a start by it, or by a second signal the process."""
        self.note(number)
        if not self._only_notes:
            raise StoppedEarly
        if len(self.numbers) > 1 and not self._patient:
            os._exit(EXIT_SECOND_SIGNAL)  # an ordinary exit waits for the threads of asyncio.to_thread


def end_at_once(number: int, _frame: FrameType | None) -> None:
    """End the process before anything has started that could stop gracefully; a handler for `handle_signal`."""
    os._exit(EXIT_SECOND_SIGNAL if number == signal.SIGINT else 0)


def ignore_stops() -> None:
    """
    Ignore signals to stop from now on, for the process is about to end.

    Python gives its handlers back while it ends: the next signal would kill the process, which had done its work.
    """
    for number in STOPS:
        signal.signal(number, signal.SIG_IGN)


_handled_signals: set[int] = set()


def handle_signal(number: int, handler: Callable[[int, FrameType | None], Any]) -> Any:
    """
    Set `handler` for a signal, but not in processes forked from this one; return the previous handler.

    SIGINT and SIGHUP stay ignored where the process was started so: a script does that for `command &`, and nohup.
    """
    if number in (signal.SIGINT, signal.SIGHUP) and signal.getsignal(number) == signal.SIG_IGN:
        return signal.SIG_IGN
    _handled_signals.add(number)
    return signal.signal(number, handler)


_forking = threading.local()


def _hold_signals_back() -> None:
    """Block the handled signals while this thread forks: a child would lose them before their default is set."""
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _handled_signals)


def _let_signals_come() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _give_up_signals() -> None:
    """Restore the default handlers in a forked process: its parent may end it by a signal."""
    for number in _handled_signals:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    _handled_signals.clear()
    _let_signals_come()


os.register_at_fork(before=_hold_signals_back, after_in_parent=_let_signals_come, after_in_child=_give_up_signals)
