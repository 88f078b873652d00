"""How messages ended: the last abnormal ends of a queue, and the last acked ones where they are kept."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from reliq import reads
from reliq.call import Command, id_text
from reliq.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from reliq.doors.blocking import BlockingDoor
    from reliq.keys import Keys
    from reliq.message import Letter

Kind = Literal["dead", "expired", "cancelled", "purged", "acked"]
KINDS: tuple[Kind, ...] = ("dead", "expired", "cancelled", "purged", "acked")

#: Entries in one read of a stream.
PAGE = 1000
#: Letters in one read: they have bodies.
LETTER_PAGE = 50
#: Around the moment of an end its letter was written.
NEARBY_MS = 200
#: For so long the letters are searched when no end says where to look.
SEARCH_SECONDS = 0.3


@dataclass(frozen=True, slots=True)
class End:
    """
    How one message ended.

    Attributes:
        kind: `dead`, `expired` (its TTL passed before a delivery, or its body was gone), `cancelled`, `purged`
            or `acked`.
        at: when, in unix seconds by Redis' clock.
        reason: of its last failure: `failed`, `rejected`, `undecodable` or `lease`; empty when there was none.
        attempt: which delivery that was, None when nobody knows.
        error: the last error's text.
        took: for how many seconds the handler of an acked one ran, None when nobody knows.
    """

    id: str
    kind: Kind
    at: float
    reason: str = ""
    attempt: int | None = None
    error: str = ""
    took: float | None = None


def ends_of(door: BlockingDoor, keys: Keys, *, kind: str | None, limit: int, for_seconds: float) -> list[End]:
    """
    Return the last abnormal ends, or the last ends of one kind, newest first.

    Raises:
        ConfigurationError: there is no such kind.
    """
    if kind is not None and kind not in KINDS:
        raise ConfigurationError(f"kind must be one of {', '.join(KINDS)}, not {kind[:40]!r}")
    found: list[End] = []
    for page in _pages(door, keys.history if kind == "acked" else keys.ends, for_seconds):
        found += [end for end in page if kind in (None, end.kind)]
        if len(found) >= limit:
            break
    return found[:limit]


def last_ends(door: BlockingDoor, queues: Sequence[Keys], limit: int) -> list[tuple[Keys, End]]:
    """Return the last abnormal ends of several queues in one round trip, newest first; none of one that refuses."""
    commands: list[Command[list[Any]]] = [
        Command(("XREVRANGE", keys.ends, "+", "-", "COUNT", limit), list) for keys in queues
    ]
    answers = zip(queues, door.run_all(commands), strict=True)
    found = [(keys, _end(*row)) for keys, answer in answers if not isinstance(answer, Exception) for row in answer]
    return sorted(found, key=lambda pair: -pair[1].at)


def ends_of_one(door: BlockingDoor, keys: Keys, id: str, for_seconds: float) -> list[End]:
    """Return every end of one id that is remembered, newest first: an id can be published again after its end."""
    streams = (keys.ends, keys.history)
    found = [end for stream in streams for page in _pages(door, stream, for_seconds) for end in page if end.id == id]
    return sorted(found, key=lambda end: -end.at)


def letters_of_one(
    door: BlockingDoor, keys: Keys, id: str, ends: Sequence[End], for_seconds: float
) -> tuple[list[Letter], bool]:
    """
    Return the dead letters of one id, newest first, and whether none can have been missed.

    Where its deaths are remembered, they say where to look; else the letters are searched from the newest on, for
    a moment.
    """
    deaths = [end for end in ends if end.kind == "dead"]
    if not deaths:
        return _search(door, keys, id, for_seconds)
    found: list[Letter] = []
    for end in deaths:
        at = round(end.at * 1000)
        near = reads.letters_between(keys, str(at - NEARBY_MS), str(at + NEARBY_MS), count=4 * LETTER_PAGE)
        found += [letter for letter in door.run(near, for_seconds=for_seconds) if letter.id == id]
    names = {letter.letter: letter for letter in found}
    return sorted(names.values(), key=lambda letter: -letter.died), True


def _search(door: BlockingDoor, keys: Keys, id: str, for_seconds: float) -> tuple[list[Letter], bool]:
    until = time.monotonic() + SEARCH_SECONDS
    last = "+"
    while time.monotonic() < until:
        page = door.run(
            reads.letters_between(keys, "-", last, count=LETTER_PAGE, newest_first=True), for_seconds=for_seconds
        )
        if found := [letter for letter in page if letter.id == id]:
            return found, True
        if len(page) < LETTER_PAGE:
            return [], True
        last = f"({page[-1].letter}"
    return [], False


def _pages(door: BlockingDoor, stream: str, for_seconds: float) -> Iterator[list[End]]:
    """Read a stream from its newest entry on."""
    last = "+"
    while True:
        command = ("XREVRANGE", stream, last, "-", "COUNT", PAGE)
        rows: list[Any] = door.run(Command(command, list), for_seconds=for_seconds)
        yield [_end(name, fields) for name, fields in rows]
        if len(rows) < PAGE:
            return
        last = f"({rows[-1][0].decode()}"


def _end(name: bytes, fields: list[bytes]) -> End:
    told = dict(zip(fields[::2], fields[1::2], strict=False))
    kind: Any = told.get(b"kind", b"").decode("utf-8", "replace")
    note = told.get(b"note", b"").decode("utf-8", "replace")
    id, at = id_text(told.get(b"id", b"")), int(name.split(b"-")[0]) / 1000
    if kind == "acked":
        return End(id, kind, at, took=int(note) / 1000 if note.isdigit() else None)
    reason, attempt, error = [*note.split(" ", 2), "", ""][:3]
    return End(id, kind, at, reason, int(attempt) if attempt.isdigit() else None, error)
