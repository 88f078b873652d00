"""How the commands answer: texts for a person, JSON for a script, and a question before what cannot be undone."""

import json
import re
import sys
import time
from collections.abc import Iterable
from typing import Any

import msgspec
import typer
from rich.console import Console

from reliq.errors import ConfigurationError
from reliq.foreign import LAST_SECOND, printable

#: Exit code of a command that was used wrongly.
EXIT_USAGE = 2

_NOT_ASCII = re.compile(r"[^\x20-\x7e]")


def console(*, stderr: bool = False) -> Console:
    """Return a console that prints texts as they are: without markup, names of emoji or highlighted numbers."""
    return Console(stderr=stderr, markup=False, emoji=False, highlight=False)


def say(*lines: object, stderr: bool = False) -> None:
    """Print each of `lines` as one line, whatever is in it."""
    for line in lines:
        print(printable(str(line)), file=sys.stderr if stderr else sys.stdout)


def complain(what: object) -> None:
    """Print what is wrong as one line on the error output."""
    say(f"reliq: {what}", stderr=True)


def print_json(value: Any) -> None:
    """Print dataclasses, lists and dictionaries as JSON, one value in one line of ASCII."""
    try:
        text = msgspec.json.encode(value).decode()
    except UnicodeEncodeError:  # an id of a foreign publisher may be any bytes
        text = json.dumps(msgspec.to_builtins(value))
    sys.stdout.write(_NOT_ASCII.sub(lambda one: json.dumps(one[0])[1:-1], text) + "\n")


def print_facts(facts: Iterable[tuple[str, Any]]) -> None:
    """Print names and values, one of each in a line; nothing is cut off."""
    say(*(f"{name:>12}  {value}" for name, value in facts))


def spoken(seconds: float) -> str:
    """Return seconds as a person says them, in at most two units: `40ms`, `1.5s`, `12s`, `3m20s`, `5h`, `2d4h`."""
    if 0.0005 <= seconds < 0.9995:  # noqa: PLR2004  what is shown as 1 to 999 ms
        return f"{seconds * 1000:.0f}ms"
    seconds = min(seconds, float(LAST_SECOND))  # of a foreign clock
    if seconds < 9.95:  # noqa: PLR2004  below it a tenth can matter
        return f"{seconds:.1f}".removesuffix(".0") + "s"
    whole = round(seconds)
    for size, unit, below, smaller in ((86_400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if whole >= size:
            rest = whole % size // below
            return f"{whole // size}{unit}" + (f"{rest}{smaller}" if rest else "")
    return f"{whole}s"


def say_age(seen: Iterable[float]) -> None:
    """Print the age of the oldest record, written at one of `seen` in unix seconds, when it is over a second."""
    age = max((time.time() - one for one in seen), default=0.0)
    if age > 1:
        say(f"as of {spoken(age)} ago")


def amount(number: float) -> str:
    """Return a number in at most six characters: `999`, `12,345`, `1.2M`."""
    if number < 100_000:  # noqa: PLR2004  below it every digit is shown
        return f"{number:,.0f}"
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.1f}{unit}" if number < 100 * size else f"{number / size:.0f}{unit}"
    return f"{number:,.0f}"


def rate(per_second: float) -> str:
    """Return a rate: with its tenths while it is small."""
    return f"{per_second:.1f}".removesuffix(".0") if per_second < 10 else amount(per_second)  # noqa: PLR2004


def confirm(question: str, *, yes: bool) -> None:
    """Have a person agree, unless `yes`; with nobody at the terminal it is an error."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise ConfigurationError(f"{question} Nobody is at the terminal to agree: say --yes")
    typer.confirm(printable(question), abort=True, err=True)


def print_found(found: int, done: str, *, json: bool) -> None:
    """Print how many a --dry-run found."""
    print_json({"found": found}) if json else say(f"{found} would be {done}")
