"""Any value as text that can be kept, sent and written: what a handler, its exceptions or foreign code call a text."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Characters that are kept of a reason or an error's text.
TEXT_LIMIT = 500
NAME_LIMIT = 100
#: A line names five ids, and how many more there are.
IDS_SHOWN = 5


def clean_text(value: object, limit: int = TEXT_LIMIT) -> str:
    """
    Return `value` as text that UTF-8 can hold, at most `limit` characters of it.

    It never raises: of what cannot say its text, the type is told.
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


def partial(away: Sequence[int]) -> str:
    """Return that figures are partial, because the Redis of these shards is away."""
    return (
        f"partial: without {'shard' if len(away) == 1 else 'shards'} {', '.join(map(str, away))}, whose Redis is away"
    )


def some(ids: Sequence[str], count: int = 0) -> str:
    """Return the first five of `ids` as one text, and how many more there are, of `count` when that are more."""
    left = max(len(ids), count) - min(len(ids), IDS_SHOWN)
    return (", ".join(ids[:IDS_SHOWN]) or "none") + (f" and {left} more" if left else "")


def typed(command: str, *names: str, options: Sequence[str] = (), layout: object = "reliq") -> str:
    """
    Return a command of reliq as a person types it into a shell, for a message that names it.

    A name that begins with a hyphen would be read as an option: `--` stands before the names then.
    """
    from shlex import join  # noqa: PLC0415  publishers import this module and seldom call this

    given = [*options, *(() if str(layout) == "reliq" else ("--layout", str(layout)))]
    words = [*given, "--", *names] if any(name.startswith("-") for name in names) else [*names, *given]
    return f"reliq {command} {join(words)}"


def count_of(number: int, one: str, more: str = "") -> str:
    """Return `1 process` or `1,200 processes`; `more` is the plural of what does not take an s."""
    return f"{number:,} {one if number == 1 else more or one + 's'}"
