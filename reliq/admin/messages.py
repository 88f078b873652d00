"""
The messages of a queue, state by state: each list, page, count and bulk change reads them by `walk`.

A walk goes in bounded steps, so that no request keeps Redis busy for long, while messages come and go. The shards of a
queue, and the keys whose messages wait, are the parts of a state: a walk goes through one after another.
"""

from __future__ import annotations

import re
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

from reliq.admin import calls
from reliq.admin.calls import STEP_IDS, KeyQueueState, Spot, place_of
from reliq.admin.filters import EVERYTHING, Filter, ignore
from reliq.admin.session import AdminBase, QueueSession
from reliq.admin.words import PLACES, Place, check_place
from reliq.errors import ConfigurationError
from reliq.lua import transitions
from reliq.message import PRIORITY_LINES, Counts
from reliq.redis import commands
from reliq.redis.commands import Command, id_text
from reliq.settings import BATCH_LIMIT, MIB, check_int, seconds
from reliq.text import chunked, clamp_time, pluralize, whole_number
from reliq.wire_format import (
    HEADER_LIMIT,
    MAGIC,
    Backoff,
    Delayed,
    FailureNote,
    StateWord,
    Suspect,
    open_envelope,
    read_count,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from reliq.admin.calls import KeySet, Stream
    from reliq.admin.filters import EndKind
    from reliq.message import DeadLetter, Priority
    from reliq.redis.commands import Request, SortedSet

EntryMark = Literal["", "held", "nacked", "suspect", "cancelled", "delayed", "dead", "expired", "purged", "acked"]
EventKind = Literal["published", "failed", "claimed", "due", "dead", "expired", "cancelled", "purged", "acked"]

#: Members of `ring` and `held` that are no keys: the turn of ready and retry, and the places of messages that only wait.
NO_KEYS = ("", "\2")
#: The first step reads one dead letter, because a letter may have any size. Each later step reads at most twice as many
#: letters as the step before, and as many as LETTERS_STEP_BYTES are expected to hold.
FIRST_STEP = 1
LETTERS_STEP_BYTES = MIB
MARKS: dict[type[StateWord], EntryMark] = {Backoff: "nacked", Suspect: "suspect", Delayed: "delayed"}

#: A page has at most this many messages.
PAGE_LIMIT = 200
#: An entry has this many bytes of a body.
BODY_BYTES = 1024
#: The first bytes of a value that are read: most headers, and the start of the body.
START_BYTES = 2 * BODY_BYTES
#: A step of a page that filters looks at this many messages.
SEARCH_STEP = 32
#: With a rate, a step of a bulk method does as many as the rate permits in this many seconds.
RATE_SECONDS = 0.2
#: A page reads for at most this many seconds.
LONGEST_SEARCH = 60
#: How the place is written at which a walk goes on.
_STREAM_PLACE = re.compile(r"[0-9]{1,20}-[0-9]{1,20}")
_PLACES = {
    "dead": _STREAM_PLACE,
    "ended": _STREAM_PLACE,
    "garbage": re.compile(r"[0-9]{1,19} [0-9]{1,9}"),
    "pending": re.compile(r"-?(inf|[0-9]+(\.[0-9]+)?(e[+-][0-9]+)?) .*", re.DOTALL),
    "ready": re.compile(r"[0-9]{1,9} .*", re.DOTALL),
}
_PLACES |= {"unack": _PLACES["pending"], "waiting": _PLACES["ready"], "retry": _PLACES["ready"]}


# ---- the parts of a queue ---------------------------------------------------


class StatePart(NamedTuple):
    """
    A part of a state that a walk goes through: of one shard, and of waiting messages of one key.

    Attributes:
        where: which of its messages are chosen.
    """

    queue: QueueSession
    spot: Spot
    where: Filter


def parts_of(queue: QueueSession, place: Place, where: Filter, without: Collection[int] = ()) -> Iterator[StatePart]:
    """Yield the parts of a state that may have a chosen message; `without` leaves shards out."""
    for shard in queue.parts:
        if shard.keys.shard in without:
            continue
        if place != "waiting":
            yield StatePart(shard, place, where)
            continue
        for key in [where.key] if where.key else every_key(shard):
            yield StatePart(shard, KeyQueueState(key), replace(where, key=""))


def every_key(shard: QueueSession) -> Iterator[str]:
    """Yield each key that may have a waiting message, once. The ring is read twice, because a key may wake meanwhile."""
    yield from PRIORITY_LINES.values()
    seen = {*NO_KEYS, *PRIORITY_LINES.values()}
    for among in ("ring", "asleep", "held", "ring"):
        steps = (
            _keys_holding(shard)
            if among == "held"
            else shard.scan(partial(calls.keys_among, shard.keys, cast("KeySet", among), count=STEP_IDS))
        )
        for keys in steps:
            new = dict.fromkeys(key for key in keys if key not in seen)
            seen |= new.keys()
            yield from new


def _keys_holding(shard: QueueSession) -> Iterator[list[str]]:
    last: str | None = None
    while keys := shard.run(calls.keys_holding(shard.keys, last, STEP_IDS)):
        yield keys
        last = keys[-1]


# ---- walks ------------------------------------------------------------------


class Step(NamedTuple):
    """
    One read of a walk. A row is the id of a message, a dead letter or an end, with the place behind it.

    Attributes:
        rows: everything that the step looked at.
        chosen: the rows that the filter chooses.
        place: where the next step goes on; None at the end of the part.
    """

    rows: list[tuple[str, Any]]
    chosen: list[tuple[str, Any]]
    place: str | None


def walk(part: StatePart, place: str = "", count: int = STEP_IDS, *, oldest_first: bool = False) -> Iterator[Step]:
    """
    Read a part of a state from a place on, in steps of at most about `count` messages.

    A message that stays where it is comes exactly once, whatever is claimed, published or deleted meanwhile. A message
    that moves back in its state, as a renewed lease does, comes again.

    Args:
        oldest_first: for dead letters, which come newest first otherwise. Letters that are written meanwhile are left out.
    """
    queue, spot, where = part
    at: str | None = place
    first, last = where.span(queue.run(commands.server_ms())) if spot in ("dead", "ended") else ("-", "+")
    if spot == "dead" and oldest_first:
        newest = queue.run(commands.letters_between(queue.keys, first, last, count=1, newest_first=True))
        last = newest[0].letter if newest else "0-0"
    most = FIRST_STEP
    while at is not None:
        match spot:
            case "dead":
                most = min(most, count)
                span = (f"({at}" if at else first, last) if oldest_first else (first, f"({at}" if at else last)
                found = queue.run(
                    commands.letters_between(queue.keys, *span, count=most, newest_first=not oldest_first)
                )
                rows: list[tuple[str, Any]] = [(letter.letter, letter) for letter in found]
                at = rows[-1][0] if len(rows) == most else None
                size = max(1, sum(len(letter.payload) for letter in found) // max(1, len(found)))
                most = max(1, min(BATCH_LIMIT, most * 2, LETTERS_STEP_BYTES // size))
            case "ended":
                stream: Stream = "history" if where.kind == "acked" else "ends"
                ends = queue.run(calls.newest_entries(queue.keys, stream, f"({at}" if at else last, count, first))
                rows = [(name.decode(), read_end(name, fields)) for name, fields in ends]
                at = rows[-1][0] if len(rows) == count else None
            case "garbage":
                rows, at = _read_garbage(queue, at, count)
            case "pending" | "unack":
                rows, at = _read_sorted_set(queue, spot, at, count)
            case _:
                rows, at = _read_list(queue, spot, at, count)
        yield Step(rows, _choose(part, rows), at)


def _choose(part: StatePart, rows: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Return the rows that the filter chooses."""
    queue, spot, where = part
    if not where.is_set:
        return rows
    if spot == "dead":
        return [row for row in rows if where.chooses_letter(row[1])]
    if spot == "ended":
        return [row for row in rows if where.chooses_end(row[1].id, row[1].kind, row[1].reason, row[1].error)]
    values = read_values(queue, [id for _, id in rows], whole=bool(where.match))
    return [
        row
        for row, value in zip(rows, values, strict=True)
        if value and where.chooses(*open_envelope(value, bare=queue.keys.bare))
    ]


def read_values(queue: QueueSession, ids: Sequence[str], *, whole: bool = False) -> list[bytes]:
    """Read the start of each message with its whole header, or with `whole` all of it; empty for one that is gone."""
    keys = queue.keys
    values = queue.read_each([commands.body_start(keys, id, START_BYTES) for id in ids], b"")
    for at, start in enumerate(values):
        has_header = keys.bare or not start.startswith(MAGIC) or b"\n" in start
        if len(start) == START_BYTES and whole:
            values[at] = queue.run(calls.value(keys, ids[at])) or b""
        elif len(start) == START_BYTES and not has_header:
            values[at] = queue.run(commands.body_start(keys, ids[at], HEADER_LIMIT + BODY_BYTES))
    return values


def _read_sorted_set(
    queue: QueueSession, place: SortedSet, after: str, count: int
) -> tuple[list[tuple[str, Any]], str | None]:
    """Read in the order of scores and ids. A place is exact, whether its message is still there or not."""
    keys = queue.keys
    start = 0
    if after:
        score_text, _, id = after.partition(" ")
        score = float(score_text)
        start, end = queue.run_all(
            [calls.count_to(keys, place, score, without=True), calls.count_to(keys, place, score)]
        )
        while start < end:  # a binary search among the messages of one score
            middle = (start + end) // 2
            found = queue.run(calls.scored_at(keys, place, middle, 1))
            if found and (found[0][1], _bytes(found[0][0])) <= (score, _bytes(id)):
                start = middle + 1
            else:
                end = middle
    rows = [(f"{score!r} {id}", id) for id, score in queue.run(calls.scored_at(keys, place, start, count + 1))]
    return rows[:count], rows[count - 1][0] if len(rows) > count else None


def _read_list(queue: QueueSession, spot: Spot, after: str, count: int) -> tuple[list[tuple[str, Any]], str | None]:
    """
    Read in the order of claims.

    The message of the place is searched for where it was, then nearer to the front, where claims move it. When it is gone,
    it was claimed, and so was every message before it: the walk goes on from the front.
    """
    keys = queue.keys
    index_text, _, id = after.partition(" ")
    index = int(index_text or 0)
    first = max(0, index - STEP_IDS)
    ids = queue.run(calls.ids_at(keys, spot, first, index - first + count + 1))
    start = _behind(id, ids[: index - first])
    if after and not start:
        searched = calls.index_of(keys, spot, id, newest_first=False, most=max(1, index))
        size, from_newest = queue.run_all([calls.size(keys, spot), searched])
        first = 0 if from_newest is None else max(0, size - from_newest - STEP_IDS // 2)
        ids = queue.run(calls.ids_at(keys, spot, first, STEP_IDS + count + 1))
        start = _behind(id, ids[:STEP_IDS])
        if first and not start:  # it was claimed since
            first = 0
            ids = queue.run(calls.ids_at(keys, spot, 0, count + 1))
    rows = [(f"{first + at} {id}", id) for at, id in enumerate(ids[start : start + count], start + 1)]
    return rows, rows[-1][0] if len(ids) > start + count else None


def _behind(id: str, ids: Sequence[str]) -> int:
    """Return the index behind the last `id` of `ids`; 0 without one."""
    return next((at for at in range(len(ids), 0, -1) if ids[at - 1] == id), 0)


def _read_garbage(queue: QueueSession, after: str, count: int) -> tuple[list[tuple[str, Any]], str | None]:
    """Read as a scan does, in no order: a message that stays is read at least once. A place is a cursor and a number."""
    cursor, seen = map(int, (after or "0 0").split())
    following, ids = queue.run(calls.ids_scanned(queue.keys, "garbage", cursor, count))
    rows = [(f"{cursor} {number}", id) for number, id in enumerate(ids[seen:], seen + 1)]
    return rows, f"{following} 0" if following else None


def read_end(name: bytes, fields: list[bytes]) -> MessageEvent:
    """Return an entry of the streams `ends` and `history`."""
    values = dict(zip(fields[::2], fields[1::2], strict=False))
    kind = cast("EndKind", values.get(b"kind", b"").decode("utf-8", "replace"))
    at = clamp_time(int(name.split(b"-")[0]) / 1000)
    id = id_text(values.get(b"id", b""))
    if kind == "acked":
        took_ms = whole_number(values.get(b"note", b""))
        return MessageEvent(at, kind, id, took=None if took_ms is None else took_ms / 1000)
    note = FailureNote.parse(values.get(b"note"))
    letter = values.get(b"letter", b"").decode("utf-8", "replace")
    return MessageEvent(at, kind, id, note.attempt, reason=note.reason, error=note.error, letter=letter)


# ---- entries ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MessageEvent:
    """
    An event in the life of a message.

    Attributes:
        at: when, in unix seconds, by Redis' clock but for `published` of a generated id, and `claimed`; None when unknown.
        kind: `published`; `failed`, a delivery; `claimed`, the delivery that runs; `due`, the next delivery; or the end:
            `dead`, `expired` (its TTL passed before a delivery, or its body was gone), `cancelled`, `purged`, `acked`.
        id: the message's id.
        attempt: the number of the delivery, 1 for the first; None when unknown.
        by: the process that ran the handler, as host:pid; empty when unknown.
        reason: of a failure, one of `DEATH_REASONS`; empty when there was none.
        raised: class and place of the exception, which hold no piece of a body; empty when nothing was raised.
        error: its text; it may hold a piece of the body.
        took: for how many seconds the handler ran; None when unknown.
        letter: names the dead letter of a `dead` message; empty when the queue keeps none.
    """

    at: float | None
    kind: EventKind
    id: str
    attempt: int | None = None
    by: str = ""
    reason: str = ""
    raised: str = ""
    error: str = ""
    took: float | None = None
    letter: str = ""


@dataclass(frozen=True, slots=True)
class Entry:
    """
    One message in one state.

    Attributes:
        mark: `held` by a worker; `nacked`, it waits there for its redelivery; `suspect`, its last delivery ended by
            its lease; `cancelled` or `delayed`, it leaves the list when a worker meets it. How an ended message ended.
        when: unix seconds: of pending and lists the due time, of unack the end of the lease or the redelivery, of
            dead and ended the end; None when that is unknown.
        attempt: deliveries so far, None when that is unknown.
        reason: of its last failure, one of `DEATH_REASONS`; empty when there was none.
        raised: class and place of the exception then, which hold no piece of a body; empty when nothing was raised.
        error: the same failure's text; it may hold a piece of the body.
        size: bytes of the whole body; None when it is gone.
        body: its first KiB.
        letter: names the death of a dead message.
        key: of the message; empty when it has none.
        priority: of a message without a key.
        took: for how many seconds the handler of an acked message ran; None when unknown.
    """

    id: str
    state: Place
    mark: EntryMark = ""
    when: float | None = None
    attempt: int | None = None
    retries_left: int | None = None
    reason: str = ""
    raised: str = ""
    error: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    size: int | None = None
    body: bytes = b""
    letter: str = ""
    key: str = ""
    priority: Priority = "normal"
    took: float | None = None

    @property
    def summary(self) -> str:
        """Reason and error of its last failure for a person."""
        return f"{self.reason}: {self.error}" if self.error else self.reason


def entries(part: StatePart, rows: Iterable[tuple[str, Any]]) -> list[Entry]:
    """Return everything known of the messages of rows, except of messages that have left a sorted set meanwhile."""
    found = [row for _, row in rows]
    if part.spot == "dead":
        return [replace(letter_entry(letter), body=letter.payload[:BODY_BYTES]) for letter in found]
    if part.spot == "ended":
        return [_end_entry(end) for end in found]
    return message_entries(part.queue, place_of(part.spot), found) if found else []


def message_entries(queue: QueueSession, state: Place, ids: Sequence[str]) -> list[Entry]:
    """Return everything known of messages that have not ended."""
    keys = queue.keys
    has_scores = state in ("pending", "unack")
    requests: list[Request[Any]] = [
        commands.state_words(keys, ids),
        commands.retries_left(keys, ids),
        Command(("HMGET", keys.errors, *ids), lambda reply: [*map(FailureNote.parse, reply)]),
        *([calls.scores(keys, cast("SortedSet", state), ids)] if has_scores else []),
    ]
    words, lefts, notes, *scores = queue.run_all(requests)
    values = read_values(queue, ids)
    sizes = queue.read_each([Command(("STRLEN", keys.msg(id)), int) for id in ids], 0)
    exist = queue.run_all([calls.has_value(keys, id) for id in ids])  # a bare body may be empty
    rows = zip(
        ids, values, sizes, exist, words, lefts, notes, scores[0] if has_scores else [None] * len(ids), strict=True
    )
    listed = []
    for id, value, size, exists, word, left, note, score in rows:
        if has_scores and score is None:
            continue
        header, body = open_envelope(value, bare=keys.bare)
        due_ms = word.due_ms if isinstance(word, Delayed) else header.due
        retries_left, _key_queue = read_count(left)
        attempt = note.attempt
        if header.retries is not None and retries_left is not None:
            attempt = max(0, header.retries - retries_left) + (state == "unack")
        entry = Entry(
            id,
            state,
            "cancelled" if word.cancelled else MARKS.get(type(word), "held" if state == "unack" else ""),
            when=score if score is not None or due_ms is None else clamp_time(due_ms / 1000),
            attempt=attempt,
            retries_left=retries_left,
            reason=note.reason,
            raised=note.raised,
            error=note.error,
            headers=header.headers,
            size=size - (len(value) - len(body)) if exists else None,
            body=body[:BODY_BYTES],
            key=header.key or "",
            priority=header.priority,
        )
        listed.append(entry)
    return listed


def letter_entry(letter: DeadLetter) -> Entry:
    """Return a dead letter as an entry."""
    return Entry(
        letter.id,
        "dead",
        when=letter.died,
        attempt=letter.attempts,
        retries_left=0,
        reason=letter.reason,
        raised=letter.raised,
        error=letter.error,
        headers=letter.header.headers,
        size=len(letter.payload),
        body=letter.payload,
        letter=letter.letter,
        key=letter.header.key or "",
        priority=letter.header.priority,
    )


def _end_entry(end: MessageEvent) -> Entry:
    mark = cast("EntryMark", end.kind)
    return Entry(
        end.id, "ended", mark, end.at, end.attempt, reason=end.reason, error=end.error, letter=end.letter, took=end.took
    )


# ---- bulk methods -----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tally:
    """
    How many messages a bulk method found, and how each ended.

    Attributes:
        verb: the meaning of `done`: `found`, `deleted`, `cancelled`, `moved` or `redriven`.
        found: messages that the filter chose.
        done: of these, the deleted, cancelled, moved or redriven messages.
        running: a worker has them: a delete or cancel keeps them from being retried, and a move leaves them.
        kept: left as they are, because their ids are in use in the queue that would get them, or it refuses them.
        gone: ended otherwise meanwhile.
    """

    verb: str
    found: int = 0
    done: int = 0
    running: int = 0
    kept: int = 0
    gone: int = 0

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            self.verb,
            self.found + other.found,
            self.done + other.done,
            self.running + other.running,
            self.kept + other.kept,
            self.gone + other.gone,
        )

    def __str__(self) -> str:
        """Return in one line how the messages ended."""
        parts = [f"{self.done} {self.verb}"]
        if self.running and self.verb in ("deleted", "cancelled"):
            parts.append(f"{pluralize(self.running, 'is running: it is', 'are running: they are')} not retried")
        elif self.running:
            parts.append(f"{self.running} kept: a worker has them")
        if self.kept:
            parts.append(f"{self.kept} kept: their ids are in use, or the queue refuses them")
        if self.gone:
            parts.append(f"{self.gone} had ended meanwhile")
        return ", ".join(parts)


#: It is called after each step, with how many messages the step looked at and the sum of all steps.
OnStep = Callable[[int, Tally], None]


def each(
    parts: Iterable[StatePart],
    nothing: Tally,
    do: Callable[[StatePart, list[Any]], Tally],
    on_step: OnStep,
    limit: int | None = None,
    rate: float | None = None,
) -> Tally:
    """
    Call `do` with the chosen rows of each step; return the sum of the answers.

    The walk through a part ends when as many were found as it had at the beginning: it does not run after new messages.

    Args:
        limit: the most messages; None for all.
        rate: the most done in a second; None for no limit.
    """
    total = nothing
    piece_size = BATCH_LIMIT if rate is None else max(1, round(rate * RATE_SECONDS))
    free_at = time.monotonic()
    for part in parts:
        left = part.queue.run(calls.size(part.queue.keys, part.spot))
        for step in walk(part, oldest_first=True):
            room = left if limit is None else min(left, limit - total.found)
            chosen = [row for _, row in step.chosen[:room]]
            left -= len(chosen)
            looked = len(step.rows)
            for piece in [*chunked(chosen, piece_size)] or [chosen]:
                done = do(part, piece) if piece else nothing
                total += done
                on_step(looked, total)
                looked = 0
                if rate is not None:
                    free_at = max(free_at, time.monotonic() - RATE_SECONDS) + done.done / rate
                    while (wait := free_at - time.monotonic()) > 0:  # `on_step` may raise to end a long wait
                        time.sleep(min(wait, RATE_SECONDS))
                        on_step(0, total)
            if left <= 0 or total.found == limit:
                break
    return total


# ---- lists, pages and counts ------------------------------------------------


@dataclass(frozen=True, slots=True)
class MessagePage:
    """
    A page of messages.

    Attributes:
        items: the first to come first; of dead letters and ended messages the newest.
        looked: how many messages were looked at.
        of: how many the state has.
        after: the place of the next page; None after the last.
    """

    items: Sequence[Entry]
    looked: int
    of: int
    after: str | None


@dataclass(frozen=True, slots=True)
class DeadGroup:
    """
    Dead letters that died alike.

    Attributes:
        reason: one of `DEATH_REASONS`.
        raised: class and place of the exception; empty without an exception. `Filter(reason=, raised=)` means the same
            letters.
        newest: when the newest of them died, in unix seconds by Redis' clock.
        example: the id of the newest letter.
    """

    reason: str
    raised: str
    count: int
    newest: float
    example: str


@dataclass(frozen=True, slots=True)
class DeadGroups:
    """
    The dead letters of a queue by how they died, the largest group first.

    Attributes:
        looked: how many letters were looked at, the newest.
        of: how many there are.
    """

    groups: Sequence[DeadGroup]
    looked: int
    of: int


class MessageReads(AdminBase):
    """The methods that read the messages of a state."""

    def messages(
        self,
        queue: str,
        state: str,
        where: Filter = EVERYTHING,
        *,
        without: Collection[int] = (),
        on_step: OnStep = ignore,
    ) -> Iterator[Entry]:
        """
        Yield the messages of a state that `where` chooses, shard by shard, as they are read.

        The next to be delivered come first; of `dead` and `ended` the newest. The messages of `waiting` come key by key.

        Args:
            state: `pending`, `ready`, `waiting`, `unack`, `retry`, `garbage`, `dead` or `ended`.
            without: shards to leave out, as `shards(queue).away`.
        """
        session, place = self._state(queue, state, where)
        return _each_entry(parts_of(session, place, where, without), on_step)

    def page(
        self,
        queue: str,
        state: str,
        where: Filter = EVERYTHING,
        *,
        after: str | None = None,
        limit: int = 50,
        for_seconds: float = 1.0,
    ) -> MessagePage:
        """
        Return the next messages of a state that `where` chooses, in the order of `messages`.

        A message that does not move is on one page only. A message that comes into the state before the place of the page
        is not returned. A message that moves back, as a renewed lease does, is returned again; so may be a message of
        garbage, and of a list whose message at the place was taken out of the middle.

        Args:
            where: names the key for the state `waiting`, which has a page for each key alone.
            after: the `after` of the page before; None for the first page.
            limit: the most messages, up to 200.
            for_seconds: the page ends after this time, up to a minute, although it has fewer messages.
        """
        most = check_int("limit", limit, least=1, most=PAGE_LIMIT)
        until = time.monotonic() + seconds("for_seconds", for_seconds, most=LONGEST_SEARCH)
        session, place = self._state(queue, state, where)
        if place == "waiting" and not where.key:
            raise ConfigurationError("waiting messages are paged by key: name one of the keys that `keys` returns")
        parts = list(parts_of(session, place, where))
        first, at = _read_place(after, place, len(parts))
        of = sum(session.run_all([calls.size(part.queue.keys, part.spot) for part in parts]))
        items = list[Entry]()
        looked = 0
        for number, part in enumerate(parts[first:], first):
            for step in walk(part, at, SEARCH_STEP if part.where.is_set else most - len(items)):
                chosen = step.chosen[: most - len(items)]
                items += entries(part, chosen)
                is_cut = len(chosen) < len(step.chosen)
                looked += 1 + step.rows.index(chosen[-1]) if is_cut else len(step.rows)
                following = chosen[-1][0] if is_cut else step.place
                if len(items) < most and time.monotonic() < until:
                    continue
                if following is not None:
                    return MessagePage(items, looked, of, opaque(f"{place} {number} {following}"))
                if number + 1 < len(parts):
                    return MessagePage(items, looked, of, opaque(f"{place} {number + 1} "))
            at = ""
        return MessagePage(items, looked, of, None)

    def count(self, queue: str, state: str, where: Filter = EVERYTHING, *, on_step: OnStep = ignore) -> int:
        """Count the messages of a state that `where` chooses; without a filter, or of a key in `waiting`, in one round trip."""
        session, place = self._state(queue, state, where)
        if place == "waiting" and where == EVERYTHING:
            return Counts.sum(session.run_all([transitions.counts(part.keys) for part in session.parts])).waiting
        parts = list(parts_of(session, place, where))
        if not any(part.where.is_set for part in parts):
            return sum(session.run_all([calls.size(part.queue.keys, part.spot) for part in parts]))
        return each(parts, Tally("found"), lambda _part, rows: Tally("found", len(rows), len(rows)), on_step).found

    def dead_groups(
        self,
        queue: str,
        where: Filter = EVERYTHING,
        *,
        for_seconds: float = 1.0,
        without: Collection[int] = (),
    ) -> DeadGroups:
        """Group the newest dead letters by cause, reading for `for_seconds` up to 60; `without` leaves shards out."""
        whole_time = seconds("for_seconds", for_seconds, most=LONGEST_SEARCH)
        session, place = self._state(queue, "dead", where)
        parts = list(parts_of(session, place, where, without))
        looked = 0
        groups = dict[tuple[str, str], DeadGroup]()
        for part in parts:
            until = time.monotonic() + whole_time / len(parts)
            for step in walk(part, count=BATCH_LIMIT):
                looked += len(step.rows)
                for _, letter in step.chosen:
                    cause = letter.reason, letter.raised
                    found = groups.get(cause) or DeadGroup(*cause, 0, letter.died, letter.id)
                    if letter.died > found.newest:
                        found = replace(found, newest=letter.died, example=letter.id)
                    groups[cause] = replace(found, count=found.count + 1)
                if time.monotonic() >= until:
                    break
        of = sum(session.run_all([calls.size(part.queue.keys, "dead") for part in parts]))
        return DeadGroups(sorted(groups.values(), key=lambda group: (-group.count, -group.newest)), looked, of)

    def _state(
        self, queue: str, state: str, where: Filter, allowed: Sequence[Place] = PLACES
    ) -> tuple[QueueSession, Place]:
        """Return the session of a queue and a state; raise ConfigurationError for a state or filter that is not allowed."""
        place = check_place(state, allowed)
        where.check(place)
        return self._redis.queue(queue), place


def _each_entry(parts: Iterable[StatePart], on_step: OnStep) -> Iterator[Entry]:
    found = 0
    for part in parts:
        for step in walk(part):
            found += len(step.chosen)
            on_step(len(step.rows), Tally("found", found, found))
            yield from entries(part, step.chosen)


def _read_place(text: str | None, state: Place, parts: int) -> tuple[int, str]:
    """Return the part and the place that `_place_text` wrote; raise ConfigurationError for another text."""
    if text is None:
        return 0, ""
    try:
        of_state, part, place = read_opaque(text).split(" ", 2)
    except (ValueError, AttributeError):
        of_state = part = place = ""
    if (
        of_state != state
        or not part.isdecimal()
        or int(part[:9]) >= parts
        or (place and not _PLACES[state].fullmatch(place))
    ):
        raise ConfigurationError(
            f"after must be the `after` of an earlier page of the state {state}, not {str(text)[:40]!r}"
        )
    return int(part), place


def opaque(place: str) -> str:
    """Return a place as the text that a person or a program is given for it."""
    return urlsafe_b64encode(_bytes(place)).decode().rstrip("=")


def read_opaque(text: str) -> str:
    """Return the place that `opaque` made a text of; raise ValueError or AttributeError for another text."""
    padded = text.encode("ascii") + b"=" * (-len(text) % 4)
    return urlsafe_b64decode(padded).decode("utf-8", "surrogateescape")


def _bytes(id: str) -> bytes:
    return id.encode("utf-8", "surrogateescape")
