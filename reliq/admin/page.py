"""The messages of one state, a page at a time, and a search through them for a moment at a time."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from heapq import merge
from typing import TYPE_CHECKING

from reliq.admin import queries
from reliq.admin.cursor import Cursor, rows_after
from reliq.admin.dead import letters_in, span_of
from reliq.admin.filters import Filter, LetterFilter
from reliq.admin.list import Entry, entries, of_letter
from reliq.admin.places import LinePlace, Spot, check_place, place_of
from reliq.admin.session import QueueSession
from reliq.admin.walk import read_messages
from reliq.errors import ConfigurationError
from reliq.message import Letter
from reliq.settings import BATCH_LIMIT, MIB, seconds, whole

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from reliq.admin.places import Place

    #: A message that was met, and its shard.
    Row = tuple[QueueSession, Cursor]

#: A page has at most this many messages, of each this many bytes of the body, and ends when so many of letters are read.
PAGE_LIMIT, BODY_BYTES, LETTERS_BYTES = 200, 1024, 4 * MIB
#: The first step of a search looks at this many messages; a step takes at most this part of the search's time.
SEARCH_STEP, STEP_PART = 32, 8
#: A search goes on for at most this many seconds.
LONGEST_SEARCH = 60
#: States whose messages have no order between shards: a page of several shards has one after another.
CHAINED = ("ready", "waiting", "retry", "garbage")


@dataclass(frozen=True, slots=True)
class MessagePage:
    """
    A page of messages.

    Attributes:
        items: what comes first first; of dead letters the newest. Bodies are cut to their first KiB.
        after: what the next page is asked for with; None after the last.
    """

    items: Sequence[Entry]
    after: str | None


@dataclass(frozen=True, slots=True)
class SearchResult:
    """
    The messages that a search found in its time.

    Attributes:
        items: as those of a page.
        looked: how many messages it looked at.
        of: how many the state had when it began.
        after: what the search is gone on with; None when it came to the end.
    """

    items: Sequence[Entry]
    looked: int
    of: int
    after: str | None


def page_of(queue: QueueSession, state: str, after: str | None, limit: int, key: str = "") -> MessagePage:
    """Return the next messages of a state; raise ConfigurationError for a state, place or limit that is not allowed."""
    place, most = check_place(state), whole("limit", limit, least=1, most=PAGE_LIMIT)
    spot = _spot(place, key)
    if queue.is_sharded and place in CHAINED:
        return _chained(queue, place, after, most, key)
    cursor = Cursor.parse(after, place)
    if place == "dead":
        return _page_of_letters(queue, cursor, most)
    rows, more = _merged_rows(queue, spot, cursor, most) if queue.is_sharded else _rows(queue, spot, cursor, most)
    found = {part: read_messages(part, [row.id for row in some], length=BODY_BYTES) for part, some in _by_part(rows)}
    known = {(part, entry.id): _cut(entry) for part, some in found.items() for entry in entries(part, place, some)}
    items = [known[part, row.id] for part, row in rows if (part, row.id) in known]
    return MessagePage(items, str(rows[-1][1]) if more else None)


def _spot(place: Place, key: str) -> Spot:
    """Return where the messages of a page or search are; raise ConfigurationError for all lines at once."""
    if place != "waiting":
        return place
    if not key:
        raise ConfigurationError("waiting messages are paged and searched by key: name one of those that `keys` tells")
    return LinePlace(key)


def search_in(
    queue: QueueSession, state: str, where: Filter, after: str | None, limit: int, for_seconds: float
) -> SearchResult:
    """Look through a state for what is meant; raise ConfigurationError for an argument that is not allowed."""
    place, most = check_place(state), whole("limit", limit, least=1, most=PAGE_LIMIT)
    until = time.monotonic() + seconds("for_seconds", for_seconds, most=LONGEST_SEARCH)
    if isinstance(where, LetterFilter) and place != "dead" and replace(where, headers={}, match="", key="").is_set:
        raise ConfigurationError(f"ids, reason, raised, error and ages are of the state dead, not of {place}")
    parts, spot = queue.parts, _spot(place, where.key)
    where = replace(where, key="") if place == "waiting" else where
    at, rest = _place_in(parts, after) if queue.is_sharded else (0, after)
    cursor, of = Cursor.parse(rest, place), sum(queue.run_all([queries.size(part.keys, spot) for part in parts]))
    items, looked, last = list[Entry](), 0, cursor
    for number, part in enumerate(parts[at:], at):
        is_dead = spot == "dead"
        met_there = _letters_meant(part, where, last) if is_dead else _messages_meant(part, spot, where, last, until)
        for met, entry in met_there:
            looked, last = looked + 1, met
            items += [_cut(entry)] if entry else []
            if len(items) == most or time.monotonic() >= until:
                return SearchResult(items, looked, of, f"{number}.{last}" if queue.is_sharded else str(last))
        last = None
    return SearchResult(items, looked, of, None)


def _rows(queue: QueueSession, spot: Spot, after: Cursor | None, most: int) -> tuple[list[Row], bool]:
    rows, more = rows_after(queue, spot, after, most)
    return [(queue, row) for row in rows], more


def _merged_rows(queue: QueueSession, spot: Spot, after: Cursor | None, most: int) -> tuple[list[Row], bool]:
    """Return the next rows of a sorted set over all shards: a place in their common order is a place in each."""
    read = [_rows(part, spot, after, most) for part in queue.parts]
    rows = sorted((row for some, _ in read for row in some), key=lambda row: row[1].order)
    return rows[:most], len(rows) > most or any(more for _, more in read)


def _by_part(rows: Sequence[Row]) -> list[tuple[QueueSession, list[Cursor]]]:
    found = dict[QueueSession, list[Cursor]]()
    for part, row in rows:
        found.setdefault(part, []).append(row)
    return list(found.items())


def _chained(queue: QueueSession, place: Place, after: str | None, most: int, key: str) -> MessagePage:
    """Return a page of one shard after another: lists and sets tell no order between them."""
    parts, items = queue.parts, list[Entry]()
    at, rest = _place_in(parts, after)
    while True:
        page = page_of(parts[at], place, rest, most - len(items), key)
        items += page.items
        at, rest = (at, page.after) if page.after else (at + 1, None)
        if at == len(parts):
            return MessagePage(items, None)
        if len(items) == most:
            return MessagePage(items, f"{at}.{rest or ''}")


def _place_in(parts: Sequence[QueueSession], after: str | None) -> tuple[int, str | None]:
    """Return the shard in which a page or search of several goes on, and the place there; None for its start."""
    number, dot, rest = ("0." if after is None else after).partition(".")
    if not dot or not number.isdecimal() or int(number) >= len(parts):
        raise ConfigurationError(f"after must be the `after` of an earlier page, not {str(after)[:40]!r}")
    return int(number), rest or None


def _page_of_letters(queue: QueueSession, after: Cursor | None, most: int) -> MessagePage:
    letters, size, last = list[Letter](), 0, after
    for at, letter in merge(*(_newest_first(part, after) for part in queue.parts), key=_newest):
        if len(letters) == most or size >= LETTERS_BYTES:
            return MessagePage([_cut(of_letter(one)) for one in letters], str(last))
        letters.append(letter)
        last, size = Cursor("dead", 0, at, letter.letter), size + len(letter.payload)
    return MessagePage([_cut(of_letter(one)) for one in letters], None)


def _newest_first(part: QueueSession, after: Cursor | None) -> Iterator[tuple[int, Letter]]:
    """Yield a shard's letters behind a place, the newest first, each with the number of the shard, by which ties go."""
    shard = part.keys.shard
    start = "+" if after is None else f"({after.id}" if shard <= after.other else after.id
    return ((shard, letter) for some in letters_in(part, "-", start, newest_first=True) for letter in some)


