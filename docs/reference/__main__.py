"""
Write the reference of commands and settings from the commands: `python docs/reference`, after a change of a command.

A test compares. The API needs no such step: its pages are filled from docstrings when the site is built.
"""

import re
from pathlib import Path
from typing import Any

from reliq.cli.app import SUMMARIES, WORKER, Commands
from reliq.cli.lazy import SHARED, is_shared
from reliq.cli.settings import settings_of, spelled, variable

HERE = Path(__file__).parent

CLI = """# Commands

After this page you can look up every command and every option. `--help` behind a command says the same in a terminal;
[Operations](../production/operations.md) says which to take when. An option that is not given has the [setting](settings.md) of its name
where the command is `reliq worker`, and `RELIQ_URL` names the Redis of all.

Exit codes: 0 done, 1 failed, 2 wrong usage, 3 nothing was published, 78 the set-up cannot work, 130 interrupted.

"""
SETTINGS = """# Settings

After this page you can look up every setting of `reliq worker`, and the variables that other commands and programs read. A
setting is taken from the first of these places that has it:

1. the command's option;
2. the environment's variable; an empty one counts as none, and a list has spaces between its items;
3. `[tool.reliq]` of the nearest `pyproject.toml` that has such a table, from the working folder up to the root of the
   repository; a name there that is no setting is refused;
4. the default.

`reliq worker --show-settings` shows the settings in force and where each comes from; it also names variables that look misspelled.
Passwords are left out. Queues and handlers are set in code: [Publishing](../guides/publishing.md#options),
[Handlers](../guides/handlers.md#options), [Keys](../guides/ordering.md#rate-limits).

"""
OTHERS = """
## Other variables

| variable | who reads it | what it is |
| --- | --- | --- |
| `RELIQ_URL` | every command, and every `Queue`, `Consumer` and `Admin` without `url=` | the Redis; commands take `url` of `[tool.reliq]` where it is not set |
| `RELIQ_WEB_TOKEN` | `reliq web` | the token that opens the [pages](../production/web.md) to other browsers and to programs |
| `RELIQ_DATABASE` | `reliq relay`, `reliq outbox` | the database of [`publish_in`](../guides/outbox.md) |

In `pyproject.toml`:

```toml
[tool.reliq]
url = "redis://127.0.0.1:6379/0"
concurrency = 32
queue = ["orders", "mails"]
```
"""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _spelling(option: Any) -> str:
    """Return an option with its value, or the name of an argument."""
    if option.param_type_name == "argument":
        name = (option.metavar or option.name.upper()) + ("…" if option.nargs == -1 else "")
        return name if option.required else f"[{name}]"
    value = option.metavar or ("N" if isinstance(option.default, int | float) else option.name.upper())
    names = ", ".join(option.opts + option.secondary_opts)
    return names if option.is_flag else f"{names} {value}"


def _default(option: Any) -> str:
    """Return the default of an option as a user types it; nothing where the help does not show it."""
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
        rows += ["| option | what it is |", "| --- | --- |"]
        for option in options:
            default = f" Default: {_default(option)}." if _default(option) else ""
            rows.append(f"| `{_cell(_spelling(option))}` | {_cell(option.help or '')}{default} |")
        rows.append("")
    if shared:
        rows += [f"Options of most commands: {', '.join(shared)}.", ""]
    return "\n".join(rows)


def cli() -> str:
    """Return the page of commands."""
    parts = [CLI.rstrip(), "", "## Options of most commands", "", "| option | what it is |", "| --- | --- |"]
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
        f"| `{spelled(option.name)}` | `{variable(option.name)}` | {_default(option)} | {_cell(option.help)} |"
        for option in worker.params
        if option.name in settings_of(worker)
    ]
    head = ["| in `pyproject.toml` | in the environment | default | what it is |", "| --- | --- | --- | --- |"]
    return SETTINGS + "\n".join(["## Settings of the worker", "", *head, *rows, ""]) + OTHERS


PAGES = {"cli.md": cli, "settings.md": settings}

if __name__ == "__main__":
    for name, make in PAGES.items():
        (HERE / name).write_text(make(), "utf-8")
