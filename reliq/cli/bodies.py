"""A body as a person or a script reads it, whatever it holds."""

import json
import re
from collections.abc import Iterator
from typing import Any

import msgspec

#: JSON nested deeper is shown as text: a reader of our JSON may take no more levels.
DEEPEST = 100

_NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_UNUSUAL = re.compile(r"[^\n\x20-\x7e]")


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
