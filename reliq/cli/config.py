"""`reliq config`: the settings of the worker, and where each comes from."""

from typing import Any

import typer

from reliq.cli.configuration import FOUND, URL, Setting, misspelled, spelled
from reliq.cli.lazy import command_of, options_of
from reliq.cli.options import Json
from reliq.cli.output import print_json, say
from reliq.cli.tables import print_table
from reliq.cli.worker import worker
from reliq.transport.url import check_url


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
