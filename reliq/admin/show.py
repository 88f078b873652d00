"""
A message and its history: state, content, failed deliveries, and its end.

The stream `ends` stores the ends of messages that were not acked. The stream `history` stores the ends of acked messages,
where the queue keeps them.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from reliq.admin import calls
from reliq.admin.calls import KeyQueueState
from reliq.admin.filters import Filter
from reliq.admin.messages import Entry, MessageEvent, StatePart, letter_entry, message_entries, read_end, walk
from reliq.admin.session import AdminBase, ask_each
from reliq.admin.workers import running_in, workers_alive
from reliq.errors import ConfigurationError
from reliq.keys import Keys, made_at
from reliq.lua import transitions
from reliq.message import BARE
from reliq.redis import commands
from reliq.redis.commands import Command
from reliq.text import clamp_time
from reliq.wire_format import FailureNote, open_envelope, read_count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reliq.admin.calls import Spot
    from reliq.admin.session import QueueSession
    from reliq.admin.words import Place
    from reliq.admin.workers import Running
    from reliq.lua.transitions import KeyQueue
    from reliq.message import DeadLetter
    from reliq.metrics.snapshot import ShardMaps
    from reliq.redis.session import Session

#: Entries in one read of a stream.
PAGE = 1000
#: When no end names the dead letter, all letters are searched for at most this many seconds.
SEARCH_SECONDS = 0.5
#: An id is searched for among this many entries from either end of a list; that keeps Redis busy for some 5 ms.
LOOK_THROUGH = 100_000
#: The mark of an id that a cancel has freed: a repeated cancel finds it, and a publish ignores it.
FREED = b"freed"


@dataclass(frozen=True, slots=True)
class MessageView(Entry):
    """
    A message, or its dead letter or end. Times are unix seconds by Redis' clock.

    Attributes:
        state: `ready` also for a message too deep in a long list to be found. An `ended` message has left no body.
        attempt: how many deliveries count against its retries, the running delivery included. A snooze, or
            a release by a stopped worker, spends none and leaves no trace. None when unknown.
        body: all of its bytes.
        queue: its name.
        suspect: its last delivery ended when its lease expired, so the message may have killed its worker.
        published: when; by its maker's clock for a generated id, else by Redis' clock. None when unknown.
        ttl_left: seconds until its body expires; None when it has none or never does.
        holder: the handler that runs it; None when none does, or its process does not report it (`Queue.receive`).
        taken_seconds: for how long its id stays taken after its end; None when it is not.
        failures: each that is kept, the newest first: at most ten.
        ends: how it ended, newest first, as far as it is remembered; an id can end more than once.
        letters: its dead letters, newest first.
        searched_all: whether no dead letter of it can have been missed.
        line: of a waiting message, the state of its key, or of the messages of its priority; else None.
        ahead: how many messages of its key come before it; None when it is too deep to be found.
    """

    queue: str = ""
    suspect: bool = False
    published: float | None = None
    ttl_left: float | None = None
    holder: Running | None = None
    taken_seconds: float | None = None
    failures: Sequence[FailureNote] = ()
    ends: Sequence[MessageEvent] = ()
    letters: Sequence[DeadLetter] = ()
    searched_all: bool = True
    line: KeyQueue | None = None
    ahead: int | None = None

    @property
    def timeline(self) -> list[MessageEvent]:
        """Its life, the oldest event first; an event without a time follows the event before it."""
        events = [MessageEvent(self.published, "published", self.id)]
        for note in reversed(self.failures):
            at, took = (None if ms is None else ms / 1000 for ms in (note.at_ms, note.took_ms))
            texts = (note.by, note.reason, note.raised, note.error)
            events.append(MessageEvent(at, "failed", self.id, note.attempt, *texts, took))
        events += reversed(self.ends)
        known = {end.letter for end in self.ends}
        for letter in reversed(self.letters):
            if letter.letter not in known:
                texts = ("", letter.reason, letter.raised, letter.error)
                events.append(MessageEvent(letter.died, "dead", self.id, letter.attempts, *texts))
        if self.holder is not None:
            by = f"{self.holder.host}:{self.holder.pid}"
            events.append(MessageEvent(self.holder.started, "claimed", self.id, self.holder.attempt, by))
        elif self.mark == "held":
            events.append(MessageEvent(None, "claimed", self.id, self.attempt))
        elif self.when is not None and (self.state == "pending" or self.mark == "nacked"):
            events.append(MessageEvent(self.when, "due", self.id))
        times = list[float]()
        for event in events:
            times.append(event.at if event.at is not None else times[-1] if times else 0.0)
        return [event for _, event in sorted(zip(times, events, strict=True), key=lambda pair: pair[0])]


class ShowReads(AdminBase):
    """The method that reads a single message."""

    def show(self, queue: str, id: str) -> MessageView:
        """Return the state, content, worker and history of a message; raise when Redis stores nothing about it."""
        views = [_view(part, id) for part in self._redis.queue(queue).homes(id)]
        known = [view for view in views if view is not None]
        if not known:
            raise ConfigurationError(
                f"queue {queue!r} has no trace of a message {id[:128]!r}: it was never published, its end is forgotten "
                "(Redis keeps the last 1,000 abnormal ends, and acked ones up to Queue(keep_completed=...)), or its dead "
                "letter is among too many to search"
            )
        return min(known, key=lambda view: view.state in ("dead", "ended"))


def _view(queue: QueueSession, id: str) -> MessageView | None:
    """Return everything that a shard stores of a message; None when it stores nothing."""
    keys = queue.keys
    (pending,), (unack,), (word,), (left,), failures, in_garbage, value, ttl_ms, mark, mark_ms = queue.run_all(
        [
            calls.scores(keys, "pending", [id]),
            calls.scores(keys, "unack", [id]),
            commands.state_words(keys, [id]),
            commands.retries_left(keys, [id]),
            Command(("HGET", keys.errors, id), FailureNote.parse_all),
            calls.is_in_garbage(keys, id),
            calls.value(keys, id),
            calls.ttl_ms(keys, id),
            calls.marker(keys, id),
            Command(("PTTL", keys.dedup(id)), int),
        ]
    )
    is_alive = pending is not None or unack is not None or left is not None or in_garbage
    ids = frozenset([id])
    parts = [StatePart(queue, "ended", Filter(ids=ids)), StatePart(queue, "ended", Filter(ids=ids, kind="acked"))]
    ends = sorted(
        (end for part in parts for step in walk(part, count=PAGE) for _, end in step.chosen), key=_newest_first
    )
    letters, searched_all = _letters_of(queue, id, ends, is_alive=is_alive)
    more: dict[str, Any] = {}
    header = BARE
    if is_alive:
        header, body = open_envelope(value or b"", bare=keys.bare)
        _, key_queue = read_count(left)
        state: Place = "waiting" if key_queue else "ready"
        if pending is not None:
            state = "pending"
        elif unack is not None:
            state = "unack"
        elif in_garbage:
            state = "garbage"
        elif key_queue and (ahead := _count_ahead(queue, KeyQueueState(key_queue), id)) is not None:
            more["ahead"] = ahead
        elif _count_ahead(queue, "retry", id) is not None:
            state = "retry"
        entry = next(iter(message_entries(queue, state, [id])), Entry(id, state))  # it may leave its state meanwhile
        more["body"] = b"" if value is None else body
        more["size"] = None if value is None else len(body)
        more["ttl_left"] = ttl_ms / 1000 if ttl_ms >= 0 else None
        if state == "waiting":
            [more["line"]] = queue.run(transitions.key_queues(keys, of=[key_queue])).largest
        if unack is not None and not word.waits:
            running = running_in(workers_alive(queue), queue.name)
            more["holder"] = next((job for job in running if job.id == id), None)
    elif letters:
        header = letters[0].header
        entry = letter_entry(letters[0])
        failures = queue.run(calls.letter_failures(keys, letters[0].letter))
    elif ends or mark is not None:
        entry = Entry(id, "ended", when=ends[0].at if ends else None)
    else:
        return None
    published_ms = made_at(id) if header.enqueued is None else header.enqueued
    known = {field.name: getattr(entry, field.name) for field in fields(entry)} | more
    return MessageView(
        **known,
        queue=queue.name,
        suspect=word.deaths > 0,
        published=None if published_ms is None else clamp_time(published_ms / 1000),
        taken_seconds=mark_ms / 1000 if mark_ms > 0 and mark not in (None, FREED) else None,
        failures=failures,
        ends=ends,
        letters=letters,
        searched_all=searched_all,
    )


def _letters_of(
    queue: QueueSession, id: str, ends: Sequence[MessageEvent], *, is_alive: bool
) -> tuple[list[DeadLetter], bool]:
    """Return the dead letters that ends name; without an end, search for one. Return also whether none can be missing."""
    if is_alive or ends:
        named = [end.letter for end in ends if end.letter]
        answers = queue.try_all([commands.letters_between(queue.keys, name, name, count=1) for name in named])
        return [letter for answer in answers if not isinstance(answer, Exception) for letter in answer], True
    until = time.monotonic() + SEARCH_SECONDS
    for step in walk(StatePart(queue, "dead", Filter(ids=frozenset([id]))), count=PAGE):
        if step.chosen or step.place is None:
            return [letter for _, letter in step.chosen], True
        if time.monotonic() >= until:
            break
    return [], False


def _count_ahead(queue: QueueSession, spot: Spot, id: str) -> int | None:
    """Return how many messages come before an id in a list; None when it is not found near either end."""
    searches = [
        calls.index_of(queue.keys, spot, id, newest_first=newest_first, most=LOOK_THROUGH)
        for newest_first in (False, True)
    ]
    size, *indexes = queue.run_all([calls.size(queue.keys, spot), *searches])
    return next((max(0, size - 1 - index) for index in indexes if index is not None), None)


def last_ends(session: Session, queues: Sequence[Keys], limit: int, maps: ShardMaps) -> list[tuple[Keys, MessageEvent]]:
    """Return the last abnormal ends of several queues in one round trip, newest first; none of a queue that refuses."""
    answers, _ = ask_each(session, queues, lambda keys: calls.newest_entries(keys, "ends", "+", limit), maps)
    newest = list[tuple[Keys, MessageEvent]]()
    for keys, parts in zip(queues, answers, strict=True):
        ends = [read_end(*row) for answer in parts if not isinstance(answer, Exception) for row in answer]
        newest += [(keys, end) for end in sorted(ends, key=_newest_first)[:limit]]
    return sorted(newest, key=lambda pair: _newest_first(pair[1]))


def _newest_first(end: MessageEvent) -> float:
    return -(end.at or 0.0)
