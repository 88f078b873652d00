"""`reliq dead`: the dead letters of a queue: list, show, redrive, purge."""

import sys
from itertools import islice
from typing import Annotated, Any

import typer

from reliq.admin import LetterFilter
from reliq.cli.bodies import pretty, start_of
from reliq.cli.common import DEFAULT_LAYOUT, Json, LayoutText, QueueName, Url, admin, print_facts, print_json, say
from reliq.cli.ends import clock
from reliq.cli.filters import Error, Headers, Ids, Match, NewerThan, OlderThan, Reason, letter_filter_of
from reliq.cli.list import TABLE_BODY, TABLE_ERROR, when_text
from reliq.cli.redrive import purge, redrive
from reliq.cli.tables import print_table
from reliq.errors import ConfigurationError
from reliq.message import Letter
from reliq.settings import whole

dead = typer.Typer(help="The dead letters of a queue: list, show, redrive, purge.", no_args_is_help=True)
dead.command()(redrive)
dead.command()(purge)

COLUMNS = ("id", "died", "reason", "error", "attempts", "size", "body")
JSON_BODY = 1000
LIST_LIMIT = 10_000


@dead.command("list")
def list_letters(
    queue: QueueName,
    ids: Ids = None,
    reason: Reason = "",
    error: Error = "",
    older_than: OlderThan = None,
    newer_than: NewerThan = None,
    header: Headers = None,
    match: Match = "",
    limit: Annotated[int, typer.Option(help="At most so many.")] = 20,
    json: Json = False,
    url: Url = None,
    layout: LayoutText = DEFAULT_LAYOUT,
) -> None:
    """
    List dead letters, oldest first.

    Example: reliq dead list orders --error 'card declined' --newer-than 2h

    Exit codes: 0 done, 1 Redis did not answer, 2 an unknown queue or a wrong filter.
    """
    where = letter_filter_of(ids, reason, error, older_than, newer_than, header, match)
    most = whole("--limit", limit, least=1, most=LIST_LIMIT)
    found = list(islice(admin(url, layout).letters(queue, where), most))
    if json:
        print_json([as_json(one, start_of(one.payload, JSON_BODY)) for one in found])
    else:
        print_table(COLUMNS, [_row(one) for one in found], long=("error", "body"))


@dead.command()
def show(
    queue: QueueName,
    id: Annotated[str, typer.Argument(help="Of the message.")],
    raw: Annotated[bool, typer.Option("--raw", help="Only the body, byte for byte.")] = False,
    json: Json = False,
    url: Url = None,
    layout: LayoutText = DEFAULT_LAYOUT,
) -> None:
    """
    Show the last dead letter of a message: why it died, its headers and its whole body.

    Example: reliq dead show orders order-42

    Exit codes: 0 done, 1 Redis did not answer, 2 an unknown queue or id.
    """
    letters = list(admin(url, layout).letters(queue, LetterFilter(ids=frozenset([id]))))
    if not letters:
        raise ConfigurationError(f"queue {queue!r} has no dead letter of the id {id[:128]!r}; see `reliq dead list`")
    letter = letters[-1]
    if raw:
        sys.stdout.buffer.write(letter.payload)
        return
    facts = as_json(letter, letter.payload.decode("utf-8", "replace"))
    if json:
        print_json(facts)
        return
    del facts["body"]
    headers, facts["died"] = facts.pop("headers"), f"{clock(letter.died)} UTC"
    print_facts([*facts.items(), *(("header", f"{name}: {value}") for name, value in headers.items())])
    say(*pretty(letter.payload))


def as_json(letter: Letter, body: str) -> dict[str, Any]:
    """Return a dead letter as JSON holds it."""
    names = ("id", "letter", "reason", "error", "attempts", "died")
    facts = {name: getattr(letter, name) for name in names}
    return facts | {"headers": letter.header.headers, "size": len(letter.payload), "body": body}


def _row(letter: Letter) -> tuple[Any, ...]:
    error, body = letter.error[:TABLE_ERROR], start_of(letter.payload, TABLE_BODY)
    return letter.id, when_text(letter.died), letter.reason, error, letter.attempts, len(letter.payload), body
