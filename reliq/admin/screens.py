"""Text for terminals and web pages: message bodies, numbers, and hints about missing shards."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from reliq.message import Counts

_UNUSUAL_IN_BODY = re.compile(r"[^\n\x20-\x7e]")


def format_missing(away: Sequence[int]) -> str:
    """Return a hint that figures are partial, because the Redis of the shards in `away` does not answer."""
    shards = "shard" if len(away) == 1 else "shards"
    return f"partial: without {shards} {', '.join(map(str, away))}, whose Redis is away"


def account(counts: Counts, layout: str) -> dict[str, int | None]:
    """
    Return the totals of a queue, with its numbers of living and missing messages.

    `missing` is None in a layout of the Go library.
    """
    kinds = ("published", "redriven", "acked", "dead", "expired", "cancelled", "purged")
    numbers = {kind: counts.totals.get(kind, 0) for kind in kinds}
    return {**numbers, "alive": counts.alive, "missing": counts.missing if layout == "reliq" else None}


def format_number(number: float) -> str:
    """Return a number in at most six characters, such as `999`, `12,345` or `1.2M`."""
    if number < 100_000:  # noqa: PLR2004  below it every digit is shown
        return f"{number:,.0f}"
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.1f}{unit}" if number < 100 * size else f"{number / size:.0f}{unit}"
    return f"{number:,.0f}"


def format_rate(per_second: float) -> str:
    """Return a rate per second as text; a rate below 10 has one decimal."""
    return f"{per_second:.1f}".removesuffix(".0") if per_second < 10 else format_number(per_second)  # noqa: PLR2004


def format_limit(limit: object) -> object:
    """Return a limit for the output: several values are joined to one text, and None becomes an empty text."""
    return ", ".join(map(str, limit)) if isinstance(limit, tuple) else limit or ""


def pretty(body: bytes) -> Iterator[str]:
    """Yield a body as lines of text: JSON is indented, other text is unchanged, and invalid UTF-8 is escaped."""
    import msgspec  # noqa: PLC0415  completion of a command does not wait for it

    try:
        text = msgspec.json.format(body, indent=2).decode()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        text = body.decode("utf-8", "backslashreplace")
    else:
        text = _UNUSUAL_IN_BODY.sub(
            lambda match: match[0] if match[0].isprintable() else json.dumps(match[0])[1:-1], text
        )
    yield from text.split("\n")


def as_value(body: bytes) -> Any:
    """Return a body as a JSON value if possible, else as text, else as bytes."""
    import msgspec  # noqa: PLC0415  completion of a command does not wait for it

    with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return msgspec.json.decode(body)
    try:
        return body.decode()
    except UnicodeDecodeError:
        return body


def start_of(body: bytes, limit: int) -> str:
    """Return the start of a body as text of at most `limit` characters; `…` at the end marks a cut body."""
    text = body[: 4 * limit].decode("utf-8", "replace")
    return text if len(text) <= limit else text[: limit - 1] + "…"
