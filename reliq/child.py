"""
One process under the supervisor: `python -m reliq.child`, started with a plan on its standard input.

The plan stays open as long as the supervisor lives: its end tells the child that it is alone.
"""

from __future__ import annotations

import gc
import json
import logging
import mmap
import os
import signal
import struct
import sys
import threading
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from reliq.consumer import EXIT_HUNG, STARTING, Consumer, load_consumer
from reliq.errors import ConfigurationError, RedisUnavailableError
from reliq.events import RedisAway, Started, notify
from reliq.foreign import printable
from reliq.health import Pulse, Sampler
from reliq.log_setup import configure_logging, limiter
from reliq.logs import LogObserver
from reliq.metrics.process import ProcessMetrics
from reliq.retry import RECONNECT, seconds_after
from reliq.settings import WorkerSettings
from reliq.signals import SignalNotes

if TYPE_CHECKING:
    from reliq.events import Event
    from reliq.worker.run import Run

logger = logging.getLogger(__name__)

#: The child cannot work as it is set up: starting it again would not help (sysexits.h: EX_CONFIG).
EXIT_CONFIG = 78
EXIT_CRASHED = 1
#: What a stop may take beyond its grace, to settle and to end.
SETTLE_SECONDS = 10.0
#: Between two looks whether a stop has begun.
STOP_LOOK_SECONDS = 0.5
BOARD_BYTES = 8
BOARD_SECONDS = 0.1
#: New objects, less those that are gone, after which the collector looks at the young ones; Python's own is 700.
COLLECT_AFTER = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """
    What a child is to do.

    Attributes:
        consumer: `module:name`.
        queues: some of the handlers' queues, none for all.
        board: file in which the child writes until when its one handler may run, in monotonic seconds.
        report: file in which the child names what it could not finish.
        pulse: file in which the child notes that it claims.
        metrics: whether the child keeps figures for its parent.
    """

    consumer: str
    queues: tuple[str, ...]
    concurrency: int
    grace: float
    max_jobs: int | None
    burst: bool
    allow_eviction: bool
    log_level: str
    board: str
    report: str
    pulse: str = ""
    metrics: bool = False
    log_format: str = "auto"
    log_error_text: bool = False

    def as_line(self) -> str:
        """Return the plan as it is sent."""
        return json.dumps(asdict(self)) + "\n"

    @classmethod
    def of(cls, line: str) -> Plan:
        """Return the plan in a line."""
        fields: dict[str, Any] = json.loads(line)
        return cls(**{**fields, "queues": tuple(fields["queues"])})


def main() -> int:
    """Work as the plan on standard input says; return the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor speaks for the terminal
    plan = Plan.of(sys.stdin.readline())
    supervisor = _take_standard_input()
    threading.Thread(target=_end_when_alone, args=(supervisor,), name="reliq-supervisor-watch", daemon=True).start()
    try:
        try:
            consumer = load_consumer(plan.consumer)
        finally:  # not before, so that an application that configures logging itself is seen to
            configure_logging(plan.log_level, plan.log_format)
        _spare_the_collector()
        return _work(consumer, plan)
    except ConfigurationError as error:
        logger.error("%s", error)  # noqa: TRY400  what to do is in the message; a trace would hide it
        return EXIT_CONFIG
    except Exception:
        logger.exception("this process cannot work")
        return EXIT_CRASHED
    finally:
        limiter.flush()


def _spare_the_collector() -> None:
    """
    Have the garbage collector look at fewer objects, and less often.

    What the modules of reliq and of the user made stays as long as the process: a full collection, a pause for every
    handler, need not look through it. What a message leaves behind has no cycles and goes without a collection; a
    handler's own cycles are collected as before, a little later.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER)


def _work(consumer: Consumer, plan: Plan) -> int:
    consumer.observers.append(LogObserver(error_text=plan.log_error_text))
    _keep_figures(consumer, plan)
    settings = WorkerSettings(
        concurrency=plan.concurrency,
        grace=plan.grace,
        max_jobs=plan.max_jobs,
        burst=plan.burst,
        allow_eviction=plan.allow_eviction,
        log_error_text=plan.log_error_text,
    )
    _write_stacks_on_signal(consumer)
    threading.Thread(target=_bound_the_stop, args=(consumer, plan), name="reliq-stop-watch", daemon=True).start()
    if plan.concurrency == 1:
        board = Board(Path(plan.board), consumer)
        consumer.observers.append(board)
        threading.Thread(target=board.keep_up, name="reliq-board", daemon=True).start()
    failures = 0
    while True:
        try:
            code = consumer.run(settings, queues=plan.queues, patient=True)
        except RedisUnavailableError as error:
            failures += 1
            notify(consumer.observers, [RedisAway("", STARTING, str(error))])
            if consumer.wait_for_signal(seconds_after(RECONNECT, failures)):
                return 0
        else:
            return code
        finally:
            _report_unfinished(consumer, Path(plan.report))


