"""
Text for people and from others: foreign data made harmless, durations formatted, keywords and chunks checked.

Redis may hold data that another program wrote. So text is escaped before it is shown, and numbers are read within bounds.
"""

from __future__ import annotations

import re
from functools import wraps
from importlib import import_module
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence


C = TypeVar("C", bound=type)
T = TypeVar("T")

#: The last second of the year 9999, where `datetime` ends.
LAST_SECOND = 253_402_300_799
#: Characters that are kept of a reason or an error's text.
TEXT_LIMIT = 500
NAME_LIMIT = 100
#: A line names five ids, and how many more there are.
IDS_SHOWN = 5

_WHOLE = re.compile(r"-?[0-9]{1,19}")


def printable(text: str) -> str:
    """Return `text` in one line, every character escaped that a terminal obeys, hides, or shows elsewhere."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def whole_number(text: str | bytes) -> int | None:
    """Return the number that `text` is, of at most 19 digits; None for any other text."""
    digits = text if isinstance(text, str) else text.decode("ascii", "replace")
    return int(digits) if _WHOLE.fullmatch(digits) else None


def clamp_time(seconds: float) -> float:
    """Return unix seconds that have a date, to the ms: what lies before 1970 or after 9999 is the nearest that does."""
    return round(min(max(float(seconds), 0.0), float(LAST_SECOND)), 3)


def clean_text(value: object, limit: int = TEXT_LIMIT) -> str:
    """
    Return `value` as text that UTF-8 can hold, at most `limit` characters of it.

    It never raises: a value without a text is replaced by the name of its type.
    """
    try:
        text = value if type(value) is str else "".join([str(value)])
        return text[:limit].encode("utf-8", "replace").decode()
    except Exception:
        return f"<{class_name(value)} without a text>"[:limit]


def class_name(value: object) -> str:
    """Return the name of the class of `value`; it never raises."""
    try:
        return str(type(value).__name__)[:NAME_LIMIT]
    except Exception:
        return "a class without a name"


def join_first(ids: Sequence[str], count: int = 0) -> str:
    """Return the first five of `ids` as one text, and how many more there are, of `count` when that are more."""
    left = max(len(ids), count) - min(len(ids), IDS_SHOWN)
    return (", ".join(ids[:IDS_SHOWN]) or "none") + (f" and {left} more" if left else "")


def shell_command(command: str, *names: str, options: Sequence[str] = (), layout: object = "reliq") -> str:
    """
    Return a command of reliq as a person types it into a shell, for a message that names it.

    A name that begins with a hyphen would be read as an option: `--` precedes the names then.
    """
    from shlex import join  # noqa: PLC0415  publishers import this module and rarely call this

    given = [*options, *(() if str(layout) == "reliq" else ("--layout", str(layout)))]
    words = [*given, "--", *names] if any(name.startswith("-") for name in names) else [*names, *given]
    return f"reliq {command} {join(words)}"


def pluralize(number: int, one: str, more: str = "") -> str:
    """Return `1 process` or `1,200 processes`; `more` is the plural of what does not take an s."""
    return f"{number:,} {one if number == 1 else more or one + 's'}"


def format_duration(seconds: float) -> str:
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


def check_keywords(call: str, given: Iterable[str], known: Collection[str], advice: str = "") -> None:
    """Raise TypeError, as for a function without `**options`, when one of `given` is not among `known`."""
    unknown = next((name for name in given if name not in known), None)
    if unknown is not None:
        near = import_module("difflib").get_close_matches(unknown, known, 1)  # few programs need it
        hint = f"Did you mean {near[0]!r}?" if near else advice or f"It takes {', '.join(sorted(known))}"
        raise TypeError(f"{call}() got an unexpected keyword argument {unknown!r}. {hint}")


def checking_keywords(kind: C) -> C:
    """Decorate a dataclass of keyword-only fields, so that it refuses other keywords as `check_keywords` does."""
    original = vars(kind)["__init__"]

    @wraps(original)
    def __init__(self: Any, **given: Any) -> None:  # noqa: N807  it takes the place of that
        try:
            original(self, **given)
        except TypeError:
            check_keywords(kind.__name__, given, kind.__dataclass_fields__)  # type: ignore[attr-defined]
            raise

    kind.__init__ = __init__  # type: ignore[misc]
    return kind


def chunked(items: Iterable[T], most: int) -> Iterator[list[T]]:
    """Yield items, at most so many at a time."""
    rest = iter(items)
    while chunk := list(islice(rest, most)):
        yield chunk


def chunked_by_size(items: Iterable[T], size: Callable[[T], int], largest: int, most: int) -> Iterator[list[T]]:
    """Yield items, at most `most` at a time, whose sizes come to `largest` at most; a larger item comes alone."""
    chunk: list[T] = []
    total = 0
    for item in items:
        total += size(item)
        if chunk and (total > largest or len(chunk) == most):
            yield chunk
            chunk = []
            total = size(item)
        chunk.append(item)
    if chunk:
        yield chunk
