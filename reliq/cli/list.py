"""`reliq list`: the messages of one state."""

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from reliq.cli.options import (
    DEFAULT_LAYOUT,
    Headers,
    Json,
    LayoutText,
    Match,
    QueueName,
    Shard,
    StateOption,
    Url,
    admin,
    filter_of,
)
from reliq.cli.output import print_json
from reliq.cli.progress import progress_bar
from reliq.cli.tables import print_table
from reliq.readable import spoken, start_of

if TYPE_CHECKING:
    from reliq.admin.list import Entry

#: Characters of a body in a table and in JSON; `reliq show` has all of it.
TABLE_BODY, JSON_BODY = 60, 1000
TABLE_ERROR = 60
MESSAGE_COLUMNS = ("id", "", "when", "attempt", "left", "size", "body", "error")


def list_messages(
    queue: QueueName,
    state: StateOption = "ready",
    limit: Annotated[int, typer.Option(help="The most to show.")] = 20,
    offset: Annotated[int, typer.Option(help="How many to pass over first.")] = 0,
    header: Headers = None,
    match: Match = "",
    json: Json = False,
    url: Url = None,
    layout: LayoutText = DEFAULT_LAYOUT,
    shard: Shard = None,
) -> None:
    """
    List the messages of one state, the next to come first.

    Example: reliq list orders --state unack --match '"number": 42'

    `when` is the due time; of unack the end of the lease or the redelivery, of dead the death. Exit codes: 0 done,
    1 Redis did not answer, 2 an unknown queue or state.
    """
    desk, where = admin(url, layout, shard), filter_of(header, match)
    total = desk.size(queue, state) if where.is_set else None
    with progress_bar("looking", total, None, lambda _none: "nothing was changed") as run:
        found = desk.messages(
            queue, state, limit=limit, offset=offset, where=where, on_look=lambda looked: run.step(looked, None)
        )
    if json:
        print_json([as_json(one) for one in found])
    else:
        print_table(MESSAGE_COLUMNS, [_row(one) for one in found], long=("body", "error"))


def as_json(entry: "Entry") -> dict[str, Any]:
    """Return an entry as JSON holds it, the start of its body as text."""
    names = ("id", "state", "mark", "when", "attempt", "retries_left", "error", "headers", "size", "letter")
    return {name: getattr(entry, name) for name in names} | {"body": start_of(entry.body, JSON_BODY)}


def when_text(when: float | None) -> str:
    """Return a time as a person on call says it."""
    if when is None:
        return ""
    away = when - time.time()
    return f"in {spoken(away)}" if away > 0 else f"{spoken(-away)} ago"


def _row(entry: "Entry") -> tuple[Any, ...]:
    size = "gone" if entry.size is None else entry.size
    body, error = start_of(entry.body, TABLE_BODY), entry.error[:TABLE_ERROR]
    return entry.id, entry.mark, when_text(entry.when), entry.attempt, entry.retries_left, size, body, error
