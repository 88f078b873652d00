"""A group of commands that imports a command when it runs: `reliq --help` and completion need their names alone."""

from __future__ import annotations

from importlib import import_module
from inspect import Parameter, Signature, getdoc, signature
from typing import TYPE_CHECKING, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

#: Options that most commands take: name -> its spelling and help. The help of a command names them in one line.
SHARED = {
    "url": ("--url URL", "The Redis, when RELIQ_URL does not name it."),
    "json": ("--json", "Print JSON, for scripts."),
    "layout": (
        "--layout LAYOUT",
        "How the queue's keys are spelled: reliq, or as in Go: hdt3213, hdt3213:tag, hdt3213:prefix=P.",
    ),
    "shard": ("--shard K", "Of a sharded queue, this shard alone."),
}


class CommandInfo(NamedTuple):
    """
    The module of a command, and its line in the list of commands.

    Attributes:
        panel: its heading in the list.
        summary: the first sentence of its help.
        module: of `reliq.cli`.
        attribute: the function, or the `typer.Typer` of a group.
    """

    panel: str
    summary: str
    module: str
    attribute: str


def is_shared(option: Any) -> bool:
    """Report whether an option is the shared one of its name."""
    return option.name in SHARED and option.help == SHARED[option.name][1]


def in_paragraphs(text: str) -> str:
    """Return a text with each paragraph in one line, which the terminal's width wraps; a bracket is no markup in it."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n")).replace("[", r"\[")


class _ShortHelp:
    """A command or a group with a short help: no types beside flags, and shared options in one line."""

    epilog: str | None

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help."""
        shared = []
        for parameter in self.get_params(ctx):  # type: ignore[attr-defined]
            if getattr(parameter, "is_flag", False):
                parameter.metavar = ""
            if is_shared(parameter):
                parameter.hidden = True
                shared.append(SHARED[parameter.name][0])
        if shared:
            self.epilog = f"It also takes {', '.join(shared)}: see reliq --help."
        super().format_help(ctx, formatter)  # type: ignore[misc]


class ShortCommand(_ShortHelp, TyperCommand):
    """A command."""


class ShortGroup(_ShortHelp, TyperGroup):
    """A group of commands, which are all loaded."""


class OptionsOf(NamedTuple):
    """Marks a parameter: the command takes the options of `make`, and the parameter gets the result of `make`."""

    make: Callable[..., Any]


def with_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a command that takes the options of each parameter that is annotated with `OptionsOf` in its place."""
    made: dict[str, tuple[Callable[..., Any], list[str]]] = {}
    options: list[Parameter] = []
    for parameter in signature(function, eval_str=True).parameters.values():
        marks = [mark for mark in getattr(parameter.annotation, "__metadata__", ()) if isinstance(mark, OptionsOf)]
        own = signature(marks[0].make).parameters if marks else {parameter.name: parameter}
        options += own.values()
        if marks:
            made[parameter.name] = (marks[0].make, list(own))
    if not made:
        return function

    def run(**given: Any) -> Any:
        values = {name: make(**{option: given.pop(option) for option in names}) for name, (make, names) in made.items()}
        return function(**given, **values)

    run.__doc__ = function.__doc__
    run.__annotations__ = {option.name: option.annotation for option in options}
    run.__signature__ = Signature([option.replace(kind=Parameter.KEYWORD_ONLY) for option in options])  # type: ignore[attr-defined]
    return run


def command_of(name: str, function: Callable[..., None]) -> Any:
    """Return the command that a function is, with its docstring as its help."""
    alone = typer.Typer(add_completion=False)
    alone.command(name, cls=ShortCommand, help=in_paragraphs(getdoc(function) or ""))(with_options(function))
    return typer.main.get_command(alone)


class LazyGroup(ShortGroup):
    """A group that imports a command when it runs; a subclass sets the `places` of the commands."""

    places: Mapping[str, CommandInfo]

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
        group = getattr(import_module(f"reliq.cli.{place.module}"), place.attribute)
        if not isinstance(group, typer.Typer):
            return command_of(name, group)
        group.info.cls = ShortGroup
        for command in group.registered_commands:
            command.cls = ShortCommand
            command.help = in_paragraphs(getdoc(command.callback) or "")
            command.name = command.name or getattr(command.callback, "__name__", "")
            command.callback = with_options(command.callback) if command.callback else None
        return typer.main.get_command(group)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the name, the command that can run and the words that are left."""
        name, listed, rest = super().resolve_command(ctx, args)
        return name, self.load(name) if listed and name else None, rest
