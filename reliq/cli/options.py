"""
The options that several commands share, and the objects that are built from options, such as an `Admin`.

The Redis client is imported inside functions, so that `--help` and shell completion start quickly.
"""

import re
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

import reliq.admin
from reliq.admin import Filter
from reliq.admin.filters import duration, headers_of
from reliq.cli.lazy import SHARED
from reliq.cli.settings import take_url
from reliq.errors import ConfigurationError
from reliq.keys import Keys, Layout
from reliq.message import DEATH_REASONS, TASK_HEADER

if TYPE_CHECKING:
    from reliq.admin import Admin

#: Shell completion waits at most this many seconds for the queue names from Redis.
COMPLETION_SECONDS = 0.5
#: Shell completion reads at most this many queue names.
COMPLETIONS_LIMIT = 1000
#: Shell completion returns only queue names that match this pattern. The shell could evaluate other characters, and a
#: command would treat a name such as -x as an option.
_COMPLETABLE = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_.-]*")

DEFAULT_LAYOUT = str(Layout.RELIQ)


class OptionsOf(NamedTuple):
    """
    An annotation for a parameter that stands for several options of a command.

    The command gets an option for each parameter of the function `make`. The value of the annotated parameter is the
    return value of `make`.
    """

    make: Callable[..., Any]


def choice(known: Sequence[str], about: str = "") -> Any:
    """
    Return an option with a fixed list of values.

    The help text of the option is `about`, followed by the values. The shell completes the values.
    """
    return typer.Option(help=f"{about}{', '.join(known[:-1])} or {known[-1]}.", autocompletion=lambda: list(known))


def parsed(parse: Callable[[str], Any], about: str, *names: str, **more: Any) -> Any:
    """
    Return an option whose value is converted by the function `parse`.

    If `parse` raises ConfigurationError, the error message also names the option.
    """

    def read(text: object) -> Any:
        try:
            return parse(str(text))
        except ConfigurationError as error:
            raise typer.BadParameter(message=str(error)) from None

    return typer.Option(*names, parser=read, help=about, **more)


def time_span(about: str, *names: str, **more: Any) -> Any:
    """Return an option for a duration such as 10m. The command gets the value in seconds."""
    return parsed(duration, about, *names, metavar="TIME", **more)


def queue_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """
    Return the queue names that begin with `incomplete`, for shell completion; empty if Redis is unreachable.

    The Redis URL is read only from --url and RELIQ_URL, not from pyproject.toml. Otherwise, pressing the Tab key in a
    cloned repository could connect to a server that the author of the repository chose.
    """
    from reliq.redis import commands  # noqa: PLC0415
    from reliq.redis.client import Client  # noqa: PLC0415
    from reliq.redis.server import Connection  # noqa: PLC0415

    with warnings.catch_warnings(), suppress(Exception):
        warnings.simplefilter("ignore")  # a printed warning would appear in the command line that the user types
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
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only count the messages that match; change nothing.")]
QueueName = Annotated[str, typer.Argument(metavar="QUEUE", help="Name of the queue.", autocompletion=queue_names)]
QueueNames = Annotated[
    list[str] | None,
    typer.Argument(metavar="QUEUE", help="Queues to include; all by default.", autocompletion=queue_names),
]
Ids = Annotated[
    list[str] | None, typer.Argument(metavar="ID", help="Only messages with these ids, for example order-42.")
]
Headers = Annotated[
    list[str] | None,
    typer.Option(
        "--header",
        metavar="NAME=VALUE",
        help="Only messages with this header, for example tenant=acme; may be given again.",
    ),
]
Task = Annotated[
    str, typer.Option("--task", metavar="NAME", help="Only messages of this task, like --header reliq-task=NAME.")
]
Match = Annotated[str, typer.Option(metavar="TEXT", help="Only messages whose body contains this text.")]
Key = Annotated[str, typer.Option("--key", metavar="KEY", help="Only messages with this message key.")]
Reason = Annotated[str, choice(DEATH_REASONS, "Only dead letters with this reason: ")]
Raised = Annotated[
    str | None,
    typer.Option(
        "--exception", metavar="PLACE", help="Only dead letters with this exception, as `reliq list --group` prints it."
    ),
]
ErrorText = Annotated[str, typer.Option(metavar="TEXT", help="Only messages whose last error contains this text.")]
OlderThan = Annotated[
    float | None, time_span("Only messages that ended longer ago than this, for example 30s, 10m or 2h.")
]
NewerThan = Annotated[
    float | None, time_span("Only messages that ended less than this time ago, for example 2h or 1d.")
]
Delay = Annotated[float | None, time_span("Time until the message is due, for example 30s, 10m, 2h or 1d.")]
Retries = Annotated[
    int | None, typer.Option(help="How often to retry a message after a failed first attempt.", show_default=False)
]
Limit = Annotated[int | None, typer.Option(help="Stop after this many messages.")]
Cron = Annotated[
    str,
    typer.Option("--cron", metavar="NAME", help="Only this periodic job of the queue, named as in `reliq cron list`."),
]
Schedule = Annotated[
    str, typer.Option("--schedule", metavar="NAME", help="Only this stored schedule, named as in `reliq schedules`.")
]
MetricsPort = Annotated[int | None, typer.Option(help="Serve /metrics, /live and /ready on this TCP port.")]
MetricsHost = Annotated[str, typer.Option(help="Address to serve /metrics on; 0.0.0.0 lets other machines connect.")]


def open_admin(url: Url = None, layout: LayoutText = DEFAULT_LAYOUT, shard: Shard = None) -> "Admin":
    """Return an `Admin` for the options --url, --layout and --shard. Without --shard, it uses all shards."""
    return reliq.admin.Admin(url, layout=Layout.parse(layout), shard=shard)


def open_whole_queue_admin(url: Url = None, layout: LayoutText = DEFAULT_LAYOUT) -> "Admin":
    """Return an `Admin` for the options --url and --layout, for commands that do not have --shard."""
    return open_admin(url, layout)


def _headers(header: list[str] | None, task: str) -> dict[str, str]:
    """Return the headers that the options --header and --task require."""
    return headers_of(header) | ({TASK_HEADER: task} if task else {})


def _filter(header: Headers = None, task: Task = "", match: Match = "", key: Key = "") -> Filter:
    """Return the message filter for the options of `reliq cancel` and `reliq move`."""
    return Filter(headers=_headers(header, task), match=match, key=key)


def _filter_of_any_state(
    ids: Ids = None,
    header: Headers = None,
    task: Task = "",
    match: Match = "",
    key: Key = "",
    reason: Reason = "",
    raised: Raised = None,
    error: ErrorText = "",
    older_than: OlderThan = None,
    newer_than: NewerThan = None,
) -> Filter:
    """Return the message filter for the options of `reliq list`, `reliq purge` and `reliq redrive`."""
    return Filter(
        headers=_headers(header, task),
        match=match,
        key=key,
        ids=frozenset(ids or ()),
        reason=reason,
        raised=raised,
        error=error,
        older_than=older_than,
        newer_than=newer_than,
    )


#: Annotations for parameters of commands. Each such parameter stands for several options.
AdminOption = Annotated["Admin", OptionsOf(open_admin)]
WholeQueueAdmin = Annotated["Admin", OptionsOf(open_whole_queue_admin)]
Which = Annotated[Filter, OptionsOf(_filter)]
WhichOfAny = Annotated[Filter, OptionsOf(_filter_of_any_state)]
