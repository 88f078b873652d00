"""
The program of a worker process: read the settings from standard input and run the consumer.

The process also shuts down when its supervisor ends. `leave` ends a supervisor or worker process, even if threads of
the application still run.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import msgspec

from reliq.consumer import EXIT_HUNG, Consumer, SignalNotes, end_at_once, handle_signal, load_consumer
from reliq.errors import EXIT_CONFIG, ConfigurationError, LoginError
from reliq.logs import LogObserver, configure_logging, limiter
from reliq.metrics.process import ProcessMetrics
from reliq.metrics.store import file_of
from reliq.settings import seconds
from reliq.supervisor.plan import EXIT_CRASHED, STOP_MARGIN_SECONDS, ChildPlan, fingerprint
from reliq.supervisor.status import ProcessStatus, spare_the_collector
from reliq.text import printable
from reliq.worker.health import sampler
from reliq.worker.upkeep import call_stack, thread_stack

if TYPE_CHECKING:
    from collections.abc import Sequence


logger = logging.getLogger("reliq.child")

#: The interval in seconds at which threads of a worker process check whether the shutdown of the process has begun.
STOP_LOOK_SECONDS = 0.5
#: The grace period, in seconds, of worker processes whose supervisor has died. If a process still runs 3 s after it,
#: the guard process kills it.
ALONE_SECONDS = 5.0
#: How long atexit functions of the application may run, for example to flush logs, spans and error reports.
ATEXIT_SECONDS = 3.0


def leave(exit_code: int) -> NoReturn:
    """Run the atexit functions, at most for ATEXIT_SECONDS, and end this process even if other threads still run."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # ignore SIGTERM, because the process is ending already
    last = threading.Thread(target=_finish, daemon=True)
    last.start()
    last.join(ATEXIT_SECONDS)
    os._exit(exit_code)


def _finish() -> None:
    atexit._run_exitfuncs()  # noqa: SLF001  Python has no public function for this
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # this process or the reader has closed the stream
            stream.flush()


def main() -> int:
    """Run the consumer with the settings (`ChildPlan`) from standard input; return the exit code."""
    # Ignore SIGINT, because the supervisor handles Ctrl-C. Do not use SIG_IGN: programs that handlers start inherit it.
    handle_signal(signal.SIGINT, lambda *_: None)
    handle_signal(signal.SIGTERM, end_at_once)
    stack_requests = SignalNotes()
    handle_signal(signal.SIGUSR1, stack_requests.note)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})  # the supervisor blocked SIGUSR1 before the start
    # Before Python 3.12.4, text streams lose lines if several threads write at once (gh-119506).
    # With write_through, each write goes directly to the byte buffer, which is thread-safe.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # Python sets a stream to None if its descriptor is closed
            stream.reconfigure(write_through=True)
    plan = ChildPlan.of(sys.stdin.readline())
    plan.find_modules()
    # Replace standard input by /dev/null. Otherwise programs that handlers start could read the supervisor's pipe.
    supervisor = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    loaded: list[Consumer] = []
    threading.Thread(target=_stop_when_alone, args=(supervisor, loaded), name="reliq-end-watch", daemon=True).start()
    try:
        try:
            consumer = load_consumer(plan.consumer)
        finally:  # configure logging last, because the application may configure logging itself
            configure_logging(plan.log_level, plan.log_format)
        if plan.handlers not in ("", fingerprint(consumer.handlers)):
            logger.error(
                "worker process: the code has changed since its worker started, so new processes cannot join it; restart the worker"
            )
            return EXIT_CRASHED
        spare_the_collector()
        loaded.append(consumer)
        return _work(consumer, plan, stack_requests)
    except (ConfigurationError, LoginError) as error:
        logger.error("%s", error)  # noqa: TRY400  the text explains what to do
        return EXIT_CONFIG
    except Exception:
        logger.exception("worker process: unexpected error; exiting")
        return EXIT_CRASHED
    finally:
        limiter.flush()


