"""`reliq worker`: its options, which are settings too, and its restart when a source changes."""

import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Annotated

import typer

from reliq.cli.frame import Answer, Table, command
from reliq.cli.options import MetricsHost, MetricsPort, Url, queue_names
from reliq.cli.output import complain
from reliq.cli.settings import ENVIRONMENT, FILE, FOUND, Setting, misspelled, settings_of, spelled, variable
from reliq.distribution import missing
from reliq.errors import ConfigurationError
from reliq.logs import FORMATS, LEVELS
from reliq.settings import WorkerSettings, check_int, check_is_one_of, seconds
from reliq.supervisor.plan import GIL_TIMEOUT_SECONDS, ChildPlan
from reliq.worker.health import DEFAULT_HOST

_SIZE = re.compile(r"(\d+)\s*([KMG]?)i?B?", re.IGNORECASE)
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@command
def worker(
    ctx: typer.Context,
    consumer: Annotated[
        str, typer.Argument(metavar="CONSUMER", help="Where the Consumer is: module:name, or module.")
    ] = "",
    processes: Annotated[int, typer.Option(help="Processes to keep running.")] = 1,
    concurrency: Annotated[int, typer.Option(help="Handlers that run at once in a process.")] = 16,
    queue: Annotated[
        list[str] | None,
        typer.Option(metavar="QUEUE", help="Only this queue; may be given again.", autocompletion=queue_names),
    ] = None,
    burst: Annotated[bool, typer.Option("--burst", help="Stop when no message is due.")] = False,
    burst_delayed: Annotated[
        bool, typer.Option("--burst-delayed", help="Stop when no message is left, also none that is due later.")
    ] = False,
    grace: Annotated[float, typer.Option(help="Seconds to let running handlers finish after SIGTERM.")] = 25.0,
    gil_timeout: Annotated[
        float, typer.Option(help="Seconds a handler may hold the interpreter while other handlers run.")
    ] = GIL_TIMEOUT_SECONDS,
    max_jobs: Annotated[int | None, typer.Option(help="Replace a process after this many jobs.")] = None,
    max_memory: Annotated[str | None, typer.Option(help="Replace a process that grows over this, like 512M.")] = None,
    url: Url = None,
    allow_eviction: Annotated[
        bool, typer.Option("--allow-eviction", help="Start if Redis may evict messages.")
    ] = False,
    metrics_port: MetricsPort = None,
    metrics_host: MetricsHost = DEFAULT_HOST,
    no_queue_metrics: Annotated[
        bool, typer.Option("--no-queue-metrics", help="Leave the figures of queues to an exporter.")
    ] = False,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
    log_format: Annotated[str, typer.Option(help="text, json, or auto: colours on a terminal.")] = "auto",
    log_error_text: Annotated[
        bool, typer.Option("--log-error-text", help="Log error texts, which may hold a piece of a body.")
    ] = False,
    reload: Annotated[bool, typer.Option("--reload", help="Restart when a source file changes here.")] = False,
    show_settings: Annotated[
        bool, typer.Option("--show-settings", help="Print each setting and its origin; run nothing.")
    ] = False,
) -> Answer:
    """
    Run the handlers of a Consumer until SIGTERM or Ctrl-C.

    Example: reliq worker shop.jobs:consumer --processes 4 --concurrency 16

    Each option is a setting, too: --max-jobs is RELIQ_MAX_JOBS in the environment, and max-jobs in [tool.reliq] of
    pyproject.toml, where CONSUMER is consumer. An option comes before the variable, the variable before the file.
    """
    if show_settings:
        return _show_settings(ctx)
    if not consumer:
        raise ConfigurationError("name the Consumer: reliq worker shop.jobs:consumer, or set it as a setting")
    check_is_one_of("--log-level", log_level, LEVELS)
    check_is_one_of("--log-format", log_format, FORMATS)
    check_int("--processes", processes, least=1, most=1000)
    seconds("--gil-timeout", gil_timeout, least=1.0)
    if reload:
        return _run_again_on_changes()
    plan = ChildPlan(
        consumer=consumer,
        queues=tuple(queue or ()),
        settings=WorkerSettings(
            concurrency=concurrency,
            grace=grace,
            max_jobs=max_jobs,
            burst="delayed" if burst_delayed else burst,
            allow_eviction=allow_eviction,
            log_error_text=log_error_text,
        ),
        log_level=log_level,
        metrics=metrics_port is not None,
        log_format=log_format,
        folder=str(Path.cwd()),
    )
    from reliq.supervisor.worker import serve  # noqa: PLC0415  help and completion do not wait for it

    page = None if metrics_port is None else (metrics_port, metrics_host, not no_queue_metrics)
    serve(
        plan,
        processes,
        url=url,
        max_memory=None if max_memory is None else _size(max_memory),
        gil_timeout=gil_timeout,
        page=page,
    )
    return Answer(None)  # `serve` has left the process


