"""`Consumer`: handlers by queue, and the worker process that runs them."""

from __future__ import annotations

import atexit
import math
import os
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from reliq.answers import Answer
from reliq.client.client import Clients
from reliq.consumer.loader import found
from reliq.consumer.main_loop import check_main_thread, work
from reliq.consumer.metrics_page import served
from reliq.consumer.signals import StoppedEarly, StopSignals
from reliq.error_text import placed
from reliq.errors import ConfigurationError, RedisUnavailableError
from reliq.events import RedisAway, RedisBack, WorkerReady, WorkerStopping, notify
from reliq.handlers.handler import check_lifespan
from reliq.handlers.registration import Registration
from reliq.relay.mover import OutboxMover
from reliq.retry import RECONNECT, seconds_after
from reliq.settings import WorkerSettings, seconds
from reliq.worker.engine import Engine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from reliq.events import Observer
    from reliq.handlers.job import Job
    from reliq.health import EngineStats
    from reliq.message import Duration
    from reliq.metrics.serving import Registry
    from reliq.relay.relay import Relay
    from reliq.transport.target import Target
    from reliq.worker.delivery import HandlerCall, HeldDelivery
    from reliq.worker.event_loop import NoteStep
    from reliq.worker.failures import ErrorHook

#: Exit codes of a worker process.
EXIT_HUNG, EXIT_REPLACE = 75, 76
#: The name under which a start reports that Redis is away.
STARTING = "start"
#: A drain looks twenty times a second whether it is done.
DRAIN_SECONDS = 0.05


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
        check_lifespan(lifespan)
        self.lifespan, self.relay = lifespan, relay
        self.observers: list[Observer] = list(observers)
        self._engine: Engine | None = None
        self._stopped: Engine | None = None
        #: Of two threads that stop at once, one does; a handler of signals may interrupt it and stop, too.
        self._stop_lock = threading.RLock()
        #: Does the stop that a handler asked for.
        self._stop_for_handler: threading.Thread | None = None
        #: Running handlers have at most so many seconds after a stop, whatever the settings say.
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
            self._register_all_of(other)
            self.observers += [one for one in other.observers if one not in self.observers]
            self.target = self.target if other.target is None else other.target
        return self

    def start(self, settings: WorkerSettings | None = None, *, queues: Sequence[str] = ()) -> None:
        """
        Start working in this process and return; `queues` names some of the handlers' queues, none means all.

        It waits while Redis is away. A consumer that nobody stops is stopped at the end of the program.

        Raises:
            ConfigurationError: there is no handler, no such queue, no Redis named, or the server is not fit.
        """
        unlimited = replace(settings or WorkerSettings(), max_jobs=None)  # nothing replaces this process
        self._start_when_redis_answers(unlimited, queues, lambda: None)

    def _start_when_redis_answers(
        self, settings: WorkerSettings | None, queues: Sequence[str], entered: Callable[[], None]
    ) -> Engine:
        failures = 0
        while True:
            try:
                return self._start(settings, queues, entered)
            except RedisUnavailableError as error:
                failures += 1
                notify(self.observers, [RedisAway("", STARTING, str(error))])
                time.sleep(seconds_after(RECONNECT, failures))

    def stop(self, grace: Duration = 25.0) -> bool:
        """
        Take no more, give back what has not started, let handlers end within `grace`; say whether all did.

        A handler that calls it gets False at once; the stop goes on in a thread and waits for that handler too. It ends
        the work of this process alone: `reliq worker` starts another process.
        """
        grace_seconds = seconds("grace", grace)
        with self._stop_lock:
            engine, self._engine = self._engine, None
            if engine is not None:
                self._stopped, self._stop_for_handler = engine, None
                if engine.is_in_handler():
                    self._stop_for_handler = threading.Thread(target=self._end, args=(engine, grace_seconds))
                    self._stop_for_handler.start()
                    return False
        if engine is not None:
            return self._end(engine, grace_seconds)
        stopped, other = self._stopped, self._stop_for_handler
        if stopped is None or other is None:
            return True
        if other is not threading.current_thread() and not stopped.is_in_handler():
            other.join()
        return not stopped.unfinished

    def _end(self, engine: Engine, grace_seconds: float) -> bool:
        """Stop what runs; say whether every handler ended."""
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
            if not isinstance(error, Answer):
                failed.append(error)

        unlimited = replace(settings or WorkerSettings(), max_jobs=None)
        engine = self._start(unlimited, queues, lambda: None, [note] if raise_errors else [])
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
        Work until SIGTERM or SIGINT, then stop in peace; a second signal ends the process at once.

        Args:
            patient: ignore a second signal, for a supervisor ends the process at once by SIGKILL.
            metrics_port: serve /metrics, /live and /ready there, on `metrics_host` or 127.0.0.1.
            metrics_registry: a registry of Prometheus' client that gets the figures, instead of a new one.

        Returns:
            The exit code: 0; EXIT_REPLACE after `max_jobs`; EXIT_HUNG when only the end of the process ends handlers
            that overran their time, or when a part of it has ended by itself.
        """
        check_main_thread()
        page = served(
            self, queues, self.observers, self.stats, port=metrics_port, host=metrics_host, registry=metrics_registry
        )
        with page, StopSignals(patient=patient) as signals:
            return self._run(settings or WorkerSettings(), queues, signals)

    def leave(self) -> None:
        """Have `run` claim no more and return when its handlers have finished: another process is to go on."""
        self._leave_asked = True

    @property
    def is_leaving(self) -> bool:
        """Whether it claims no more and only lets its handlers finish, without a stop."""
        engine = self._engine
        return engine is not None and engine.inflight.closed and not engine.stopping.is_set()

    def deliveries(self) -> list[HeldDelivery]:
        """Return everything held in this process, running or not."""
        engine = self._engine or self._stopped  # a stop in another thread takes it away
        return [] if engine is None else engine.inflight.deliveries()

    @property
    def is_stopping(self) -> bool:
        """Whether a stop has begun, or ended, since the last start."""
        return self._engine is None and self._stopped is not None

    @property
    def unfinished(self) -> list[HeldDelivery] | None:
        """The deliveries that the last stop cut off, or could not give back; None before the end of its grace."""
        return None if self._stopped is None else self._stopped.unfinished

    def running(self) -> list[HandlerCall]:
        """Return the calls of handlers that are under way in this process, also during a stop."""
        engine = self._engine or self._stopped
        return [] if engine is None else engine.inflight.runs()

    def stats(self) -> EngineStats | None:
        """Return what this process does at this moment; None when nothing runs."""
        engine = self._engine
        return None if engine is None else engine.stats()

    def engine(self) -> Engine:
        """Return what runs; raise ConfigurationError when nothing does."""
        if self._engine is None:
            raise ConfigurationError("this consumer has not been started")
        return self._engine

    def _start(
        self,
        settings: WorkerSettings | None,
        queues: Sequence[str],
        entered: Callable[[], None],
        hooks: Sequence[ErrorHook] = (),
    ) -> Engine:
        if self._engine is not None:
            raise ConfigurationError("this consumer has been started; stop it first")
        chosen = self.chosen(queues)
        engine = Engine(
            chosen,
            self.connection(chosen),
            settings or WorkerSettings(),
            lifespan=self.lifespan,
            middleware=self.around_calls,
            observers=tuple(self.observers),
            on_error=(*self.error_hooks, *hooks),
            periodic=self.ticked_beside(chosen),
            relay=None if self.relay is None else OutboxMover(self.relay, Clients(self.redis(chosen), self.observers)),
        )
        with ExitStack() as locked:

            def enter() -> None:
                entered()
                locked.enter_context(self._stop_lock)  # a first handler may stop this consumer before `start` returns

            engine.start(enter, self.before_call, self.note_step)
            self._engine, self._pid = engine, os.getpid()
            atexit.register(self._stop_at_exit)
        notify(self.observers, [RedisBack("", STARTING), WorkerReady("", tuple(one.queue.name for one in chosen))])
        return engine

    def _run(self, settings: WorkerSettings, queues: Sequence[str], signals: StopSignals) -> int:
        """Start, work and stop; return the exit code."""
        self._leave_asked = False
        try:
            # Whatever a lifespan has done to signals: from its end on, before any message is worked, they are noted.
            engine = self._start_when_redis_answers(settings, queues, signals.works)
        except StoppedEarly:
            self.stop(0)
            return 0

        def must_leave() -> bool:
            had_enough = settings.max_jobs is not None and engine.inflight.started >= settings.max_jobs
            if had_enough and self.must_stay:
                engine.inflight.most = math.inf
            return self._leave_asked or (had_enough and not self.must_stay)

        is_replaced = work(engine, settings, signals, must_leave)
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
    return found(place, Consumer)
