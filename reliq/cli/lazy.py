"""A command group that imports a command only when it runs. So `reliq --help` and shell completion start quickly."""

from __future__ import annotations

from importlib import import_module
from inspect import getdoc
from typing import TYPE_CHECKING, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

#: The options that most commands have, with their usage and help text. To keep the help of each command short, it lists
#: only their usage.
SHARED = {
    "url": ("--url URL", "URL of Redis instead of RELIQ_URL, for example redis://127.0.0.1:6379/0."),
    "json": ("--json", "Print the result as JSON, for scripts."),
    "layout": (
        "--layout LAYOUT",
        "Layout of the Redis keys: reliq, or for the Go library delayqueue hdt3213, hdt3213:tag or hdt3213:prefix=P.",
    ),
    "shard": ("--shard K", "Use only shard K of a sharded queue."),
}


class CommandInfo(NamedTuple):
    """
    The module and function of a command, and its line in `reliq --help`.

    Attributes:
        panel: the heading in `reliq --help` under which the command is listed.
        summary: the first paragraph of the command's help text.
        module: the name of a module in `reliq.cli`.
        attribute: the name of the command's function, or of the `typer.Typer` of a group, in that module.
    """

    panel: str
    summary: str
    module: str
    attribute: str


def is_shared(option: Any) -> bool:
    """Return whether an option has both the name and the help of an option in `SHARED`."""
    return option.name in SHARED and option.help == SHARED[option.name][1]


def in_paragraphs(text: str) -> str:
    """
    Join the lines of each paragraph, so that the help text is wrapped at the width of the terminal.

    Also escape `[`, which starts markup in the library rich.
    """
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n")).replace("[", r"\[")


class _ShortHelp:
    """A command or group with a short help: it shows no type for flags, and lists shared options in a single line."""

    epilog: str | None

    def format_help(self, ctx: Any, formatter: Any) -> None:
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
    """A command with a short help text."""


class ShortGroup(_ShortHelp, TyperGroup):
    """A command group with a short help text."""


def command_of(name: str, function: Callable[..., None]) -> Any:
    """Return a Typer command that calls a function. The docstring of the function is the help text."""
    alone = typer.Typer(add_completion=False)
    alone.command(name, cls=ShortCommand, help=in_paragraphs(getdoc(function) or ""))(function)
    return typer.main.get_command(alone)


class LazyGroup(ShortGroup):
    """
    A command group that imports a command when it runs.

    A subclass sets `places`, which describes each command by name.
    """

    places: Mapping[str, CommandInfo]

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.commands = {
            name: TyperCommand(name, help=place.summary, rich_help_panel=place.panel)
            for name, place in self.places.items()
        }

    @classmethod
    def load(cls, name: str) -> Any:
        """Import a command from its module and return it."""
        place = cls.places[name]
        group = getattr(import_module(f"reliq.cli.{place.module}"), place.attribute)
        if not isinstance(group, typer.Typer):
            return command_of(name, group)
        group.info.cls = ShortGroup
        for command in group.registered_commands:
            command.cls = ShortCommand
            command.help = in_paragraphs(getdoc(command.callback) or "")
            command.name = command.name or getattr(command.callback, "__name__", "")
        return typer.main.get_command(group)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the name of a command, the imported command and its arguments."""
        name, listed, rest = super().resolve_command(ctx, args)
        return name, self.load(name) if listed and name else None, rest