def _show_settings(ctx: typer.Context) -> Answer:
    """Return each setting with its value and origin, without passwords."""
    found = ctx.meta[FOUND]
    rows = {}
    for name in settings_of(ctx.command):
        setting = found.get(name, Setting(ctx.params[name], "default"))
        is_given = getattr(ctx.get_parameter_source(name), "name", "") == "COMMANDLINE"
        value = ctx.params[name] if name != "url" or is_given else setting.value
        if name == "url" and value:
            from reliq.redis.url import check_url  # noqa: PLC0415  completion does not wait for it

            value = " ".join(check_url(url).shown for url in value.split())
        rows[spelled(name)] = Setting(value, "command line" if is_given else setting.origin)
    texts = [
        (name, " ".join(value) if isinstance(value, list | tuple) else value, origin)
        for name, (value, origin) in rows.items()
    ]
    hints = [f"{name} is no setting; is {meant} meant?" for name, meant in misspelled(ctx.command).items()]
    value = {name: setting._asdict() for name, setting in rows.items()}
    return Answer(value, [Table(("setting", "value", "from"), texts, ("value", "from")), *hints])


def _run_again_on_changes() -> Answer:
    """Run this command without --reload until a signal; restart it when a source of the working folder changes."""
    try:
        import watchfiles  # noqa: PLC0415  the extra `reload` brings it
    except ImportError:
        raise ConfigurationError(missing("--reload", "watchfiles", "reload")) from None
    from reliq.consumer import STOPS, handle_signal  # noqa: PLC0415  completion does not wait for it

    again = [sys.executable, *(word for word in sys.orig_argv[1:] if word != "--reload")]
    stop = threading.Event()

    def end(*_: object) -> None:
        stop.set()
        process.terminate()

    sources = watchfiles.PythonFilter(extra_extensions=(FILE,))
    changes = watchfiles.watch(Path.cwd(), watch_filter=sources, stop_event=stop, raise_interrupt=False)
    complain(f"the worker begins anew when a .py file or {FILE} in {Path.cwd()} changes")
    while not stop.is_set():
        # Ctrl-C reaches this process alone: a worker that gets two signals does not wait for its handlers.
        environment = {**ENVIRONMENT, variable("reload"): "0"}
        with subprocess.Popen(again, env=environment, process_group=0) as process:  # noqa: S603  this command
            for number in STOPS:
                handle_signal(number, end)
            changed = {os.path.relpath(path) for _, path in next(changes, ())}
            if changed and not stop.is_set():
                complain(f"{', '.join(sorted(changed))} changed: restarting the worker")
                process.terminate()
    return Answer(None, ())


def _size(text: str) -> int:
    """Return a size such as 512M in bytes; raise ConfigurationError for another form."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigurationError(f"--max-memory must be a size such as 512M or 2G, not {text!r}")
    return int(match[1]) * _UNITS[match[2].upper()]
