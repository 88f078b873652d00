"""`reliq worker`: run handlers in one process or many."""

import logging
import os
import re
import sys
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Annotated, Any, Literal

import typer

from reliq.cli.options import queue_names
from reliq.cli.output import EXIT_USAGE, complain, say
from reliq.cli.reload import Reloader, reloaded
from reliq.cli.tables import print_table
from reliq.consumer.consumer import Consumer, load_consumer
from reliq.consumer.loader import traceback_of_module
from reliq.consumer.signals import STOPS, end_at_once, take
from reliq.errors import ConfigurationError, ReliqError
from reliq.handlers.handler import Handler
from reliq.logs.setup import FORMATS, LEVELS, configure_logging
from reliq.metrics import serving
from reliq.metrics.endpoint import DEFAULT_HOST
from reliq.metrics.files import FOLDER_VARIABLE
from reliq.process.folder import METRICS_FOLDER
from reliq.process.plan import ChildPlan, environment_of_children
from reliq.process.supervisor import STALL_SECONDS, Supervisor
from reliq.settings import WorkerSettings, seconds, whole
from reliq.transport.connection import URL_VARIABLE
from reliq.transport.url import check_url

logger = logging.getLogger(__name__)

_SIZE = re.compile(r"(\d+)\s*([KMG]?)i?B?", re.IGNORECASE)
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


#: The texts that stand for yes and no in the environment.
_WORDS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def burst_of(text: object) -> bool | Literal["delayed"]:
    """Return what --burst says; raise BadParameter for another word."""
    word = str(text).lower()
    if word == "delayed":
        return "delayed"
    if word not in _WORDS:
        raise typer.BadParameter(f"write --burst or --burst=delayed, not {str(text)[:80]!r}")
    return _WORDS[word]


def worker(
    consumer: Annotated[str, typer.Argument(metavar="CONSUMER", help="Where the Consumer is: module:name, or module.")],
    processes: Annotated[int, typer.Option(help="Processes to keep running.")] = 1,
    concurrency: Annotated[int, typer.Option(help="Handlers that run at once in a process.")] = 16,
    queue: Annotated[
        list[str] | None,
        typer.Option(metavar="QUEUE", help="Only this queue; may be given again.", autocompletion=queue_names),
    ] = None,
    burst: Annotated[
        Any,
        typer.Option(
            parser=burst_of,
            metavar="[=delayed]",
            help="Stop when nothing is due; --burst=delayed waits for what is due later, too.",
            show_default=False,
        ),
    ] = False,
    grace: Annotated[float, typer.Option(help="Seconds that running handlers have after a stop.")] = 25.0,
    stall: Annotated[
        float, typer.Option(help="Seconds a handler may hold the interpreter, where others run beside it.")
    ] = STALL_SECONDS,
    max_jobs: Annotated[int | None, typer.Option(help="Replace a process after this many jobs.")] = None,
    max_memory: Annotated[str | None, typer.Option(help="Replace a process that grows over this, like 512M.")] = None,
    url: Annotated[str | None, typer.Option(help="The Redis, when RELIQ_URL does not say it.")] = None,
    allow_eviction: Annotated[
        bool, typer.Option("--allow-eviction", help="Start although Redis may evict messages.")
    ] = False,
    metrics_port: Annotated[int | None, typer.Option(help="Serve /metrics, /live and /ready on this port.")] = None,
    metrics_host: Annotated[str, typer.Option(help="The address to serve them on.")] = DEFAULT_HOST,
    no_queue_metrics: Annotated[
        bool, typer.Option("--no-queue-metrics", help="Leave the figures of queues to an exporter.")
    ] = False,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
    log_format: Annotated[str, typer.Option(help="text, json, or auto: colours on a terminal.")] = "auto",
    log_error_text: Annotated[
        bool, typer.Option("--log-error-text", help="Log what exceptions say too; that may hold a piece of a body.")
    ] = False,
    reload: Annotated[
        bool, typer.Option("--reload", help="For development: stop and begin anew when a source file changes.")
    ] = False,
) -> None:
    """
    Run the handlers of a Consumer until SIGTERM or Ctrl-C.

    Example: reliq worker shop.jobs:consumer --processes 4 --concurrency 16

    Each option is a setting, too: --max-jobs is RELIQ_MAX_JOBS in the environment, and max-jobs in [tool.reliq] of
    pyproject.toml, where CONSUMER is consumer. `reliq config` shows what is in force.
    """
    _check_options(log_level, log_format, processes, stall)
    settings = WorkerSettings(concurrency=concurrency, grace=grace, max_jobs=max_jobs, burst=burst)
    limit = None if max_memory is None else size(max_memory)
    plan = ChildPlan(
        consumer=consumer,
        queues=tuple(queue or ()),
        concurrency=settings.concurrency,
        grace=grace,
        max_jobs=max_jobs,
        burst=burst,
        allow_eviction=allow_eviction,
        log_level=log_level,
        metrics=metrics_port is not None,
        log_format=log_format,
        log_error_text=log_error_text,
    )
    _prepare_process()

    def work(reloader: Reloader | None = None) -> int:
        found = _loaded(consumer)
        _configure_logging(log_level, log_format)
        _use_url(found, url)
        handlers = found.chosen(plan.queues)
        if log_format != "json":
            _print_handlers(handlers, f"{processes} processes of {concurrency} on {found.connection(handlers).name}")
        supervisor = Supervisor(found, plan, processes=processes, max_memory=limit, stall=stall)
        if reloader is not None:
            reloader.watch(supervisor.stop)
        with _served(supervisor, found, handlers, metrics_port, metrics_host, with_queues=not no_queue_metrics):
            return supervisor.run()

    raise typer.Exit(reloaded(work) if reload else work())


