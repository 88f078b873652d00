"""
The options that several commands share, and the objects that commands get for them.

Redis is imported within functions: `--help` and a shell that completes a word do not wait for it.
"""

import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Annotated

import typer

import reliq.admin
from reliq.admin import Filter
from reliq.admin.filters import duration, headers_of
from reliq.cli.lazy import SHARED, OptionsOf
from reliq.cli.output import complain
from reliq.cli.settings import take_url
from reliq.keys import Keys, Layout
from reliq.message import DEATH_REASONS

if TYPE_CHECKING:
    from reliq.admin import Admin
    from reliq.outbox.store import Database as DatabaseConnection

#: The environment variable that names the database of an outbox.
DATABASE_VARIABLE = "RELIQ_DATABASE"
#: A shell waits at most this many seconds for the names of queues.
COMPLETION_SECONDS = 0.5
#: The most names that a shell completes.
COMPLETIONS_LIMIT = 1000
#: Any producer can register a name such as `x;reboot` in Go's layout, and shells evaluate completions. A name that begins
#: with a hyphen would be an option.
_COMPLETABLE = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_.-]*")

DEFAULT_LAYOUT = str(Layout.RELIQ)


def words(known: Sequence[str]) -> Callable[[], list[str]]:
    """Return a function that completes an option's value from these words."""
    return lambda: list(known)


def queue_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """
    Return the queue names with this prefix, for a shell; none while Redis is unreachable.

    Only --url and RELIQ_URL name the Redis: pressing Tab in a stranger's repository must not connect to its author's.
    """
    from reliq.redis import commands  # noqa: PLC0415
    from reliq.redis.client import Client  # noqa: PLC0415
    from reliq.redis.server import Connection  # noqa: PLC0415

    with warnings.catch_warnings(), suppress(Exception):
        warnings.simplefilter("ignore")  # a warning would appear in the middle of the line that the person types
        client = Client.to(Connection.to(ctx.params.get("url")), COMPLETION_SECONDS)
        _, entries = client.run(commands.registry_page(0, COMPLETIONS_LIMIT))
        names = sorted(keys.name for entry in entries if (keys := Keys.registered(entry)) is not None)
        given = ctx.params.get("queues") or ()
        return [
            name
            for name in names
            if name.startswith(incomplete) and name not in given and _COMPLETABLE.fullmatch(name) is not None
        ]
    return []


Url = Annotated[str | None, typer.Option(help=SHARED["url"][1], callback=take_url)]
Json = Annotated[bool, typer.Option("--json", help=SHARED["json"][1])]
LayoutText = Annotated[str, typer.Option("--layout", help=SHARED["layout"][1])]
Shard = Annotated[int | None, typer.Option("--shard", metavar="K", help=SHARED["shard"][1])]
Database = Annotated[
    str,
    typer.Option(
        envvar=DATABASE_VARIABLE,
        help="The URL of PostgreSQL or SQLite. Others see a command line: set the variable.",
    ),
]
Prefix = Annotated[str, typer.Option(help="The beginning of the tables' names; SCHEMA.PREFIX names a schema too.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only count the chosen messages.")]
QueueName = Annotated[str, typer.Argument(metavar="QUEUE", help="The queue's name.", autocompletion=queue_names)]
QueueNames = Annotated[
    list[str] | None, typer.Argument(metavar="QUEUE", help="Only these queues.", autocompletion=queue_names)
]
Ids = Annotated[list[str] | None, typer.Argument(metavar="ID", help="Message ids, for example order-42.")]
Headers = Annotated[
    list[str] | None, typer.Option("--header", metavar="NAME=VALUE", help="Only with this header; may be given again.")
]
Match = Annotated[str, typer.Option(metavar="TEXT", help="Only with this text in the body.")]
Key = Annotated[str, typer.Option("--key", metavar="KEY", help="Only messages of this key.")]
Reason = Annotated[
    str,
    typer.Option(help=f"Only dead for this reason: {', '.join(DEATH_REASONS)}.", autocompletion=words(DEATH_REASONS)),
]
Raised = Annotated[
    str | None,
    typer.Option(
        metavar="PLACE", help="Only dead by this exception and place, as `list --group` prints it; '' for none."
    ),
]
ErrorText = Annotated[str, typer.Option(metavar="TEXT", help="Only dead with this text in the last error.")]
OlderThan = Annotated[str | None, typer.Option(metavar="TIME", help="Only ended longer ago: 30s, 10m, 2h, 1d.")]
NewerThan = Annotated[str | None, typer.Option(metavar="TIME", help="Only ended within: 30s, 10m, 2h, 1d.")]
MetricsPort = Annotated[int | None, typer.Option(help="Serve /metrics, /live and /ready on this port.")]
MetricsHost = Annotated[str, typer.Option(help="The address to serve them on.")]


def open_admin(url: Url = None, layout: LayoutText = DEFAULT_LAYOUT, shard: Shard = None) -> "Admin":
    """Return the Admin of a Redis, a layout, and a shard of its queues or all of them."""
    return reliq.admin.Admin(url, layout=Layout.parse(layout), shard=shard)


def open_whole_queue_admin(url: Url = None, layout: LayoutText = DEFAULT_LAYOUT) -> "Admin":
    """Return the Admin of a Redis and a layout, for commands on a queue as a whole."""
    return open_admin(url, layout)


def _filter(header: Headers = None, match: Match = "", key: Key = "") -> Filter:
    """Return the filter that the options describe."""
    return Filter(headers=headers_of(header), match=match, key=key)


def _filter_of_any_state(
    ids: Ids = None,
    header: Headers = None,
    match: Match = "",
    key: Key = "",
    reason: Reason = "",
    raised: Raised = None,
    error: ErrorText = "",
    older_than: OlderThan = None,
    newer_than: NewerThan = None,
) -> Filter:
    """Return the filter that the options describe, for messages of any state."""
    return Filter(
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
AdminOption = Annotated["Admin", OptionsOf(open_admin)]
WholeQueueAdmin = Annotated["Admin", OptionsOf(open_whole_queue_admin)]
Which = Annotated[Filter, OptionsOf(_filter)]
WhichOfAny = Annotated[Filter, OptionsOf(_filter_of_any_state)]


@contextmanager
def report_database_errors(database: "DatabaseConnection") -> Iterator[None]:
    """End the command with exit code 1 when the database is unreachable or refuses a statement."""
    try:
        yield
    except database.away as error:
        complain(
            f"the database failed: {error}; see that it runs, that --database or {DATABASE_VARIABLE} names it, and that "
            "this role may change the tables"
        )
        raise typer.Exit(1) from None
