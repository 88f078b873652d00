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


def some(ids: Sequence[str], count: int = 0) -> str:
    """Return the first five of `ids` as one text, and how many more there are, of `count` when that are more."""
    left = max(len(ids), count) - min(len(ids), IDS_SHOWN)
    return (", ".join(ids[:IDS_SHOWN]) or "none") + (f" and {left} more" if left else "")


def count_of(number: int, one: str, more: str = "") -> str:
    """Return `1 process` or `1,200 processes`; `more` is the plural of what does not take an s."""
    return f"{number:,} {one if number == 1 else more or one + 's'}"
