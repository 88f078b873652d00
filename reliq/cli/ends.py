"""`reliq ends`: how the last messages of a queue ended."""

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from reliq.cli.options import Desk, Json, QueueName
from reliq.cli.output import print_json, say
from reliq.cli.tables import print_table
from reliq.readable import spoken
from reliq.text import typed

if TYPE_CHECKING:
    from reliq.admin import End


def ends(
    queue: QueueName,
    *,
    kind: Annotated[
        str | None, typer.Option(help="Only dead, expired, cancelled, purged, or acked (where history is kept).")
    ] = None,
    limit: Annotated[int, typer.Option(help="The most to show.")] = 100,
    json: Json = False,
    desk: Desk,
) -> None:
    """
    Show how the last messages ended that were not acked, newest first, each with its time, reason and error.

    The last 1,000 are remembered; of acked ones as many as `Queue(history=...)` says. Exit codes: 0 done (also when
    there is none), 1 Redis is away or refuses, 2 wrong usage or an unknown queue.

    Example: reliq ends orders --kind expired --limit 20
    """
    found = desk.ends(queue, kind=kind, limit=limit)
    if json:
        print_json(found)
    elif not found:
        say("None is remembered." + (" (Queue(history=...) keeps acked ones.)" if kind == "acked" else ""))
    else:
        rows = [(clock(end.at), end.kind, end.id, why(end)) for end in found]
        print_table(("when", "end", "id", "why"), rows, long=("why",))


def clock(at: float) -> str:
    """Return a time as a person reads it, in UTC."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S")


def why(end: "End") -> str:
    """Return the reason of an end in one line, as far as it is known."""
    if end.took is not None:
        return f"after {spoken(end.took)}"
    attempt = f" (delivery {end.attempt})" if end.attempt is not None else ""
    return f"{end.reason}{attempt}" + (f": {end.error}" if end.error else "") if end.reason else ""


def asleep_text(queue: str, until: float) -> str:
    """Return until when a queue sleeps, why, and what wakes it."""
    return (
        f"{queue} sleeps until {clock(until)} UTC: a handler raised RateLimited for a message without a key; "
        f"`{typed('resume', queue)}` wakes it"
    )
