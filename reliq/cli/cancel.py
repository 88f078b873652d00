"""`reliq cancel`: messages by id, or those of a state that match."""

from typing import TYPE_CHECKING, Annotated

import typer

import reliq.admin
from reliq.admin.places import CANCELLABLE, check_place
from reliq.cli.options import Desk, DryRun, Json, QueueName, Which, Yes, state_option
from reliq.cli.output import EXIT_UNKNOWN_ID, confirm, print_found, print_json, say
from reliq.cli.progress import progress_bar
from reliq.errors import ConfigurationError

if TYPE_CHECKING:
    from reliq.admin import Admin, Filter

Tombstone = Annotated[
    float | None,
    typer.Option(metavar="SECONDS", help="Refuse a publish of these ids for this time.", show_default=False),
]


def cancel(
    queue: QueueName,
    ids: Annotated[list[str] | None, typer.Argument(metavar="ID", help="Messages.")] = None,
    *,
    state: Annotated[
        str, typer.Option(help="Instead of ids: " + " | ".join(CANCELLABLE), autocompletion=state_option(CANCELLABLE))
    ] = "",
    where: Which,
    tombstone: Tombstone = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    json: Json = False,
    desk: Desk,
) -> None:
    """
    Cancel messages: they do not start; one that runs is not retried, and its handler is told.

    The id of a `cancelled` one is free at once, that of a `running` one stays taken until its end and its `dedup`.

    Example: reliq cancel orders order-42 order-43

    Instead of ids: reliq cancel orders --state pending --match '"tenant":"acme"' --dry-run. Exit codes: 0 cancelled
    or running, 1 Redis did not answer or you did not agree, 2 an unknown queue or id, 130 interrupted.
    """
    if bool(ids) == bool(state):
        raise ConfigurationError("say which messages: ids, or --state with --header, --match or --key")
    if state:
        _cancel_where(desk, queue, state, where, tombstone=tombstone, dry_run=dry_run, yes=yes, json=json)
        return
    if where.is_set or dry_run:
        raise ConfigurationError("--header, --match, --key and --dry-run go with --state, not with ids")
    answers = desk.cancel(queue, ids or [], tombstone=tombstone)
    if json:
        print_json(answers)
    else:
        for id, word in answers.items():
            say(f"{word} {id}")
    if "not_found" in answers.values():
        raise typer.Exit(EXIT_UNKNOWN_ID)


def _cancel_where(
    desk: "Admin",
    queue: str,
    state: str,
    where: "Filter",
    *,
    tombstone: float | None,
    dry_run: bool,
    yes: bool,
    json: bool,
) -> None:
    total = desk.size(queue, check_place(state, CANCELLABLE), key=where.key)
    if dry_run:
        with progress_bar("looking", total, reliq.admin.RemoveResult(), lambda _sum: "nothing was cancelled") as run:
            found = desk.count_messages(queue, state, where, on_step=run.step)
        print_found(found, "cancelled", json=json)
        return
    what = "those that match" if where.is_set else f"all {total}"
    confirm(f"Cancel the {state} messages of {queue}, {what}?", yes=yes)
    with progress_bar("cancelling", total, reliq.admin.RemoveResult(), lambda done: done.summary("cancelled")) as run:
        done = desk.cancel_where(queue, state, where, tombstone=tombstone, on_step=run.step)
    print_json(done) if json else say(done.summary("cancelled"))
