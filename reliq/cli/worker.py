"""`reliq worker`, and `reliq config`: the settings of the worker, and where each comes from."""

import re
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from reliq.cli.lazy import command_of, options_of
from reliq.cli.options import Json, queue_names
from reliq.cli.output import print_json, print_table, say
from reliq.cli.settings import FOUND, URL, Setting, misspelled, spelled, take_url
from reliq.errors import ConfigurationError
from reliq.logs import FORMATS, LEVELS
from reliq.settings import WorkerSettings, check_int, check_is_one_of, seconds
from reliq.supervisor.plan import STALL_SECONDS, ChildPlan
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
    command = command_of("worker", worker)
    settings = ctx.meta[FOUND]
    defaults = {"consumer": "", **{name: setting.value for name, setting in settings.items()}}
    values = command.make_context("worker", [], ctx.parent, default_map=defaults).params
    if values[URL]:
        from reliq.redis.url import check_url  # noqa: PLC0415  completion does not wait for it

        values[URL] = " ".join(check_url(url).shown for url in values[URL].split())
    return {
        spelled(name): Setting(values[name], settings[name].origin if name in settings else "default")
        for name in options_of(command)
    }


def _text(value: Any) -> str:
    """Return a value as a person reads it; a list as its items."""
    if value is None or isinstance(value, bool):
        return {None: "", True: "true", False: "false"}[value]
    return " ".join(value) if isinstance(value, list | tuple) else str(value)


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
    limit = None if max_memory is None else size(max_memory)
    plan = ChildPlan(
        consumer=consumer,
        queues=tuple(queue or ()),
        settings=WorkerSettings(
            concurrency=concurrency,
            grace=grace,
            max_jobs=max_jobs,
            burst=burst,
            allow_eviction=allow_eviction,
            log_error_text=log_error_text,
        ),
        log_level=log_level,
        metrics=metrics_port is not None,
        log_format=log_format,
        folder=str(Path.cwd()),
    )
    # The module is imported here: who asks for help or the name of an option need not wait for all that runs.
    serve = import_module("reliq.supervisor.worker").serve
    page = None if metrics_port is None else (metrics_port, metrics_host, not no_queue_metrics)
    serve(plan, processes, url=url, max_memory=limit, stall=stall, page=page, reload=reload)


def _check_options(log_level: str, log_format: str, processes: int, stall: float) -> None:
    """Raise ConfigurationError for a value that its option does not take."""
    check_is_one_of("--log-level", log_level, LEVELS)
    check_is_one_of("--log-format", log_format, FORMATS)
    check_int("--processes", processes, least=1, most=1000)
    seconds("--stall", stall, least=1.0)


def size(text: str) -> int:
    """Return a size such as 512M in bytes; raise ConfigurationError for another form."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigurationError(f"--max-memory must be a size such as 512M or 2G, not {text!r}")
    return int(match[1]) * _UNITS[match[2].upper()]
