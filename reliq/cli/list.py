"""`reliq list`: the messages of one state."""

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from reliq.cli.options import Desk, Json, QueueName, StateOption, Which
from reliq.cli.output import print_json, say
from reliq.cli.progress import progress_bar
from reliq.cli.tables import print_table
from reliq.readable import spoken, start_of

if TYPE_CHECKING:
    from reliq.admin.list import Entry

#: Characters of a body in a table and in JSON; `reliq show` has all of it.
TABLE_BODY, JSON_BODY = 60, 1000
TABLE_ERROR = 60
MESSAGE_COLUMNS = ("id", "", "when", "attempt", "left", "size", "key", "body", "error")


def list_messages(
    queue: QueueName,
    *,
    state: StateOption = "",
    limit: Annotated[int, typer.Option(help="The most to show.")] = 20,
    offset: Annotated[int, typer.Option(help="How many to pass over first.")] = 0,
    where: Which,
    json: Json = False,
    desk: Desk,
) -> None:
    """
    List the messages of one state, the next to come first.

    Example: reliq list orders --state unack --match '"number": 42'

    Without --state those of ready; with --key those that wait in the line of the key. `when` is the due time; of unack
    the end of the lease or the redelivery, of dead the death. Exit codes: 0 done, 1 Redis did not answer, 2 an unknown
    queue or state.
    """
    state = state or ("waiting" if where.key else "ready")
    total = desk.size(queue, state, key=where.key) if where.is_set else None
    with progress_bar("looking", total, None, lambda _none: "nothing was changed") as run:
        found = desk.messages(
            queue, state, limit=limit, offset=offset, where=where, on_look=lambda looked: run.step(looked, None)
        )
    if json:
        print_json([as_json(one) for one in found])
    elif not found:
        say(f"no {'more ' * bool(offset)}{state} messages in {queue}{' that match' * where.is_set}")
    else:
        without = {"key"} - {"key" for one in found if one.key}
        rows = [dict(zip(MESSAGE_COLUMNS, _row(one), strict=True)) for one in found]
        shown = [name for name in MESSAGE_COLUMNS if name not in without]
        print_table(shown, [[row[name] for name in shown] for row in rows], long=("body", "error"))


def as_json(entry: "Entry") -> dict[str, Any]:
    """Return an entry as JSON holds it, the start of its body as text."""
    names = ("id", "state", "mark", "when", "attempt", "retries_left", "error", "key", "headers", "size", "letter")
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
    when = when_text(entry.when)
    return entry.id, entry.mark, when, entry.attempt, entry.retries_left, size, entry.key, body, error