def _newest(row: tuple[int, Letter]) -> tuple[int, int, int]:
    shard, letter = row
    at_ms, number = map(int, letter.letter.split("-"))
    return -at_ms, -number, shard


def _letters_meant(queue: QueueSession, where: Filter, after: Cursor | None) -> Iterator[tuple[Cursor, Entry | None]]:
    """Yield the place of each dead letter from `after` on, with its entry when it is meant."""
    asked = where.of_letters()
    test, (first, last) = asked.letter_tester(), span_of(queue, asked)
    for some in letters_in(queue, first, f"({after.id}" if after else last, newest_first=True):
        for letter in some:
            yield Cursor("dead", 0, 0, letter.letter), of_letter(letter) if test(letter) else None


def _messages_meant(
    queue: QueueSession, spot: Spot, where: Filter, after: Cursor | None, until: float
) -> Iterator[tuple[Cursor, Entry | None]]:
    """Yield the place of each message from `after` on, with its entry when it is meant."""
    test, step, more = where.tester(), SEARCH_STEP, True
    part = max(0.0, until - time.monotonic()) / STEP_PART
    while more:
        began = time.monotonic()
        rows, more = rows_after(queue, spot, after, step)
        found = read_messages(queue, [row.id for row in rows], length=BODY_BYTES, whole=bool(where.match))
        meant = [one for one in found if not one.is_gone and test(one.header, one.body)]
        known = {entry.id: entry for entry in entries(queue, place_of(spot), meant)}
        yield from ((row, known.get(row.id)) for row in rows)
        after = rows[-1] if rows else after
        step = min(BATCH_LIMIT, 2 * step) if time.monotonic() - began < part / 2 else max(1, step // 2)


def _cut(entry: Entry) -> Entry:
    return entry if len(entry.body) <= BODY_BYTES else replace(entry, body=entry.body[:BODY_BYTES])
