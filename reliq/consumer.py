"""`Consumer`: handlers by queue, and the worker process that runs them."""

from __future__ import annotations

import importlib
import signal
import time
from typing import TYPE_CHECKING, Any, Self

from reliq.connection import Connection, check_slots
from reliq.errors import ConfigurationError
from reliq.events import RedisBack, WorkerReady, WorkerStopping, notify
from reliq.registration import Registration
from reliq.settings import WorkerSettings, seconds
from reliq.signals import SignalNotes
from reliq.worker.engine import Engine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from types import FrameType

    from reliq.events import Observer
    from reliq.handler import Handler
    from reliq.message import Duration
    from reliq.metrics.serving import Registry
    from reliq.pools import Target
    from reliq.worker.flight import Flight
    from reliq.worker.run import Run

#: Exit codes of a worker process.
EXIT_HUNG, EXIT_REPLACE, EXIT_SECOND_SIGNAL = 75, 76, 130
#: The part that misses Redis before there are others.
STARTING = "start"
#: Between two looks whether a drain is done.
DRAIN_SECONDS = 0.05
#: Between two looks whether a run is over.
LOOK_SECONDS = 0.2


class Consumer(Registration):
    """
    Handlers of any number of queues, and how their worker runs.

    Args:
        url: a Redis URL or a redis-py client; None means that of the queues, else RELIQ_URL.
        lifespan: returns a context manager, plain or async, entered once for each worker process before the first
            claim and left after the last handler; what it yields is `job.state`.
        observers: are told of every event.
    """

    def __init__(
        self,
        url: Target | None = None,
        *,
        lifespan: Callable[[], Any] | None = None,
        observers: Iterable[Observer] = (),
    ) -> None:
        super().__init__()
        self.target = url
        self.lifespan = lifespan
        self.observers: list[Observer] = list(observers)
        self._engine: Engine | None = None
        self._stopped: Engine | None = None
        self._signals = SignalNotes()
        self._patient = False

    def include(self, *sources: Consumer | str) -> Self:
        """
        Add the handlers, middleware, error hooks and observers of other consumers, given as such or as `module` or `module:name`.

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
            self._handlers.update(other._handlers)  # noqa: SLF001  of our own kind
            self._middleware += other._middleware  # noqa: SLF001
            self._on_error += other._on_error  # noqa: SLF001
            self.observers += [one for one in other.observers if one not in self.observers]
            self.target = self.target if other.target is None else other.target
        return self

    def start(self, settings: WorkerSettings | None = None, *, queues: Sequence[str] = ()) -> None:
        """
        Start working in this process and return; `queues` names some of the handlers' queues, none means all.

        Raises:
            ConfigurationError: there is no handler, no such queue, no Redis named, or the server is not fit.
            RedisUnavailableError: Redis is away.
        """
        if self._engine is not None:
            raise ConfigurationError("this consumer has been started; stop it first")
        chosen = self.chosen(queues)
        engine = Engine(
            chosen,
            self.connection(chosen),
            settings or WorkerSettings(),
            lifespan=self.lifespan,
            middleware=tuple(self._middleware),
            observers=tuple(self.observers),
            on_error=tuple(self._on_error),
        )
        engine.start()
        self._engine = engine
        names = tuple(handler.queue.name for handler in chosen)
        notify(self.observers, [RedisBack("", STARTING), WorkerReady("", names)])

    def stop(self, grace: Duration = 25.0) -> bool:
        """Take no more, give back what has not started, let handlers end within `grace`; say whether all did."""
        engine, self._engine = self._engine, None
        if engine is None:
            return True
        self._stopped = engine
        grace_seconds = seconds("grace", grace)
        notify(self.observers, [WorkerStopping("", len(engine.inflight.runs()), grace_seconds)])
        return not engine.stop(grace_seconds)

    def drain(self, settings: WorkerSettings | None = None, *, queues: Sequence[str] = ()) -> None:
        """Work until the queues are empty, what is delayed included, and stop."""
        self.start(settings, queues=queues)
        engine = self.engine()
        try:
            while not engine.is_drained():
                time.sleep(DRAIN_SECONDS)
        finally:
            self.stop()

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
            patient: let a second signal change nothing, for under a supervisor only SIGKILL ends at once.
            metrics_port: serve /metrics, /live and /ready there, on `metrics_host` or 127.0.0.1.
            metrics_registry: the registry of Prometheus' client that also gets the figures, instead of a new one.

        Returns:
            The exit code: 0; EXIT_REPLACE after `max_jobs`; EXIT_HUNG when handlers that overran their time must be
            ended with the process, or a part of it has ended by itself.
        """
        if metrics_port is not None or metrics_registry is not None:
            # A layer above, and the client of Prometheus with it, that only who asks for it pays for.
            serving = importlib.import_module("reliq.metrics.serving")
            with serving.of_one_process(self, queues, port=metrics_port, host=metrics_host, registry=metrics_registry):
                return self.run(settings, queues=queues, patient=patient)
        self._patient = patient
        chosen = settings or WorkerSettings()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note_signal)
        self.start(chosen, queues=queues)
        engine = self.engine()
        while not (self.wait_for_signal(LOOK_SECONDS) or self._is_over(engine, chosen)):
            pass
        enough = not self._signals.numbers and _had_enough(engine, chosen)
        broken = engine.hung_slots > 0 or bool(engine.dead_parts())
        if not self.stop(chosen.grace) or broken:
            return EXIT_HUNG
        return EXIT_REPLACE if enough else 0

    def wait_for_signal(self, seconds_at_most: float) -> bool:
        """Wait for a signal to stop; say whether one has come."""
        return bool(self._signals.numbers) or self._signals.wait(seconds_at_most)

    @property
    def is_stopping(self) -> bool:
        """Whether a stop has begun, or ended, since the last start."""
        return self._engine is None and self._stopped is not None

    @property
    def unfinished(self) -> list[Flight]:
        """What the last stop cut off: deliveries whose handlers still ran at the end of the grace."""
        return [] if self._stopped is None else self._stopped.unfinished

    def running(self) -> list[Run]:
        """Return the calls of handlers that are under way in this process."""
        return [] if self._engine is None else self._engine.inflight.runs()

    def engine(self) -> Engine:
        """Return what runs; raise ConfigurationError when nothing does."""
        if self._engine is None:
            raise ConfigurationError("this consumer has not been started")
        return self._engine

    def connection(self, handlers: Sequence[Handler]) -> Connection:
        """Return the one Redis of the consumer and its queues; raise ConfigurationError when they name two."""
        named = [self.target, *(handler.queue.target for handler in handlers)]
        targets = [target for target in named if target is not None]
        if any(target != targets[0] for target in targets):
            raise ConfigurationError("the consumer and its queues name different Redis servers; name one")
        for handler in handlers:
            check_slots(targets[0] if targets else None, handler.queue.layout)
        return Connection.to(targets[0] if targets else None)

    def _is_over(self, engine: Engine, settings: WorkerSettings) -> bool:
        return _had_enough(engine, settings) or engine.must_be_replaced() or (settings.burst and engine.is_drained())

    def _note_signal(self, number: int, _frame: FrameType | None) -> None:
        """Only take note; the second one ends the process, for it is what the person wants."""
        self._signals.note(number)
        if len(self._signals.numbers) > 1 and not self._patient:
            raise SystemExit(EXIT_SECOND_SIGNAL)


def _had_enough(engine: Engine, settings: WorkerSettings) -> bool:
    return settings.max_jobs is not None and engine.inflight.started >= settings.max_jobs


def load_consumer(place: str) -> Consumer:
    """
    Return the consumer at `module:name`, or the only one of `module`.

    Raises:
        ConfigurationError: the module cannot be imported or has no such consumer.
    """
    module_name, _, attribute = place.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigurationError(f"cannot import {module_name!r}: {error}; is its folder on PYTHONPATH?") from error
    found = {name: value for name, value in vars(module).items() if isinstance(value, Consumer)}
    if attribute:
        found = {name: value for name, value in found.items() if name == attribute}
    if len(set(map(id, found.values()))) != 1:
        wanted = f"a Consumer named {attribute!r}" if attribute else "exactly one Consumer"
        raise ConfigurationError(f"module {module_name!r} must have {wanted}; write it as module:name")
    return next(iter(found.values()))
