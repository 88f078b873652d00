"""The progress of a long command: a bar on a terminal, and a line when it is interrupted."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from reliq.cli.output import EXIT_INTERRUPTED, complain, console

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
