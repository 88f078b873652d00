"""`reliq check`: a queue's own fsck."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from reliq.cli.options import Desk, Json, QueueName
from reliq.cli.output import console, print_json, say
from reliq.text import count_of, partial

if TYPE_CHECKING:
    from reliq.admin.fsck.report import CheckReport


def check(
    queue: QueueName,
    *,
    repair: Annotated[bool, typer.Option("--repair", help="Set right what is wrong.")] = False,
    json: Json = False,
    desk: Desk,
) -> None:
    """
    Look at every message of a queue for what contradicts the model, beside those who use it.

    With --repair, what can be is set right without guessing, and the rest becomes dead letters with the reason `lost`.
    In a layout of the Go original, whose moves take several commands, only what stays wrong for 5 seconds counts.
    Exit 0: nothing is wrong, or nothing any more; what passes by itself does not count. Exit 1: something is wrong.

    Example: reliq check orders --repair
    """
    with _progress() as progress:
        report = desk.check(queue, repair=repair, progress=progress)
    if json:
        print_json(report)
    else:
        _print(report, repair=repair)
    raise typer.Exit(0 if report.is_sound else 1)


@contextmanager
def _progress() -> Iterator[Callable[[str, int], None]]:
    """Show on a terminal what is being read; elsewhere nothing."""
    with console(stderr=True).status("") as status:
        yield lambda what, looked_at: status.update(f"reading {what}: {count_of(looked_at, 'id')} looked at")


def _print(report: "CheckReport", *, repair: bool) -> None:
    for fault in report.faults:
        mended = f", {fault.mended} mended" if repair else ""
        say(f"{'passes' if fault.passes else 'wrong':8} {fault.name}: {fault.count}{mended}")
        examples = ", ".join(fault.examples) + (", …" if fault.count > len(fault.examples) else "")
        for label, text in (("means", fault.means), ("such as", examples), ("--repair", fault.repair)):
            say(f"{'':9}{label}: {text}")
    if report.unproved:
        say(
            f"{count_of(report.unproved, 'id')} may be in no list, or in two; the lists are too long to be looked through."
        )
    if report.away:
        say(f"The check is {partial(report.away)}.")
    verdict = "sound" if report.is_sound else "NOT sound"
    say(f"{report.queue}: {count_of(report.looked_at, 'id')} looked at; the queue is {verdict}.")
