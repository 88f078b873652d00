"""How messages ended: the last abnormal ends of a queue, and the last acked ones where they are kept."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from reliq import commands
from reliq.call import Command, id_text
from reliq.errors import ConfigurationError
from reliq.foreign import moment, whole_number
from reliq.wireformat import FailureNote

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from reliq.client.client import Client
    from reliq.keys import Keys
    from reliq.message import Letter

Kind = Literal["dead", "expired", "cancelled", "purged", "acked"]
KINDS: tuple[Kind, ...] = ("dead", "expired", "cancelled", "purged", "acked")

#: Entries in one read of a stream.
PAGE = 1000
#: The first read of a search is one letter, for it has a body of any size; at most twice as many follow, and about as
#: many as these bytes hold.
PAGE_BYTES = 500_000
#: For so long the letters are searched when no end says where to look.
SEARCH_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class End:
    """
    How one message ended.

    Attributes:
        kind: `dead`, `expired` (its TTL passed before a delivery, or its body was gone), `cancelled`, `purged`
            or `acked`.
        at: when, in unix seconds by Redis' clock.
        reason: of its last failure, one of `DEATH_REASONS`; empty when there was none.
        attempt: which delivery that was, None when nobody knows.
        error: the last error's text.
        took: for how many seconds the handler of an acked one ran, None when nobody knows.
        letter: names the dead letter of a dead one; empty when the queue keeps none.
    """

    id: str
    kind: Kind
    at: float
    reason: str = ""
    attempt: int | None = None
    error: str = ""
    took: float | None = None
    letter: str = ""


def ends_of(client: Client, keys: Keys, *, kind: str | None, limit: int, for_seconds: float) -> list[End]:
    """
    Return the last abnormal ends, or the last ends of one kind, newest first.

    Raises:
        ConfigurationError: there is no such kind.
    """
    check_kind(kind)
    found: list[End] = []
    for page in _pages(client, keys.history if kind == "acked" else keys.ends, for_seconds):
        found += [end for end in page if kind in (None, end.kind)]
        if len(found) >= limit:
            break
    return found[:limit]


def check_kind(kind: str | None) -> None:
    """Raise ConfigurationError when there is no such kind of end; None stands for all that are abnormal."""
    if kind is not None and kind not in KINDS:
        raise ConfigurationError(f"kind must be one of {', '.join(KINDS)}, not {str(kind)[:40]!r}")


def last_ends(client: Client, queues: Sequence[Keys], limit: int) -> list[tuple[Keys, End]]:
    """Return the last abnormal ends of several queues in one round trip, newest first; none of one that refuses."""
    asked: list[Command[list[Any]]] = [
        Command(("XREVRANGE", keys.ends, "+", "-", "COUNT", limit), list) for keys in queues
    ]
    answers = zip(queues, client.run_all(asked), strict=True)
    found = [(keys, _end(*row)) for keys, answer in answers if not isinstance(answer, Exception) for row in answer]
    return sorted(found, key=lambda pair: -pair[1].at)


def ends_of_one(client: Client, keys: Keys, id: str, for_seconds: float) -> list[End]:
    """Return every end of one id that is remembered, newest first: an id can be published again after its end."""
    streams = (keys.ends, keys.history)
    found = [end for stream in streams for page in _pages(client, stream, for_seconds) for end in page if end.id == id]
    return sorted(found, key=lambda end: -end.at)


def letters_of_one(client: Client, keys: Keys, ends: Sequence[End], for_seconds: float) -> list[Letter]:
    """Return the dead letters that remembered ends of one id left, newest first, as far as they are still there."""
    asked = [commands.letters_between(keys, end.letter, end.letter, count=1) for end in ends if end.letter]
    answers = client.run_all(asked, for_seconds=for_seconds)
    return [letter for answer in answers if not isinstance(answer, Exception) for letter in answer]


def letter_searched(client: Client, keys: Keys, id: str, for_seconds: float) -> tuple[list[Letter], bool]:
    """Look through the letters for one of `id`, newest first, for a moment; say also whether that was all of them."""
    until = time.monotonic() + SEARCH_SECONDS
    last, count = "+", 1
    wanted = id.encode("utf-8", "surrogateescape")
    while time.monotonic() < until:
        command = Command(("XREVRANGE", keys.dead, last, "-", "COUNT", count), list[Any])
        rows = client.run(command, for_seconds=for_seconds)
        for name, fields in rows:
            if wanted in fields[:2]:
                place = name.decode()
                return client.run(commands.letters_between(keys, place, place, count=1), for_seconds=for_seconds), True
        if len(rows) < count:
            return [], True
        last = f"({rows[-1][0].decode()}"
        average = sum(len(part) for _, fields in rows for part in fields) // len(rows)
        count = max(1, min(2 * count, PAGE, PAGE_BYTES // max(1, average)))
    return [], False


def _pages(client: Client, stream: str, for_seconds: float) -> Iterator[list[End]]:
    """Read a stream from its newest entry on."""
    last = "+"
    while True:
        command = ("XREVRANGE", stream, last, "-", "COUNT", PAGE)
        rows: list[Any] = client.run(Command(command, list), for_seconds=for_seconds)
        yield [_end(name, fields) for name, fields in rows]
        if len(rows) < PAGE:
            return
        last = f"({rows[-1][0].decode()}"


def _end(name: bytes, fields: list[bytes]) -> End:
    told = dict(zip(fields[::2], fields[1::2], strict=False))
    kind: Any = told.get(b"kind", b"").decode("utf-8", "replace")
    id, at = id_text(told.get(b"id", b"")), moment(int(name.split(b"-")[0]) / 1000)
    if kind == "acked":
        took = whole_number(told.get(b"note", b""))
        return End(id, kind, at, took=None if took is None else took / 1000)
    note = FailureNote.parse(told.get(b"note"))
    letter = told.get(b"letter", b"").decode("utf-8", "replace")
    return End(id, kind, at, note.reason, note.attempt, note.error, letter=letter)
