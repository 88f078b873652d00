"""Tables on a terminal of any width: the columns that tell rows apart are never cut off."""

import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import typer
from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from reliq.cli.output import EXIT_INTERRUPTED, complain, console, say
from reliq.text import format_duration, printable

GAP = "  "
#: A long text keeps at least this many columns.
LEAST_WIDTH = 10


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
    cells = [["" if cell is None else printable(str(cell)) for cell in row] for row in rows]
    full = [max(map(cell_len, column)) for column in zip(columns, *cells, strict=True)]
    terminal = console(stderr=stderr)
    width = terminal.width if (sys.stderr if stderr else sys.stdout).isatty() else None
    widths = full if width is None else _fitted(full, [name in long for name in columns], width)
    if title:
        say(title, stderr=stderr)
    if widths is None:
        for row in cells:
            _head(row[0], terminal)
            say(*_paragraph(columns[1:], row[1:], width or 0), stderr=stderr)
        return
    _head(_line(columns, widths), terminal)
    say(*(_line(row, widths) for row in cells), stderr=stderr)


def _fitted(full: list[int], is_long: list[bool], width: int) -> list[int] | None:
    """Return how wide each column may be, None when they do not fit."""
    widths = list(full)
    over = sum(widths) + len(GAP) * (len(widths) - 1) - width
    for at in sorted((at for at, long in enumerate(is_long) if long), key=lambda at: -full[at]):
        cut = max(0, min(over, widths[at] - LEAST_WIDTH))
        widths[at] -= cut
        over -= cut
    return widths if over <= 0 else None


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return GAP.join(_cell(cell, width) for cell, width in zip(cells, widths, strict=True)).rstrip()


def _cell(text: str, width: int) -> str:
    cut = text if cell_len(text) <= width else set_cell_size(text, width - 1) + "…"
    return set_cell_size(cut, width)


def _paragraph(columns: Sequence[str], cells: Sequence[str], width: int) -> Iterator[str]:
    """Yield each cell with its column, as many in a line as fit."""
    line = ""
    for part in (f"{column} {cell}".strip() for column, cell in zip(columns, cells, strict=True) if cell):
        if line and cell_len(line) + len(GAP) + cell_len(part) > width:
            yield line
            line = ""
        line += GAP + part
    yield line


def _head(text: str, terminal: Console) -> None:
    terminal.print(Text(text, "bold"), soft_wrap=True)


def say_age(seen: Iterable[float]) -> None:
    """Print the age of the oldest record, written at one of `seen` in unix seconds, when it is over a second."""
    age = max((time.time() - one for one in seen), default=0.0)
    if age > 1:
        say(f"as of {format_duration(age)} ago")


T = TypeVar("T")


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
    terminal = console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    bar = Progress(*columns, console=terminal, transient=True, disable=not terminal.is_terminal)
    task = bar.add_task(what, total=total)
    run = ProgressBar(first, lambda count: bar.advance(task, count))
    try:
        with bar:
            yield run
    except KeyboardInterrupt:
        complain(f"interrupted: {summary(run.sum)}; run it again to go on")
        raise typer.Exit(EXIT_INTERRUPTED) from None
