"""
One process under the supervisor: `python -m reliq.process.main`, started with a plan on its standard input.

The plan stays open as long as the supervisor lives: its end tells the child that it is alone.
"""

from __future__ import annotations

import atexit
import gc
import json
import logging
import os
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from reliq.consumer.consumer import EXIT_HUNG, Consumer, load_consumer
from reliq.consumer.signals import SignalNotes, end_at_once, take
from reliq.errors import ConfigurationError, LoginError
from reliq.foreign import printable
from reliq.health import Pulse, Sampler
from reliq.logs.observer import LogObserver
from reliq.logs.setup import configure_logging, limiter
from reliq.metrics.process import ProcessMetrics
from reliq.process.board import Board
from reliq.settings import WorkerSettings

if TYPE_CHECKING:
    from types import FrameType

    from reliq.worker.delivery import HandlerCall

logger = logging.getLogger("reliq.child")

#: The child cannot work as it is set up: starting it again would not help (sysexits.h: EX_CONFIG).
EXIT_CONFIG = 78
EXIT_CRASHED = 1
#: What a stop may take beyond its grace, to settle and to end.
SETTLE_SECONDS = 10.0
#: Between two looks whether a stop has begun.
STOP_LOOK_SECONDS = 0.5
#: What running handlers have when the supervisor is gone: its guard ends what is left soon after.
ALONE_SECONDS = 5.0
#: What the functions of atexit may take: they flush logs, spans and reports of errors.
ATEXIT_SECONDS = 3.0
#: New objects, less those that are gone, after which the collector looks at the young ones; Python's own is 700.
COLLECT_AFTER = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """
    What a child is to do.

    Attributes:
        consumer: `module:name`.
        queues: some of the handlers' queues, none for all.
        board: file in which the child writes what it runs.
        report: file in which the child names what it could not finish.
        pulse: file in which the child notes that it claims.
        metrics: whether the child keeps figures for its parent.
    """

    consumer: str
    queues: tuple[str, ...]
    concurrency: int
    grace: float
    max_jobs: int | None
    burst: bool | Literal["delayed"]
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
    take(signal.SIGINT, _pass)  # the supervisor speaks for the terminal
    take(signal.SIGTERM, end_at_once)
    wishes = SignalNotes()
    take(signal.SIGUSR1, wishes.note)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})  # the supervisor starts us with it held back
    plan = Plan.of(sys.stdin.readline())
    supervisor = _take_standard_input()
    alone = threading.Event()
    threading.Thread(
        target=_notice_its_end, args=(supervisor, alone), name="reliq-supervisor-watch", daemon=True
    ).start()
    try:
        try:
            consumer = load_consumer(plan.consumer)
        finally:  # not before, so that an application that configures logging itself is seen to
            configure_logging(plan.log_level, plan.log_format)
        _spare_the_collector()
        return _work(consumer, plan, wishes, alone)
    except (ConfigurationError, LoginError) as error:
        logger.error("%s", error)  # noqa: TRY400  what to do is in the message; a trace would hide it
        return EXIT_CONFIG
    except Exception:
        logger.exception("this process cannot work")
        return EXIT_CRASHED
    finally:
        limiter.flush()


def _pass(_number: int, _frame: FrameType | None) -> None:
    """Do nothing; unlike SIG_IGN it is not handed on to the programs that handlers start."""


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


def _work(consumer: Consumer, plan: Plan, wishes: SignalNotes, alone: threading.Event) -> int:
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
    board = Board(Path(plan.board), consumer, consumer.chosen(plan.queues), plan.concurrency)
    consumer.observers.append(board)
    for name, watch in (
        ("stacks", lambda: _write_stacks(consumer, wishes)),
        ("stop-watch", lambda: _bound_the_stop(consumer, plan)),
        ("board", board.keep_up),
        ("end-watch", lambda: _end_when_alone(consumer, alone)),
    ):
        threading.Thread(target=watch, name=f"reliq-{name}", daemon=True).start()
    try:
        return consumer.run(settings, queues=plan.queues, patient=True)
    finally:
        _report_unfinished(consumer, Path(plan.report))


def _keep_figures(consumer: Consumer, plan: Plan) -> None:
    """Note for the parent that this process claims, and what it measures."""
    pulse = Pulse(Path(plan.pulse) if plan.pulse else None)
    consumer.observers.append(pulse)
    if not plan.metrics:
        Sampler(consumer.stats, pulse.note).start()
        return
    metrics = ProcessMetrics([handler.queue.name for handler in consumer.chosen(plan.queues)])
    consumer.observers.append(metrics)
    Sampler(consumer.stats, pulse.note, metrics.sample).start()


def _take_standard_input() -> int:
    """Return what was standard input; what handlers start gets an empty one, not the supervisor's."""
    supervisor = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return supervisor


def _notice_its_end(supervisor: int, alone: threading.Event) -> None:
    """Notice when the supervisor is gone: its pipe ends with it. What has not started to work ends at once."""
    while os.read(supervisor, 4096):
        pass
    alone.set()
    os.kill(os.getpid(), signal.SIGTERM)


def _end_when_alone(consumer: Consumer, alone: threading.Event) -> None:
    """Stop in peace when the supervisor is gone."""
    alone.wait()
    consumer.longest_grace = ALONE_SECONDS
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
    if consumer.unfinished is None:
        return  # no stop has come so far: the board knows more
    rows = [
        {"queue": held.queue, **msgspec.structs.asdict(held.delivery.claimed)}
        for held in consumer.unfinished
        if not held.abandoned
    ]
    half = path.with_suffix(".half")
    with suppress(OSError):  # somebody has cleaned up the folder
        half.write_text(json.dumps(rows))
        half.replace(path)


def _write_stacks(consumer: Consumer, wishes: SignalNotes) -> None:
    while wishes.wait():
        logger.warning("stacks:\n%s", stacks(consumer))


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


def _named(run: HandlerCall) -> str:
    """Return what a run works on: queue and id, of a batch the first and how many more."""
    more = f" and {len(run.deliveries) - 1} more" if len(run.deliveries) > 1 else ""
    return f"{run.handler.queue.name} {printable(run.deliveries[0].delivery.id)}{more}"


def _leave(exit_code: int) -> None:
    """End this process, with what was registered for its end: a handler that hangs in a thread must not hold it."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it ends already
    last = threading.Thread(target=atexit._run_exitfuncs, daemon=True)  # noqa: SLF001  there is no public way
    last.start()
    last.join(ATEXIT_SECONDS)
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # closed, here or at its other end
            stream.flush()
    os._exit(exit_code)


if __name__ == "__main__":
    try:
        code = main()
    except BaseException:
        traceback.print_exc()
        code = EXIT_CRASHED
    _leave(code)
