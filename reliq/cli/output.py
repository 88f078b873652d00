"""
The output of the commands: text for a person, JSON for a script, and a question before what cannot be undone.

rich and msgspec are imported when they print something: completion and the options of a command wait for neither.
"""

from __future__ import annotations

import json
import re
import signal
import sys
import time
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import typer

from reliq.errors import ConfigurationError
from reliq.text import format_duration, printable

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from rich.console import Console

#: Exit code of a command that was used wrongly, or that names a message or a queue that does not exist.
EXIT_USAGE = 2
#: Exit code of a command that published nothing, or left work undone.
EXIT_UNFINISHED = 3
#: Exit code of a command that Ctrl-C ended.
EXIT_INTERRUPTED = 130

_NOT_ASCII = re.compile(r"[^\x20-\x7e]")
#: Spaces between the columns of a table.
_GAP = 2
#: On a narrow terminal a long column of a table keeps at least this width, until every column is folded to the other one.
_LEAST_LONG, _LEAST_WIDTH = 10, 4


def console(*, stderr: bool = False) -> Console:
    """Return a console that prints texts as they are: without markup, names of emoji or highlighted numbers."""
    from rich.console import Console  # noqa: PLC0415

    return Console(stderr=stderr, markup=False, emoji=False, highlight=False)


def say(*lines: object, stderr: bool = False) -> None:
    """Print each of `lines` as a single line without control characters, and flush: a program may read them."""
    for line in lines:
        print(printable(str(line)), file=sys.stderr if stderr else sys.stdout, flush=True)


def complain(problem: object) -> None:
    """Print a problem as a single line on standard error."""
    say(f"reliq: {problem}", stderr=True)


def print_json(value: Any) -> None:
    """Print dataclasses, lists and dictionaries as JSON in a line of ASCII."""
    import msgspec  # noqa: PLC0415

    try:
        text = msgspec.json.encode(value).decode()
    except UnicodeEncodeError:  # an id of a foreign publisher may be any bytes
        text = json.dumps(msgspec.to_builtins(value))
    sys.stdout.write(_NOT_ASCII.sub(lambda one: json.dumps(one[0])[1:-1], text) + "\n")


def facts(pairs: Iterable[tuple[str, Any]]) -> list[str]:
    """Return a line for each name and value; pairs without a value are left out, and nothing is cut off."""
    return [f"{name:>12}  {value}" for name, value in pairs if value not in (None, "")]


def format_time(at: float | None) -> str:
    """Return a time in UTC, for example `2026-11-21 03:00:00 UTC`; nothing for None."""
    return "" if at is None else datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def format_when(at: float | None) -> str:
    """Return a time relative to now, for example `in 5m` or `3s ago`; nothing for None."""
    if at is None:
        return ""
    seconds = at - time.time()
    return f"in {format_duration(seconds)}" if seconds > 0 else f"{format_duration(-seconds)} ago"


def confirm(question: str, *, yes: bool) -> None:
    """Ask a person to agree, unless `yes`; without a terminal it is an error."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise ConfigurationError(f"{question} There is no terminal to agree on: say --yes")
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

    A column without a text is left out. A pipe gets a line for each row. On a narrow terminal the cells of the columns `long`
    take several lines, and the other cells only where that is not enough.
    """
    from rich.cells import cell_len, chop_cells, set_cell_size  # noqa: PLC0415

    if title:
        say(title, stderr=stderr)
    texts = [["" if cell is None else printable(str(cell)) for cell in row] for row in rows]
    filled = [column for column in zip(columns, *texts, strict=True) if any(column[1:])]
    widths = [max(map(cell_len, column)) for column in filled]
    terminal = console(stderr=stderr)
    room = terminal.width - _GAP * (len(widths) - 1) if terminal.is_terminal else sum(widths)
    while sum(widths) > room and max(widths) > _LEAST_WIDTH:
        foldable = [at for at, column in enumerate(filled) if column[0] in long and widths[at] > _LEAST_LONG]
        widths[max(foldable or range(len(widths)), key=widths.__getitem__)] -= 1
    for row in zip(*filled, strict=True):
        folded = [chop_cells(cell, width) for cell, width in zip(row, widths, strict=True)]
        for cells in zip_longest(*folded, fillvalue=""):
            say((" " * _GAP).join(map(set_cell_size, cells, widths)).rstrip(), stderr=stderr)


@contextmanager
def show_progress(total: int | None, done: str) -> Iterator[Callable[..., None]]:
    """
    Show a bar on stderr when that is a terminal; yield a function that a long command calls after each step.

    The first Ctrl-C lets the running step end, then prints the result of all steps; the second does not wait for the step.
    Both times the exit code is 130.

    Args:
        total: how many messages the command will look at, if that is known.
        done: how each of them ends, for example `deleted`.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn  # noqa: PLC0415

    result: Any = None
    presses = 0
    is_exact = False
    terminal = console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=terminal, transient=True, disable=not terminal.is_terminal)
    task = bar.add_task("looked at", total=total)

    def step(looked: int, so_far: Any = None) -> None:
        nonlocal result, presses, is_exact
        result = so_far
        bar.advance(task, looked)
        if presses == 1:
            presses, is_exact = 2, True
            raise KeyboardInterrupt

    def interrupt(*_: object) -> None:
        nonlocal presses
        presses += 1
        if presses == 2:  # noqa: PLR2004  more of them must not cut off the result
            raise KeyboardInterrupt

    after = signal.signal(signal.SIGINT, interrupt)
    try:
        with bar:
            yield step
    except KeyboardInterrupt:
        after = signal.SIG_IGN
        last = "" if is_exact else ", and perhaps a last step"
        complain(f"interrupted: {f'nothing was {done}' if result is None else result}{last}; run it again to go on")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    finally:
        signal.signal(signal.SIGINT, after)
