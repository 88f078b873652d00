"""
The messages of a queue, as an operator reads them: listed, paged, searched, and their dead letters walked through.

Every walk goes in bounded steps, so that no request keeps Redis busy for long, while messages come and go. The shards of a
queue, and the keys whose messages wait, are its parts: each is walked through by itself, and the results are merged.
"""

from __future__ import annotations

import math
import operator
import re
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections import defaultdict
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

    from reliq.admin.calls import KeySet
    from reliq.message import Header, Priority
    from reliq.redis.commands import Request, SortedSet

P = TypeVar("P")
R = TypeVar("R")

#: It is called after each step, with how many letters it looked at and the sum.
OnLetters = Callable[[int, int], None]
#: It is called after each step, with how many ids the step looked at.
OnLook = Callable[[int], None]
EntryMark = Literal["", "held", "nacked", "suspect", "cancelled", "delayed", "moving"]

#: Members of `ring` and `held` that are no keys: the turn of ready and retry, and the places of messages that only wait.
NO_KEYS = ("", "\2")
#: The first step reads this many letters, for a letter may be of any size. Each later step reads at most twice as many as
#: the step before, and as many as LETTERS_STEP_BYTES are expected to hold.
FIRST_STEP = 1
LETTERS_STEP_BYTES = MIB
#: Bytes of a value that are read at first: the whole header and the start of the body.
START_BYTES = 2 * HEADER_LIMIT
#: One list has at most this many messages.
LIST_LIMIT = 10_000
#: A message of a list is searched for this far before the place where it was.
NEAR = 500
#: A message that is not near is searched for this far from both ends; that keeps Redis busy for some 3 ms.
FAR = 100_000
#: Scans and lists have no place beyond this one.
LAST_PLACE = 2**64
_LETTER_NAME = re.compile(r"[0-9]{1,20}-[0-9]{1,20}")
#: A page has at most this many messages.
PAGE_LIMIT = 200
#: A page and a search return this many bytes of a body.
BODY_BYTES = 1024
#: A page of dead letters ends when this many bytes of them are read.
LETTERS_BYTES = 4 * MIB
#: The first step of a search looks at this many messages.
SEARCH_STEP = 32
#: A step of a search takes at most this part of the search's time.
STEP_PART = 8
#: A search goes on for at most this many seconds.
LONGEST_SEARCH = 60
#: States whose messages have no order between shards: a page of several shards has the messages of one after another.
CHAINED = ("ready", "waiting", "retry", "garbage")


# ---- the parts of a queue ---------------------------------------------------


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
    for shard in queue.parts:
        if place != "waiting":
            yield StatePart(shard, place, where)
            continue
        for key in [where.key] if where.key else _every_key(shard):
            yield StatePart(shard, KeyQueueState(key), replace(where, key=""))


def _every_key(shard: QueueSession) -> Iterator[str]:
    """Yield each key of which a message may wait, once, in no order; the ring comes twice, for a key may wake meanwhile."""
    seen = set[str]()
    for key in chain(
        PRIORITY_LINES.values(),
        _keys_among(shard, "ring"),
        _keys_among(shard, "asleep"),
        _keys_holding(shard),
        _keys_among(shard, "ring"),
    ):
        if key not in seen and key not in NO_KEYS:
            seen.add(key)
            yield key


def _first_keys(shard: QueueSession, most: int) -> list[str]:
    """Return up to `most` keys in the order in which they come first: by turns, then those that wake first, then others."""
    first, sleeping = shard.run_all([calls.first_keys(shard.keys, among, most) for among in ("ring", "asleep")])
    keys = dict.fromkeys(key for key in (*first, *sleeping, *PRIORITY_LINES.values()) if key not in NO_KEYS)
    for key in _keys_holding(shard) if len(keys) < most else ():
        keys[key] = None
        if len(keys) >= most:
            break
    return list(keys)[:most]


def _keys_among(shard: QueueSession, among: KeySet) -> Iterator[str]:
    for keys in shard.scan(partial(calls.keys_among, shard.keys, among, count=STEP_IDS)):
        yield from keys


def _keys_holding(shard: QueueSession) -> Iterator[str]:
    last: str | None = None
    while keys := shard.run(calls.keys_holding(shard.keys, last, STEP_IDS)):
        yield from (key for key in keys if key not in NO_KEYS)
        last = keys[-1]


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


# ---- dead letters -----------------------------------------------------------


