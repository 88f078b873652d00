"""The messages of one state as a person looks at them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from heapq import merge
from itertools import chain, islice, zip_longest
from typing import TYPE_CHECKING, Any, Literal, cast

from reliq import commands, transitions
from reliq.admin import queries
from reliq.admin.dead import walk_letters
from reliq.admin.filters import Filter
from reliq.admin.lines import StatePart, first_lines, parts_of
from reliq.admin.places import MOVING_MS, Place, check_place, place_of
from reliq.admin.walk import Found, Walk
from reliq.foreign import moment
from reliq.message import Counts
from reliq.settings import whole
from reliq.wireformat import Backoff, Delayed, StateWord, Suspect, read_count

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from reliq.admin.session import QueueSession
    from reliq.call import Request
    from reliq.commands import SortedSet
    from reliq.failure_note import FailureNote
    from reliq.message import Letter, Priority

#: It is called after each step, with how many ids the step looked at.
OnLook = Callable[[int], None]
EntryMark = Literal["", "held", "nacked", "suspect", "cancelled", "delayed", "moving"]

#: One list has at most this many messages.
LIST_LIMIT = 10_000


@dataclass(frozen=True, slots=True)
class Entry:
    """
    One message in one state.

    Attributes:
        mark: `held` by a worker; `nacked`, it waits there for its redelivery; `suspect`, its last delivery ended by
            its lease; `cancelled` or `delayed`, it leaves the list when a worker meets it; `moving` to another queue.
        when: unix seconds: of pending and lists the due time, of unack the end of the lease or the redelivery, of
            dead the death; None when that is unknown.
        attempt: deliveries so far, None when that is unknown.
        reason: of its last failure, one of `DEATH_REASONS`; empty when there was none.
        raised: class and place of the exception then, which hold no piece of a body; empty when nothing was raised.
        error: the same failure's text, after its reason; it may hold a piece of the body.
        size: bytes of the whole body; None when it is gone.
        body: its start.
        letter: names the death of a dead one.
        key: of the message; empty when it has none.
        priority: of a message without a key.
    """

    id: str
    state: Place
    mark: EntryMark
    when: float | None
    attempt: int | None
    retries_left: int | None
    reason: str
    raised: str
    error: str
    headers: Mapping[str, str]
    size: int | None
    body: bytes
    letter: str = ""
    key: str = ""
    priority: Priority = "normal"


def messages_of(
    queue: QueueSession, state: str, where: Filter, *, limit: int, offset: int, on_look: OnLook
) -> list[Entry]:
    """
    Return up to `limit` messages of a state that are meant, after the first `offset` of them.

    Raises:
        ConfigurationError: a state that is none, or a number that is not allowed.
    """
    place, at = check_place(state), whole("offset", offset, most=10**9)
    most = whole("limit", limit, least=1, most=LIST_LIMIT)
    if place == "waiting" and not where.key:
        return list(islice(_waiting(queue, where, at + most, on_look), at, at + most))
    parts = list(parts_of(queue, place, where))
    if len(parts) == 1:
        return list(islice(_browse(parts[0], at, on_look), most))
    browsed = [_browse(part, 0, on_look) for part in parts]
    has_order = place not in (*commands.LISTS, "waiting", "garbage")
    merged = merge(*browsed, key=lambda entry: entry.when or 0.0) if has_order else _in_turn(browsed)
    return list(islice(merged, at, at + most))


def size_of(queue: QueueSession, state: str, key: str = "") -> int:
    """Return how many messages a state has, of the waiting ones with `key` how many have it."""
    place = check_place(state)
    if place == "waiting" and not key:
        return Counts.sum(queue.run_all([transitions.counts(part.keys) for part in queue.parts])).waiting
    parts = parts_of(queue, place, Filter(key=key))
    return sum(queue.run_all([queries.size(part.queue.keys, part.spot) for part in parts]))


def _in_turn(browsed: Iterable[Iterator[Entry]]) -> Iterator[Entry]:
    """Yield the first of each, then the second: lists tell no order between shards, and keys take turns."""
    return (entry for some in zip_longest(*browsed) for entry in some if entry is not None)


def _waiting(queue: QueueSession, where: Filter, most: int, on_look: OnLook) -> Iterator[Entry]:
    """Yield the messages of all lines: by turns those of as many keys as may be told, or with a filter key after key."""
    if where.is_set:
        return chain.from_iterable(_browse(part, 0, on_look) for part in parts_of(queue, "waiting", where))
    lines = [StatePart(shard, line, where) for shard in queue.parts for line in first_lines(shard, most)]
    return _in_turn([_browse(part, 0, on_look) for part in lines[:most]])


def _browse(part: StatePart, offset: int, on_look: OnLook) -> Iterator[Entry]:
    """Yield the messages of a part of a state that are meant; tell `on_look` how many were looked at in each step."""
    queue, spot, where = part
    if spot == "dead":
        for looked, letters in walk_letters(queue, where):
            on_look(looked)
            skipped, offset = offset, max(0, offset - len(letters))
            yield from map(of_letter, letters[skipped:])
        return
    # Without a filter the place is the offset; with one, matches are counted.
    walk = Walk(queue, spot, where, offset=0 if where.is_set else offset)
    skip = offset if where.is_set else 0
    for looked, found in walk.pieces():
        on_look(looked)
        meant = list(islice(found, skip, None))
        skip = max(0, skip - len(found))
        yield from entries(queue, place_of(spot), meant)


def entries(queue: QueueSession, state: Place, found: list[Found]) -> list[Entry]:
    """Return all that is known of messages that were met; what has left a sorted set meanwhile is left out."""
    if not found:
        return []
    ids, keys = [one.id for one in found], queue.keys
    asked: list[Request[Any]] = [
        commands.state_words(keys, ids),
        commands.retries_left(keys, ids),
        queries.failure_notes(keys, ids),
    ]
    sorted_set = state in ("pending", "unack")
    places = [commands.scores(keys, cast("SortedSet", state), ids)] if sorted_set else []
    words, lefts, notes, *times = queue.run_all([*asked, *places])
    sizes = queue.read_each([queries.length(keys, id) for id in ids], 0)
    rows = zip(found, words, lefts, notes, times[0] if sorted_set else [None] * len(ids), sizes, strict=True)
    return [_entry(state, *row) for row in rows if row[4] is not None or not sorted_set]


def of_letter(letter: Letter) -> Entry:
    """Return a dead letter as an entry of the state `dead`."""
    error = f"{letter.reason}: {letter.error}" if letter.error else letter.reason
    headers, size = letter.header.headers, len(letter.payload)
    return Entry(
        id=letter.id,
        state="dead",
        mark="",
        when=letter.died,
        attempt=letter.attempts,
        retries_left=0,
        reason=letter.reason,
        raised=letter.raised,
        error=error,
        headers=headers,
        size=size,
        body=letter.payload,
        letter=letter.letter,
        key=letter.header.key or "",
        priority=letter.header.priority,
    )


def held_until(word: StateWord, score: float | None) -> int | None:
    """Return until when a message that is being moved is put off, in unix ms; None for one that is not."""
    at = word.due_ms if isinstance(word, Delayed) else round((score or 0) * 1000)
    return at if MOVING_MS <= at < 2 * MOVING_MS else None


def _entry(
    state: Place,
    one: Found,
    word: StateWord,
    left: bytes | None,
    note: FailureNote,
    score: float | None,
    size: int,
) -> Entry:
    due = None if one.header.due is None else moment(one.header.due / 1000)
    when = score if score is not None else moment(word.due_ms / 1000) if isinstance(word, Delayed) else due
    moving, (retries_left, _line) = held_until(word, score), read_count(left)
    if moving is not None:
        when = (moving - MOVING_MS) / 1000
    return Entry(
        id=one.id,
        state=state,
        mark=_mark(state, word, moving),
        when=when,
        attempt=_attempt(state, one.header.retries, retries_left),
        retries_left=retries_left,
        reason=note.reason,
        raised=note.raised,
        error=note.summary,
        headers=one.header.headers,
        size=None if one.is_gone else size - one.overhead,
        body=one.body,
        key=one.header.key or "",
        priority=one.header.priority,
    )


def _attempt(state: Place, retries: int | None, left: int | None) -> int | None:
    """Return how many deliveries there were, the one that is under way included; None when that is unknown."""
    if retries is None or left is None:
        return None
    return max(0, retries - left) + (state == "unack")


def _mark(state: Place, word: StateWord, moving: int | None) -> EntryMark:
    if word.cancelled:
        return "cancelled"
    if moving is not None:
        return "moving"
    match word:
        case Backoff():
            return "nacked"
        case Suspect():
            return "suspect"
        case Delayed():
            return "delayed"
    return "held" if state == "unack" else ""
