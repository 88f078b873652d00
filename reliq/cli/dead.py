"""`reliq dead`: the dead letters of a queue: list, show, redrive, purge."""

import re
import sys
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

import typer

import reliq.admin
from reliq.admin.filters import Filter, duration
from reliq.admin.screens import format_missing, pretty, start_of
from reliq.cli.messages import JSON_BODY, TABLE_BODY, TABLE_ERROR, format_when
from reliq.cli.options import AdminOption, All, DryRun, Json, QueueName, WhichLetters, Yes, queue_names
from reliq.cli.output import (
    EXIT_UNKNOWN_ID,
    complain,
    confirm,
    print_facts,
    print_found,
    print_json,
    print_table,
    progress_bar,
    say,
)
from reliq.cli.queues import format_time
from reliq.errors import ConfigurationError
from reliq.settings import check_int
from reliq.text import pluralize

if TYPE_CHECKING:
    from reliq.admin import Admin, DeadGroups, Entry

dead = typer.Typer(
    help="The dead letters of a queue: list, show, redrive, purge.", no_args_is_help=True, add_completion=False
)

_RATE = re.compile(r"([0-9]+(?:\.[0-9]+)?)(?:/([smh]))?")
_PERIODS = {"s": 1, "m": 60, "h": 3600}

LETTER_COLUMNS = ("id", "died", "reason", "error", "attempts", "size", "body")
LETTERS_LIMIT = 10_000
#: Letters are grouped for this many seconds.
GROUP_SECONDS = 5.0


@dead.command("list")
def list_letters(
    queue: QueueName,
    *,
    where: WhichLetters,
    limit: Annotated[int, typer.Option(help="The most to show.")] = 20,
    group: Annotated[bool, typer.Option("--group", help="How many died of what, the most first, and where.")] = False,
    json: Json = False,
    admin: AdminOption,
) -> None:
    """
    List dead letters, oldest first; or with --group how many died of what.

    Example: reliq dead list orders --error 'card declined' --newer-than 2h

    Groups are made of the newest letters, as many as are read in 5 s; `dead redrive` takes one by --reason and --raised.

    Exit codes: 0 done, 1 Redis did not answer, 2 an unknown queue or a wrong filter.
    """
    most = check_int("--limit", limit, least=1, most=LETTERS_LIMIT)
    away = admin.shards(queue).away
    nothing = f"no dead letters in {queue}{' that match' * where.is_set}"
    if group:
        groups = admin.dead_groups(queue, where=where, for_seconds=GROUP_SECONDS, without=away)
        _list_groups(groups, most, nothing, json=json)
    else:
        letters = list(islice(admin.messages(queue, "dead", where, without=away), most))
        if json:
            print_json([as_json(letter, start_of(letter.body, JSON_BODY)) for letter in letters])
        elif not letters:
            say(nothing)
        else:
            print_table(LETTER_COLUMNS, map(_row, letters), long=("error", "body"))
    if away:
        say(f"The list is {format_missing(away)}.", stderr=json)


@dead.command()
def show(
    queue: QueueName,
    id: Annotated[str, typer.Argument(help="Of the message.")],
    *,
    raw: Annotated[bool, typer.Option("--raw", help="Only the body, byte for byte.")] = False,
    json: Json = False,
    admin: AdminOption,
) -> None:
    """
    Show the last dead letter of a message: why it died, its headers and its whole body.

    Example: reliq dead show orders order-42

    Exit codes: 0 done, 1 Redis did not answer, 2 an unknown queue or id.
    """
    letter = next(admin.messages(queue, "dead", Filter(ids=frozenset([id]))), None)
    if letter is None:
        raise ConfigurationError(f"queue {queue!r} has no dead letter of the id {id[:128]!r}; see `reliq dead list`")
    if raw:
        sys.stdout.buffer.write(letter.body)
        return
    facts = as_json(letter, letter.body.decode("utf-8", "replace"))
    if json:
        print_json(facts)
        return
    del facts["body"]
    del facts["headers"]
    facts["when"] = f"{format_time(letter.when or 0)} UTC"
    headers = [("header", f"{name}: {value}") for name, value in letter.headers.items()]
    print_facts([*facts.items(), *headers])
    say(*pretty(letter.body))


