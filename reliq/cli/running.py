"""`reliq running`: which message runs where, and for how long."""

from typing import Annotated

import typer

from reliq.admin.filters import duration
from reliq.cli.options import DEFAULT_LAYOUT, Json, LayoutText, QueueName, Url, admin
from reliq.cli.output import print_json, say, say_age
from reliq.cli.tables import print_table
from reliq.keys import Layout
from reliq.readable import spoken


def running(
    queue: QueueName,
    longer_than: Annotated[str, typer.Option(help="Only handlers that have run longer, such as 10m.")] = "0s",
    json: Json = False,
    url: Url = None,
    layout: LayoutText = DEFAULT_LAYOUT,
) -> None:
    """
    Show the handlers that run, the longest running first, as their workers say every 5 s.

    Of each process at most 200 are shown, and none of what `Queue.receive` holds. Exit codes: 0 done (also when
    nothing runs), 1 Redis is away or refuses, 2 wrong usage or an unknown queue.

    Example: reliq running orders --longer-than 10m
    """
    rows = admin(url, layout).running(queue, longer_than=duration(longer_than))
    if json:
        print_json(rows)
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
    say_age(row.seen for row in rows)
