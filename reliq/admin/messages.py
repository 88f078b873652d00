"""The lines of a queue, one after another: the places of messages that wait for the turn of their key."""

from __future__ import annotations

import math
import operator
import re
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable
from dataclasses import astuple, dataclass, replace
from functools import partial
from heapq import merge
from itertools import chain, islice, zip_longest
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, cast

from reliq.admin import calls
from reliq.admin.calls import MOVING_MS, STEP_IDS, KeyQueueState, Place, Spot, check_place, is_list, place_of
from reliq.admin.filters import Filter, LetterFilter
from reliq.admin.session import QueueSession
from reliq.errors import ConfigurationError
from reliq.lua import transitions
from reliq.message import BARE, PRIORITY_LINES, Counts, Letter
from reliq.redis import commands
from reliq.settings import BATCH_LIMIT, MIB, check_int, seconds
from reliq.text import clamp_time
from reliq.wire_format import HEADER_LIMIT, MAGIC, Backoff, Delayed, StateWord, Suspect, open_envelope, read_count

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
    from typing import Self

    from reliq.admin.calls import KeySet, Place, Spot
    from reliq.admin.session import Session
    from reliq.keys import Keys
    from reliq.message import Header, Priority
    from reliq.metrics.snapshot import ShardMaps
    from reliq.redis.commands import Request, SortedSet
    from reliq.wire_format import FailureNote


#: Members of `ring` and `held` that are no keys: the turn of ready and retry, and the places of messages that only wait.
NO_LINES = ("", "\2")


class StatePart(NamedTuple):
    """
    A part of a state that is gone through in bounded steps: of one shard, and of waiting messages of one key.

    Attributes:
        where: which of its messages are meant.
    """

    queue: QueueSession
    spot: Spot
    where: Filter


def parts_of(queue: QueueSession, place: Place, where: Filter) -> Iterator[StatePart]:
    """Yield the parts of a state that may have a message which is meant."""
    if place != "waiting":
        yield from (StatePart(shard, place, where) for shard in queue.parts)
        return
    rest = replace(where, key="")
    for shard in queue.parts:
        yield from (
            StatePart(shard, KeyQueueState(key), rest) for key in ([where.key] if where.key else every_key(shard))
        )


def every_key(shard: QueueSession) -> Iterator[str]:
    """Yield each key of which a message may wait, once, in no order; the ring comes twice, for a key may wake meanwhile."""
    seen = set[str]()
    for key in chain(
        PRIORITY_LINES.values(), _among(shard, "ring"), _among(shard, "asleep"), _holding(shard), _among(shard, "ring")
    ):
        if key not in seen and key not in NO_LINES:
            seen.add(key)
            yield key


def first_lines(shard: QueueSession, most: int) -> list[KeyQueueState]:
    """Return up to `most` lines in the order in which they come first: by turns, then those that wake first, then others."""
    first, sleeping = shard.run_all([calls.first_keys(shard.keys, among, most) for among in ("ring", "asleep")])
    found = dict.fromkeys(key for key in (*first, *sleeping, *PRIORITY_LINES.values()) if key not in NO_LINES)
    for key in _holding(shard) if len(found) < most else ():
        found[key] = None
        if len(found) >= most:
            break
    return [KeyQueueState(key) for key in list(found)[:most]]


def _among(shard: QueueSession, among: KeySet) -> Iterator[str]:
    for found in shard.scan(partial(calls.keys_among, shard.keys, among, count=STEP_IDS)):
        yield from found


def _holding(shard: QueueSession) -> Iterator[str]:
    last: str | None = None
    while found := shard.run(calls.keys_holding(shard.keys, last, STEP_IDS)):
        yield from (key for key in found if key not in NO_LINES)
        last = found[-1]


def ask_each(
    session: Session,
    queues: Sequence[Keys],
    make: Callable[[Keys], Request[Any]],
    maps: ShardMaps,
    *along: Request[Any],
) -> tuple[list[list[Any]], list[Any]]:
    """
    Make a request for each shard of each queue in one round trip, and in another for shards that nobody knew of.

    Returns:
        The answers of each queue, a refused one as its exception; and those of the requests that went `along`.
    """
    due, known = maps.due(queues), [maps.shards(keys) for keys in queues]
    asked = maps.questions(due)
    first = [make(shard) for shards in known for shard in shards]
    answers = iter(session.try_all([*first, *asked, *along]))
    told = [list(islice(answers, len(shards))) for shards in known]
    refused = maps.learn(due, list(islice(answers, len(asked))))
    new = [
        (found, shard) for found, keys in zip(told, queues, strict=True) for shard in maps.shards(keys)[len(found) :]
    ]
    for (found, _), answer in zip(new, session.try_all([make(shard) for _, shard in new]), strict=True):
        found.append(answer)
    for found, keys in zip(told, queues, strict=True):
        del found[len(maps.shards(keys)) :]
        found.extend([refused[keys]] if keys in refused else [])
    return told, list(answers)


