"""`reliq dead redrive` and `reliq dead purge`: what is done with dead letters."""

import re
from collections.abc import Sequence
from typing import Annotated

import typer

from reliq.admin import Admin, LetterFilter, Redriven, Terms
from reliq.cli.common import (
    DEFAULT_LAYOUT,
    Json,
    LayoutText,
    QueueName,
    Url,
    Yes,
    admin,
    complain,
    confirm,
    duration,
    print_json,
    say,
)
from reliq.cli.filters import (
    All,
    DryRun,
    Error,
    Headers,
    Ids,
    Match,
    NewerThan,
    OlderThan,
    Reason,
    letter_filter_of,
    print_found,
)
from reliq.cli.progress import running
from reliq.errors import ConfigurationError

EXIT_UNKNOWN_ID = 2

_RATE = re.compile(r"([0-9]+(?:\.[0-9]+)?)(?:/([smh]))?")
_PERIODS = {"s": 1, "m": 60, "h": 3600}


def redrive(
    queue: QueueName,
    ids: Ids = None,
    reason: Reason = "",
    error: Error = "",
    older_than: OlderThan = None,
    newer_than: NewerThan = None,
    header: Headers = None,
    match: Match = "",
    every: All = False,
    rate: Annotated[str | None, typer.Option(metavar="N/s", help="No faster than this: 50/s, 100/m.")] = None,
    limit: Annotated[int | None, typer.Option(help="At most so many.")] = None,
    to: Annotated[str | None, typer.Option(metavar="QUEUE", help="Into another queue.")] = None,
    retries: Annotated[int | None, typer.Option(help="Deliveries after the first; default as before.")] = None,
    delay: Annotated[str, typer.Option(metavar="TIME", help="Due after 30s, 10m, 2h, 1d.")] = "0",
    dry_run: DryRun = False,
    yes: Yes = False,
    json: Json = False,
    url: Url = None,
    layout: LayoutText = DEFAULT_LAYOUT,
) -> None:
    """
    Publish dead letters again, oldest first, with fresh retries.

    Example: reliq dead redrive orders --error 'card declined' --rate 50/s

    Ctrl-C stops it and says how far it came; run again, it goes on. Exit codes: 0 done, 1 Redis did not answer or you
    did not agree, 2 an unknown queue, id or filter, 130 interrupted.
    """
    where = _meant(letter_filter_of(ids, reason, error, older_than, newer_than, header, match), every=every)
    terms = Terms(
        limit=limit,
        rate=None if rate is None else per_second(rate),
        retries=retries,
        delay=duration(delay),
    )
    desk = admin(url, layout)
    if dry_run:
        found = _count(desk, queue, where)
        print_found(found if limit is None else min(found, limit), "redriven", json=json)
        return
    total, missing = desk.size(queue, "dead"), _missing(desk, queue, ids)
    if every:
        confirm(f"Redrive all {total} dead letters of {queue}?", yes=yes)
    with running("redriving", total, Redriven(), _said) as run:
        done = desk.redrive(queue, where, terms, to=to, on_step=run.step)
    print_json(done) if json else say(_said(done))
    _complain(queue, missing)


def purge(
    queue: QueueName,
    ids: Ids = None,
    reason: Reason = "",
    error: Error = "",
    older_than: OlderThan = None,
    newer_than: NewerThan = None,
    header: Headers = None,
    match: Match = "",
    every: All = False,
    dry_run: DryRun = False,
    yes: Yes = False,
    json: Json = False,
    url: Url = None,
    layout: LayoutText = DEFAULT_LAYOUT,
) -> None:
    """
    Delete dead letters for good; asks first.

    Example: reliq dead purge orders --older-than 3d --dry-run

    Exit codes: 0 done, 1 Redis did not answer or you did not agree, 2 an unknown queue, id or filter, 130
    interrupted.
    """
    where = _meant(letter_filter_of(ids, reason, error, older_than, newer_than, header, match), every=every)
    desk = admin(url, layout)
    found = _count(desk, queue, where)
    if dry_run:
        print_found(found, "deleted", json=json)
        return
    missing = _missing(desk, queue, ids)
    confirm(f"Delete {found} dead letters of {queue}?", yes=yes)
    with running("deleting", desk.size(queue, "dead"), 0, lambda done: f"{done} deleted") as run:
        deleted = desk.delete_letters(queue, where, on_step=run.step)
    print_json({"deleted": deleted}) if json else say(f"{deleted} deleted")
    _complain(queue, missing)


def per_second(text: str) -> float:
    """Return `50/s`, `100/m`, `1000/h` or a plain number as how many in a second; else raise ConfigurationError."""
    rate = _RATE.fullmatch(text)
    number = float(rate[1]) / _PERIODS[rate[2] or "s"] if rate else 0.0
    if number <= 0:
        raise ConfigurationError(f"--rate is written 50/s, 100/m or 1000/h, not {text[:40]!r}")
    return number


def _meant(where: LetterFilter, *, every: bool) -> LetterFilter:
    """Return the filter; raise ConfigurationError when it says nothing, or says something beside --all."""
    if where.is_set == every:
        raise ConfigurationError("say which dead letters: ids, --reason, --error, an age, --header, --match; or --all")
    return where


def _count(desk: Admin, queue: str, where: LetterFilter) -> int:
    with running("looking", desk.size(queue, "dead"), 0, lambda _found: "nothing was changed") as run:
        return desk.count_letters(queue, where, on_step=run.step)


def _missing(desk: Admin, queue: str, ids: Sequence[str] | None) -> list[str]:
    """Return those of `ids` that have no dead letter."""
    if not ids:
        return []
    there = {letter.id for letter in desk.letters(queue, LetterFilter(ids=frozenset(ids)))}
    return [id for id in ids if id not in there]


def _complain(queue: str, missing: list[str]) -> None:
    """Say which ids have no dead letter, and exit with 2, when there are such."""
    if missing:
        names = ", ".join(id[:128] for id in missing[:20])
        complain(f"queue {queue!r} has no dead letter of {names}; see `reliq dead list`")
        raise typer.Exit(EXIT_UNKNOWN_ID)


def _said(done: Redriven) -> str:
    parts = [f"{done.redriven} redriven"]
    if done.alive:
        parts.append(f"{done.alive} left: a message of their id is alive")
    if done.gone:
        parts.append(f"{done.gone} were gone meanwhile")
    if done.kept:
        parts.append(f"{done.kept} kept: the other queue cannot have such headers or bodies")
    return ", ".join(parts)
