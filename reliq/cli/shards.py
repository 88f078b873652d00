"""`reliq shards`: how many shards a queue has, and the change of that number."""

from typing import TYPE_CHECKING, Annotated

import typer

import reliq.admin
from reliq.cli.options import Json, QueueName, WholeDesk, Yes
from reliq.cli.output import EXIT_UNFINISHED, confirm, print_json, say
from reliq.cli.tables import print_table
from reliq.text import count_of, partial, typed

if TYPE_CHECKING:
    from reliq.admin.shards import ShardsView


def shards(
    queue: QueueName,
    number: Annotated[int | None, typer.Argument(metavar="[NUMBER]", help="Have so many: a power of two.")] = None,
    *,
    finish: Annotated[bool, typer.Option("--finish", help="End a change at once: workers do it too.")] = False,
    yes: Yes = False,
    json: Json = False,
    desk: WholeDesk,
) -> None:
    """
    Show the shards of a queue, or change how many there are while it is in use.

    A change begins at once. Workers move what lies where only the earlier number looks for it, and finish the change; with
    --finish that is done now. Until then publishers ask twice for ids of their own, and no other change can begin.

    Example: reliq shards orders 16 --yes

    Exit codes: 0 done, 1 Redis did not answer or you did not agree, 2 an unknown queue or a wrong number, 3 not finished.
    """
    if number is not None:
        confirm(f"Have {number} shards of {queue}? Every publisher must be of a version that knows of shards.", yes=yes)
        desk.resize(queue, number)
    left = desk.finish_resize(queue) if finish else reliq.admin.Leftover()
    view = desk.shards(queue)
    if json:
        print_json({"map": view.map, "counts": view.counts, "away": view.away, "left": left})
    else:
        _print(queue, view)
        if left:
            say(f"not finished: {left}")
    if left:
        raise typer.Exit(EXIT_UNFINISHED)


def _print(queue: str, view: "ShardsView") -> None:
    print_table(
        ("shard", "pending", "ready", "unack", "retry", "dead"),
        [
            (at, one.pending, one.ready, one.unack, one.retry, one.dead) if one else (at, *"?????")
            for at, one in enumerate(view.counts)
        ],
    )
    now = view.map
    change = (
        ""
        if now.was == now.n
        else f"; {now.state}, there were {now.was}: workers end it, and `{typed('shards', queue, options=['--finish'])}` does"
    )
    say(f"{queue} has {count_of(now.n, 'shard')} (epoch {now.epoch}){change}")
    if view.away:
        say(f"{queue} is {partial(view.away)}")
