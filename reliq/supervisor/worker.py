"""The command `reliq worker` after its options are parsed: load the consumer, run supervisor and metrics page."""

import logging
import os
import signal
import sys
from contextlib import suppress
from typing import NoReturn

from reliq.cli.output import EXIT_USAGE, complain, print_table, say
from reliq.consumer import STOPS, Consumer, end_at_once, handle_signal, load_consumer, traceback_of_module
from reliq.errors import ConfigurationError, ReliqError
from reliq.handlers.handler import Handler
from reliq.logs import configure_logging
from reliq.metrics import serving
from reliq.redis.server import URL_VARIABLE
from reliq.redis.url import check_url
from reliq.supervisor.main import leave
from reliq.supervisor.plan import METRICS_FOLDER, ChildPlan
from reliq.supervisor.supervisor import Supervisor
from reliq.text import pluralize

logger = logging.getLogger(__name__)

#: Exception class raised by an import -> advice for the user.
_CURES = {"AppRegistryNotReady": "; the worker's module must call django.setup() before it imports models"}


def serve(
    plan: ChildPlan,
    processes: int,
    *,
    url: str | None,
    max_memory: int | None,
    gil_timeout: float,
    page: tuple[int, str, bool] | None,
) -> NoReturn:
    """
    Run the worker processes until a signal, then exit, even if threads of the application still run.

    Args:
        plan: the settings of the processes.
        processes: the number of processes.
        url: the URL of Redis, from --url.
        max_memory: bytes of resident memory after which a process is replaced; None for no limit.
        gil_timeout: seconds for which a handler may hold the GIL.
        page: port and address of the metrics page, and whether it contains queue metrics; None for no page.
    """
    for number in STOPS:  # process 1 of a container ignores signals without a handler
        handle_signal(number, end_at_once)
    handle_signal(signal.SIGUSR1, lambda *_: None)  # its default action ends the process
    _fill_standard_streams()
    # glibc uses up to eight heaps per core for threads, and each keeps its memory; see mallopt(3).
    os.environ.setdefault("MALLOC_ARENA_MAX", "2")
    plan.find_modules()

    try:
        code = _work(plan, processes, url=url, max_memory=max_memory, gil_timeout=gil_timeout, page=page)
    except ConfigurationError as error:
        complain(error)
        code = EXIT_USAGE
    leave(code)


def _work(
    plan: ChildPlan,
    processes: int,
    *,
    url: str | None,
    max_memory: int | None,
    gil_timeout: float,
    page: tuple[int, str, bool] | None,
) -> int:
    """Load the consumer, print its handlers, and run the processes; return the exit code."""
    try:
        consumer = load_consumer(plan.consumer)
    except ReliqError:
        raise
    except Exception as error:  # print the traceback without frames of reliq
        raised = type(error).__name__
        complain(f"cannot import {plan.consumer.partition(':')[0]!r}: it raised {raised}{_CURES.get(raised, '')}")
        say(*traceback_of_module(error), stderr=True)
        return EXIT_USAGE
    if not configure_logging(plan.log_level, plan.log_format) and plan.log_format != "auto":
        logger.warning(
            "--log-format %s is ignored, because the application has configured logging itself", plan.log_format
        )
    _use_url(consumer, url)
    handlers = consumer.chosen(plan.queues)
    if plan.log_format != "json":
        count = pluralize(processes, "process", "processes")
        _print_handlers(handlers, f"{count} of {plan.settings.concurrency} on {consumer.connection(handlers).name}")
    supervisor = Supervisor(consumer, plan, processes=processes, max_memory=max_memory, gil_timeout=gil_timeout)
    if page is None:
        return supervisor.run()
    port, host, with_queues = page
    endpoint, observer = serving.of_children(
        port,
        host,
        connection=consumer.connection(handlers),
        queues=[handler.queue.keys for handler in handlers],
        folder=lambda: supervisor.folder / METRICS_FOLDER,
        pulses=supervisor.pulses,
        pids=supervisor.pids,
        with_queues=with_queues,
    )
    supervisor.observers.append(observer)
    with endpoint:
        return supervisor.run()


def _fill_standard_streams() -> None:
    """Open /dev/null for closed standard streams, so that no other file gets their descriptors; print a warning."""
    for descriptor in (0, 1, 2):
        with suppress(OSError):
            os.fstat(descriptor)
            continue
        os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # gets the lowest free number, which is `descriptor`
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115  stays open
        if sys.stdout is not None:
            say("standard error is closed, so the logs of this worker are lost; remove 2>&- from the command")


def _use_url(consumer: Consumer, url: str | None) -> None:
    """Use the Redis of --url; raise ConfigurationError if the code names another."""
    if url is None:
        return
    named = [consumer.target, *(handler.queue.target for handler in consumer.handlers)]
    if any(target is not None and target != url for target in named):
        raise ConfigurationError("--url and the code name different Redis servers; remove one of the two")
    check_url(url)
    os.environ[URL_VARIABLE] = url


def _print_handlers(handlers: list[Handler], title: str) -> None:
    """Print a table of the handlers and their settings to standard error."""
    rows = [
        (
            handler.queue.name,
            handler.name,
            "async" if handler.is_async else "plain",
            f"{handler.settings.lease:g} s",
            "none" if handler.settings.timeout is None else f"{handler.settings.timeout:g} s",
            handler.settings.concurrency or "all",
            handler.queue.settings.retries,
        )
        for handler in handlers
    ]
    columns = ("queue", "handler", "kind", "lease", "timeout", "concurrency", "retries")
    print_table(columns, rows, title=title, stderr=True)
