"""
The output of commands: text, JSON, progress bars, and confirmation before actions that cannot be undone.

The packages rich and msgspec are imported inside functions, so that shell completion starts quickly.
"""

from __future__ import annotations

import json
import re
import signal
import sys
import time
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib import import_module
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import typer

from reliq.errors import ConfigurationError
from reliq.text import format_duration, printable

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from rich.console import Console

#: The exit code for wrong usage, and for a message or queue that does not exist.
EXIT_USAGE = 2
#: The exit code if nothing was published, or if the command did not finish its work.
EXIT_UNFINISHED = 3
#: The exit code after Ctrl-C.
EXIT_INTERRUPTED = 130

_NOT_ASCII = re.compile(r"[^\x20-\x7e]")
#: The number of spaces between the columns of a table.
_GAP = 2
#: On a narrow terminal, columns with long texts are made narrower, but not below _LEAST_LONG characters. If this is not
#: enough, all columns are made narrower, but not below _LEAST_WIDTH characters.
_LEAST_LONG, _LEAST_WIDTH = 10, 4


def console(*, stderr: bool = False) -> Console:
    """Return a rich console that prints texts unchanged: no markup, no emoji names, no highlighting."""
    from rich.console import Console  # noqa: PLC0415

    return Console(stderr=stderr, markup=False, emoji=False, highlight=False)


def say(*lines: object, stderr: bool = False) -> None:
    """
    Print each argument as a single line, with control characters escaped.

    Flush the output, so that a program that reads it from a pipe gets the line immediately.
    """
    for line in lines:
        print(printable(str(line)), file=sys.stderr if stderr else sys.stdout, flush=True)


def complain(problem: object) -> None:
    """Print a problem as a single line on standard error, with the prefix `reliq: `."""
    say(f"reliq: {problem}", stderr=True)


def print_json(value: Any) -> None:
    """Print a value, such as a dataclass, list or dictionary, as JSON on a single line in ASCII."""
    import msgspec  # noqa: PLC0415

    try:
        text = msgspec.json.encode(value).decode()
    except UnicodeEncodeError:  # another program may have published an id that is not UTF-8
        text = json.dumps(msgspec.to_builtins(value))
    sys.stdout.write(_NOT_ASCII.sub(lambda one: json.dumps(one[0])[1:-1], text) + "\n")


def facts(pairs: Iterable[tuple[str, Any]]) -> list[str]:
    """Return a line for each pair of name and value, with aligned values. Leave out values that are None or empty."""
    return [f"{name:>12}  {value}" for name, value in pairs if value not in (None, "")]


def format_time(at: float | None) -> str:
    """Format a time in unix seconds, such as `2026-11-21 03:00:00 UTC`. Return an empty text for None."""
    return "" if at is None else datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def format_when(at: float | None) -> str:
    """Format a time in unix seconds relative to now, such as `in 5m` or `3s ago`. Return an empty text for None."""
    if at is None:
        return ""
    seconds = at - time.time()
    return f"in {format_duration(seconds)}" if seconds > 0 else f"{format_duration(-seconds)} ago"


def confirm(question: str, *, yes: bool) -> None:
    """
    Ask the user to confirm an action on the terminal. If `yes` is true, do not ask.

    Raises:
        ConfigurationError: standard input is not a terminal.
        typer.Abort: the user does not confirm.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        raise ConfigurationError(f"{question} There is no terminal to confirm this: add --yes")
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
    Print a table on standard output, or on standard error if `stderr` is true.

    Columns without any text are left out. In a pipe, each row is a single line. On a narrow terminal, long cells are
    wrapped to several lines, and no text is cut off. The columns in `long` are wrapped first, and the other columns
    only if necessary.
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


def exit_on_signals() -> None:
    """
    Install a signal handler that raises SystemExit at the first SIGINT, SIGTERM or SIGHUP.

    Later signals are ignored, so that they do not interrupt the cleanup.
    """
    stops = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def end(number: int, _frame: object) -> None:
        for stop in stops:
            signal.signal(stop, signal.SIG_IGN)
        sys.exit(128 + number)

    for stop in stops:
        import_module("reliq.consumer").handle_signal(stop, end)


@contextmanager
def show_progress(total: int | None, done: str) -> Iterator[Callable[..., None]]:
    """
    Show a progress bar if standard error is a terminal. Yield a function to call after each step of the work.

    After the first Ctrl-C, the work stops at the end of its current step. A second Ctrl-C stops it immediately. In both
    cases, the result so far is printed, and the exit code is 130.

    Args:
        total: the number of messages that the command will read, or the size of its file in bytes; None if unknown.
        done: the word for the effect on a message, such as `deleted`.
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
        if presses == 2:  # noqa: PLR2004  a third Ctrl-C must not interrupt printing the result
            raise KeyboardInterrupt

    after = signal.signal(signal.SIGINT, interrupt)
    try:
        with bar:
            yield step
    except KeyboardInterrupt:
        after = signal.SIG_IGN
        last = "" if is_exact else " (the last step may not be counted)"
        complain(f"interrupted: {f'nothing was {done}' if result is None else result}{last}; run it again to continue")
        raise typer.Exit(code=EXIT_INTERRUPTED) from None
    finally:
        signal.signal(signal.SIGINT, after)
