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
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import typer

from reliq.errors import ConfigurationError
from reliq.text import format_duration, printable

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from rich.console import Console

T = TypeVar("T")

#: Exit code of a command that was used wrongly.
EXIT_USAGE = 2
#: Exit code of a command that named a message that is not there.
EXIT_UNKNOWN_ID = 2
#: Exit code of a command that left work undone.
EXIT_UNFINISHED = 3
#: Exit code of a command that Ctrl-C ended.
EXIT_INTERRUPTED = 130

_NOT_ASCII = re.compile(r"[^\x20-\x7e]")
_COLUMN_GAP = "  "
#: A long text keeps at least this many columns of a table.
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


def print_facts(facts: Iterable[tuple[str, Any]]) -> None:
    """Print names and values, one of each in a line; nothing is cut off."""
    say(*(f"{name:>12}  {value}" for name, value in facts))


def confirm(question: str, *, yes: bool) -> None:
    """Ask a person to agree, unless `yes`; without a terminal it is an error."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise ConfigurationError(f"{question} Nobody is at the terminal to agree: say --yes")
    typer.confirm(printable(question), abort=True, err=True)


def print_found(found: int, done: str, *, json: bool) -> None:
    """Print how many a --dry-run found."""
    print_json({"found": found}) if json else say(f"{found} would be {done}")


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[Any]],
    *,
    title: str = "",
    long: Collection[str] = (),
    stderr: bool = False,
) -> None:
    """
    Print rows under their columns on standard output, or with `stderr` on standard error; a pipe gets them uncut.

    On a terminal that is too narrow the columns `long` are cut; where that is not enough each row is a paragraph.
    """
    from rich.cells import cell_len  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    cells = [["" if cell is None else printable(str(cell)) for cell in row] for row in rows]
    widths = [max(map(cell_len, column)) for column in zip(columns, *cells, strict=True)]
    terminal = console(stderr=stderr)
    excess = 0
    if (sys.stderr if stderr else sys.stdout).isatty():
        excess = sum(widths) + len(_COLUMN_GAP) * (len(widths) - 1) - terminal.width
        cuttable = [at for at, column in enumerate(columns) if column in long]
        for at in sorted(cuttable, key=lambda at: -widths[at]):
            cut = max(0, min(excess, widths[at] - _LEAST_WIDTH))
            widths[at] -= cut
            excess -= cut
    if title:
        say(title, stderr=stderr)
    if excess > 0:
        for row in cells:
            terminal.print(Text(row[0], "bold"), soft_wrap=True)
            say(*_paragraph(columns[1:], row[1:], terminal.width), stderr=stderr)
        return
    terminal.print(Text(_table_row(columns, widths), "bold"), soft_wrap=True)
    say(*(_table_row(row, widths) for row in cells), stderr=stderr)


def _table_row(cells: Sequence[str], widths: Sequence[int]) -> str:
    from rich.cells import cell_len, set_cell_size  # noqa: PLC0415

    fitted = [
        set_cell_size(cell if cell_len(cell) <= width else set_cell_size(cell, width - 1) + "…", width)
        for cell, width in zip(cells, widths, strict=True)
    ]
    return _COLUMN_GAP.join(fitted).rstrip()


def _paragraph(columns: Sequence[str], cells: Sequence[str], width: int) -> Iterator[str]:
    """Yield each cell with its column, as many in a line as fit."""
    from rich.cells import cell_len  # noqa: PLC0415

    line = ""
    for part in (f"{column} {cell}".strip() for column, cell in zip(columns, cells, strict=True) if cell):
        if line and cell_len(line) + len(_COLUMN_GAP) + cell_len(part) > width:
            yield line
            line = ""
        line += _COLUMN_GAP + part
    yield line


def say_age(times: Iterable[float]) -> None:
    """Print the age of the oldest record, written at one of `times` in unix seconds, when it is over a second."""
    age = max((time.time() - at for at in times), default=0.0)
    if age > 1:
        say(f"as of {format_duration(age)} ago")


class ProgressBar(Generic[T]):
    """
    A long command under way.

    Attributes:
        sum: what it has done so far.
    """

    def __init__(self, first: T, advance: Callable[[int], None]) -> None:
        self.sum = first
        self._advance = advance

    def step(self, looked: int, sum_of: T) -> None:
        """Note a step: how many it looked at, and what was done so far."""
        self.sum = sum_of
        self._advance(looked)


@contextmanager
def progress_bar(
    what: str, total: int | None, first: T, summary: Callable[[T], object] = str
) -> Iterator[ProgressBar[T]]:
    """
    Show a bar on stderr when that is a terminal; on Ctrl-C say in one line how far it came, and exit with 130.

    Args:
        what: the work, such as "moving".
        total: how many there are to look at, if that is known.
        first: what has been done before the first step.
        summary: returns what was done, in one line.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn  # noqa: PLC0415

    terminal = console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=terminal, transient=True, disable=not terminal.is_terminal)
    task = bar.add_task(what, total=total)
    run = ProgressBar(first, lambda count: bar.advance(task, count))
    try:
        with bar:
            yield run
    except KeyboardInterrupt:
        complain(f"interrupted: {summary(run.sum)}; run it again to go on")
        raise typer.Exit(EXIT_INTERRUPTED) from None
