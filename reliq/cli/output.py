"""
The output of the commands: text for a person, JSON for a script, and a question before what cannot be undone.

rich and msgspec are imported when they print something: completion and the options of a command wait for neither.
"""

from __future__ import annotations

import json
import re
import sys
from typing import TYPE_CHECKING, Any

import typer

from reliq.errors import ConfigurationError
from reliq.text import printable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import Console

#: Exit codes: a command that was used wrongly, one that named a message that is not there, one that left work undone, one
#: that Ctrl-C ended.
EXIT_USAGE, EXIT_UNKNOWN_ID, EXIT_UNFINISHED, EXIT_INTERRUPTED = 2, 2, 3, 130

_NOT_ASCII = re.compile(r"[^\x20-\x7e]")


def console(*, stderr: bool = False) -> Console:
    """Return a console that prints texts as they are: without markup, names of emoji or highlighted numbers."""
    from rich.console import Console  # noqa: PLC0415

    return Console(stderr=stderr, markup=False, emoji=False, highlight=False)


def say(*lines: object, stderr: bool = False) -> None:
    """Print each of `lines` as one line, whatever is in it, at once: also where another program reads them."""
    for line in lines:
        print(printable(str(line)), file=sys.stderr if stderr else sys.stdout, flush=True)


def complain(what: object) -> None:
    """Print what is wrong as one line on the error output."""
    say(f"reliq: {what}", stderr=True)


def print_json(value: Any) -> None:
    """Print dataclasses, lists and dictionaries as JSON, one value in one line of ASCII."""
    import msgspec  # noqa: PLC0415

    try:
        text = msgspec.json.encode(value).decode()
    except UnicodeEncodeError:  # an id of a foreign publisher may be any bytes
        text = json.dumps(msgspec.to_builtins(value))
    sys.stdout.write(_NOT_ASCII.sub(lambda one: json.dumps(one[0])[1:-1], text) + "\n")


def print_facts(facts: Iterable[tuple[str, Any]]) -> None:
    """Print names and values, one of each in a line; nothing is cut off."""
    say(*(f"{name:>12}  {value}" for name, value in facts))


def confirm(question: str, *, yes: bool) -> None:
    """Ask a person to agree, unless `yes`; without a terminal it is an error."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise ConfigurationError(f"{question} Nobody is at the terminal to agree: say --yes")
    typer.confirm(printable(question), abort=True, err=True)


def print_found(found: int, done: str, *, json: bool) -> None:
    """Print how many a --dry-run found."""
    print_json({"found": found}) if json else say(f"{found} would be {done}")
