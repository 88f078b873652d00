"""`reliq move`: messages of one state to another queue."""

from typing import Annotated

import typer

from reliq.admin import Moved, Removed
from reliq.admin.move import MOVABLE
from reliq.admin.pieces import check_state
from reliq.cli.common import DEFAULT_LAYOUT, Json, LayoutText, QueueName, Url, Yes, admin, confirm, print_json, say
from reliq.cli.filters import DryRun, Headers, Match, filter_of, print_found, state_option
from reliq.cli.progress import running
from reliq.errors import ConfigurationError


def move(
    queue: QueueName,
    other: Annotated[str, typer.Argument(metavar="OTHER", help="The queue that gets them.")],
    state: Annotated[str, typer.Option(help=" | ".join(MOVABLE), autocompletion=state_option(MOVABLE))],
    header: Headers = None,
    match: Match = "",
    limit: Annotated[int | None, typer.Option(help="At most so many.")] = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    json: Json = False,
    url: Url = None,
    layout: LayoutText = DEFAULT_LAYOUT,
) -> None:
    """
    Move messages of one state to another queue, with ids, due times, retries left and headers.

    Example: reliq move orders orders-slow --state ready --header tenant=acme --dry-run

    Cut off at any point, even by a kill, nothing is lost and nothing runs twice: make the same move again to finish
    it. Dead letters go by `reliq dead redrive --to`. Exit codes: 0 done, 1 Redis did not answer or you did not
    agree, 2 an unknown queue or state, 130 interrupted.
    """
    desk, where = admin(url, layout), filter_of(header, match)
    if state == "dead":
        raise ConfigurationError(f"dead letters go by `reliq dead redrive {queue} --to {other}`")
    total = desk.size(queue, check_state(state, MOVABLE))
    if dry_run:
        with running("looking", total, Removed(), lambda _sum: "nothing was moved") as looking:
            found = desk.count_messages(queue, state, where, on_step=looking.step)
        print_found(found if limit is None else min(found, limit), "moved", json=json)
        return
    what = "those that match" if where.is_set else f"all {total}"
    confirm(f"Move the {state} messages of {queue} to {other}, {what}?", yes=yes)
    with running("moving", total, Moved(), _said) as moving:
        done = desk.move(queue, other, state, where, limit=limit, on_step=moving.step)
    print_json(done) if json else say(_said(done))


def _said(done: Moved) -> str:
    parts = [f"{done.moved} moved"]
    if done.kept:
        parts.append(f"{done.kept} kept: their ids are in use there, or it cannot have them")
    if done.running:
        parts.append(f"{done.running} kept: a worker has them")
    if done.gone:
        parts.append(f"{done.gone} had ended meanwhile")
    return ", ".join(parts)
