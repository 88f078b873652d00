"""The work of `reliq worker`, once its options are read: this process becomes a supervisor."""

import logging
import os
import signal
import sys
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, NoReturn

import typer

from reliq.cli.output import EXIT_USAGE, complain, say
from reliq.cli.reload import Reloader, reloaded
from reliq.cli.tables import print_table
from reliq.consumer.consumer import Consumer, load_consumer
from reliq.consumer.loader import traceback_of_module
from reliq.consumer.signals import STOPS, end_at_once, take
from reliq.errors import ConfigurationError, ReliqError
from reliq.handlers.handler import Handler
from reliq.logs.setup import configure_logging
from reliq.metrics import serving
from reliq.process.folder import METRICS_FOLDER
from reliq.process.leaving import leave
from reliq.process.plan import ChildPlan, find_modules
from reliq.process.supervisor import Supervisor
from reliq.text import count_of
from reliq.transport.connection import URL_VARIABLE
from reliq.transport.url import check_url

logger = logging.getLogger(__name__)

#: Port and address of the page of figures, and whether those of queues are on it.
Page = tuple[int, str, bool]
#: The class of what a module raised at its import -> what helps.
_CURES = {"AppRegistryNotReady": "; the worker's module must call django.setup() before it imports models"}


def serve(
    plan: ChildPlan,
    processes: int,
    *,
    url: str | None,
    max_memory: int | None,
    stall: float,
    page: Page | None,
    reload: bool,
) -> NoReturn:
    """Run the processes of a plan until a signal, and leave with its exit code, whatever threads the module has begun."""
    _prepare_process()
    find_modules(plan.folder)

    def work(reloader: Reloader | None = None) -> int:
        found = _loaded(plan.consumer)
        _configure_logging(plan.log_level, plan.log_format)
        _use_url(found, url)
        handlers = found.chosen(plan.queues)
        if plan.log_format != "json":
            where = found.connection(handlers).name
            _print_handlers(handlers, f"{count_of(processes, 'process', 'processes')} of {plan.concurrency} on {where}")
        supervisor = Supervisor(found, plan, processes=processes, max_memory=max_memory, stall=stall)
        if reloader is not None:
            reloader.watch(supervisor.stop)
        with _served(supervisor, found, handlers, page):
            return supervisor.run()

    def ended(reloader: Reloader | None = None) -> int:
        try:
            return work(reloader)
        except ConfigurationError as error:
            complain(error)
            return EXIT_USAGE
        except typer.Exit as end:
            return end.exit_code

    leave(reloaded(ended) if reload else ended())


def _prepare_process() -> None:
    """Let signals end this process before it serves; set up its standard streams and its children's environment."""
    for number in STOPS:  # a container's first process ignores a signal for which it has no handler
        take(number, end_at_once)
    take(signal.SIGUSR1, lambda *_: None)  # its default is to end the process
    _fill_standard_streams()
    # glibc gives threads heaps of their own, up to eight for each core, and each keeps what it once took (mallopt(3)).
    os.environ.setdefault("MALLOC_ARENA_MAX", "2")


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
        raised = type(error).__name__
        complain(f"cannot import {place.partition(':')[0]!r}: it raised {raised}{_CURES.get(raised, '')}")
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


def _served(
    supervisor: Supervisor, found: Consumer, handlers: list[Handler], page: Page | None
) -> AbstractContextManager[Any]:
    """Return the endpoint of the parent, if there is a port, and have the children keep figures where it finds them."""
    if page is None:
        return nullcontext()
    port, host, with_queues = page
    endpoint, processes = serving.of_children(
        port,
        host,
        connection=found.connection(handlers),
        queues=[handler.queue.keys for handler in handlers],
        folder=lambda: supervisor.folder / METRICS_FOLDER,
        pulses=supervisor.pulses,
        pids=supervisor.pids,
        with_queues=with_queues,
    )
    supervisor.observers.append(processes)
    return endpoint


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
