"""`reliq purge`: delete the messages of one state."""

from typing import TYPE_CHECKING, Annotated

import typer

import reliq.admin
from reliq.admin.places import PLACES
from reliq.cli.options import Desk, DryRun, Json, QueueName, Which, Yes, state_option
from reliq.cli.output import confirm, print_found, print_json, say
from reliq.cli.progress import progress_bar
from reliq.errors import ConfigurationError

if TYPE_CHECKING:
    from reliq.admin import Admin, Filter, RemoveResult


def purge(
    queue: QueueName,
    *,
    state: Annotated[str, typer.Option(help=" | ".join(PLACES), autocompletion=state_option(PLACES))] = "",
    where: Which,
    dry_run: DryRun = False,
    yes: Yes = False,
    json: Json = False,
    desk: Desk,
) -> None:
    """
    Delete the messages of one state for good; say --dry-run first.

    Example: reliq purge orders --state ready --match '"tenant":"acme"' --dry-run

    With --key alone those are meant that wait in the line of the key: reliq purge mail --key tenant-7. What lies in the
    middle of a list is cancelled: its body goes at once, its id when a worker meets it. Exit codes: 0 done, 1 Redis did
    not answer or you did not agree, 2 an unknown queue or state, 130 interrupted.
    """
    state = state or ("waiting" if where.key else "")
    if not state:
        raise ConfigurationError("say which messages: --state, or --key for those that wait in the line of a key")
    total = desk.size(queue, state, key=where.key)
    if dry_run:
        print_found(_count(desk, queue, state, where, total), "deleted", json=json)
        return
    what = "those that match" if where.is_set else f"all {total}"
    confirm(f"Delete the {state} messages of {queue}, {what}?", yes=yes)
    done = _delete(desk, queue, state, where, total)
    print_json(done) if json else say(done)


def _count(desk: "Admin", queue: str, state: str, where: "Filter", total: int) -> int:
    with progress_bar("looking", total, reliq.admin.RemoveResult(), lambda _sum: "nothing was deleted") as run:
        if state != "dead":
            return desk.count_messages(queue, state, where, on_step=run.step)
        return desk.count_letters(
            queue, where.of_letters(), on_step=lambda looked, _sum: run.step(looked, reliq.admin.RemoveResult())
        )


def _delete(desk: "Admin", queue: str, state: str, where: "Filter", total: int) -> "RemoveResult":
    with progress_bar("deleting", total, reliq.admin.RemoveResult()) as run:
        if state != "dead":
            return desk.purge(queue, state, where, on_step=run.step)
        desk.delete_letters(
            queue,
            where.of_letters(),
            on_step=lambda looked, done: run.step(looked, reliq.admin.RemoveResult(found=done, purged=done)),
        )
        return run.sum
