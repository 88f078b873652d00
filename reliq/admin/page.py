"""The messages of one state, a page at a time, and a search through them for a moment at a time."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from reliq import commands
from reliq.admin import queries
from reliq.admin.cursor import Cursor, rows_after
from reliq.admin.dead import FIRST_STEP, next_step
from reliq.admin.filters import EVERY_LETTER, Filter, LetterFilter
from reliq.admin.list import Entry, entries, of_letter
from reliq.admin.places import check_place
from reliq.admin.walk import read_messages
from reliq.errors import ConfigurationError
from reliq.message import Letter
from reliq.settings import BATCH_LIMIT, MIB, seconds, whole

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from reliq.admin.places import Place
    from reliq.admin.session import QueueSession

#: A page has at most this many messages, of each this many bytes of the body, and ends when so many of letters are read.
PAGE_LIMIT, BODY_BYTES, LETTERS_BYTES = 200, 1024, 4 * MIB
#: The first step of a search looks at this many messages; a step takes at most this part of the search's time.
SEARCH_STEP, STEP_PART = 32, 8
#: A search goes on for at most this many seconds.
LONGEST_SEARCH = 60


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


def page_of(queue: QueueSession, state: str, after: str | None, limit: int) -> MessagePage:
    """Return the next messages of a state; raise ConfigurationError for a state, place or limit that is not allowed."""
    place, most = check_place(state), whole("limit", limit, least=1, most=PAGE_LIMIT)
    cursor = Cursor.parse(after, place)
    if place == "dead":
        return _page_of_letters(queue, cursor, most)
    rows, more = rows_after(queue, place, cursor, most)
    found = read_messages(queue, [row.id for row in rows], length=BODY_BYTES)
    items = [_cut(entry) for entry in entries(queue, place, found)]
    return MessagePage(items, str(rows[-1]) if more else None)


def search_in(
    queue: QueueSession, state: str, where: Filter, after: str | None, limit: int, for_seconds: float
) -> SearchResult:
    """Look through a state for what is meant; raise ConfigurationError for an argument that is not allowed."""
    place, most = check_place(state), whole("limit", limit, least=1, most=PAGE_LIMIT)
    until = time.monotonic() + seconds("for_seconds", for_seconds, most=LONGEST_SEARCH)
    cursor, of = Cursor.parse(after, place), queue.run(queries.size(queue.keys, place))
    if isinstance(where, LetterFilter) and place != "dead" and replace(where, headers={}, match="").is_set:
        raise ConfigurationError(f"ids, reason, raised, error and ages are of the state dead, not of {place}")
    steps = (
        _letters_meant(queue, where, cursor) if place == "dead" else _messages_meant(queue, place, where, cursor, until)
    )
    items, looked, last = list[Entry](), 0, cursor
    for met, entry in steps:
        looked, last = looked + 1, met
        items += [_cut(entry)] if entry else []
        if len(items) == most or time.monotonic() >= until:
            return SearchResult(items, looked, of, str(last))
    return SearchResult(items, looked, of, None)


def letters_back(queue: QueueSession, first: str, last: str) -> Iterator[list[Letter]]:
    """Yield the dead letters from one place of their stream back to another, the newest first, in bounded steps."""
    count = FIRST_STEP
    while True:
        look = commands.letters_between(queue.keys, first, last, count=count, newest_first=True)
        letters = queue.run(look)
        if not letters:
            return
        yield letters
        last, count = f"({letters[-1].letter}", next_step(count, letters)


def span_of(queue: QueueSession, where: LetterFilter) -> tuple[str, str]:
    """Return between which places of the stream the letters lie whose age is meant."""
    return where.span(queue.run(commands.server_ms()))


def _page_of_letters(queue: QueueSession, after: Cursor | None, most: int) -> MessagePage:
    letters, size = list[Letter](), 0
    for some in letters_back(queue, "-", f"({after.id}" if after else "+"):
        for letter in some:
            if len(letters) == most or size >= LETTERS_BYTES:
                return MessagePage(
                    [_cut(of_letter(one)) for one in letters], str(Cursor("dead", 0, 0, letters[-1].letter))
                )
            letters.append(letter)
            size += len(letter.payload)
    return MessagePage([_cut(of_letter(one)) for one in letters], None)


def _letters_meant(queue: QueueSession, where: Filter, after: Cursor | None) -> Iterator[tuple[Cursor, Entry | None]]:
    """Yield the place of each dead letter from `after` on, with its entry when it is meant."""
    asked = (
        where if isinstance(where, LetterFilter) else replace(EVERY_LETTER, headers=where.headers, match=where.match)
    )
    test, (first, last) = asked.letter_tester(), span_of(queue, asked)
    for some in letters_back(queue, first, f"({after.id}" if after else last):
        for letter in some:
            yield Cursor("dead", 0, 0, letter.letter), of_letter(letter) if test(letter) else None


def _messages_meant(
    queue: QueueSession, place: Place, where: Filter, after: Cursor | None, until: float
) -> Iterator[tuple[Cursor, Entry | None]]:
    """Yield the place of each message from `after` on, with its entry when it is meant."""
    test, step, more = where.tester(), SEARCH_STEP, True
    part = max(0.0, until - time.monotonic()) / STEP_PART
    while more:
        began = time.monotonic()
        rows, more = rows_after(queue, place, after, step)
        found = read_messages(queue, [row.id for row in rows], length=BODY_BYTES, whole=bool(where.match))
        meant = [one for one in found if not one.is_gone and test(one.header, one.body)]
        known = {entry.id: entry for entry in entries(queue, place, meant)}
        yield from ((row, known.get(row.id)) for row in rows)
        after = rows[-1] if rows else after
        step = min(BATCH_LIMIT, 2 * step) if time.monotonic() - began < part / 2 else max(1, step // 2)


def _cut(entry: Entry) -> Entry:
    return entry if len(entry.body) <= BODY_BYTES else replace(entry, body=entry.body[:BODY_BYTES])
