"""
The output of the commands: text for a person, JSON for a script, and a question before what cannot be undone.

rich and msgspec are imported when they print something: completion and the options of a command wait for neither.
"""

from __future__ import annotations

import json
import re
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

from reliq.errors import ConfigurationError
from reliq.text import format_duration, printable

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from rich.console import Console

#: Exit code of a command that was used wrongly.
EXIT_USAGE = 2
#: Exit code of a command that named a message that is not there.
EXIT_UNKNOWN_ID = 2
#: Exit code of a command that left work undone.
EXIT_UNFINISHED = 3
#: Exit code of a command that Ctrl-C ended.
EXIT_INTERRUPTED = 130

_NOT_ASCII = re.compile(r"[^\x20-\x7e]")
_PADDING = re.compile(" +$", re.MULTILINE)
#: Spaces between the columns of a table.
_GAP = 2
#: A long text keeps at least this many columns of a terminal.
_LEAST_WIDTH = 10


def console(*, stderr: bool = False) -> Console:
    """Return a console that prints texts as they are: without markup, names of emoji or highlighted numbers."""
    from rich.console import Console  # noqa: PLC0415

    return Console(stderr=stderr, markup=False, emoji=False, highlight=False)


def say(*lines: object, stderr: bool = False) -> None:
    """Print each of `lines` as one line, whatever is in it, at once: also where another program reads them."""
    for line in lines:
        print(printable(str(line)), file=sys.stderr if stderr else sys.stdout, flush=True)


def complain(what: object) -> None:
    """Print what is wrong as one line on the error output."""
    say(f"reliq: {what}", stderr=True)


def print_json(value: Any) -> None:
    """Print dataclasses, lists and dictionaries as JSON, one value in one line of ASCII."""
    import msgspec  # noqa: PLC0415

    try:
        text = msgspec.json.encode(value).decode()
    except UnicodeEncodeError:  # an id of a foreign publisher may be any bytes
        text = json.dumps(msgspec.to_builtins(value))
    sys.stdout.write(_NOT_ASCII.sub(lambda one: json.dumps(one[0])[1:-1], text) + "\n")


def facts(pairs: Iterable[tuple[str, Any]]) -> list[str]:
    """Return names and values, one of each in a line; nothing is cut off."""
    return [f"{name:>12}  {value}" for name, value in pairs]


def confirm(question: str, *, yes: bool) -> None:
    """Ask a person to agree, unless `yes`; without a terminal it is an error."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise ConfigurationError(f"{question} Nobody is at the terminal to agree: say --yes")
    typer.confirm(printable(question), abort=True, err=True)


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[Any]],
    long: Collection[str] = (),
    *,
    title: str = "",
    stderr: bool = False,
) -> None:
    """
    Print rows under their columns on standard output, or with `stderr` on standard error; nothing is cut off.

    A pipe gets each row in one line. On a narrow terminal the cells of the columns `long` take several lines, and the other
    cells only where that is not enough.
    """
    from rich.cells import cell_len  # noqa: PLC0415
    from rich.table import Column, Table  # noqa: PLC0415

    cells = [["" if cell is None else printable(str(cell)) for cell in row] for row in rows]
    widths = [max(map(cell_len, column)) for column in zip(columns, *cells, strict=True)]
    terminal = console(stderr=stderr)
    if not terminal.is_terminal:
        terminal.width = sum(widths) + _GAP * len(widths)
    least = [_LEAST_WIDTH if name in long else width for name, width in zip(columns, widths, strict=True)]
    has_room = sum(least) + _GAP * (len(least) - 1) <= terminal.width
    heads = [Column(name, overflow="fold", no_wrap=has_room and name not in long) for name in columns]
    table = Table(*heads, box=None, pad_edge=False, padding=(0, _GAP, 0, 0))
    for row in cells:
        table.add_row(*row)
    if title:
        say(title, stderr=stderr)
    with terminal.capture() as captured:
        terminal.print(table)
    print(_PADDING.sub("", captured.get()), end="", file=sys.stderr if stderr else sys.stdout, flush=True)


def age_of(times: Iterable[float]) -> list[str]:
    """Return the age of the oldest record, written at one of `times` in unix seconds, when it is over a second."""
    age = max((time.time() - at for at in times), default=0.0)
    return [f"as of {format_duration(age)} ago"] if age > 1 else []


@contextmanager
def show_progress(total: int | None, describe: Callable[[Any], object]) -> Iterator[Callable[[int, Any], None]]:
    """
    Show on stderr, when that is a terminal, how much was looked at; yield a function that a long command calls after each step.

    On Ctrl-C, print the sum of the steps so far and exit with code 130.

    Args:
        total: how many there are to look at, if that is known.
        describe: returns the sum of the steps in one line; it gets None before the first step.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn  # noqa: PLC0415

    done: Any = None
    terminal = console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=terminal, transient=True, disable=not terminal.is_terminal)
    task = bar.add_task("looked at", total=total)

    def step(looked: int, sum_of: Any = None) -> None:
        nonlocal done
        done = sum_of
        bar.advance(task, looked)

    try:
        with bar:
            yield step
    except KeyboardInterrupt:
        complain(f"interrupted: {describe(done)}; run it again to go on")
        raise typer.Exit(EXIT_INTERRUPTED) from None
