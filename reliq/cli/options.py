"""
The options that several commands share, and the objects that commands get for them.

Redis is imported within functions: `--help` and a shell that completes a word do not wait for it.
"""

import re
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

import reliq.admin
from reliq.admin import Filter
from reliq.admin.filters import duration, headers_of
from reliq.cli.lazy import SHARED, OptionsOf
from reliq.cli.settings import take_url
from reliq.errors import ConfigurationError
from reliq.keys import Keys, Layout
from reliq.message import DEATH_REASONS

if TYPE_CHECKING:
    from reliq.admin import Admin

#: A shell waits at most this many seconds for the names of queues.
COMPLETION_SECONDS = 0.5
#: The most names that a shell completes.
COMPLETIONS_LIMIT = 1000
#: Any producer can register a name such as `x;reboot` in Go's layout, and shells evaluate completions. A name that begins
#: with a hyphen would be an option.
_COMPLETABLE = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_.-]*")

DEFAULT_LAYOUT = str(Layout.RELIQ)


def choice(known: Sequence[str], about: str = "") -> Any:
    """Return an option with a shell completion of its values."""
    return typer.Option(help=f"{about}{', '.join(known[:-1])} or {known[-1]}.", autocompletion=lambda: list(known))


def parsed(parse: Callable[[str], Any], about: str, *names: str, **more: Any) -> Any:
    """Return an option with a function that reads its text; an error of the function names the option."""

    def read(text: object) -> Any:
        try:
            return parse(str(text))
        except ConfigurationError as error:
            raise typer.BadParameter(str(error)) from None

    return typer.Option(*names, parser=read, help=about, **more)


def time_span(about: str, *names: str, **more: Any) -> Any:
    """Return an option that takes a duration; the command gets its seconds."""
    return parsed(duration, about, *names, metavar="TIME", **more)


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
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only count the chosen messages.")]
QueueName = Annotated[str, typer.Argument(metavar="QUEUE", help="The queue's name.", autocompletion=queue_names)]
QueueNames = Annotated[
    list[str] | None, typer.Argument(metavar="QUEUE", help="Only these queues.", autocompletion=queue_names)
]
Ids = Annotated[list[str] | None, typer.Argument(metavar="ID", help="Message ids, for example order-42.")]
Headers = Annotated[list[str] | None, typer.Option("--header", metavar="NAME=VALUE", help="May be given again.")]
Match = Annotated[str, typer.Option(metavar="TEXT", help="Only messages with this text in the body.")]
Key = Annotated[str, typer.Option("--key", metavar="KEY", help="Only messages of this key.")]
Reason = Annotated[str, choice(DEATH_REASONS, "Only dead letters of this reason: ")]
Raised = Annotated[
    str | None,
    typer.Option("--exception", metavar="PLACE", help="Only this exception and place, as `list --group` prints it."),
]
ErrorText = Annotated[str, typer.Option(metavar="TEXT", help="Only messages with this text in the last error.")]
OlderThan = Annotated[float | None, time_span("Only messages that ended longer ago, for example 30s, 10m, 2h or 1d.")]
NewerThan = Annotated[float | None, time_span("Only messages that ended within this time.")]
Delay = Annotated[float | None, time_span("Due after this time, for example 30s, 10m, 2h or 1d.")]
Retries = Annotated[int | None, typer.Option(help="Deliveries after the first.", show_default=False)]
Limit = Annotated[int | None, typer.Option(help="At most this many messages.")]
Cron = Annotated[str, typer.Option("--cron", metavar="NAME", help="Only this periodic job of `reliq cron list`.")]
MetricsPort = Annotated[int | None, typer.Option(help="Serve /metrics, /live and /ready on this port.")]
MetricsHost = Annotated[str, typer.Option(help="The address of this port.")]


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
        older_than=older_than,
        newer_than=newer_than,
    )


#: Parameters of several options.
AdminOption = Annotated["Admin", OptionsOf(open_admin)]
WholeQueueAdmin = Annotated["Admin", OptionsOf(open_whole_queue_admin)]
Which = Annotated[Filter, OptionsOf(_filter)]
WhichOfAny = Annotated[Filter, OptionsOf(_filter_of_any_state)]
