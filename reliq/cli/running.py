"""`reliq running`: which message runs where, and for how long."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from reliq.admin.filters import duration
from reliq.cli.options import DEFAULT_LAYOUT, Json, LayoutText, QueueName, Shard, Url, admin
from reliq.cli.output import print_json, say
from reliq.cli.tables import print_table, say_age
from reliq.keys import Layout
from reliq.readable import spoken

if TYPE_CHECKING:
    from reliq.admin import Running, StackReport

#: Workers have this long to tell their stacks: they hear of it at most 5 s after the question.
STACK_SECONDS = 10.0
#: A handler without a stack has ended, or its process does not answer.
_NO_STACK = ("has ended meanwhile", "no answer: a handler holds the interpreter of this process, or its reliq is older")


def running(
    queue: QueueName,
    longer_than: Annotated[str, typer.Option(help="Only handlers that have run longer, such as 10m.")] = "0s",
    stacks: Annotated[
        bool, typer.Option("--stacks", help="Also ask their workers where each stands, for 10 s.")
    ] = False,
    json: Json = False,
    url: Url = None,
    layout: LayoutText = DEFAULT_LAYOUT,
    shard: Shard = None,
) -> None:
    """
    Show the handlers that run, the longest running first, as their workers say every 5 s.

    Of each process at most 200 are shown, and none of what `Queue.receive` holds. A stack has files, lines and
    functions, and no values; a process whose interpreter is held tells none. Exit codes: 0 done (also when
    nothing runs), 1 Redis is away or refuses, 2 wrong usage or an unknown queue.

    Example: reliq running orders --longer-than 10m
    """
    operator = admin(url, layout, shard)
    rows = operator.running(queue, longer_than=duration(longer_than))
    reports = operator.stacks({row.worker for row in rows}, for_seconds=STACK_SECONDS) if stacks else {}
    if json:
        print_json([asdict(row) | {"stack": _frames(reports, row)} for row in rows] if stacks else rows)
        return
    if not rows:
        say("Nothing runs." if longer_than == "0s" else f"Nothing runs for {longer_than}.")
        if Layout.parse(layout).bare:
            say("What programs in Go run, nobody tells.")
        return
    print_table(
        ("id", "attempt", "for", "host", "pid", "worker"),
        [(row.id, row.attempt, spoken(row.seconds), row.host, row.pid, row.worker) for row in rows],
    )
    if stacks:
        for row in rows:
            frames = _frames(reports, row)
            say(
                "",
                f"{row.id} in {row.host}:{row.pid}",
                *(f"  {frame}" for frame in frames or [_NO_STACK[frames is None]]),
            )
    say_age(row.seen for row in rows)


def _frames(reports: "Mapping[str, StackReport]", row: "Running") -> Sequence[str] | None:
    """Return the stack of a handler; None when its worker told nothing, empty when it has ended meanwhile."""
    if row.worker not in reports:
        return None
    found = (one.frames for one in reports[row.worker].stacks if (one.queue, one.id) == (row.queue, row.id))
    return next(found, ())
