"""Options that say which messages are meant, and the values they come with."""

from collections.abc import Callable, Sequence
from typing import Annotated

import typer

from reliq.admin import Filter, LetterFilter
from reliq.admin.pieces import STATES
from reliq.cli.common import duration, print_json, say
from reliq.errors import ConfigurationError
from reliq.message import DEATH_REASONS


def state_option(words: Sequence[str]) -> Callable[[], list[str]]:
    """Return what completes the names of states."""
    return lambda: list(words)


State = Annotated[
    str,
    typer.Option(help="pending, ready, unack, retry, garbage or dead.", autocompletion=state_option(STATES)),
]
Headers = Annotated[
    list[str] | None, typer.Option("--header", metavar="NAME=VALUE", help="Only with this header; may be given again.")
]
Match = Annotated[str, typer.Option(metavar="TEXT", help="Only with this text in the body.")]
Ids = Annotated[list[str] | None, typer.Argument(metavar="[ID]...", help="Of messages.")]
All = Annotated[bool, typer.Option("--all", help="All of them; asks before it acts.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say how many are meant.")]
OlderThan = Annotated[str | None, typer.Option(metavar="TIME", help="Only those dead for longer: 30s, 10m, 2h, 1d.")]
NewerThan = Annotated[str | None, typer.Option(metavar="TIME", help="Only those that died within: 30s, 10m, 2h, 1d.")]
Error = Annotated[str, typer.Option(metavar="TEXT", help="Only with this text in the last error.")]
Reason = Annotated[
    str, typer.Option(help=f"Only those: {', '.join(DEATH_REASONS)}.", autocompletion=state_option(DEATH_REASONS))
]


def headers_of(given: Sequence[str] | None) -> dict[str, str]:
    """Return `NAME=VALUE` texts as headers; raise ConfigurationError for another form."""
    headers = {}
    for one in given or ():
        name, equals, value = one.partition("=")
        if not name or not equals:
            raise ConfigurationError("--header is written NAME=VALUE, such as --header tenant=acme")
        headers[name] = value
    return headers


def filter_of(headers: Sequence[str] | None, match: str) -> Filter:
    """Return which messages the options mean."""
    return Filter(headers=headers_of(headers), match=match)


def letter_filter_of(
    ids: Sequence[str] | None,
    reason: str,
    error: str,
    older_than: str | None,
    newer_than: str | None,
    headers: Sequence[str] | None,
    match: str,
) -> LetterFilter:
    """Return which dead letters the options mean."""
    return LetterFilter(
        headers=headers_of(headers),
        match=match,
        ids=frozenset(ids or ()),
        reason=reason,
        error=error,
        older_than=None if older_than is None else duration(older_than),
        newer_than=None if newer_than is None else duration(newer_than),
    )


def print_found(found: int, done: str, *, json: bool) -> None:
    """Print how many a --dry-run found."""
    print_json({"found": found}) if json else say(f"{found} would be {done}")
