"""Numbers, times and bodies as a person reads them."""

import json
import re
from collections.abc import Iterator
from typing import Any

import msgspec

from reliq.foreign import LAST_SECOND

#: JSON nested deeper is shown as text: a reader of our JSON may take no more levels.
DEEPEST = 100

_NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_UNUSUAL = re.compile(r"[^\n\x20-\x7e]")


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


def pretty(body: bytes) -> Iterator[str]:
    """Yield the lines of a body: JSON laid out, text as it is, else its bytes escaped."""
    try:
        text = msgspec.json.format(body, indent=2).decode()
    except _NOT_JSON:
        text = body.decode("utf-8", "backslashreplace")
    else:
        text = _UNUSUAL.sub(lambda one: one[0] if one[0].isprintable() else json.dumps(one[0])[1:-1], text)
    yield from text.split("\n")


def as_value(body: bytes) -> Any:
    """Return a body as JSON where it is JSON, else as text, else as bytes, which become base 64."""
    try:
        value = msgspec.json.decode(body)
    except _NOT_JSON:
        pass
    else:
        if not _is_deep(value):
            return value
    try:
        return body.decode()
    except UnicodeDecodeError:
        return body


def start_of(body: bytes, limit: int) -> str:
    """Return the start of a body as text, with `…` when there is more."""
    text = body[: 4 * limit].decode("utf-8", "replace")
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(DEEPEST):
        level = [inner for one in level for inner in _inner(one)]
        if not level:
            return False
    return True


def _inner(value: Any) -> Any:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
