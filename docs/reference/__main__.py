"""
Write the pages of this folder that commands tell themselves: `python docs/reference`, after a change of a command.

A test compares. The API needs no such step: its pages are filled from docstrings when the site is built.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from reliq.cli.app import SUMMARIES, WORKER, Commands
from reliq.cli.settings import spelled, variable

HERE = Path(__file__).parent

CLI = """# Commands

After this page you can look up every command and every option. `--help` behind a command says the same in a terminal;
[Operations](../operations.md) says which to take when. An option that is not given has the [setting](settings.md) of its name
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

`reliq config` shows the settings in force and where each comes from; it also names variables that look misspelled.
Passwords are left out. Queues and handlers are set in code: [Publishing](../publishing.md#options),
[Handlers](../handlers.md#options), [Keys](../keys.md#limits).

"""
OTHERS = """
## Other variables

| variable | who reads it | what it is |
| --- | --- | --- |
| `RELIQ_URL` | every command, and every `Queue`, `Consumer` and `Admin` without `url=` | the Redis; commands take `url` of `[tool.reliq]` where it is not set |
| `RELIQ_WEB_TOKEN` | `reliq web` | the token that opens the [pages](../web.md) to other browsers and to programs |
| `RELIQ_DATABASE` | `reliq relay`, `reliq outbox` | the database of [`publish_in`](../transactions.md) |

In `pyproject.toml`:

```toml
[tool.reliq]
url = "redis://127.0.0.1:6379/0"
concurrency = 32
queue = ["orders", "mails"]
```
"""


def _loaded(name: str) -> Iterator[tuple[str, Any]]:
    """Yield a command, or those of its group, each with how it is called."""
    command = Commands.load(name)
    for part, one in getattr(command, "commands", {"": command}).items():
        yield f"reliq {name} {part}".rstrip(), one


def _is_argument(one: Any) -> bool:
    return bool(one.param_type_name == "argument")


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _spelling(one: Any) -> str:
    """Return an option with what follows it, or the name of an argument."""
    if _is_argument(one):
        name = (one.metavar or one.name.upper()) + ("…" if one.nargs == -1 else "")
        return name if one.required else f"[{name}]"
    value = one.metavar or ("N" if isinstance(one.default, int | float) else one.name.upper())
    names = ", ".join(one.opts + one.secondary_opts)
    return names if one.is_flag else f"{names}{value}" if value.startswith("[") else f"{names} {value}"


def _default(one: Any) -> str:
    """Return the default of an option as one would type it; nothing where it is not to be seen in the help."""
    value = one.default
    if _is_argument(one) or one.is_flag or not one.show_default or value in (None, "", (), []) or callable(value):
        return ""
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def _by_default(one: Any) -> str:
    return f" Default: {_default(one)}." if _default(one) else ""


def _told(text: str) -> str:
    """Return a help text as Markdown: its examples are code."""
    told = re.sub(r"^Example: (.+)$", r"Example: `\1`", text.strip(), flags=re.MULTILINE)
    return told.replace("\\[", "[")


def _command(called: str, command: Any) -> str:
    """Return the section of one command."""
    shown = [one for one in command.params if not one.hidden]
    usage = " ".join([called, *(_spelling(one) for one in shown if _is_argument(one))])
    lines = [f"### {called}", "", f"`{usage}`", "", _told(command.help or ""), ""]
    if shown:
        lines += ["| option | what it is |", "| --- | --- |"]
        lines += [f"| `{_cell(_spelling(one))}` | {_cell(one.help or '')}{_by_default(one)} |" for one in shown]
        lines.append("")
    return "\n".join(lines)


def cli() -> str:
    """Return the page of commands."""
    parts = [CLI.rstrip(), ""]
    for panel, names in SUMMARIES.items():
        parts += [f"## {panel}", ""]
        parts += [_command(called, command) for name in names for called, command in _loaded(name)]
    return "\n".join(parts).rstrip() + "\n"


def settings() -> str:
    """Return the page of settings."""
    rows = [
        f"| `{spelled(one.name)}` | `{variable(one.name)}` | {_default(one)} | {_cell(one.help)} |"
        for one in Commands.load(WORKER).params
        if not one.hidden
    ]
    head = ["| in `pyproject.toml` | in the environment | default | what it is |", "| --- | --- | --- | --- |"]
    return SETTINGS + "\n".join(["## Settings of the worker", "", *head, *rows, ""]) + OTHERS


PAGES = {"cli.md": cli, "settings.md": settings}

if __name__ == "__main__":
    for name, made in PAGES.items():
        (HERE / name).write_text(made(), "utf-8")
