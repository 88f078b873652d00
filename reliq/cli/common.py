"""What the commands share: where Redis is, how an answer is printed, how a person is asked."""

import sys
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from reliq.admin import Admin
from reliq.errors import ConfigurationError
from reliq.keys import Layout

Url = Annotated[str | None, typer.Option(help="The Redis, when RELIQ_URL does not say it.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
Hdt3213 = Annotated[bool, typer.Option("--hdt3213", help="The queue is in the layout of the Go original.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]
QueueName = Annotated[str, typer.Argument(metavar="QUEUE", help="The queue's name.")]


def admin(url: str | None, *, hdt3213: bool = False) -> Admin:
    """Return what looks and acts for the commands."""
    return Admin(url, layout=Layout.hdt3213() if hdt3213 else Layout.RELIQ)


def print_json(value: Any) -> None:
    """Print dataclasses, lists and dictionaries as JSON, one value in one line."""
    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")


def print_table(columns: Sequence[str], rows: Iterable[Sequence[Any]], *, title: str | None = None) -> None:
    """Print rows under their columns; over a pipe nothing is cut off."""
    table = Table(*columns, title=title, title_justify="left", box=None, header_style="bold", pad_edge=False)
    for row in rows:
        table.add_row(*("" if cell is None else str(cell) for cell in row))
    console = Console()
    if not console.is_terminal:
        console = Console(width=10_000)
    console.print(table, markup=False, highlight=False)


def confirm(question: str, *, yes: bool) -> None:
    """Have a person agree, unless `yes`; with nobody at the terminal it is an error."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise ConfigurationError(f"{question} Nobody is at the terminal to agree: say --yes")
    typer.confirm(question, abort=True, err=True)
