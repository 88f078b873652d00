"""
Read the messages of a state. Lists, pages, counts and bulk changes of messages all use `walk`.

A walk reads messages in bounded steps, so that no command blocks Redis for long, and the queue can be in use during the
walk. Each walk reads one part of a state: one shard of the queue or, for waiting messages, one message key of a shard.
"""

from __future__ import annotations

import re
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple, cast

from reliq.admin import calls
from reliq.admin.calls import STEP_IDS, KeyQueueState, KeySet, Spot, Stream, place_of
from reliq.admin.filters import EVERYTHING, PLACES, EndKind, Filter, Place, check_place, ignore
from reliq.admin.session import AdminBase, QueueSession
from reliq.errors import ConfigurationError
from reliq.lua import transitions
from reliq.message import PRIORITY_LINES, Counts, DeadLetter, Priority
from reliq.redis import commands
from reliq.redis.commands import Command, Request, SortedSet, id_text, read_ids
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

EntryMark = Literal["", "held", "nacked", "suspect", "cancelled", "delayed", "dead", "expired", "purged", "acked"]
EventKind = Literal["published", "failed", "claimed", "due", "dead", "expired", "cancelled", "purged", "acked"]

#: Members of the sorted sets `ring` and `held` that are not message keys. In `ring`, "" stands for the states ready and
#: retry, which take turns with the message keys. In `held`, "\2" marks ordered messages that wait for a redelivery.
NO_KEYS = ("", "\2")
#: Dead letters may be large. So the first step of a walk reads one dead letter, and each later step reads at most twice
#: as many as the previous step. A step reads no more dead letters than probably fit into LETTERS_STEP_BYTES.
FIRST_STEP = 1
LETTERS_STEP_BYTES = MIB
MARKS: dict[type[StateWord], EntryMark] = {Backoff: "nacked", Suspect: "suspect", Delayed: "delayed"}

#: A page contains at most this many messages.
PAGE_LIMIT = 200
#: An `Entry` contains at most this many bytes of a message's body.
BODY_BYTES = 1024
#: The first read of a stored message reads this many bytes: usually all headers, and the start of the body.
START_BYTES = 2 * BODY_BYTES
#: If a filter is set, the method `page` reads this many messages in each step.
SEARCH_STEP = 32
#: If a bulk method has a maximum rate, it processes together the messages that the rate allows in this many seconds.
RATE_SECONDS = 0.2
#: The method `page` reads messages for at most this many seconds.
LONGEST_SEARCH = 60
#: For each state, the valid form of a position in the state. The argument `after` of the method `page` contains a
#: position.
_POSITIONS = {
    **dict.fromkeys(("dead", "ended"), re.compile(r"[0-9]{1,20}-[0-9]{1,20}")),
    **dict.fromkeys(("pending", "unack"), re.compile(r"-?(inf|[0-9]+(\.[0-9]+)?(e[+-][0-9]+)?) .*", re.DOTALL)),
    **dict.fromkeys(("ready", "waiting", "retry"), re.compile(r"[0-9]{1,9} .*", re.DOTALL)),
    "garbage": re.compile(r"[0-9]{1,19} [0-9]{1,9}"),
}


# ---- the parts of a state ---------------------------------------------------


class StatePart(NamedTuple):
    """
    A part of a state: one shard or, for waiting messages, one message key of a shard.

    Attributes:
        queue: the session of the shard.
        spot: the state; for waiting messages, the key queue.
        where: the filter for its messages.
    """

    queue: QueueSession
    spot: Spot
    where: Filter


def parts_of(queue: QueueSession, place: Place, where: Filter, without: Collection[int] = ()) -> Iterator[StatePart]:
    """Yield the parts of a state that may contain matching messages; skip the shards in `without`."""
    for shard in queue.parts:
        if shard.keys.shard in without:
            continue
        if place != "waiting":
            yield StatePart(shard, place, where)
            continue
        for key in [where.key] if where.key else every_key(shard):
            yield StatePart(shard, KeyQueueState(key), replace(where, key=""))


def every_key(shard: QueueSession) -> Iterator[str]:
    """
    Yield each message key that may have waiting messages, once.

    The Redis key `ring` is read twice, because a throttled message key may move from `asleep` back to `ring` after the
    first read.
    """
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
    """Yield lists of the message keys that have entries in the Redis key `held`; no list contains a key twice."""
    start = "-"
    while members := shard.run(
        Command(("ZRANGE", shard.keys.held, start, "+", "BYLEX", "LIMIT", 0, STEP_IDS), read_ids)
    ):
        keys = list(dict.fromkeys(member.partition("\0")[0] for member in members))
        yield keys
        start = f"({keys[-1]}\1"  # skip all further entries of the last message key


