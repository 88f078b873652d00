"""
Generate cli.md, metrics.md and settings.md; run `python docs/reference` after each change of a command or metric.

A test fails if the files are out of date. The API pages do not need this step, because the site build fills them from
docstrings.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_args

from reliq.cli.app import SUMMARIES, WORKER, Commands
from reliq.cli.lazy import SHARED, is_shared
from reliq.cli.settings import settings_of, spelled, variable
from reliq.events import Handled
from reliq.metrics.names import ALL, CAUSES, KEY_LENGTH, STATES, WAITING, Spec
from reliq.metrics.queues import REASONS

HERE = Path(__file__).parent


def _words(values: Iterable[str]) -> str:
    """Return values as code."""
    return ", ".join(f"`{value}`" for value in values)


CLI = """# Commands

All commands and options. `--help` after a command prints the same text in your terminal.
[Operations](../production/operations.md) shows which command to use for which task. `RELIQ_URL` sets the Redis of all
commands. Options of `reliq worker` also have [settings](settings.md).

| exit code | meaning |
| --- | --- |
| 0 | done |
| 1 | failed |
| 2 | wrong usage |
| 3 | nothing was published, or work is left |
| 78 | the configuration cannot work |
| 130 | interrupted |

"""
SETTINGS = """# Settings

All settings of `reliq worker`, and the environment variables of other commands and programs. reliq takes each setting
from the first of these places that has it:

1. the option of the command;
2. the environment variable. An empty variable counts as not set. Separate the items of a list with spaces;
3. `[tool.reliq]` in the nearest `pyproject.toml` with such a table, from the working folder up to the root of the
   repository. An unknown name is an error;
4. the default.

