"""The options of commands on an outbox, and what they say when its database fails."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Annotated

import typer

import reliq.admin
from reliq.admin import Filter, LetterFilter
from reliq.admin.calls import PLACES
from reliq.admin.filters import duration, headers_of
from reliq.cli.lazy import OptionsOf
from reliq.cli.output import complain
from reliq.cli.settings import take_url
from reliq.keys import Layout
from reliq.message import DEATH_REASONS

if TYPE_CHECKING:
    from reliq.admin import Admin
    from reliq.outbox.store import Database as DatabaseConnection


#: The environment's names of what the options say.
DATABASE_VARIABLE = "RELIQ_DATABASE"

Database = Annotated[
    str,
    typer.Option(
        envvar=DATABASE_VARIABLE,
        help="The URL of PostgreSQL or SQLite. Others see a command line: set the variable.",
    ),
]
Prefix = Annotated[str, typer.Option(help="The beginning of the tables' names; SCHEMA.PREFIX names a schema too.")]


@contextmanager
def asking(database: "DatabaseConnection") -> Iterator[None]:
    """End the command with exit code 1 when the database is away or refuses."""
    try:
        yield
    except database.away as error:
        complain(
            f"the database failed: {error}; see that it runs, that --database or {DATABASE_VARIABLE} names it, and that "
            "this role may change the tables"
        )
        raise typer.Exit(1) from None


DEFAULT_LAYOUT = str(Layout.RELIQ)


def state_option(words: Sequence[str]) -> Callable[[], list[str]]:
    """Return a function that completes an option's value from these words."""
    return lambda: list(words)


def queue_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """
    Return the queue names with this prefix, for a shell; none while Redis is unreachable.

    Only --url and RELIQ_URL name the Redis: pressing Tab in a stranger's repository must not connect to its author's.
    """
    known: list[str] = import_module("reliq.cli.completion").names(ctx.params.get("url"))
    given = ctx.params.get("queues") or ctx.params.get("names") or ()
    return [name for name in known if name.startswith(incomplete) and name not in given]


Url = Annotated[
    str | None,
    typer.Option(help="The Redis, when RELIQ_URL does not name it.", callback=take_url),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
LayoutText = Annotated[
    str,
    typer.Option(
        "--layout",
        help="How the queue's keys are spelled: reliq, or as in Go: hdt3213, hdt3213:tag, hdt3213:prefix=P.",
    ),
]
Shard = Annotated[int | None, typer.Option("--shard", metavar="K", help="Of a sharded queue, this shard alone.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]
QueueName = Annotated[str, typer.Argument(metavar="QUEUE", help="The queue's name.", autocompletion=queue_names)]
StateOption = Annotated[
    str,
    typer.Option(help=f"{', '.join(PLACES[:-1])} or {PLACES[-1]}.", autocompletion=state_option(PLACES)),
]
Headers = Annotated[
    list[str] | None, typer.Option("--header", metavar="NAME=VALUE", help="Only with this header; may be given again.")
]
Match = Annotated[str, typer.Option(metavar="TEXT", help="Only with this text in the body.")]
Key = Annotated[str, typer.Option("--key", metavar="KEY", help="Only of this key.")]
Ids = Annotated[list[str] | None, typer.Argument(metavar="ID", help="Of messages.")]
All = Annotated[bool, typer.Option("--all", help="All of them; asks before it acts.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say how many are meant.")]
OlderThan = Annotated[str | None, typer.Option(metavar="TIME", help="Only those dead for longer: 30s, 10m, 2h, 1d.")]
NewerThan = Annotated[str | None, typer.Option(metavar="TIME", help="Only those that died within: 30s, 10m, 2h, 1d.")]
Error = Annotated[str, typer.Option(metavar="TEXT", help="Only with this text in the last error.")]
Raised = Annotated[
    str | None,
    typer.Option(
        metavar="PLACE", help="Only of this exception and place, as `dead list --group` shows it; '' of none."
    ),
]
Reason = Annotated[
    str, typer.Option(help=f"Only those: {', '.join(DEATH_REASONS)}.", autocompletion=state_option(DEATH_REASONS))
]


def admin(url: Url = None, layout: LayoutText = DEFAULT_LAYOUT, shard: Shard = None) -> "Admin":
    """Return the Admin of a Redis, a layout, and a shard of its queues or all of them."""
    return reliq.admin.Admin(url, layout=Layout.parse(layout), shard=shard)


def admin_of_whole(url: Url = None, layout: LayoutText = DEFAULT_LAYOUT) -> "Admin":
    """Return the Admin of a Redis and a layout, for commands on a queue as a whole."""
    return admin(url, layout)


def filter_of(header: Headers = None, match: Match = "", key: Key = "") -> Filter:
    """Return the filter that the options describe."""
    return Filter(headers=headers_of(header), match=match, key=key)


def letter_filter_of(
    ids: Ids = None,
    reason: Reason = "",
    raised: Raised = None,
    error: Error = "",
    older_than: OlderThan = None,
    newer_than: NewerThan = None,
    header: Headers = None,
    match: Match = "",
    key: Key = "",
) -> LetterFilter:
    """Return the filter of dead letters that the options describe."""
    return LetterFilter(
        headers=headers_of(header),
        match=match,
        key=key,
        ids=frozenset(ids or ()),
        reason=reason,
        raised=raised,
        error=error,
        older_than=None if older_than is None else duration(older_than),
        newer_than=None if newer_than is None else duration(newer_than),
    )


#: Parameters that stand for several options.
AdminOption = Annotated["Admin", OptionsOf(admin)]
WholeQueueAdmin = Annotated["Admin", OptionsOf(admin_of_whole)]
Which = Annotated[Filter, OptionsOf(filter_of)]
WhichLetters = Annotated[LetterFilter, OptionsOf(letter_filter_of)]
