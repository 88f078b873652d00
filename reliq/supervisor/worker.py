"""The command `reliq worker` after its options are parsed: load the consumer and run the supervisor."""

import logging
import os
import signal
import sys
from contextlib import ExitStack, closing, suppress
from typing import NoReturn

from reliq.cli.output import EXIT_USAGE, complain, print_table, say
from reliq.consumer import STOPS, Consumer, end_at_once, handle_signal, load_consumer, traceback_of_module
from reliq.errors import ConfigurationError, ReliqError
from reliq.handlers.handler import Handler
from reliq.logs import configure_logging
from reliq.metrics import serving
from reliq.redis.server import URL_VARIABLE
from reliq.redis.url import check_url
from reliq.supervisor.child import Folder
from reliq.supervisor.main import leave
from reliq.supervisor.plan import ChildPlan
from reliq.supervisor.supervisor import Supervisor
from reliq.text import pluralize

logger = logging.getLogger(__name__)

#: Advice to the user if the import of the application raises an exception, by the name of the exception class.
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
    Run the worker processes until a stop signal arrives, then exit this process.

    The exit does not wait for threads of the application.

    Args:
        plan: the settings of the processes.
        processes: the number of processes.
        url: the URL of Redis, from --url.
        max_memory: bytes of resident memory after which a process is replaced; None for no limit.
        gil_timeout: seconds for which a handler may hold the GIL.
        page: the port and the address of the HTTP server for metrics and health checks, and whether this server also
            serves the metrics of queues; None for no server.
    """
    for number in STOPS:  # Linux drops a signal for a container's first process if the process does not handle it
        handle_signal(number, end_at_once)
    handle_signal(signal.SIGUSR1, lambda *_: None)  # without a handler, SIGUSR1 would end the process
    _fill_standard_streams()
    # Reduce the memory that the worker processes use; see mallopt(3).
    # By default, glibc uses up to eight heaps per core for threads, and each heap keeps freed memory.
    os.environ.setdefault("MALLOC_ARENA_MAX", "2")
    plan.find_modules()
    code = EXIT_USAGE
    try:
        consumer = _load(plan)
        _use_url(consumer, url)
        handlers = consumer.chosen(plan.queues)
        connection = consumer.connection(handlers)
        if plan.log_format != "json":
            count = pluralize(processes, "process", "processes")
            _print_handlers(handlers, f"{count} of {plan.settings.concurrency} on {connection.name}")
        with ExitStack() as stack:
            folder = None if page is None else stack.enter_context(closing(Folder()))
            supervisor = Supervisor(
                consumer, plan, processes=processes, max_memory=max_memory, gil_timeout=gil_timeout, folder=folder
            )
            if page is not None and folder is not None:
                port, host, with_queues = page
                endpoint, observer = serving.of_children(
                    port,
                    host,
                    connection=connection,
                    queues=[handler.queue.keys for handler in handlers],
                    folder=lambda: folder.path,
                    pulses=supervisor.pulses,
                    pids=supervisor.pids,
                    with_queues=with_queues,
                )
                supervisor.observers.append(observer)
                stack.enter_context(endpoint)
            code = supervisor.run()
    except ConfigurationError as error:
        complain(error)
    leave(code)


def _load(plan: ChildPlan) -> Consumer:
    """Import the application's consumer, and configure logging; exit if the import fails."""
    try:
        consumer = load_consumer(plan.consumer)
    except ReliqError:
        raise
    except Exception as error:  # print the application's part of the traceback
        raised = type(error).__name__
        complain(f"cannot import {plan.consumer.partition(':')[0]!r}: it raised {raised}{_CURES.get(raised, '')}")
        say(*traceback_of_module(error), stderr=True)
        leave(EXIT_USAGE)
    if not configure_logging(plan.log_level, plan.log_format) and plan.log_format != "auto":
        logger.warning(
            "worker: --log-format %s is ignored, because the application has configured logging itself", plan.log_format
        )
    return consumer


def _fill_standard_streams() -> None:
    """
    Open /dev/null for each closed standard stream, so that no other file gets the descriptor.

    If standard error is closed, print a warning to standard output.
    """
    for descriptor in (0, 1, 2):
        with suppress(OSError):
            os.fstat(descriptor)
            continue
        # `os.open` returns the lowest free descriptor, which is `descriptor`.
        os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115  must stay open
        if sys.stdout is not None:
            say("standard error is closed, so the logs of this worker are lost; remove 2>&- from the command")


def _use_url(consumer: Consumer, url: str | None) -> None:
    """
    Use the Redis server that the option --url names.

    Raises:
        ConfigurationError: the code of the application names another Redis server.
    """
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
            " and ".join(sorted({"async" if each.is_async else "plain" for each in handler.each})),
            f"{handler.settings.lease:g} s",
            "none" if handler.settings.timeout is None else f"{handler.settings.timeout:g} s",
            handler.settings.concurrency or "all",
            handler.queue.settings.retries,
        )
        for handler in handlers
    ]
    columns = ("queue", "handler", "kind", "lease", "timeout", "concurrency", "retries")
    print_table(columns, rows, title=title, stderr=True)
