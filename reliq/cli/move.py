"""`reliq move`: messages of one state to another queue."""

from typing import Annotated

import typer

import reliq.admin
from reliq.admin.places import MOVABLE, check_place
from reliq.cli.options import Desk, DryRun, Json, QueueName, Which, Yes, queue_names, state_option
from reliq.cli.output import confirm, print_found, print_json, say
from reliq.cli.progress import progress_bar
from reliq.errors import ConfigurationError
from reliq.text import typed


def move(
    queue: QueueName,
    other: Annotated[
        str, typer.Argument(metavar="OTHER", help="The queue that gets them.", autocompletion=queue_names)
    ],
    *,
    state: Annotated[str, typer.Option(help=" | ".join(MOVABLE), autocompletion=state_option(MOVABLE))],
    where: Which,
    limit: Annotated[int | None, typer.Option(help="The most to move.")] = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    json: Json = False,
    desk: Desk,
) -> None:
    """
    Move messages of one state to another queue, with ids, due times, retries left and headers.

    Example: reliq move orders orders-slow --state ready --header tenant=acme --dry-run

    Cut off at any point, even by a kill, nothing is lost and nothing runs twice: make the same move again to finish
    it. Dead letters go by `reliq dead redrive --to`. Exit codes: 0 done, 1 Redis did not answer or you did not
    agree, 2 an unknown queue or state, 130 interrupted.
    """
    if state == "dead":
        raise ConfigurationError(
            f"dead letters go by `{typed('dead redrive', queue, options=['--to', other], layout=desk.redis_keys(queue).layout)}`"
        )
    total = desk.size(queue, check_place(state, MOVABLE), key=where.key)
    if dry_run:
        with progress_bar("looking", total, reliq.admin.RemoveResult(), lambda _sum: "nothing was moved") as looking:
            found = desk.count_messages(queue, state, where, on_step=looking.step)
        print_found(found if limit is None else min(found, limit), "moved", json=json)
        return
    what = "those that match" if where.is_set else f"all {total}"
    confirm(f"Move the {state} messages of {queue} to {other}, {what}?", yes=yes)
    with progress_bar("moving", total, reliq.admin.MoveResult()) as moving:
        done = desk.move(queue, other, state, where, limit=limit, on_step=moving.step)
    print_json(done) if json else say(done)