def _stop_when_alone(supervisor: int, loaded: Sequence[Consumer]) -> None:
    """
    Wait until the supervisor ends, and then shut this process down.

    The end of the supervisor closes its pipe to this process.

    Send SIGTERM to this process repeatedly until its shutdown has begun, because a signal can have no effect. The
    application may handle SIGTERM while it starts, and Python drops exceptions that a signal handler raises within a
    `__del__`.

    Args:
        supervisor: the descriptor of the pipe from the supervisor.
        loaded: a list of the consumer of this process; empty until the consumer is loaded.
    """
    while os.read(supervisor, 4096):
        pass
    while not any(consumer.is_stopping for consumer in loaded):
        for consumer in loaded:
            consumer.longest_grace = ALONE_SECONDS
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(STOP_LOOK_SECONDS)


def _work(consumer: Consumer, plan: ChildPlan, stack_requests: SignalNotes) -> int:
    """Run the consumer, and write its logs, metrics and status; return the exit code."""
    handlers = consumer.chosen(plan.queues)
    settings = plan.settings
    status = ProcessStatus(plan.board, consumer, handlers, settings.concurrency)
    notes = [status.pulse.note]
    consumer.observers += [LogObserver(error_text=settings.log_error_text), status.pulse]
    if plan.metrics:
        file = file_of(Path(plan.metrics), os.getpid())
        tasks = [(each.queue.name, each.task) for handler in handlers for each in handler.each]
        metrics = ProcessMetrics(tasks, file)
        consumer.observers.append(metrics)
        notes.append(metrics.sample)
    sampler(consumer.stats, *notes).start()
    consumer.before_call = status.begins
    if settings.concurrency > 1:  # with one slot, `begins` already writes which coroutine runs
        consumer.note_step = status.steps

    def write_stacks() -> None:
        while stack_requests.wait():
            logger.warning("worker process: stacks of the running handlers:\n%s", stacks(consumer))

    def bound_the_stop() -> None:
        """End this process if its shutdown takes much longer than the grace period."""
        while not consumer.is_stopping:
            time.sleep(STOP_LOOK_SECONDS)
        time.sleep(seconds("grace", settings.grace) + STOP_MARGIN_SECONDS)
        logger.error(
            "worker process: the shutdown took %.0f s longer than the grace period; exiting", STOP_MARGIN_SECONDS
        )
        _report_unfinished(consumer, status)
        os._exit(EXIT_HUNG)

    for name, look in (("board", status.keep_up), ("stacks", write_stacks), ("stop-watch", bound_the_stop)):
        threading.Thread(target=look, name=f"reliq-{name}", daemon=True).start()
    try:
        return consumer.run(settings, queues=plan.queues, patient=True)
    finally:
        _report_unfinished(consumer, status)


def _report_unfinished(consumer: Consumer, status: ProcessStatus) -> None:
    """
    Report to the supervisor the messages whose handlers have not finished, or that could not be returned.

    Leave out messages whose handlers exceeded their timeouts and still run. When this process has ended, the supervisor
    returns the reported messages to their queues.
    """
    if consumer.unfinished is None:
        return  # before the end of the grace period, write no report; the supervisor reads the status rows instead
    rows = [
        {"queue": held.queue, "shard": held.keys.shard, **msgspec.structs.asdict(held.delivery.claimed)}
        for held in consumer.unfinished
        if not held.abandoned
    ]
    status.report(rows)


def stacks(consumer: Consumer) -> str:
    """Return the stacks of the running handlers, each with its queue and message id, and of all other threads."""
    lines = []
    running = consumer.running()
    for run in running:
        more = f" and {len(run.deliveries) - 1} more" if len(run.deliveries) > 1 else ""
        id = printable(run.deliveries[0].delivery.id)
        lines += [f"handler on {run.handler.queue_name} {id}{more}", *(f"  {place}" for place in call_stack(run))]
    busy = {run.thread for run in running if run.task is None}
    for thread in threading.enumerate():
        if thread.ident is not None and thread.ident not in busy:
            lines += [f"thread {thread.name}", *(f"  {place}" for place in thread_stack(thread.ident))]
    return "\n".join(lines)


if __name__ == "__main__":
    try:
        code = main()
    except BaseException:
        traceback.print_exc()
        code = EXIT_CRASHED
    leave(code)
