"""The main thread of a worker process: it waits for a signal, for drained queues, or for its replacement."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from reliq.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable

    from reliq.consumer.signals import StopSignals
    from reliq.settings import WorkerSettings
    from reliq.worker.engine import Engine

#: The main thread looks five times a second whether the work is over; a signal wakes it at once.
END_CHECK_SECONDS = 0.2


def work(engine: Engine, settings: WorkerSettings, signals: StopSignals, must_leave: Callable[[], bool]) -> bool:
    """
    Work until a signal, or until nothing more is to be done here.

    What is to be replaced claims no more and lets its handlers finish: their timeouts are its limit, unless one of its
    parts has ended.

    Returns:
        Whether another process is to replace this one.
    """

    def is_over() -> bool:  # a handler may stop its consumer
        return bool(signals.numbers) or engine.stopping.is_set() or _is_done(engine, settings)

    while not (is_over() or must_leave() or engine.must_be_replaced()):
        signals.wait(END_CHECK_SECONDS)
    if is_over():
        return False
    if not engine.dead_parts():
        engine.stop_claiming()
        while not (signals.numbers or engine.inflight.wait_until_none_runs(0.0)):
            signals.wait(END_CHECK_SECONDS)
    return True


def check_main_thread() -> None:
    """Raise ConfigurationError when this thread may not set handlers of signals."""
    if threading.current_thread() is not threading.main_thread():
        raise ConfigurationError(
            "consumer.run() handles signals, which only the main thread may; in another thread use consumer.start() and "
            "consumer.stop()"
        )


def _is_done(engine: Engine, settings: WorkerSettings) -> bool:
    """Say whether a worker that is to end when its queues are drained has drained them."""
    return settings.burst and engine.is_drained(delayed=settings.burst == "delayed")