def _check_options(log_level: str, log_format: str, processes: int, stall: float) -> None:
    """Raise ConfigurationError for a value that its option does not take."""
    _one_of("--log-level", log_level, LEVELS)
    _one_of("--log-format", log_format, FORMATS)
    whole("--processes", processes, least=1, most=1000)
    seconds("--stall", stall, least=1.0)


def _prepare_process() -> None:
    """Let signals end this process before it serves; set up its standard streams and its children's environment."""
    for number in STOPS:  # a container's first process ignores a signal for which it has no handler
        take(number, end_at_once)
    _fill_standard_streams()
    environment_of_children()


def _configure_logging(level: str, form: str) -> None:
    """Configure logging unless the application has; say so when --log-format does nothing."""
    if not configure_logging(level, form) and form != "auto":
        logger.warning("--log-format %s does nothing: the application has configured logging itself", form)


def _loaded(place: str) -> Consumer:
    """Return the consumer; an exception of its module is shown without our own frames and ends like a wrong name."""
    try:
        return load_consumer(place)
    except ReliqError:
        raise
    except Exception as error:
        complain(f"cannot import {place.partition(':')[0]!r}: it raised {type(error).__name__}")
        say(*traceback_of_module(error), stderr=True)
        raise typer.Exit(EXIT_USAGE) from None


def _fill_standard_streams() -> None:
    """Open the null device for each standard stream that is closed, so that no other file becomes it; warn of that."""
    for descriptor in (0, 1, 2):
        with suppress(OSError):
            os.fstat(descriptor)
            continue
        os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free: the same
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115  as long as the process
        if sys.stdout is not None:
            say("standard error is closed: nothing that this worker logs is seen; leave out 2>&-")


def _one_of(option: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigurationError(f"{option} must be one of {', '.join(allowed)}, not {value!r}")


def _served(
    supervisor: Supervisor, found: Consumer, handlers: list[Handler], port: int | None, host: str, *, with_queues: bool
) -> AbstractContextManager[Any]:
    """Return the endpoint of the parent, if there is a port, and have the children keep figures where it finds them."""
    if port is None:
        return nullcontext()
    folder = supervisor.folder / METRICS_FOLDER
    endpoint, processes = serving.of_children(
        port,
        host,
        connection=found.connection(handlers),
        queues=[handler.queue.keys for handler in handlers],
        folder=folder,
        pulses=supervisor.pulses,
        pids=supervisor.pids,
        with_queues=with_queues,
    )
    supervisor.observers.append(processes)
    os.environ[FOLDER_VARIABLE] = str(folder)
    return endpoint


def size(text: str) -> int:
    """Return a size such as 512M in bytes; raise ConfigurationError for another form."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigurationError(f"--max-memory must be a size such as 512M or 2G, not {text!r}")
    return int(match[1]) * _UNITS[match[2].upper()]


def _use_url(found: Consumer, url: str | None) -> None:
    """Let --url say where Redis is; one that contradicts the code is refused."""
    if url is None:
        return
    named = [found.target, *(handler.queue.target for handler in found.handlers)]
    if any(target is not None and target != url for target in named):
        raise ConfigurationError("--url contradicts the Redis that the code names; leave one of them out")
    check_url(url)
    os.environ[URL_VARIABLE] = url


def _print_handlers(handlers: list[Handler], title: str) -> None:
    """Print the handlers and their settings on standard error."""
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