# ---- walks ------------------------------------------------------------------


class Step(NamedTuple):
    """
    The result of one step of a walk.

    A row is a pair: the position after a message, and the message itself as an id, a dead letter or an event.

    Attributes:
        rows: all rows that the step read.
        chosen: the rows that match the filter.
        place: the position at which the next step continues; None if the step has reached the end.
    """

    rows: list[tuple[str, Any]]
    chosen: list[tuple[str, Any]]
    place: str | None


def walk(part: StatePart, place: str = "", count: int = STEP_IDS, *, oldest_first: bool = False) -> Iterator[Step]:
    """
    Read a part of a state from the position `place`, in steps of about `count` messages.

    A message that keeps its position is read exactly once, even if other messages are claimed, published or deleted
    meanwhile. A message that moves to a later position, for example because its lease is renewed, is read again.

    Args:
        part: the part of the state, with the filter.
        place: the `place` of an earlier step, or an empty text to begin at the first message.
        count: approximate maximum number of messages in a step.
        oldest_first: read dead letters oldest first instead of newest first, and skip dead letters that are written
            during the walk.
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
                # SSCAN has no order, so a position consists of a cursor and the number of ids read at that cursor.
                cursor, seen = map(int, (at or "0 0").split())
                following, ids = queue.run(calls.ids_scanned(queue.keys, "garbage", cursor, count))
                rows = [(f"{cursor} {number}", id) for number, id in enumerate(ids[seen:], seen + 1)]
                at = f"{following} 0" if following else None
            case "pending" | "unack":
                rows, at = _read_sorted_set(queue, spot, at, count)
            case _:
                rows, at = _read_list(queue, spot, at, count)
        yield Step(rows, _choose(part, rows), at)


def _choose(part: StatePart, rows: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
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
    """
    Read the header and the start of the body of each message; return empty bytes for a missing message.

    With `whole`, read the header and the whole body.
    """
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
    """
    Read messages of a sorted set in the order of scores and ids.

    Begin after the position `after`. A position consists of the score and id of a message, so it stays valid after the
    message has left the sorted set.
    """
    keys = queue.keys
    start = 0
    if after:
        score_text, _, id = after.partition(" ")
        score = float(score_text)
        # The first index to read is between the number of lower scores and the number of lower or equal scores.
        highest = (f"({score!r}", f"{score!r}")
        start, end = queue.run_all(
            [Command(("ZCOUNT", calls.redis_key(keys, place), "-inf", to), int) for to in highest]
        )
        while start < end:  # binary search among the ids with the same score
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
    Read messages of a list in the order of claims.

    Begin after the position `after`, which consists of the index and id of the last message that was read. Claims
    remove messages at the front, so this message is now at the same or a lower index: search for it there. If it is not
    found, it was claimed, and all messages before it too. Then continue with the first message of the list.
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
        if first and not start:  # the last read message was not found, so it was claimed
            first = 0
            ids = queue.run(calls.ids_at(keys, spot, 0, count + 1))
    rows = [(f"{first + at} {id}", id) for at, id in enumerate(ids[start : start + count], start + 1)]
    return rows, rows[-1][0] if len(ids) > start + count else None


def _behind(id: str, ids: Sequence[str]) -> int:
    """Return the index after the last occurrence of `id` in `ids`; 0 if there is none."""
    return next((at for at in range(len(ids), 0, -1) if ids[at - 1] == id), 0)


def read_end(name: bytes, fields: list[bytes]) -> MessageEvent:
    """Return an entry of the stream `ends` or `history` as an event."""
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
        at: unix seconds by the server's clock; None if unknown. A `claimed` event has the worker's clock. A `published`
            event of a generated id has the publisher's clock.
        kind: `published`; `failed` (a delivery failed); `claimed` (a handler is running); `due` (the next delivery is
            due); or how the message ended: `dead`, `expired` (its TTL passed before a delivery, or its body was
            missing), `cancelled`, `purged`, `acked`.
        id: the message's id.
        attempt: the number of the delivery, 1 for the first; None if unknown.
        by: the process that ran the handler, as host:pid; empty if unknown.
        reason: reason of a failure, one of `DEATH_REASONS`; empty if there was no failure.
        raised: class and source line of the exception, without any data of the body; empty if no exception was raised.
        error: text of the exception, which may contain data of the body.
        took: for how many seconds the handler ran; None if unknown.
        letter: stream id of the dead letter of a `dead` message; empty if the queue keeps no dead letters.
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
        id: the message's id.
        mark: `held`: leased by a worker. `nacked`: waits in unack for its redelivery. `suspect`: its last lease
            expired. `cancelled` or `delayed`: a worker that claims the id will remove it from the list. For an ended
            message: how it ended.
        when: unix seconds, None if unknown. For pending and lists, the due time; for unack, the end of the lease or the
            time of the redelivery; for dead letters and ended messages, the time of the end.
        attempt: number of deliveries so far; None if unknown.
        reason: reason of the last failure, one of `DEATH_REASONS`; empty if there was none.
        raised: class and source line of the last failure's exception, without any data of the body; empty without an
            exception.
        error: text of the last failure, which may contain data of the body.
        size: bytes of the whole body; None if the body does not exist.
        body: the first KiB of the body.
        letter: stream id of the dead letter; empty without a dead letter.
        key: the message key; empty without a key.
        priority: the priority of a message without a key.
        cost: how much the message takes from a rate by cost, 1 by default.
        took: for how many seconds the handler of an acked message ran; None if unknown.
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
    cost: int = 1
    took: float | None = None

    @property
    def summary(self) -> str:
        """Reason and error of the last failure as one text."""
        return f"{self.reason}: {self.error}" if self.error else self.reason


def entries(part: StatePart, rows: Iterable[tuple[str, Any]]) -> list[Entry]:
    """Return an `Entry` for each row of a step; skip messages that have left their sorted set since the step."""
    found = [row for _, row in rows]
    if part.spot == "dead":
        return [replace(letter_entry(letter), body=letter.payload[:BODY_BYTES]) for letter in found]
    if part.spot == "ended":
        return [_end_entry(end) for end in found]
    return message_entries(part.queue, place_of(part.spot), found) if found else []


def message_entries(queue: QueueSession, state: Place, ids: Sequence[str]) -> list[Entry]:
    """Return an `Entry` for each message that has not ended; skip messages that have left their sorted set."""
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
    exist = queue.run_all([calls.has_value(keys, id) for id in ids])  # STRLEN is 0 for missing and for empty bodies
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
            cost=header.cost,
        )
        listed.append(entry)
    return listed


def letter_entry(letter: DeadLetter) -> Entry:
    """Return the `Entry` of a dead letter."""
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
        cost=letter.header.cost,
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
    The result of a bulk method: numbers of messages.

    Attributes:
        verb: the meaning of `done`: `found`, `deleted`, `cancelled`, `moved` or `redriven`.
        found: number of messages that matched the filter.
        done: number of messages that were deleted, cancelled, moved or redriven.
        running: number of messages with a running handler. After a delete or cancel, these messages are not retried; a
            move leaves them unchanged.
        kept: number of messages left unchanged, because the other queue already has their ids or does not accept them.
        gone: number of messages that had ended before the method reached them.
    """

    verb: str
    found: int = 0
    done: int = 0
    running: int = 0
    kept: int = 0
    gone: int = 0

    def __add__(self, other: Tally) -> Tally:
        numbers = ("found", "done", "running", "kept", "gone")
        return Tally(self.verb, *(getattr(self, name) + getattr(other, name) for name in numbers))

    def __str__(self) -> str:
        """Return the numbers as one line of text."""
        parts = [f"{self.done} {self.verb}"]
        if self.running and self.verb in ("deleted", "cancelled"):
            parts.append(f"{pluralize(self.running, 'is running: it is', 'are running: they are')} not retried")
        elif self.running:
            parts.append(f"{self.running} kept: a worker runs them")
        if self.kept:
            parts.append(f"{self.kept} kept: their ids are in use, or the queue refuses them")
        if self.gone:
            parts.append(f"{self.gone} had ended meanwhile")
        return ", ".join(parts)