@dead.command()
def redrive(
    queue: QueueName,
    *,
    where: WhichLetters,
    every: All = False,
    rate: Annotated[str | None, typer.Option(metavar="N/s", help="No faster than this: 50/s, 100/m.")] = None,
    limit: Annotated[int | None, typer.Option(help="The most to redrive.")] = None,
    to: Annotated[
        str | None, typer.Option(metavar="QUEUE", help="Into another queue.", autocompletion=queue_names)
    ] = None,
    retries: Annotated[int | None, typer.Option(help="Deliveries after the first; default as before.")] = None,
    delay: Annotated[str, typer.Option(metavar="TIME", help="Due after 30s, 10m, 2h, 1d.")] = "0",
    dry_run: DryRun = False,
    yes: Yes = False,
    json: Json = False,
    admin: AdminOption,
) -> None:
    """
    Publish dead letters again, oldest first, with fresh retries.

    Example: reliq dead redrive orders --error 'card declined' --rate 50/s

    Ctrl-C stops it and says how far it came; run again, it goes on. Exit codes: 0 done, 1 Redis did not answer or you
    did not agree, 2 an unknown queue, id or filter, 130 interrupted.
    """
    _check_choice(where, every=every)
    per_second_most = None if rate is None else per_second(rate)
    delay_seconds = duration(delay)
    if dry_run:
        count = _count(admin, queue, where)
        print_found(count if limit is None else min(count, limit), "redriven", json=json)
        return
    total = admin.size(queue, "dead")
    missing = _missing(admin, queue, where.ids)
    if every:
        confirm(f"Redrive {'all ' * (total != 1)}{pluralize(total, 'dead letter')} of {queue}?", yes=yes)
    with progress_bar("redriving", total, reliq.admin.Tally("redriven")) as run:
        done = admin.redrive(
            queue,
            where,
            to=to,
            limit=limit,
            rate=per_second_most,
            retries=retries,
            delay=delay_seconds,
            on_step=run.step,
        )
    print_json(done) if json else say(done)
    _complain(queue, missing)


@dead.command()
def purge(
    queue: QueueName,
    *,
    where: WhichLetters,
    every: All = False,
    dry_run: DryRun = False,
    yes: Yes = False,
    json: Json = False,
    admin: AdminOption,
) -> None:
    """
    Delete dead letters for good; asks first.

    Example: reliq dead purge orders --older-than 3d --dry-run

    Exit codes: 0 done, 1 Redis did not answer or you did not agree, 2 an unknown queue, id or filter, 130
    interrupted.
    """
    _check_choice(where, every=every)
    count = _count(admin, queue, where)
    if dry_run:
        print_found(count, "deleted", json=json)
        return
    missing = _missing(admin, queue, where.ids)
    confirm(f"Delete {pluralize(count, 'dead letter')} of {queue}?", yes=yes)
    with progress_bar("deleting", admin.size(queue, "dead"), reliq.admin.Tally("deleted")) as run:
        done = admin.purge(queue, "dead", where, on_step=run.step)
    print_json(done) if json else say(done)
    _complain(queue, missing)


def _list_groups(result: "DeadGroups", most: int, nothing: str, *, json: bool) -> None:
    groups = result.groups[:most]
    if json:
        print_json({"groups": groups, "looked": result.looked, "of": result.of})
        return
    if groups:
        rows = [(group.count, group.reason, group.raised, format_when(group.newest), group.example) for group in groups]
        print_table(("count", "reason", "raised", "newest", "example"), rows)
    else:
        say(nothing)
    if result.looked < result.of:
        say(f"these are of the newest {pluralize(result.looked, 'letter')} looked at, of {result.of:,}")


def as_json(letter: "Entry", body: str) -> dict[str, Any]:
    """Return a dead letter as JSON holds it."""
    names = ("id", "letter", "reason", "raised", "error", "attempt", "when", "key", "headers", "size")
    return {name: getattr(letter, name) for name in names} | {"body": body}


def _row(letter: "Entry") -> tuple[Any, ...]:
    error = letter.error[:TABLE_ERROR]
    body = start_of(letter.body, TABLE_BODY)
    return letter.id, format_when(letter.when), letter.reason, error, letter.attempt, letter.size, body


def per_second(text: str) -> float:
    """Return `50/s`, `100/m`, `1000/h` or a plain number as how many in a second; else raise ConfigurationError."""
    rate = _RATE.fullmatch(text)
    number = float(rate[1]) / _PERIODS[rate[2] or "s"] if rate else 0.0
    if number <= 0:
        raise ConfigurationError(f"--rate is written 50/s, 100/m or 1000/h, not {text[:40]!r}")
    return number


def _check_choice(where: Filter, *, every: bool) -> None:
    """Raise ConfigurationError when a filter says nothing, or says something beside --all."""
    if where.is_set == every:
        raise ConfigurationError(
            "say which dead letters: ids, --reason, --raised, --error, an age, --header, --match, --key; or --all"
        )


def _count(admin: "Admin", queue: str, where: Filter) -> int:
    with progress_bar(
        "looking", admin.size(queue, "dead"), reliq.admin.Tally("found"), lambda _found: "nothing was changed"
    ) as run:
        return admin.count(queue, "dead", where, on_step=run.step)


def _missing(admin: "Admin", queue: str, ids: frozenset[str]) -> list[str]:
    """Return those of `ids` that have no dead letter."""
    return sorted(ids - {letter.id for letter in admin.messages(queue, "dead", Filter(ids=ids))}) if ids else []


def _complain(queue: str, missing: list[str]) -> None:
    """Name the ids without a dead letter, if there are any, and exit with 2."""
    if missing:
        names = ", ".join(id[:128] for id in missing[:20])
        complain(f"queue {queue!r} has no dead letter of {names}; see `reliq dead list`")
        raise typer.Exit(EXIT_UNKNOWN_ID)