`reliq worker --show-settings` prints the settings in force, without passwords, and where each comes from. It also
lists variables that look misspelled. You set options of queues and handlers in code: see
[Publishing](../guides/publishing.md#options), [Handlers](../guides/handlers.md#options) and [Rate limits](../guides/ordering.md#rate-limits).

"""
OTHERS = """
## Other environment variables

| variable | used by | value |
| --- | --- | --- |
| `RELIQ_URL` | all commands; `Queue`, `Consumer`, `Admin` | URL of Redis, unless `--url` or `url=` is given. Commands also read `url` of `[tool.reliq]` |
| `RELIQ_WEB_TOKEN` | `reliq web` | token with which browsers and programs log in to the [web UI](../production/web.md) |
| `RELIQ_DATABASE` | `reliq relay`, `reliq outbox` | URL of the database of [`publish_in`](../guides/outbox.md) |

## Settings in pyproject.toml

```toml
[tool.reliq]
url = "redis://127.0.0.1:6379/0"
concurrency = 32
queue = ["orders", "mails"]
```
"""


METRICS = """# Metrics

All Prometheus metrics of reliq. You need them when you write your own queries, dashboards or alerts. [Metrics,
dashboard and alerts](../production/monitoring.md) shows you how to scrape them, and has alerts that you can load.

:::{warning}
All workers and exporters of one Redis report the same values for queues, message keys, periodic jobs and Redis. Use
`max` over them in your queries, never `sum`.
:::

- Redis keeps the counters of queues, so they continue when you replace every process.
- A worker adds up the metrics of its handlers and processes. The counts of a dead process remain.
- You get the metrics of the [outbox](../guides/outbox.md) from the process that runs its relay.
- In a Redis Cluster, each primary has its own series of the Redis metrics, with its address as label `server`.
- Your application serves the metrics of [publishers](../production/monitoring.md#metrics-of-a-publisher).

"""
LABELS = {
    "queue": "name of the queue, with all its shards",
    "state": f"{_words(STATES)}; in a queue with message keys also `{WAITING}`",
    "cause": f"why a message is redelivered: {_words(CAUSES)} (the handler failed, or the lease expired)",
    "task": "name of the [task](../guides/tasks.md); `unknown` if the worker does not know it, empty without tasks",
    "outcome": (
        f"of a handler call: {_words(get_args(Handled.__annotations__['outcome']))}; of a publish: "
        "`published`, `duplicate`, `tombstoned`, `refused`, `unknown`"
    ),
    "reason": f"why a worker process was replaced: {_words(REASONS)}; kind of a Redis error: `away`, `refused`",
    "key": f"a [message key](../guides/ordering.md), cut to {KEY_LENGTH} characters",
    "entry": "name of the [periodic job](../guides/periodic.md)",
    "server": "`HOST:PORT`; the path of a Unix socket, or the name of the primary in Sentinel",
    "process": "`supervisor`, or the number of the worker process",
}
#: Heading of a table -> the source and the name prefixes of its metrics. A metric is in the first table that matches.
TABLES = {
    "Message keys": ("queue", "reliq_key", "reliq_limited"),
    "Periodic jobs": ("queue", "reliq_cron"),
    "Queues": ("queue", ""),
    "Handlers": ("process", "reliq_"),
    "Redis": ("", "reliq_redis", "reliq_queue"),
    "Publishers": ("", "reliq_publish"),
    "Worker processes": ("", ""),
}


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _setting(text: str) -> str:
    """Return the help of an option as the meaning of a setting, which can be the variable RELIQ_URL itself."""
    return _cell(text.replace(" instead of RELIQ_URL", ""))


def _spelling(option: Any) -> str:
    """Return an option with its value, or the name of an argument."""
    if option.param_type_name == "argument":
        name = (option.metavar or option.name.upper()) + ("…" if option.nargs == -1 else "")
        return name if option.required else f"[{name}]"
    value = option.metavar or ("N" if isinstance(option.default, int | float) else option.name.upper())
    names = ", ".join(option.opts + option.secondary_opts)
    return names if option.is_flag else f"{names} {value}"


def _default(option: Any) -> str:
    """Return the default of an option as a user types it; empty if the help shows no default."""
    value = option.default
    is_shown = option.param_type_name != "argument" and not option.is_flag and option.show_default
    if not is_shown or value in (None, "", (), []) or callable(value):
        return ""
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def _format_command(usage: str, command: Any) -> str:
    """Return the section of one command; examples of its help text are code."""
    options = [option for option in command.params if not option.hidden]
    shared = [f"`{SHARED[option.name][0]}`" for option in options if is_shared(option)]
    options = [option for option in options if not is_shared(option)]
    arguments = [_spelling(option) for option in options if option.param_type_name == "argument"]
    text = re.sub(r"^Example: (.+)$", r"Example: `\1`", (command.help or "").strip(), flags=re.MULTILINE)
    rows = [f"### {usage}", "", f"`{' '.join([usage, *arguments])}`", "", text.replace("\\[", "["), ""]
    if options:
        rows += ["| option | description |", "| --- | --- |"]
        for option in options:
            default = f" Default: {_default(option)}." if _default(option) else ""
            rows.append(f"| `{_cell(_spelling(option))}` | {_cell(option.help or '')}{default} |")
        rows.append("")
    if shared:
        rows += [f"Options of most commands: {', '.join(shared)}.", ""]
    return "\n".join(rows)


def cli() -> str:
    """Return the page of commands."""
    parts = [CLI.rstrip(), "", "## Options of most commands", "", "| option | description |", "| --- | --- |"]
    parts += [*(f"| `{option}` | {text} |" for option, text in SHARED.values()), ""]
    for panel, names in SUMMARIES.items():
        parts += [f"## {panel}", ""]
        for name in names:
            command = Commands.load(name)
            for part, subcommand in getattr(command, "commands", {"": command}).items():
                parts.append(_format_command(f"reliq {name} {part}".rstrip(), subcommand))
    return "\n".join(parts).rstrip() + "\n"


def settings() -> str:
    """Return the page of settings."""
    worker = Commands.load(WORKER)
    rows = [
        f"| `{spelled(option.name)}` | `{variable(option.name)}` | {_default(option)} | {_setting(option.help)} |"
        for option in worker.params
        if option.name in settings_of(worker)
    ]
    head = ["| in `pyproject.toml` | in the environment | default | description |", "| --- | --- | --- | --- |"]
    return SETTINGS + "\n".join(["## Settings of the worker", "", *head, *rows, ""]) + OTHERS


def _table_of(spec: Spec) -> str:
    """Return the heading of the table that contains this metric."""
    return next(
        head
        for head, (source, *starts) in TABLES.items()
        if source == spec.source and spec.name.startswith(tuple(starts))
    )


def _metric(spec: Spec) -> str:
    """Return the row of a metric; the row of a histogram contains the bounds of its buckets."""
    bounds = f" Buckets from {spec.buckets[0]:g} s to {spec.buckets[-1]:g} s." if spec.buckets else ""
    return f"| `{spec.name}` | {spec.kind} | {_words(spec.labels)} | {_cell(spec.help)}{bounds} |"


def metrics() -> str:
    """Return the page of metrics."""
    labels = [f"| `{label}` | {values} |" for label, values in LABELS.items()]
    parts = [METRICS + "\n".join(["| label | values |", "| --- | --- |", *labels, ""])]
    for head in ("Queues", *(head for head in TABLES if head != "Queues")):
        rows = [_metric(spec) for spec in ALL.values() if _table_of(spec) == head]
        parts.append(
            "\n".join(
                [f"## {head}", "", "| metric | type | labels | meaning |", "| --- | --- | --- | --- |", *rows, ""]
            )
        )
    return "\n".join(parts)


PAGES = {"cli.md": cli, "metrics.md": metrics, "settings.md": settings}

if __name__ == "__main__":
    for name, make in PAGES.items():
        (HERE / name).write_text(make(), "utf-8")