#: A callback that is called after each step, with the number of messages that the step read, and with the sum of the
#: results of all steps so far.
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
    Read the parts of a state, call `do` with the matching messages of each step, and return the sum of the results.

    In each part, at most as many messages are processed as the part contains at the start. So this function ends even
    if new messages are published all the time.

    Args:
        parts: the parts of the state.
        nothing: a result with all numbers 0.
        do: a function that processes messages of a part, and returns the result.
        on_step: called after each step.
        limit: maximum number of messages; None for all.
        rate: maximum number of processed messages per second; None for no limit.
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
                    while (wait := free_at - time.monotonic()) > 0:  # short sleeps, so that `on_step` can raise soon
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
        items: the messages in the order of delivery; dead letters and ended messages newest first.
        looked: number of messages that were read to fill this page.
        of: number of messages in the state, with or without a match.
        after: the value to pass as `after` for the next page; None on the last page.
    """

    items: Sequence[Entry]
    looked: int
    of: int
    after: str | None


@dataclass(frozen=True, slots=True)
class DeadGroup:
    """
    Dead letters with the same cause.

    Attributes:
        reason: one of `DEATH_REASONS`.
        raised: class and source line of the exception; empty without an exception. A `Filter` with this `reason` and
            `raised` matches the same dead letters.
        count: number of dead letters with this cause, of the dead letters that were read.
        newest: when the newest message of this group died, in unix seconds by the server's clock.
        example: the id of the newest message of this group.
    """

    reason: str
    raised: str
    count: int
    newest: float
    example: str


@dataclass(frozen=True, slots=True)
class DeadGroups:
    """
    The dead letters of a queue, grouped by cause, the largest group first.

    Attributes:
        groups: the groups.
        looked: number of dead letters that were read, beginning with the newest.
        of: number of dead letters in the queue.
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
        Yield the messages of a state that match the filter `where`, shard by shard.

        Messages come in the order of delivery; `dead` and `ended` messages come newest first, and `waiting` messages
        key by key.

        Args:
            queue: name of the queue.
            state: `pending`, `ready`, `waiting`, `unack`, `retry`, `garbage`, `dead` or `ended`.
            where: the filter.
            without: numbers of shards to skip, for example `shards(queue).away`.
            on_step: called after each step, with the number of messages that the step read, and with the sum of the
                results of all steps so far.
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
        Return the next messages of a state that match the filter, in the order of `messages`.

        A message that keeps its position is on exactly one page. A message that enters the state at a position before
        the next page is on no page. A message may be on several pages if it moves to a later position, for example
        because its lease is renewed; if it is in garbage; or if it is in a list, and the last message of a page was
        removed from the middle of this list.

        Args:
            queue: name of the queue.
            state: a state, as in `messages`.
            where: the filter. For the state `waiting` it must name a key, because each key has its own pages.
            after: the `after` of the previous page; None for the first page.
            limit: maximum number of messages on the page, up to 200.
            for_seconds: return the page after this time, up to a minute, even if it has fewer than `limit` messages.
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
        """
        Count the messages of a state that match the filter `where`.

        Without a filter, or with only a message key for `waiting`, this needs a single round trip to Redis.
        """
        session, place = self._state(queue, state, where)
        if place == "waiting" and where == EVERYTHING:
            return Counts.sum(session.run_all([transitions.counts(part.keys) for part in session.parts])).waiting
        parts = list(parts_of(session, place, where))
        if not any(part.where.is_set for part in parts):
            return sum(session.run_all([calls.size(part.queue.keys, part.spot) for part in parts]))
        return each(parts, Tally("found"), lambda _part, rows: Tally("found", len(rows), len(rows)), on_step).found

    def dead_groups(
        self, queue: str, where: Filter = EVERYTHING, *, for_seconds: float = 1.0, without: Collection[int] = ()
    ) -> DeadGroups:
        """
        Read the newest dead letters of a queue, and group them by cause.

        Args:
            queue: name of the queue.
            where: the filter for the dead letters.
            for_seconds: read for at most this long, up to 60 s.
            without: numbers of shards to skip.
        """
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
        """
        Check the queue, state and filter that a method was given; return the queue's session and the state.

        Raises:
            ConfigurationError: the queue is unknown, or the state or the filter is not allowed.
        """
        place = check_place(state, allowed)
        where.check(place)
        return self._queue(queue), place


