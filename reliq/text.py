"""
Helpers: escape text, format durations, check keyword arguments, split sequences into chunks.

Redis may contain data that other programs wrote. So reliq escapes text from Redis before it prints the text, and limits
numbers from Redis to valid ranges.
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

#: The last second of the year 9999, the end of `datetime`.
LAST_SECOND = 253_402_300_799
#: The longest reason or error text that is stored, in characters.
TEXT_LIMIT = 500
NAME_LIMIT = 100
#: Log lines and errors list at most this many ids, and then the number of further ids.
IDS_SHOWN = 5

_WHOLE = re.compile(r"-?[0-9]{1,19}")


def printable(text: str) -> str:
    """Return `text` on one line, with escapes for characters that a terminal interprets, hides or reorders."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def whole_number(text: str | bytes) -> int | None:
    """Parse a whole number of at most 19 digits; return None for any other text."""
    digits = text if isinstance(text, str) else text.decode("ascii", "replace")
    return int(digits) if _WHOLE.fullmatch(digits) else None


def clamp_time(seconds: float) -> float:
    """Return unix seconds, rounded to ms and limited to the years 1970 to 9999."""
    return round(min(max(float(seconds), 0.0), float(LAST_SECOND)), 3)


def clean_text(value: object, limit: int = TEXT_LIMIT) -> str:
    """
    Return the first `limit` characters of `str(value)`; replace characters that UTF-8 cannot encode.

    This function never raises. If `str(value)` raises, the result contains the name of the class.
    """
    try:
        text = value if type(value) is str else "".join([str(value)])
        return text[:limit].encode("utf-8", "replace").decode()
    except Exception:
        return f"<{class_name(value)} without a text>"[:limit]


def class_name(value: object) -> str:
    """Return the name of the class of `value`. This function never raises."""
    try:
        return str(type(value).__name__)[:NAME_LIMIT]
    except Exception:
        return "a class without a name"


def join_first(ids: Sequence[str], count: int = 0) -> str:
    """
    Format ids for a log line or an error, for example `a, b, c, d, e and 7 more`.

    Args:
        ids: all ids, or only the first ids.
        count: the total number of ids, if `ids` has only the first of them.
    """
    left = max(len(ids), count) - min(len(ids), IDS_SHOWN)
    return (", ".join(ids[:IDS_SHOWN]) or "none") + (f" and {left} more" if left else "")


def shell_command(command: str, *names: str, options: Sequence[str] = (), layout: object = "reliq") -> str:
    """
    Return a reliq command as a user must type it in a shell, for error and log texts.

    If one of the `names` begins with a hyphen, put `--` before the names, so that they are not parsed as options.
    """
    from shlex import join  # noqa: PLC0415  publishers rarely call this

    given = [*options, *(() if str(layout) == "reliq" else ("--layout", str(layout)))]
    words = [*given, "--", *names] if any(name.startswith("-") for name in names) else [*names, *given]
    return f"reliq {command} {join(words)}"


def pluralize(number: int, one: str, more: str = "") -> str:
    """Return a number with its noun, for example `1 worker`. Give the plural as `more` if it is not `one` plus s."""
    return f"{number:,} {one if number == 1 else more or one + 's'}"


def format_duration(seconds: float) -> str:
    """Format seconds with at most two units, for example `40ms`, `1.5s`, `12s`, `3m20s`, `5h` or `2d4h`."""
    if 0.0005 <= seconds < 0.9995:  # noqa: PLR2004  displayed as 1 to 999 ms
        return f"{seconds * 1000:.0f}ms"
    seconds = min(seconds, float(LAST_SECOND))  # a wrong clock of another host can cause a huge duration
    if seconds < 9.95:  # noqa: PLR2004  tenths only for short times
        return f"{seconds:.1f}".removesuffix(".0") + "s"
    whole = round(seconds)
    for size, unit, below, smaller in ((86_400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if whole >= size:
            rest = whole % size // below
            return f"{whole // size}{unit}" + (f"{rest}{smaller}" if rest else "")
    return f"{whole}s"


def check_keywords(call: str, given: Iterable[str], known: Collection[str], advice: str = "") -> None:
    """Raise TypeError, with a hint, if `given` has a keyword argument that the function `call` does not know."""
    unknown = next((name for name in given if name not in known), None)
    if unknown is not None:
        near = import_module("difflib").get_close_matches(unknown, known, 1)  # rarely needed, so imported here
        hint = f"Did you mean {near[0]!r}?" if near else advice or f"It takes {', '.join(sorted(known))}"
        raise TypeError(f"{call}() got an unexpected keyword argument {unknown!r}. {hint}")


def checking_keywords(kind: C) -> C:
    """
    Class decorator: give a keyword-only dataclass better errors for unknown keyword arguments.

    The dataclass then raises the TypeError of `check_keywords`, which suggests a similar name.
    """
    original = vars(kind)["__init__"]

    @wraps(original)
    def __init__(self: Any, **given: Any) -> None:  # noqa: N807  replaces __init__
        try:
            original(self, **given)
        except TypeError:
            check_keywords(kind.__name__, given, kind.__dataclass_fields__)  # type: ignore[attr-defined]
            raise

    kind.__init__ = __init__  # type: ignore[misc]
    return kind


def chunked(items: Iterable[T], most: int) -> Iterator[list[T]]:
    """Yield chunks of at most `most` items."""
    rest = iter(items)
    while chunk := list(islice(rest, most)):
        yield chunk


def chunked_by_size(items: Iterable[T], size: Callable[[T], int], largest: int, most: int) -> Iterator[list[T]]:
    """
    Yield chunks of at most `most` items whose sizes add up to at most `largest`.

    An item larger than `largest` gets its own chunk. `size` returns the size of an item.
    """
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