def _keep_figures(consumer: Consumer, plan: Plan) -> None:
    """Note for the parent that this process claims, and what it measures."""
    pulse = Pulse(Path(plan.pulse) if plan.pulse else None)
    consumer.observers.append(pulse)
    if not plan.metrics:
        Sampler(consumer, pulse.note).start()
        return
    metrics = ProcessMetrics([handler.queue.name for handler in consumer.chosen(plan.queues)])
    consumer.observers.append(metrics)
    Sampler(consumer, pulse.note, metrics.sample).start()


class Board:
    """Tells the supervisor until when the handler that runs may take: it ends one that holds the interpreter."""

    kinds = (Started,)

    def __init__(self, path: Path, consumer: Consumer) -> None:
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), BOARD_BYTES)
        self._consumer = consumer

    def __call__(self, event: Event, /) -> None:
        """Write at once when a handler begins: it may not let us again."""
        if isinstance(event, Started):
            self._write()

    def keep_up(self) -> None:
        """Write again and again, for a handler may extend its time, or end."""
        while True:
            time.sleep(BOARD_SECONDS)
            self._write()

    def _write(self) -> None:
        running = self._consumer.running()
        until = min((run.timeout_at for run in running if run.timeout_at is not None), default=0.0)
        struct.pack_into("d", self._memory, 0, until)


def _take_standard_input() -> int:
    """Return what was standard input; what handlers start gets an empty one, not the supervisor's."""
    supervisor = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return supervisor


def _end_when_alone(supervisor: int) -> None:
    """Stop in peace when the supervisor is gone: its pipe ends with it."""
    while os.read(supervisor, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _bound_the_stop(consumer: Consumer, plan: Plan) -> None:
    """End this process when a stop of its own choice does not end: of the stops it makes the supervisor keeps watch."""
    while not consumer.is_stopping:
        time.sleep(STOP_LOOK_SECONDS)
    time.sleep(plan.grace + SETTLE_SECONDS)
    logger.error("the stop has taken %.0f s longer than its grace; ending this process", SETTLE_SECONDS)
    _report_unfinished(consumer, Path(plan.report))
    os._exit(EXIT_HUNG)


def _report_unfinished(consumer: Consumer, path: Path) -> None:
    """Name the deliveries that the stop cut off: the supervisor gives them back once this process is dead."""
    rows = [
        {"queue": flight.handler.queue.name, **msgspec.structs.asdict(flight.delivery.claimed)}
        for flight in consumer.unfinished
        if not flight.abandoned
    ]
    half = path.with_suffix(".half")
    half.write_text(json.dumps(rows))
    half.replace(path)


def _write_stacks_on_signal(consumer: Consumer) -> None:
    wishes = SignalNotes()
    signal.signal(signal.SIGUSR1, wishes.note)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})  # the supervisor starts us with it held back

    def serve() -> None:
        while wishes.wait():
            logger.warning("stacks:\n%s", stacks(consumer))

    threading.Thread(target=serve, name="reliq-stacks", daemon=True).start()


def stacks(consumer: Consumer) -> str:
    """Return every thread's and every task's stack, with the message it works on."""
    running = consumer.running()
    of_thread = {run.thread: run for run in running if run.task is None}
    frames = sys._current_frames()  # noqa: SLF001  the documented way to see other threads
    parts = []
    for thread in threading.enumerate():
        ident = thread.ident or 0
        frame, run = frames.get(ident), of_thread.get(ident)
        where = f" on {_named(run)}" if run else ""
        parts.append(f"thread {thread.name}{where}\n{''.join(traceback.format_stack(frame))}")
    for one in running:
        if one.task is not None:
            lines = "".join("".join(traceback.format_stack(frame)) for frame in one.task.get_stack())
            parts.append(f"task on {_named(one)}\n{lines}")
    return "\n".join(parts)


def _named(run: Run) -> str:
    """Return what a run works on: queue and id, of a batch the first and how many more."""
    more = f" and {len(run.flights) - 1} more" if len(run.flights) > 1 else ""
    return f"{run.handler.queue.name} {printable(run.flights[0].delivery.id)}{more}"


if __name__ == "__main__":
    try:
        exit_code = main()
    except BaseException:
        traceback.print_exc()
        exit_code = EXIT_CRASHED
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)  # a handler that hangs in a thread must not hold the process
