"""
The program of a worker process: it works as the plan on its standard input says, and ends when its supervisor is gone.

`leave` ends a supervisor or one of its processes; no thread of the application can hold that up.
"""

from __future__ import annotations

import atexit
import json
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
from reliq.supervisor.plan import EXIT_CRASHED, METRICS_FOLDER, STOP_MARGIN_SECONDS, ChildPlan, fingerprint
from reliq.supervisor.status import ProcessStatus, spare_the_collector
from reliq.text import printable
from reliq.worker.health import sampler
from reliq.worker.upkeep import call_stack, thread_stack

if TYPE_CHECKING:
    from collections.abc import Sequence


logger = logging.getLogger("reliq.child")

#: Twice a second a process looks whether a stop has begun.
STOP_LOOK_SECONDS = 0.5
#: Running handlers have 5 s when the supervisor is gone: its guard ends what is left 3 s later.
ALONE_SECONDS = 5.0
#: The functions of atexit have 3 s to flush logs, spans and reports of errors.
ATEXIT_SECONDS = 3.0


def leave(exit_code: int) -> NoReturn:
    """Call what atexit has, and end this process although a thread of it may run on."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it ends already
    last = threading.Thread(target=_finish, daemon=True)
    last.start()
    last.join(ATEXIT_SECONDS)
    os._exit(exit_code)


def _finish() -> None:
    atexit._run_exitfuncs()  # noqa: SLF001  there is no public way
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # closed, here or at its other end
            stream.flush()


def main() -> int:
    """Work as the plan on standard input says; return the exit code."""
    # The supervisor speaks for the terminal; a program that a handler starts would inherit SIG_IGN, but not this.
    handle_signal(signal.SIGINT, lambda *_: None)
    handle_signal(signal.SIGTERM, end_at_once)
    stack_requests = SignalNotes()
    handle_signal(signal.SIGUSR1, stack_requests.note)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})  # the supervisor has held it back until now
    # A buffer of texts loses lines and writes freed memory when threads fill it at once: gh-119506, before Python 3.12.4.
    # So texts are handed on at once to the buffer of bytes, which many threads may fill.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # it is none where its descriptor is closed
            stream.reconfigure(write_through=True)
    plan = ChildPlan.of(sys.stdin.readline())
    plan.find_modules()
    # Programs that handlers start get an empty standard input, not the supervisor's.
    supervisor = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    loaded: list[Consumer] = []
    threading.Thread(target=_stop_when_alone, args=(supervisor, loaded), name="reliq-end-watch", daemon=True).start()
    try:
        try:
            consumer = load_consumer(plan.consumer)
        finally:  # not before, so that an application that configures logging itself is seen to
            configure_logging(plan.log_level, plan.log_format)
        if plan.handlers not in ("", fingerprint(consumer.handlers)):
            logger.error("the code has changed since this worker started; restart the worker, its processes do not fit")
            return EXIT_CRASHED
        spare_the_collector()
        loaded.append(consumer)
        return _work(consumer, plan, stack_requests)
    except (ConfigurationError, LoginError) as error:
        logger.error("%s", error)  # noqa: TRY400  what to do is in the message; a trace would hide it
        return EXIT_CONFIG
    except Exception:
        logger.exception("this process cannot work")
        return EXIT_CRASHED
    finally:
        limiter.flush()


def _stop_when_alone(supervisor: int, loaded: Sequence[Consumer]) -> None:
    """
    Stop when the supervisor is gone, for its pipe ends with it; a process that has not loaded its consumer ends at once.

    The signal is sent again until a stop has begun: an application may have a handler of its own while it starts, and
    Python drops an exception that a signal raises within a `__del__`.
    """
    while os.read(supervisor, 4096):
        pass
    while not any(consumer.is_stopping for consumer in loaded):
        for consumer in loaded:
            consumer.longest_grace = ALONE_SECONDS
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(STOP_LOOK_SECONDS)


def _work(consumer: Consumer, plan: ChildPlan, stack_requests: SignalNotes) -> int:
    """Run the consumer, and have it log what happens, and write what its supervisor reads."""
    handlers = consumer.chosen(plan.queues)
    settings = plan.settings
    status = ProcessStatus(Path(plan.board), consumer, handlers, settings.concurrency)
    notes = [status.pulse.note]
    consumer.observers += [LogObserver(error_text=settings.log_error_text), status.pulse]
    if plan.metrics:
        file = file_of(Path(plan.board).parent / METRICS_FOLDER, os.getpid())
        metrics = ProcessMetrics([handler.queue.name for handler in handlers], file)
        consumer.observers.append(metrics)
        notes.append(metrics.sample)
    sampler(consumer.stats, *notes).start()
    consumer.before_call = status.begins
    if settings.concurrency > 1:  # else `begins` names the only coroutine
        consumer.note_step = status.steps

    def write_stacks() -> None:
        while stack_requests.wait():
            logger.warning("stacks:\n%s", stacks(consumer))

    def bound_the_stop() -> None:
        """End this process when a stop of its own choice does not end; the supervisor watches the stops that it orders."""
        while not consumer.is_stopping:
            time.sleep(STOP_LOOK_SECONDS)
        time.sleep(seconds("grace", settings.grace) + STOP_MARGIN_SECONDS)
        logger.error("the stop has taken %.0f s longer than its grace; ending this process", STOP_MARGIN_SECONDS)
        _report_unfinished(consumer, Path(plan.report))
        os._exit(EXIT_HUNG)

    for name, look in (("board", status.keep_up), ("stacks", write_stacks), ("stop-watch", bound_the_stop)):
        threading.Thread(target=look, name=f"reliq-{name}", daemon=True).start()
    try:
        return consumer.run(settings, queues=plan.queues, patient=True)
    finally:
        _report_unfinished(consumer, Path(plan.report))


def _report_unfinished(consumer: Consumer, path: Path) -> None:
    """Name the deliveries that the stop cut off: the supervisor gives them back once this process is dead."""
    if consumer.unfinished is None:
        return  # no stop has come so far, and the board knows more
    rows = [
        {"queue": held.queue, "shard": held.keys.shard, **msgspec.structs.asdict(held.delivery.claimed)}
        for held in consumer.unfinished
        if not held.abandoned
    ]
    half = path.with_suffix(".half")
    with suppress(OSError):  # the folder was cleaned up
        half.write_text(json.dumps(rows))
        half.replace(path)


def stacks(consumer: Consumer) -> str:
    """Return where each handler stands, with the message it works on, and each other thread of this process."""
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
