"""Exceptions as text: class and place, of causes too, which anybody may read; the exception's own text when asked for."""

from __future__ import annotations

import errno
from pathlib import PurePath
from traceback import extract_tb, walk_tb
from typing import TYPE_CHECKING

from reliq.foreign import printable
from reliq.text import class_name, clean_text

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

#: At most this many exceptions of a chain, and members of a group, are written.
CHAIN_LIMIT = 5
#: At most this many frames of a traceback are written, the innermost.
FRAMES_LIMIT = 50
#: The places beside a text have at most this many characters.
PLACES_LIMIT = 280

_PORT_REFUSALS = {
    errno.EADDRINUSE: "something listens there already",
    errno.EACCES: "this user may not listen there",
    errno.EADDRNOTAVAIL: "this machine has no such address",
}
_LINKS = {
    True: "The above exception was the direct cause of the following exception:",
    False: "During handling of the above exception, another exception occurred:",
}


def described(error: BaseException) -> str:
    """Return the class of `error` and at most 200 characters of its text, on one line."""
    text = " ".join(clean_text(error, 1000).split())[:200]
    return f"{class_name(error)}: {text}" if text else class_name(error)


def port_refusal(error: Exception) -> str:
    """Return why a port cannot be listened on."""
    return _PORT_REFUSALS.get(getattr(error, "errno", None) or 0, str(error))


def placed(error: BaseException) -> str:
    """
    Return the class of `error`, the line of the handler that it came through, the line that raised it, and its causes.

    Example: `ValueError at jobs.py:31 > gateway.py:77, from KeyError at cache.py:12`. There is no text of an exception
    in it, which may hold a piece of a body.
    """
    return f"{class_name(error)} {_places(error)}".rstrip()


def traceback_of(error: BaseException, *, with_text: bool) -> str:
    """Return the traceback of `error` and of its causes, from the handler on; texts and lines of code only `with_text`."""
    parts: list[str] = []
    chain = list(_chain(error))
    for number, (one, is_cause) in reversed(list(enumerate(chain))):
        frames = extract_tb(from_handler(one.__traceback__), limit=-FRAMES_LIMIT)
        lines = (
            frames.format() if with_text else [f'  File "{f.filename}", line {f.lineno}, in {f.name}\n' for f in frames]
        )
        head = "Traceback (most recent call last):\n" if lines else ""
        said = printable(f"{class_name(one)}: {clean_text(one)}" if with_text else class_name(one))
        inside = f" of {', '.join(map(placed, _members(one)))}" if _members(one) else ""
        parts.append(f"{head}{''.join(lines)}{said}{inside}")
        if number:
            parts.append(f"\n{_LINKS[is_cause]}\n")
    return "\n".join(parts)


def _places(error: BaseException) -> str:
    """Return where `error` came through and from, and the same of its causes, without any text."""
    told: list[str] = []
    for number, (one, _) in enumerate(_chain(error)):
        lines = _lines(one.__traceback__)
        if number == 0:
            told += ["at " + " > ".join(dict.fromkeys([lines[0], lines[-1]]))] if lines else []
        else:
            told.append(f"from {class_name(one)}" + (f" at {lines[-1]}" if lines else ""))
    if members := _members(error):
        told.append(f"of {', '.join(map(class_name, members))}")
    return printable(", ".join(told))[:PLACES_LIMIT]


def _chain(error: BaseException) -> Iterator[tuple[BaseException, bool]]:
    """Yield `error`, what it was raised from, and so on; each with whether that was its direct cause."""
    seen: set[int] = set()
    one: BaseException | None = error
    is_cause = False
    while one is not None and id(one) not in seen and len(seen) < CHAIN_LIMIT:
        yield one, is_cause
        seen.add(id(one))
        is_cause = one.__cause__ is not None
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)


def _members(error: BaseException) -> list[BaseException]:
    """Return the exceptions in a group, none of one that is no group."""
    return list(error.exceptions[:CHAIN_LIMIT]) if isinstance(error, BaseExceptionGroup) else []


def _lines(traceback: TracebackType | None) -> list[str]:
    """Return file and line of the handler that an exception came through, and of what raised it."""
    frames = list(walk_tb(from_handler(traceback)))
    return [
        f"{clean_text(PurePath(frame.f_code.co_filename).name, 100)}:{line}" for frame, line in frames[:1] + frames[-1:]
    ]


def from_handler(traceback: TracebackType | None) -> TracebackType | None:
    """Return the part of `traceback` that is not ours: from the handler, or a middleware, on."""
    while traceback and str(traceback.tb_frame.f_globals.get("__name__", "")).startswith("reliq."):
        traceback = traceback.tb_next
    return traceback