def letters_of(queue: QueueSession, where: LetterFilter, without: Collection[int]) -> Iterator[Letter]:
    """Yield the chosen dead letters, oldest first, but for some shards; each is read when it is asked for."""
    chosen = [
        (letter for _, letters in walk_letters(part, where) for letter in letters)
        for part in queue.parts
        if part.keys.shard not in without
    ]
    return merge(*chosen, key=lambda letter: letter.died)


def count(queue: QueueSession, where: LetterFilter, on_step: OnLetters) -> int:
    """Count the chosen letters; call `on_step` after each step with how many it looked at, and the sum."""

    def count_part(part: QueueSession, step: OnLetters, _before: int) -> int:
        counted = 0
        for looked, letters in walk_letters(part, where):
            counted += len(letters)
            step(looked, counted)
        return counted

    return sequentially(queue.parts, count_part, on_step, 0)


def delete(queue: QueueSession, where: LetterFilter, on_step: OnLetters) -> int:
    """Delete letters; return how many. Their messages have ended already, so the account stays as it is."""

    def delete_part(part: QueueSession, step: OnLetters, _before: int) -> int:
        deleted = 0
        for looked, letters in walk_letters(part, where):
            if letters:
                deleted += part.run(commands.delete_letters(part.keys, [letter.letter for letter in letters]))
            step(looked, deleted)
        return deleted

    return sequentially(queue.parts, delete_part, on_step, 0)


def walk_letters(queue: QueueSession, where: Filter) -> Iterator[tuple[int, list[Letter]]]:
    """Yield for each step how many letters it looked at, and the chosen ones, oldest first; later deaths are left out."""
    letter_filter = where.of_letters()
    test = letter_filter.letter_tester()
    first, last = span_of(queue, letter_filter)
    for newest in queue.run(commands.letters_between(queue.keys, first, last, count=1, newest_first=True)):
        last = newest.letter
    for letters in letters_in(queue, first, last):
        yield len(letters), [letter for letter in letters if test(letter)]


def span_of(queue: QueueSession, where: LetterFilter) -> tuple[str, str]:
    """Return between which places of the stream the letters lie whose age is meant."""
    return where.span(queue.run(commands.server_ms()))


