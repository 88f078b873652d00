"""The command `reliq worker`: its options, its settings, and --reload, which restarts it when a source file changes."""

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
        str,
        typer.Argument(
            metavar="CONSUMER", help="Consumer to run: module:name, or only the module if it has one Consumer."
        ),
    ] = "",
    processes: Annotated[int, typer.Option(help="How many worker processes to run.")] = 1,
    concurrency: Annotated[int, typer.Option(help="How many handlers each process runs at the same time.")] = 16,
    queue: Annotated[
        list[str] | None,
        typer.Option(
            metavar="QUEUE", help="Run only handlers of this queue; may be given again.", autocompletion=queue_names
        ),
    ] = None,
    burst: Annotated[bool, typer.Option("--burst", help="Stop when no message is due.")] = False,
    burst_delayed: Annotated[
        bool, typer.Option("--burst-delayed", help="Stop when no message is left, including messages due later.")
    ] = False,
    grace: Annotated[float, typer.Option(help="Seconds to let running handlers finish after SIGTERM.")] = 25.0,
    gil_timeout: Annotated[
        float, typer.Option(help="Seconds that a handler may hold the GIL before its process is killed.")
    ] = GIL_TIMEOUT_SECONDS,
    max_jobs: Annotated[int | None, typer.Option(help="Replace each worker process after this many jobs.")] = None,
    max_memory: Annotated[
        str | None, typer.Option(help="Replace a worker process that uses more memory than this, for example 512M.")
    ] = None,
    url: Url = None,
    allow_eviction: Annotated[
        bool, typer.Option("--allow-eviction", help="Start even if Redis may evict keys, which loses messages.")
    ] = False,
    metrics_port: MetricsPort = None,
    metrics_host: MetricsHost = DEFAULT_HOST,
    no_queue_metrics: Annotated[
        bool,
        typer.Option(
            "--no-queue-metrics", help="Leave out the metrics of queues, for example if `reliq exporter` serves them."
        ),
    ] = False,
    log_level: Annotated[str, typer.Option(help="Lowest level to log: debug, info, warning or error.")] = "info",
    log_format: Annotated[
        str, typer.Option(help="Format of log lines: text, json, or auto (text, in colour on a terminal).")
    ] = "auto",
    log_error_text: Annotated[
        bool, typer.Option("--log-error-text", help="Log error texts of handlers, which may contain parts of bodies.")
    ] = False,
    reload: Annotated[
        bool, typer.Option("--reload", help="Restart when a source file in the working folder changes.")
    ] = False,
    show_settings: Annotated[
        bool, typer.Option("--show-settings", help="Print each setting with its value and origin, and exit.")
    ] = False,
) -> Answer:
    """
    Run the handlers of a Consumer until SIGTERM or Ctrl-C.

    Example: reliq worker shop.jobs:consumer --processes 4 --concurrency 16

    You can also set each option in the environment, such as RELIQ_MAX_JOBS for --max-jobs, or in [tool.reliq] of
    pyproject.toml, such as max-jobs. The setting for CONSUMER is RELIQ_CONSUMER or consumer. An option overrides the
    variable, and the variable overrides the file.
    """
    if show_settings:
        return _show_settings(ctx)
    if not consumer:
        raise ConfigurationError("name the Consumer: reliq worker shop.jobs:consumer, or set RELIQ_CONSUMER")
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
        log_format=log_format,
        folder=str(Path.cwd()),
    )
    from reliq.supervisor.worker import serve  # noqa: PLC0415  slow to import, and not needed for help and completion

    page = None if metrics_port is None else (metrics_port, metrics_host, not no_queue_metrics)
    memory = None if max_memory is None else _size(max_memory)
    serve(plan, processes, url=url, max_memory=memory, gil_timeout=gil_timeout, page=page)
    return Answer(None)  # never reached, because `serve` exits the process


def _show_settings(ctx: typer.Context) -> Answer:
    """Return a table of all settings, with the value of each setting and its source. Passwords in URLs are hidden."""
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
    hints = [f"{name} is not a setting; did you mean {meant}?" for name, meant in misspelled(ctx.command).items()]
    value = {name: setting._asdict() for name, setting in rows.items()}
    return Answer(value, [Table(("setting", "value", "from"), texts, ("value", "from")), *hints])


def _run_again_on_changes() -> Answer:
    """
    Run this command without --reload in a child process, and restart it when a source file changes.

    Return after SIGTERM or Ctrl-C.
    """
    try:
        import watchfiles  # noqa: PLC0415  part of the extra `reload`
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
    complain(f"the worker restarts when a .py file or {FILE} in {Path.cwd()} changes")
    while not stop.is_set():
        # Use a new process group, so that the worker does not get Ctrl-C from the terminal in addition to the SIGTERM
        # of this process. A second signal would end the worker without waiting for running handlers.
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
    """Convert a size such as 512M to a number of bytes. Raise ConfigurationError if the size is malformed."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigurationError(f"--max-memory must be a size such as 512M or 2G, not {text!r}")
    return int(match[1]) * _UNITS[match[2].upper()]
