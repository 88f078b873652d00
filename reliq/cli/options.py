"""A group of commands that imports a command when it runs: `reliq --help` and completion need their names alone."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from inspect import Parameter, Signature, getdoc, signature
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

import reliq.admin
from reliq.admin import Filter, LetterFilter
from reliq.admin.calls import PLACES
from reliq.admin.messages import duration, headers_of
from reliq.cli.output import complain
from reliq.cli.settings import take_url
from reliq.keys import Keys, Layout
from reliq.message import DEATH_REASONS
from reliq.redis import commands
from reliq.redis.client import Client
from reliq.redis.server import Connection
from reliq.redis.url import Target

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from reliq.admin import Admin
    from reliq.outbox.store import Database as DatabaseConnection


class Place(NamedTuple):
    """
    Where a command is and how the list of commands shows it.

    Attributes:
        panel: the heading that it stands under.
        summary: the first sentence of its help.
        module: of `reliq.cli`.
        attribute: the function, or the `typer.Typer` of a group.
    """

    panel: str
    summary: str
    module: str
    attribute: str


def options_of(command: Any) -> dict[str, bool]:
    """Return the names of a command's arguments and options, each with whether it may be given again."""
    return {str(one.name): bool(getattr(one, "multiple", False)) for one in command.params}


def in_paragraphs(text: str) -> str:
    """Return a text with each paragraph in one line, which the terminal's width wraps; a bracket is no markup in it."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n")).replace("[", r"\[")


class _PlainFlags:
    """A command or a group whose help shows no type beside a flag, which takes no value."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help."""
        for parameter in self.get_params(ctx):  # type: ignore[attr-defined]
            if getattr(parameter, "is_flag", False):
                parameter.metavar = ""
        super().format_help(ctx, formatter)  # type: ignore[misc]


class PlainCommand(_PlainFlags, TyperCommand):
    """A command."""


class PlainGroup(_PlainFlags, TyperGroup):
    """A group of commands, which are all loaded."""


class OptionsOf(NamedTuple):
    """Stands in the annotation of a parameter, which has the options that `make` takes, and is what `make` returns."""

    make: Callable[..., Any]


def with_options(function: Callable[..., None]) -> Callable[..., None]:
    """Return a command that takes the options of each parameter that is annotated with `OptionsOf` in its place."""
    made: dict[str, tuple[Callable[..., Any], list[str]]] = {}
    options: list[Parameter] = []
    for one in signature(function).parameters.values():
        marks = [mark for mark in getattr(one.annotation, "__metadata__", ()) if isinstance(mark, OptionsOf)]
        own = signature(marks[0].make).parameters if marks else {one.name: one}
        options += own.values()
        if marks:
            made[one.name] = marks[0].make, list(own)

    def run(**given: Any) -> None:
        values = {name: make(**{one: given.pop(one) for one in names}) for name, (make, names) in made.items()}
        function(**given, **values)

    run.__doc__ = function.__doc__
    run.__annotations__ = {one.name: one.annotation for one in options}
    run.__signature__ = Signature([one.replace(kind=Parameter.KEYWORD_ONLY) for one in options])  # type: ignore[attr-defined]
    return run if made else function


def command_of(name: str, function: Callable[..., None]) -> Any:
    """Return the command that a function is, with its docstring as its help."""
    alone = typer.Typer(add_completion=False)
    alone.command(name, cls=PlainCommand, help=in_paragraphs(getdoc(function) or ""))(with_options(function))
    return typer.main.get_command(alone)


class LazyGroup(PlainGroup):
    """A group that knows its commands by their places; `places` are set by a subclass."""

    places: Mapping[str, Place]

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.commands = {
            name: TyperCommand(name, help=place.summary, rich_help_panel=place.panel)
            for name, place in self.places.items()
        }

    @classmethod
    def load(cls, name: str) -> Any:
        """Return a command that can run, from its module."""
        place = cls.places[name]
        found = getattr(import_module(f"reliq.cli.{place.module}"), place.attribute)
        if not isinstance(found, typer.Typer):
            return command_of(name, found)
        found.info.cls = PlainGroup
        for one in found.registered_commands:
            one.cls, one.help = PlainCommand, in_paragraphs(getdoc(one.callback) or "")
            one.name = one.name or getattr(one.callback, "__name__", "")
            one.callback = with_options(one.callback) if one.callback else None
        return typer.main.get_command(found)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the name, the command that can run and the words that are left."""
        name, found, rest = super().resolve_command(ctx, args)
        return name, self.load(name) if found and name else None, rest


#: A shell waits no longer than this for a reply, and takes no more names.
COMPLETION_SECONDS, MOST = 0.5, 1000
#: Any producer can register a name such as `x;reboot` in Go's layout, and shells evaluate completions. A name that begins
#: with a hyphen would be an option.
_COMPLETABLE = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_.-]*")


def names(redis: Target | None) -> list[str]:
    """Return the names in the registry that mean nothing else to a shell; none when Redis does not reply in time."""
    with warnings.catch_warnings(), suppress(Exception):
        warnings.simplefilter("ignore")  # a line of ours would stand in the middle of the person's own
        client = Client.to(Connection.to(redis), COMPLETION_SECONDS)
        _, entries = client.run(commands.registry_page(0, MOST))
        known = [keys.name for entry in entries if (keys := Keys.registered(entry)) is not None]
        return sorted(filter(_COMPLETABLE.fullmatch, known))
    return []


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
    known: list[str] = import_module("reliq.cli.options").names(ctx.params.get("url"))
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
Desk = Annotated["Admin", OptionsOf(admin)]
WholeDesk = Annotated["Admin", OptionsOf(admin_of_whole)]
Which = Annotated[Filter, OptionsOf(filter_of)]
WhichLetters = Annotated[LetterFilter, OptionsOf(letter_filter_of)]
