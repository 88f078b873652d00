"""How messages ended: the last abnormal ends of a queue, and the last acked ones where they are kept."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from reliq import commands
from reliq.admin import queries
from reliq.admin.parts import ask_each
from reliq.call import id_text
from reliq.failure_note import FailureNote
from reliq.foreign import moment, whole_number
from reliq.keys import Keys
from reliq.settings import check_is_one_of, whole

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from reliq.admin.queries import Stream
    from reliq.admin.session import QueueSession, Session
    from reliq.message import Letter
    from reliq.snapshot.shard_maps import ShardMaps

EndKind = Literal["dead", "expired", "cancelled", "purged", "acked"]
END_KINDS: tuple[EndKind, ...] = ("dead", "expired", "cancelled", "purged", "acked")

#: One list has at most this many ends.
ENDS_LIMIT = 100_000
#: Entries in one read of a stream.
PAGE = 1000
#: The first read of a search is one letter, for it may be of any size; each later read has at most twice as many as the
#: one before, and as many as these bytes are expected to hold.
PAGE_BYTES = 500_000
#: When no end says where a letter is, all letters are searched for at most this many seconds.
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
        attempt: which delivery that was, None when it is unknown.
        error: the last error's text.
        took: for how many seconds the handler of an acked one ran, None when it is unknown.
        letter: names the dead letter of a dead one; empty when the queue keeps none.
    """

    id: str
    kind: EndKind
    at: float
    reason: str = ""
    attempt: int | None = None
    error: str = ""
    took: float | None = None
    letter: str = ""


def check_ends(kind: str | None, limit: int) -> None:
    """Raise ConfigurationError when there is no such kind of end, or the limit is not 1 to 100,000."""
    whole("limit", limit, least=1, most=ENDS_LIMIT)
    if kind is not None:
        check_is_one_of("kind", kind, END_KINDS)


def ends_of(queue: QueueSession, *, kind: str | None, limit: int) -> list[End]:
    """Return the last abnormal ends, or the last ends of one kind, newest first."""
    found: list[End] = []
    for part in queue.parts:
        met = 0
        for page in _pages(part, "history" if kind == "acked" else "ends"):
            ends = [end for end in page if kind in (None, end.kind)]
            found, met = found + ends, met + len(ends)
            if met >= limit:
                break
    return (sorted(found, key=lambda end: -end.at) if queue.is_sharded else found)[:limit]


def last_ends(session: Session, queues: Sequence[Keys], limit: int, maps: ShardMaps) -> list[tuple[Keys, End]]:
    """Return the last abnormal ends of several queues in one round trip, newest first; none of one that refuses."""
    answers, _ = ask_each(session, queues, lambda keys: queries.newest_entries(keys, "ends", "+", limit), maps)
    found = list[tuple[Keys, End]]()
    for keys, parts in zip(queues, answers, strict=True):
        ends = [_end(*row) for answer in parts if not isinstance(answer, Exception) for row in answer]
        found += [(keys, end) for end in sorted(ends, key=lambda end: -end.at)[:limit]]
    return sorted(found, key=lambda pair: -pair[1].at)


def ends_of_one(queue: QueueSession, id: str) -> list[End]:
    """Return every end of one id that is remembered, newest first: an id can be published again after its end."""
    streams: tuple[Stream, ...] = ("ends", "history")
    found = [end for stream in streams for page in _pages(queue, stream) for end in page if end.id == id]
    return sorted(found, key=lambda end: -end.at)


def letters_of_one(queue: QueueSession, ends: Sequence[End]) -> list[Letter]:
    """Return the dead letters that remembered ends of one id left, newest first, as far as they are still there."""
    asked = [commands.letters_between(queue.keys, end.letter, end.letter, count=1) for end in ends if end.letter]
    answers = queue.try_all(asked)
    return [letter for answer in answers if not isinstance(answer, Exception) for letter in answer]


def letter_searched(queue: QueueSession, id: str) -> tuple[list[Letter], bool]:
    """Look through the letters for one of `id`, newest first, for a moment; say also whether that was all of them."""
    until = time.monotonic() + SEARCH_SECONDS
    last, count = "+", 1
    wanted = id.encode("utf-8", "surrogateescape")
    while time.monotonic() < until:
        rows = queue.run(queries.newest_entries(queue.keys, "dead", last, count))
        for name, fields in rows:
            if wanted in fields[:2]:
                place = name.decode()
                return queue.run(commands.letters_between(queue.keys, place, place, count=1)), True
        if len(rows) < count:
            return [], True
        last = f"({rows[-1][0].decode()}"
        average = sum(len(part) for _, fields in rows for part in fields) // len(rows)
        count = max(1, min(2 * count, PAGE, PAGE_BYTES // max(1, average)))
    return [], False


def _pages(queue: QueueSession, stream: Stream) -> Iterator[list[End]]:
    """Read a stream from its newest entry on."""
    last = "+"
    while True:
        rows = queue.run(queries.newest_entries(queue.keys, stream, last, PAGE))
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
