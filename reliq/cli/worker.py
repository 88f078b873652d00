"""`reliq config`: the settings of the worker, and where each comes from."""

import logging
import os
import re
import signal
import sys
import sysconfig
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer

from reliq.cli.options import Json, command_of, options_of, queue_names
from reliq.cli.output import EXIT_INTERRUPTED, EXIT_USAGE, complain, print_json, print_table, say
from reliq.cli.settings import ENVIRONMENT, FILE, FOUND, URL, Setting, misspelled, spelled, take_url
from reliq.consumer import STOPS, Consumer, end_at_once, load_consumer, take, traceback_of_module
from reliq.distribution import missing
from reliq.errors import ConfigurationError, ReliqError
from reliq.handlers.handler import Handler
from reliq.logs import FORMATS, LEVELS, configure_logging
from reliq.metrics import serving
from reliq.redis.server import URL_VARIABLE
from reliq.redis.url import check_url
from reliq.settings import WorkerSettings, check_is_one_of, seconds, whole
from reliq.supervisor.child import METRICS_FOLDER, STALL_SECONDS, ChildPlan, find_modules
from reliq.supervisor.main import leave
from reliq.supervisor.supervisor import Supervisor
from reliq.text import count_of
from reliq.worker.health import DEFAULT_HOST


def config(ctx: typer.Context, json: Json = False) -> None:
    """
    Show the settings of `reliq worker`, and where each of them comes from.

    An option of the worker comes before the variable of its name, such as RELIQ_MAX_JOBS, that before the key of its
    name in [tool.reliq] of the nearest pyproject.toml, and that before the default. Passwords are left out. Exit codes:
    0 done, 2 a setting is not allowed.

    Example: reliq config
    """
    rows = in_force(ctx)
    if json:
        print_json({name: setting._asdict() for name, setting in rows.items()})
        return
    print_table(("setting", "value", "from"), [(name, _text(value), origin) for name, (value, origin) in rows.items()])
    for name, meant in misspelled([name.replace("-", "_") for name in rows]).items():
        say(f"{name} is no setting; is {meant} meant?")


def in_force(ctx: typer.Context) -> dict[str, Setting]:
    """Return every setting of the worker by the name of its option, as a worker that is given no option has it."""
    command, found = command_of("worker", worker), ctx.meta[FOUND]
    given = {name: setting.value for name, setting in found.items()}
    values = command.make_context("worker", [], ctx.parent, default_map={"consumer": "", **given}).params
    if values[URL]:
        values[URL] = " ".join(check_url(one).shown for one in values[URL].split())
    return {
        spelled(name): Setting(values[name], found[name].origin if name in found else "default")
        for name in options_of(command)
    }


def _text(value: Any) -> str:
    """Return a value as a person reads it; a list as its items."""
    if value is None or isinstance(value, bool):
        return {None: "", True: "true", False: "false"}[value]
    return " ".join(value) if isinstance(value, list | tuple) else str(value)


try:
    import watchfiles
except ImportError:  # the extra `reload` brings it
    watchfiles = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

#: Imported modules that lie elsewhere are looked at ten times a second.
LOOK_MS = 100
#: Modules that were installed do not change while one develops.
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


class Reloader:
    """
    Notices a change of a Python file or of pyproject.toml in the working folder, or of an imported module elsewhere.

    It watches when it is made: nothing that changes while modules are imported is missed.

    Raises:
        ConfigurationError: watchfiles is not installed.
    """

    def __init__(self) -> None:
        if watchfiles is None:
            raise ConfigurationError(missing("--reload", "watchfiles", "reload"))
        logging.getLogger("watchfiles").setLevel(logging.WARNING)  # it counts the changes that are named here
        self._began = time.time()
        self._watch = watchfiles.watch(
            Path.cwd(),
            watch_filter=watchfiles.PythonFilter(extra_extensions=(FILE,)),
            rust_timeout=LOOK_MS,
            yield_on_timeout=True,
            raise_interrupt=False,
        )
        next(self._watch)
        self._changed, self._watches = threading.Event(), False
        self._stop: Callable[[], bool] = lambda: True

    def watch(self, stop: Callable[[], bool]) -> None:
        """Have `stop` called, once, when a source has changed since this process began; it says whether it stops it."""
        self._stop, self._watches = stop, True
        threading.Thread(target=self._notice, name="reliq-reload", daemon=True).start()

    def exit_code(self, code: int) -> int:
        """Return `code` when the worker was to end; begin anew when a source has changed, and if it failed wait for that."""
        if code not in (0, EXIT_INTERRUPTED) and not self._changed.is_set():
            for number in STOPS:
                take(number, end_at_once)
            complain("the worker has ended; it begins anew when a source changes")
            if not self._watches:
                self.watch(lambda: True)
            self._changed.wait()
        if self._changed.is_set():
            sys.stdout.flush()
            os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], ENVIRONMENT)  # noqa: S606  this command
        return code

    def _notice(self) -> None:
        for changes in self._watch:
            names = {path for _, path in changes} | _changed_since(self._began)
            if names and self._stop():
                logger.info("%s changed: restarting", ", ".join(sorted(map(os.path.relpath, names))))
                self._changed.set()
            if names:
                return


def reloaded(work: Callable[[Reloader], int]) -> int:
    """Run a worker until it is to end, and begin it anew after each change of a source; return its exit code."""
    reloader = Reloader()
    return reloader.exit_code(work(reloader))


def _changed_since(moment: float) -> set[str]:
    """Return the files of imported modules that were written after a moment in unix seconds, installed ones aside."""
    changed = set()
    for path in {getattr(module, "__file__", None) or "" for module in list(sys.modules.values())}:
        with suppress(OSError):
            if path and not path.startswith(_INSTALLED) and Path(path).stat().st_mtime > moment:
                changed.add(path)
    return changed


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
    url: Annotated[
        str | None, typer.Option(help="The Redis, when RELIQ_URL does not say it.", callback=take_url)
    ] = None,
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
        bool,
        typer.Option(
            "--log-error-text",
            help="Log the texts of exceptions and the reasons of answers; they may hold a piece of a body.",
        ),
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
        folder=str(Path.cwd()),
    )
    # The module is imported here: who asks for help or the name of an option need not wait for all that runs.
    serve = import_module("reliq.cli.worker").serve
    page = None if metrics_port is None else (metrics_port, metrics_host, not no_queue_metrics)
    serve(plan, processes, url=url, max_memory=limit, stall=stall, page=page, reload=reload)


def _check_options(log_level: str, log_format: str, processes: int, stall: float) -> None:
    """Raise ConfigurationError for a value that its option does not take."""
    check_is_one_of("--log-level", log_level, LEVELS)
    check_is_one_of("--log-format", log_format, FORMATS)
    whole("--processes", processes, least=1, most=1000)
    seconds("--stall", stall, least=1.0)


def size(text: str) -> int:
    """Return a size such as 512M in bytes; raise ConfigurationError for another form."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigurationError(f"--max-memory must be a size such as 512M or 2G, not {text!r}")
    return int(match[1]) * _UNITS[match[2].upper()]
