"""A group of commands that imports a command when it runs: `reliq --help` and completion need their names alone."""

from __future__ import annotations

from importlib import import_module
from inspect import getdoc
from typing import TYPE_CHECKING, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

if TYPE_CHECKING:
    from collections.abc import Mapping


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


def in_paragraphs(text: str) -> str:
    """Return a text with each paragraph in one line: the terminal's width wraps it, not the source's."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))


class _PlainFlags:
    """A command or a group whose help shows no type beside a flag, which takes no value."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help."""
        for parameter in self.get_params(ctx):  # type: ignore[attr-defined]
            if getattr(parameter, "is_flag", False):
                parameter.metavar = ""
        super().format_help(ctx, formatter)  # type: ignore[misc]


class Command(_PlainFlags, TyperCommand):
    """A command."""


class Group(_PlainFlags, TyperGroup):
    """A group of commands, which are all loaded."""


class LazyGroup(Group):
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
            alone = typer.Typer(add_completion=False)
            alone.command(name, cls=Command, help=in_paragraphs(getdoc(found) or ""))(found)
            return typer.main.get_command(alone)
        found.info.cls = Group
        for one in found.registered_commands:
            one.cls, one.help = Command, in_paragraphs(getdoc(one.callback) or "")
        return typer.main.get_command(found)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the name, the command that can run and the words that are left."""
        name, found, rest = super().resolve_command(ctx, args)
        return name, self.load(name) if found and name else None, rest