P = TypeVar("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Sum:
    """The numbers of a step of a bulk method, which add up to those of all."""

    def __add__(self, other: Self) -> Self:
        return type(self)(*map(operator.add, astuple(self), astuple(other)))


def sequentially(
    parts: Iterable[P],
    do: Callable[[P, Callable[[int, R], None], R], R],
    on_step: Callable[[int, R], None],
    nothing: R,
) -> R:
    """
    Call `do` for each part that is meant, and return the sum of what it returns.

    Args:
        do: is called with the part, the function to call after each step of it, and the sum so far.
        on_step: is called after each step with how many ids it looked at, and the sum over all parts.
    """
    total: Any = nothing
    for part in parts:

        def step(looked: int, sum_of: Any, before: Any = total) -> None:
            on_step(looked, before + sum_of)

        total = total + do(part, step, total)
    return total  # type: ignore[no-any-return]


#: The first step reads one letter, for it may be of any size; each later step reads at most twice as many as the one
#: before, and as many as LETTERS_STEP_BYTES are expected to hold.
FIRST_STEP, LETTERS_STEP_BYTES = 1, MIB
#: It is called after each step, with how many letters it looked at and the sum.
OnLetters = Callable[[int, int], None]


def letters_of(queue: QueueSession, where: LetterFilter, without: Collection[int]) -> Iterator[Letter]:
    """Yield the chosen dead letters, oldest first, but for some shards; each is read when it is asked for."""
    parts = [_chosen(part, where) for part in queue.parts if part.keys.shard not in without]
    return merge(*parts, key=lambda letter: letter.died)


def _chosen(part: QueueSession, where: LetterFilter) -> Iterator[Letter]:
    return (letter for _, some in walk_letters(part, where) for letter in some)


def walk_letters(queue: QueueSession, where: Filter) -> Iterator[tuple[int, list[Letter]]]:
    """Yield for each step how many letters it looked at, and the chosen ones, oldest first; later deaths are left out."""
    asked = where.of_letters()
    test = asked.letter_tester()
    first, last = span_of(queue, asked)
    newest = commands.letters_between(queue.keys, first, last, count=1, newest_first=True)
    for letter in queue.run(newest):
        last = letter.letter
    for letters in letters_in(queue, first, last):
        yield len(letters), [letter for letter in letters if test(letter)]


def span_of(queue: QueueSession, where: LetterFilter) -> tuple[str, str]:
    """Return between which places of the stream the letters lie whose age is meant."""
    return where.span(queue.run(commands.server_ms()))


def letters_in(queue: QueueSession, first: str, last: str, *, newest_first: bool = False) -> Iterator[list[Letter]]:
    """Yield the dead letters between two places of their stream, in bounded steps."""
    count, read = FIRST_STEP, partial(commands.letters_between, queue.keys, newest_first=newest_first)
    while letters := queue.run(read(first, last, count=count)):
        yield letters
        behind = f"({letters[-1].letter}"
        first, last = (first, behind) if newest_first else (behind, last)
        weight = max(1, sum(len(letter.payload) for letter in letters) // len(letters))
        count = max(1, min(BATCH_LIMIT, count * 2, LETTERS_STEP_BYTES // weight))


def count(queue: QueueSession, where: LetterFilter, on_step: OnLetters) -> int:
    """Count the chosen letters; call `on_step` after each step with how many it looked at, and the sum."""

    def count_part(part: QueueSession, step: OnLetters, _before: int) -> int:
        found = 0
        for looked, letters in walk_letters(part, where):
            found += len(letters)
            step(looked, found)
        return found

    return sequentially(queue.parts, count_part, on_step, 0)


def delete(queue: QueueSession, where: LetterFilter, on_step: OnLetters) -> int:
    """Delete letters; return how many. Their messages have ended already, so the account stays as it is."""

    def delete_part(part: QueueSession, step: OnLetters, _before: int) -> int:
        deleted = 0
        for looked, letters in walk_letters(part, where):
            if letters:
                deleted += part.run(commands.delete_letters(part.keys, [one.letter for one in letters]))
            step(looked, deleted)
        return deleted

    return sequentially(queue.parts, delete_part, on_step, 0)


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
    place, at = check_place(state), check_int("offset", offset, most=10**9)
    most = check_int("limit", limit, least=1, most=LIST_LIMIT)
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
    return sum(queue.run_all([calls.size(part.queue.keys, part.spot) for part in parts]))


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
        calls.failure_notes(keys, ids),
    ]
    sorted_set = state in ("pending", "unack")
    places = [commands.scores(keys, cast("SortedSet", state), ids)] if sorted_set else []
    words, lefts, notes, *times = queue.run_all([*asked, *places])
    sizes = queue.read_each([calls.length(keys, id) for id in ids], 0)
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
    due = None if one.header.due is None else clamp_time(one.header.due / 1000)
    when = score if score is not None else clamp_time(word.due_ms / 1000) if isinstance(word, Delayed) else due
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


#: A message of a list that was met is looked for this far before the place where it was, and then this far from both
#: ends; that keeps Redis busy for some 3 ms.
NEAR, FAR = 500, 100_000


#: Scans and lists have no place beyond this one.
LAST_PLACE = 2**64
_LETTER_NAME = re.compile(r"[0-9]{1,20}-[0-9]{1,20}")


@dataclass(frozen=True, slots=True)
class Cursor:
    """
    The place of one message in a state.

    Attributes:
        at: the score in a sorted set; in a list how many are claimed before it; in garbage where a scan went on.
        other: how many claims the queue had counted; in garbage how many of that scan's ids come before; of a dead
            letter its shard.
        id: of the message; of a dead letter its letter.
    """

    state: Place
    at: float
    other: int
    id: str

    def __str__(self) -> str:
        return opaque(f"{self.state} {self.at!r} {self.other} {self.id}")

    @classmethod
    def parse(cls, text: str | None, state: Place) -> Cursor | None:
        """Return the place that `text` says, None for None; raise ConfigurationError for one that is not of `state`."""
        if text is None:
            return None
        try:
            told, at, other, id = read_opaque(text).split(" ", 3)
            cursor = cls(state, float(at), int(other), id)
        except (ValueError, AttributeError):
            told, cursor = "", cls(state, math.nan, 0, "")
        if told != state or not cursor._is_whole():
            raise ConfigurationError(
                f"after must be the `after` of an earlier page of the state {state}, not {str(text)[:40]!r}"
            )
        return cursor

    @property
    def order(self) -> tuple[float, bytes]:
        """The place in a sorted set, and among those of several shards."""
        return self.at, _bytes(self.id)

    def _is_whole(self) -> bool:
        """Say whether it can be the place of a message."""
        if self.state in ("pending", "unack"):
            return not math.isnan(self.at)
        if self.state == "dead" and _LETTER_NAME.fullmatch(self.id) is None:
            return False
        return 0 <= self.at < LAST_PLACE and 0 <= self.other < LAST_PLACE


def rows_after(queue: QueueSession, spot: Spot, after: Cursor | None, count: int) -> tuple[list[Cursor], bool]:
    """Return up to `count` messages of a place, except dead, that come next, and whether there may be more."""
    if spot == "garbage":
        return _of_garbage(queue, after, count)
    read = _of_list if is_list(spot) else _of_sorted_set
    rows = read(queue, spot, after, count + 1)
    return rows[:count], len(rows) > count


def _of_sorted_set(queue: QueueSession, spot: Spot, after: Cursor | None, count: int) -> list[Cursor]:
    """Read in the order of scores and ids: the place is exact, whether its message is still there or not."""
    place = cast("SortedSet", spot)
    start = 0 if after is None else _rank_after(queue, place, after)
    rows = queue.run(calls.scored_at(queue.keys, place, start, count))
    return [Cursor(place, score, 0, id) for id, score in rows]


def _rank_after(queue: QueueSession, place: SortedSet, after: Cursor) -> int:
    """Return how many messages come before the one next to a place, or at it."""
    keys = queue.keys
    rank, score, low, high = queue.run_all(
        [
            calls.rank(keys, place, after.id),
            calls.score(keys, place, after.id),
            calls.count_to(keys, place, after.at, without=True),
            calls.count_to(keys, place, after.at),
        ]
    )
    if rank is not None and score == after.at:
        return int(rank) + 1
    wanted = _bytes(after.id)
    while low < high:  # among those of one score it is found by halves
        middle = (low + high) // 2
        rows = queue.run(calls.scored_at(keys, place, middle, 1))
        if rows and (rows[0][1], _bytes(rows[0][0])) <= (after.at, wanted):
            low = middle + 1
        else:
            high = middle
    return int(low)


def _of_list(queue: QueueSession, spot: Spot, after: Cursor | None, count: int) -> list[Cursor]:
    """
    Read in the order of claims.

    The message of the place is looked for, and those behind it are read in the same look. When it is gone, as many as
    were claimed since are taken to have stood before it: nothing is passed over, and some may be seen twice.
    """
    keys, state = queue.keys, place_of(spot)
    claims = queue.run(commands.claims(keys))
    if after is None:
        first_ids = queue.run(calls.ids_at(keys, spot, 0, count))
        return [Cursor(state, at, claims, id) for at, id in enumerate(first_ids)]
    likely = max(0, int(after.at) - max(0, claims - after.other))
    for guess in _guesses(queue, spot, after, likely):
        start = max(0, guess - NEAR)
        window = queue.run(calls.ids_at(keys, spot, start, NEAR + 1 + count))
        if after.id in window:
            first = window.index(after.id) + 1
            return [Cursor(state, start + at, claims, window[at]) for at in range(first, len(window))][:count]
    ids = queue.run(calls.ids_at(keys, spot, likely, count))
    return [Cursor(state, at, claims, id) for at, id in enumerate(ids, likely)]


def _guesses(queue: QueueSession, spot: Spot, after: Cursor, likely: int) -> Iterator[int]:
    """Yield where the message of a place in a list may be: where it was, where the claims moved it, where it is found."""
    yield int(after.at)
    yield likely
    for newest_first in (False, True):
        size = queue.run(calls.size(queue.keys, spot))
        index = queue.run(calls.index_of(queue.keys, spot, after.id, newest_first=newest_first, most=FAR))
        if index is not None:
            yield size - 1 - index


def _of_garbage(queue: QueueSession, after: Cursor | None, count: int) -> tuple[list[Cursor], bool]:
    """Read as a scan does: what stays is seen at least once."""
    at, skip = (0, 0) if after is None else (int(after.at), after.other)
    rows = list[Cursor]()
    while True:
        following, ids = queue.run(calls.ids_scanned(queue.keys, "garbage", at, count))
        for number, id in enumerate(ids[skip:], skip + 1):
            is_last = number == len(ids)
            if len(rows) == count:
                return rows, True
            if is_last and not following:
                return [*rows, Cursor("garbage", at, number, id)], False
            rows.append(Cursor("garbage", following, 0, id) if is_last else Cursor("garbage", at, number, id))
        if not following:
            return rows, False
        at, skip = following, 0


def opaque(place: str) -> str:
    """Return a place as the text that a person or a program is given for it."""
    return urlsafe_b64encode(_bytes(place)).decode().rstrip("=")


def read_opaque(text: str) -> str:
    """Return the place that `opaque` made a text of; raise ValueError or AttributeError for what is none."""
    padded = text.encode("ascii") + b"=" * (-len(text) % 4)
    return urlsafe_b64decode(padded).decode("utf-8", "surrogateescape")


def _bytes(id: str) -> bytes:
    return id.encode("utf-8", "surrogateescape")


#: Bytes of a value that are read at first: the whole header and the start of the body.
START_BYTES = 2 * HEADER_LIMIT


@dataclass(frozen=True, slots=True)
class Found:
    """
    A message that was met on a walk.

    Attributes:
        body: its start, or the whole of it when a text was looked for.
        overhead: bytes of the header line before it.
        is_gone: whether Redis has no value of it any more.
    """

    id: str
    header: Header
    body: bytes
    overhead: int
    is_gone: bool


class Walk:
    """
    A walk through one place, except dead, a piece at a time.

    What is claimed meanwhile shifts the rest towards the walker, so each look goes half over the last one: nothing
    is passed over unless messages leave faster than they are looked at. With `ids_only` no value is read.
    """

    def __init__(
        self, queue: QueueSession, spot: Spot, where: Filter, *, offset: int = 0, ids_only: bool = False
    ) -> None:
        self._queue, self._keys, self._spot = queue, queue.keys, spot
        self._where, self._offset, self._at, self._ids_only = where, offset, offset, ids_only

    def pieces(self) -> Iterator[tuple[int, list[Found]]]:
        """Yield for each step how many ids it looked at, and the chosen messages."""
        test = self._where.tester()
        for ids in self._ids():
            found = (
                [Found(id, BARE, b"", 0, False) for id in ids]
                if self._ids_only
                else read_messages(self._queue, ids, whole=bool(self._where.match))
            )
            if self._where.is_set:
                found = [one for one in found if not one.is_gone and test(one.header, one.body)]
            yield len(ids), found

    def removed(self, count: int) -> None:
        """Note that `count` of the messages passed by were removed."""
        self._at = max(self._offset, self._at - count)

    def _ids(self) -> Iterator[list[str]]:
        if self._spot == "garbage":
            yield from self._garbage()
            return
        seen: set[str] = set()
        while True:
            back = min(STEP_IDS, self._at - self._offset)
            window = self._queue.run(calls.ids_at(self._keys, self._spot, self._at - back, back + STEP_IDS))
            fresh = [id for id in window if id not in seen]
            if not fresh:
                return
            seen = set(window)
            self._at += STEP_IDS
            for at in range(0, len(fresh), STEP_IDS):
                yield fresh[at : at + STEP_IDS]

    def _garbage(self) -> Iterator[list[str]]:
        skip = self._offset
        for ids in self._queue.scan(partial(calls.ids_scanned, self._keys, "garbage", count=STEP_IDS)):
            if fresh := ids[skip:]:
                yield fresh
            skip = max(0, skip - len(ids))


def read_messages(
    queue: QueueSession, ids: Sequence[str], *, length: int = START_BYTES, whole: bool = False
) -> list[Found]:
    """Read the first `length` bytes of messages, of long headers more, or with `whole` all of each."""
    keys = queue.keys
    values = queue.read_each([commands.body_start(keys, id, length) for id in ids], b"")
    cut = [
        at for at, start in enumerate(values) if len(start) == length and (whole or not _has_header(start, keys.bare))
    ]
    for at in cut:
        if whole:
            values[at] = queue.run(calls.value(keys, ids[at])) or b""
        else:
            values[at] = queue.run(commands.body_start(keys, ids[at], START_BYTES))
    gone = {id for id, value in zip(ids, values, strict=True) if not value}
    if gone and keys.bare:  # only a bare body can be empty
        there = queue.run_all([calls.has_value(keys, id) for id in gone])
        gone -= {id for id, is_there in zip(gone, there, strict=True) if is_there}
    return [_found(id, value, id in gone, bare=keys.bare) for id, value in zip(ids, values, strict=True)]


def _has_header(start: bytes, bare: bool) -> bool:
    """Say whether the start of a value holds its whole header, or it has none."""
    return bare or not start.startswith(MAGIC) or b"\n" in start


def _found(id: str, value: bytes, is_gone: bool, *, bare: bool) -> Found:
    header, body = open_envelope(value, bare=bare)
    return Found(id, header, body, len(value) - len(body), is_gone)


if TYPE_CHECKING:
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
    place, most = check_place(state), check_int("limit", limit, least=1, most=PAGE_LIMIT)
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
    return KeyQueueState(key)


def search_in(
    queue: QueueSession, state: str, where: Filter, after: str | None, limit: int, for_seconds: float
) -> SearchResult:
    """Look through a state for what is meant; raise ConfigurationError for an argument that is not allowed."""
    place, most = check_place(state), check_int("limit", limit, least=1, most=PAGE_LIMIT)
    until = time.monotonic() + seconds("for_seconds", for_seconds, most=LONGEST_SEARCH)
    if isinstance(where, LetterFilter) and place != "dead" and replace(where, headers={}, match="", key="").is_set:
        raise ConfigurationError(f"ids, reason, raised, error and ages are of the state dead, not of {place}")
    parts, spot = queue.parts, _spot(place, where.key)
    where = replace(where, key="") if place == "waiting" else where
    at, rest = _place_in(parts, after) if queue.is_sharded else (0, after)
    cursor, of = Cursor.parse(rest, place), sum(queue.run_all([calls.size(part.keys, spot) for part in parts]))
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