def letters_in(queue: QueueSession, first: str, last: str, *, newest_first: bool = False) -> Iterator[list[Letter]]:
    """Yield the dead letters between two places of their stream, in bounded steps."""
    count = FIRST_STEP
    while letters := queue.run(
        commands.letters_between(queue.keys, first, last, count=count, newest_first=newest_first)
    ):
        yield letters
        behind = f"({letters[-1].letter}"
        if newest_first:
            last = behind
        else:
            first = behind
        weight = max(1, sum(len(letter.payload) for letter in letters) // len(letters))
        count = max(1, min(BATCH_LIMIT, count * 2, LETTERS_STEP_BYTES // weight))


# ---- walks through messages -------------------------------------------------


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
        self._queue = queue
        self._spot = spot
        self._where = where
        self._offset = offset
        self._at = offset
        self._ids_only = ids_only

    def pieces(self) -> Iterator[tuple[int, list[Found]]]:
        """Yield for each step how many ids it looked at, and the chosen messages."""
        test = self._where.tester()
        for ids in self._ids():
            if self._ids_only:
                messages = [Found(id, BARE, b"", 0, False) for id in ids]
            else:
                messages = _read_messages(self._queue, ids, whole=bool(self._where.match))
            if self._where.is_set:
                messages = [
                    message for message in messages if not message.is_gone and test(message.header, message.body)
                ]
            yield len(ids), messages

    def removed(self, count: int) -> None:
        """Note that `count` of the messages passed by were removed."""
        self._at = max(self._offset, self._at - count)

    def _ids(self) -> Iterator[list[str]]:
        keys = self._queue.keys
        if self._spot == "garbage":
            skip = self._offset
            for ids in self._queue.scan(partial(calls.ids_scanned, keys, "garbage", count=STEP_IDS)):
                if fresh := ids[skip:]:
                    yield fresh
                skip = max(0, skip - len(ids))
            return
        seen: set[str] = set()
        while True:
            back = min(STEP_IDS, self._at - self._offset)
            window = self._queue.run(calls.ids_at(keys, self._spot, self._at - back, back + STEP_IDS))
            fresh = [id for id in window if id not in seen]
            if not fresh:
                return
            seen = set(window)
            self._at += STEP_IDS
            for at in range(0, len(fresh), STEP_IDS):
                yield fresh[at : at + STEP_IDS]


def _read_messages(
    queue: QueueSession, ids: Sequence[str], *, length: int = START_BYTES, whole: bool = False
) -> list[Found]:
    """Read the first `length` bytes of messages, of long headers more, or with `whole` all of each."""
    keys = queue.keys
    values = queue.read_each([commands.body_start(keys, id, length) for id in ids], b"")
    for at, start in enumerate(values):
        has_header = keys.bare or not start.startswith(MAGIC) or b"\n" in start
        if len(start) < length or (has_header and not whole):
            continue
        if whole:
            values[at] = queue.run(calls.value(keys, ids[at])) or b""
        else:
            values[at] = queue.run(commands.body_start(keys, ids[at], START_BYTES))
    gone = {id for id, value in zip(ids, values, strict=True) if not value}
    if gone and keys.bare:  # only a bare body can be empty
        answers = queue.run_all([calls.has_value(keys, id) for id in gone])
        gone -= {id for id, has_value in zip(gone, answers, strict=True) if has_value}
    messages = []
    for id, value in zip(ids, values, strict=True):
        header, body = open_envelope(value, bare=keys.bare)
        messages.append(Found(id, header, body, len(value) - len(body), id in gone))
    return messages


# ---- entries ----------------------------------------------------------------


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


def entries(queue: QueueSession, state: Place, messages: list[Found]) -> list[Entry]:
    """Return all that is known of messages that were met; those that have left a sorted set meanwhile are left out."""
    if not messages:
        return []
    keys = queue.keys
    ids = [message.id for message in messages]
    has_scores = state in ("pending", "unack")
    requests: list[Request[Any]] = [
        commands.state_words(keys, ids),
        commands.retries_left(keys, ids),
        calls.failure_notes(keys, ids),
    ]
    if has_scores:
        requests.append(calls.scores(keys, cast("SortedSet", state), ids))
    words, lefts, notes, *scores = queue.run_all(requests)
    sizes = queue.read_each([calls.length(keys, id) for id in ids], 0)
    rows = zip(messages, words, lefts, notes, scores[0] if has_scores else [None] * len(ids), sizes, strict=True)
    listed = []
    for message, word, left, note, score, size in rows:
        if has_scores and score is None:
            continue
        header = message.header
        retries_left, _key_queue = read_count(left)
        attempt = None
        if header.retries is not None and retries_left is not None:
            attempt = max(0, header.retries - retries_left) + (state == "unack")
        due_ms = word.due_ms if isinstance(word, Delayed) else header.due
        when = score if score is not None or due_ms is None else clamp_time(due_ms / 1000)
        # A message that is being moved is put off: its place has its due time, later by MOVING_MS.
        held_until_ms = word.due_ms if isinstance(word, Delayed) else round((score or 0) * 1000)
        is_moving = MOVING_MS <= held_until_ms < 2 * MOVING_MS
        if is_moving:
            when = (held_until_ms - MOVING_MS) / 1000
        listed.append(
            Entry(
                id=message.id,
                state=state,
                mark=_mark(state, word, is_moving=is_moving),
                when=when,
                attempt=attempt,
                retries_left=retries_left,
                reason=note.reason,
                raised=note.raised,
                error=note.summary,
                headers=header.headers,
                size=None if message.is_gone else size - message.overhead,
                body=message.body,
                key=header.key or "",
                priority=header.priority,
            )
        )
    return listed


def _mark(state: Place, word: StateWord, *, is_moving: bool) -> EntryMark:
    if word.cancelled:
        return "cancelled"
    if is_moving:
        return "moving"
    match word:
        case Backoff():
            return "nacked"
        case Suspect():
            return "suspect"
        case Delayed():
            return "delayed"
    return "held" if state == "unack" else ""


def _letter_entry(letter: Letter) -> Entry:
    return Entry(
        id=letter.id,
        state="dead",
        mark="",
        when=letter.died,
        attempt=letter.attempts,
        retries_left=0,
        reason=letter.reason,
        raised=letter.raised,
        error=f"{letter.reason}: {letter.error}" if letter.error else letter.reason,
        headers=letter.header.headers,
        size=len(letter.payload),
        body=letter.payload,
        letter=letter.letter,
        key=letter.header.key or "",
        priority=letter.header.priority,
    )


# ---- lists ------------------------------------------------------------------


def messages_of(
    queue: QueueSession, state: str, where: Filter, *, limit: int, offset: int, on_look: OnLook
) -> list[Entry]:
    """
    Return up to `limit` messages of a state that are meant, after the first `offset` of them.

    Raises:
        ConfigurationError: a state that is none, or a number that is not allowed.
    """
    place = check_place(state)
    start = check_int("offset", offset, most=10**9)
    most = check_int("limit", limit, least=1, most=LIST_LIMIT)
    end = start + most
    if place == "waiting" and not where.key and not where.is_set:
        key_queues = [(shard, KeyQueueState(key)) for shard in queue.parts for key in _first_keys(shard, end)]
        browsed = [_browse(StatePart(shard, spot, where), 0, on_look) for shard, spot in key_queues[:end]]
        return list(islice(_by_turns(browsed), start, end))
    parts = parts_of(queue, place, where)
    if place == "waiting" and not where.key:
        return list(islice(chain.from_iterable(_browse(part, 0, on_look) for part in parts), start, end))
    first, *others = parts
    if not others:
        return list(islice(_browse(first, start, on_look), most))
    browsed = [_browse(part, 0, on_look) for part in (first, *others)]
    if place in (*commands.LISTS, "waiting", "garbage"):
        return list(islice(_by_turns(browsed), start, end))
    return list(islice(merge(*browsed, key=lambda entry: entry.when or 0.0), start, end))


def size_of(queue: QueueSession, state: str, key: str = "") -> int:
    """Return how many messages a state has, of the waiting ones with `key` how many have it."""
    place = check_place(state)
    if place == "waiting" and not key:
        return Counts.sum(queue.run_all([transitions.counts(part.keys) for part in queue.parts])).waiting
    parts = parts_of(queue, place, Filter(key=key))
    return sum(queue.run_all([calls.size(part.queue.keys, part.spot) for part in parts]))


def _by_turns(browsed: Iterable[Iterator[Entry]]) -> Iterator[Entry]:
    """Yield the first of each, then the second: lists have no order between shards, and keys take turns."""
    return (entry for turn in zip_longest(*browsed) for entry in turn if entry is not None)


def _browse(part: StatePart, offset: int, on_look: OnLook) -> Iterator[Entry]:
    """Yield the messages of a part of a state that are meant; call `on_look` with how many each step looked at."""
    queue, spot, where = part
    if spot == "dead":
        for looked, letters in walk_letters(queue, where):
            on_look(looked)
            yield from map(_letter_entry, letters[offset:])
            offset = max(0, offset - len(letters))
        return
    # Without a filter the place is the offset; with one, matches are counted.
    walk = Walk(queue, spot, where, offset=0 if where.is_set else offset)
    skip = offset if where.is_set else 0
    for looked, messages in walk.pieces():
        on_look(looked)
        yield from entries(queue, place_of(spot), messages[skip:])
        skip = max(0, skip - len(messages))


# ---- places from which a page or a search goes on ---------------------------


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
        """Return the place that `text` names, None for None; raise ConfigurationError for one that is not of `state`."""
        if text is None:
            return None
        try:
            of_state, at_text, other_text, id = read_opaque(text).split(" ", 3)
            at = float(at_text)
            other = int(other_text)
        except (ValueError, AttributeError):
            is_valid = False
        else:
            if state in ("pending", "unack"):
                is_valid = not math.isnan(at)
            else:
                is_valid = 0 <= at < LAST_PLACE and 0 <= other < LAST_PLACE
            if state == "dead" and _LETTER_NAME.fullmatch(id) is None:
                is_valid = False
        if not is_valid or of_state != state:
            raise ConfigurationError(
                f"after must be the `after` of an earlier page of the state {state}, not {str(text)[:40]!r}"
            )
        return cls(state, at, other, id)


def opaque(place: str) -> str:
    """Return a place as the text that a person or a program is given for it."""
    return urlsafe_b64encode(_bytes(place)).decode().rstrip("=")


def read_opaque(text: str) -> str:
    """Return the place that `opaque` made a text of; raise ValueError or AttributeError for another text."""
    padded = text.encode("ascii") + b"=" * (-len(text) % 4)
    return urlsafe_b64decode(padded).decode("utf-8", "surrogateescape")


def _bytes(id: str) -> bytes:
    return id.encode("utf-8", "surrogateescape")


def _rows_after(queue: QueueSession, spot: Spot, after: Cursor | None, count: int) -> tuple[list[Cursor], bool]:
    """Return up to `count` messages of a place, except dead, that come next, and whether there may be more."""
    if spot == "garbage":
        return _garbage_rows(queue, after, count)
    if is_list(spot):
        rows = _list_rows(queue, spot, after, count + 1)
    else:
        rows = _sorted_set_rows(queue, cast("SortedSet", spot), after, count + 1)
    return rows[:count], len(rows) > count


def _sorted_set_rows(queue: QueueSession, place: SortedSet, after: Cursor | None, count: int) -> list[Cursor]:
    """Read in the order of scores and ids: the place is exact, whether its message is still there or not."""
    keys = queue.keys
    start = 0
    if after is not None:
        rank, score, low, high = queue.run_all(
            [
                calls.rank(keys, place, after.id),
                calls.score(keys, place, after.id),
                calls.count_to(keys, place, after.at, without=True),
                calls.count_to(keys, place, after.at),
            ]
        )
        if rank is not None and score == after.at:
            start = rank + 1
        else:
            wanted = _bytes(after.id)
            while low < high:  # a binary search among the messages of one score
                middle = (low + high) // 2
                rows = queue.run(calls.scored_at(keys, place, middle, 1))
                if rows and (rows[0][1], _bytes(rows[0][0])) <= (after.at, wanted):
                    low = middle + 1
                else:
                    high = middle
            start = low
    return [Cursor(place, score, 0, id) for id, score in queue.run(calls.scored_at(keys, place, start, count))]


def _list_rows(queue: QueueSession, spot: Spot, after: Cursor | None, count: int) -> list[Cursor]:
    """
    Read in the order of claims.

    The message of the place is looked for, and those behind it are read in the same look. When it is gone, as many as
    were claimed since are taken to have stood before it: nothing is passed over, and some may be seen twice.
    """
    keys = queue.keys
    state = place_of(spot)
    claims = queue.run(commands.claims(keys))
    likely = 0
    if after is not None:
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


def _garbage_rows(queue: QueueSession, after: Cursor | None, count: int) -> tuple[list[Cursor], bool]:
    """Read as a scan does: what stays is seen at least once."""
    at = 0 if after is None else int(after.at)
    skip = 0 if after is None else after.other
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
        at = following
        skip = 0


# ---- pages and searches -----------------------------------------------------


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
    place = check_place(state)
    most = check_int("limit", limit, least=1, most=PAGE_LIMIT)
    spot = _spot(place, key)
    parts = queue.parts
    if queue.is_sharded and place in CHAINED:
        items = list[Entry]()
        at, rest = _shard_and_place(parts, after)
        while at < len(parts) and len(items) < most:
            page = page_of(parts[at], place, rest, most - len(items), key)
            items += page.items
            rest = page.after
            if rest is None:
                at += 1
        return MessagePage(items, None if at == len(parts) else f"{at}.{rest or ''}")
    cursor = Cursor.parse(after, place)
    if place == "dead":
        return _letters_page(parts, cursor, most)
    # A place in the common order of all shards is a place in each.
    rows = list[tuple[QueueSession, Cursor]]()
    has_more = False
    for part in parts:
        part_rows, part_has_more = _rows_after(part, spot, cursor, most)
        rows += [(part, row) for row in part_rows]
        has_more |= part_has_more
    if queue.is_sharded:
        rows.sort(key=lambda row: (row[1].at, _bytes(row[1].id)))
        has_more |= len(rows) > most
        rows = rows[:most]
    ids = defaultdict[QueueSession, list[str]](list)
    for part, row in rows:
        ids[part].append(row.id)
    known = {
        (part, entry.id): _cut(entry)
        for part, part_ids in ids.items()
        for entry in entries(part, place, _read_messages(part, part_ids, length=BODY_BYTES))
    }
    items = [known[part, row.id] for part, row in rows if (part, row.id) in known]
    return MessagePage(items, str(rows[-1][1]) if has_more else None)


def search_in(
    queue: QueueSession, state: str, where: Filter, after: str | None, limit: int, for_seconds: float
) -> SearchResult:
    """Look through a state for what is meant; raise ConfigurationError for an argument that is not allowed."""
    place = check_place(state)
    most = check_int("limit", limit, least=1, most=PAGE_LIMIT)
    until = time.monotonic() + seconds("for_seconds", for_seconds, most=LONGEST_SEARCH)
    if isinstance(where, LetterFilter) and place != "dead" and replace(where, headers={}, match="", key="").is_set:
        raise ConfigurationError(f"ids, reason, raised, error and ages are of the state dead, not of {place}")
    parts = queue.parts
    spot = _spot(place, where.key)
    if place == "waiting":
        where = replace(where, key="")
    first, rest = _shard_and_place(parts, after) if queue.is_sharded else (0, after)
    cursor = Cursor.parse(rest, place)
    of = sum(queue.run_all([calls.size(part.keys, spot) for part in parts]))
    items = list[Entry]()
    looked = 0
    for at, part in enumerate(parts[first:], first):
        if spot == "dead":
            rows = _search_letters(part, where, cursor)
        else:
            rows = _search_messages(part, spot, where, cursor, until)
        for row, entry in rows:
            looked += 1
            if entry is not None:
                items.append(_cut(entry))
            if len(items) == most or time.monotonic() >= until:
                return SearchResult(items, looked, of, f"{at}.{row}" if queue.is_sharded else str(row))
        cursor = None
    return SearchResult(items, looked, of, None)


def _spot(place: Place, key: str) -> Spot:
    """Return where the messages of a page or search are; raise ConfigurationError for the queues of all keys at once."""
    if place != "waiting":
        return place
    if not key:
        raise ConfigurationError("waiting messages are paged and searched by key: name one of those that `keys` tells")
    return KeyQueueState(key)


def _shard_and_place(parts: Sequence[QueueSession], after: str | None) -> tuple[int, str | None]:
    """Return the shard in which a page or search of several goes on, and the place there; None for its start."""
    number, dot, rest = ("0." if after is None else after).partition(".")
    if not dot or not number.isdecimal() or int(number) >= len(parts):
        raise ConfigurationError(f"after must be the `after` of an earlier page, not {str(after)[:40]!r}")
    return int(number), rest or None


def _letters_page(parts: Sequence[QueueSession], after: Cursor | None, most: int) -> MessagePage:
    """Return a page of dead letters, the newest first; of those that died together by the number of the shard."""

    def newest_first(part: QueueSession) -> Iterator[tuple[tuple[int, int, int], Letter]]:
        shard = part.keys.shard
        start = "+" if after is None else f"({after.id}" if shard <= after.other else after.id
        for letters in letters_in(part, "-", start, newest_first=True):
            for letter in letters:
                at_ms, number = map(int, letter.letter.split("-"))
                yield (-at_ms, -number, shard), letter

    items = list[Entry]()
    size = 0
    last = after
    for (*_, shard), letter in merge(*map(newest_first, parts), key=operator.itemgetter(0)):
        if len(items) == most or size >= LETTERS_BYTES:
            return MessagePage(items, str(last))
        items.append(_cut(_letter_entry(letter)))
        size += len(letter.payload)
        last = Cursor("dead", 0, shard, letter.letter)
    return MessagePage(items, None)


def _search_letters(queue: QueueSession, where: Filter, after: Cursor | None) -> Iterator[tuple[Cursor, Entry | None]]:
    """Yield the place of each dead letter from `after` on, with its entry when it is meant."""
    letter_filter = where.of_letters()
    test = letter_filter.letter_tester()
    first, last = span_of(queue, letter_filter)
    for letters in letters_in(queue, first, f"({after.id}" if after else last, newest_first=True):
        for letter in letters:
            yield Cursor("dead", 0, 0, letter.letter), _letter_entry(letter) if test(letter) else None


def _search_messages(
    queue: QueueSession, spot: Spot, where: Filter, after: Cursor | None, until: float
) -> Iterator[tuple[Cursor, Entry | None]]:
    """Yield the place of each message from `after` on, with its entry when it is meant."""
    test = where.tester()
    step = SEARCH_STEP
    step_seconds = max(0.0, until - time.monotonic()) / STEP_PART
    has_more = True
    while has_more:
        began = time.monotonic()
        rows, has_more = _rows_after(queue, spot, after, step)
        messages = _read_messages(queue, [row.id for row in rows], length=BODY_BYTES, whole=bool(where.match))
        meant = [message for message in messages if not message.is_gone and test(message.header, message.body)]
        known = {entry.id: entry for entry in entries(queue, place_of(spot), meant)}
        yield from ((row, known.get(row.id)) for row in rows)
        if rows:
            after = rows[-1]
        step = min(BATCH_LIMIT, 2 * step) if time.monotonic() - began < step_seconds / 2 else max(1, step // 2)


def _cut(entry: Entry) -> Entry:
    return entry if len(entry.body) <= BODY_BYTES else replace(entry, body=entry.body[:BODY_BYTES])