def _each_entry(parts: Iterable[StatePart], on_step: OnStep) -> Iterator[Entry]:
    found = 0
    for part in parts:
        for step in walk(part):
            found += len(step.chosen)
            on_step(len(step.rows), Tally("found", found, found))
            yield from entries(part, step.chosen)


def _read_place(text: str | None, state: Place, parts: int) -> tuple[int, str]:
    """
    Decode `after`, the position at which a page of messages begins.

    A state has a part for each Redis key that stores its ids. Return the index of the part, and the position in it.

    Raises:
        ConfigurationError: `text` is not the `after` of a page of this state.
    """
    if text is None:
        return 0, ""
    try:
        padded = text.encode("ascii") + b"=" * (-len(text) % 4)
        of_state, part, place = urlsafe_b64decode(padded).decode("utf-8", "surrogateescape").split(" ", 2)
        is_position = not place or _POSITIONS[state].fullmatch(place)
        if of_state == state and part.isdecimal() and int(part[:9]) < parts and is_position:
            return int(part), place
    except (ValueError, AttributeError):
        pass
    raise ConfigurationError(
        f"after must be the `after` of an earlier page of the state {state}, not {str(text)[:40]!r}"
    )


def opaque(place: str) -> str:
    """Return a position as an encoded text, which callers pass back as `after`."""
    return urlsafe_b64encode(_bytes(place)).decode().rstrip("=")


def _bytes(id: str) -> bytes:
    return id.encode("utf-8", "surrogateescape")
