"""
A message and its history: state, content, failed deliveries and end.

The stream `ends` records how and when messages ended, except acked messages. The stream `history` records acked
messages, if the queue keeps them.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from reliq.admin import calls
from reliq.admin.calls import KeyQueueState, Spot
from reliq.admin.filters import Filter, Place
from reliq.admin.messages import Entry, MessageEvent, StatePart, letter_entry, message_entries, read_end, walk
from reliq.admin.session import AdminBase, QueueSession, ask_each
from reliq.admin.workers import Running, running_in, workers_alive
from reliq.errors import ConfigurationError
from reliq.keys import Keys, made_at
from reliq.lua import transitions
from reliq.message import BARE, DeadLetter
from reliq.redis import commands
from reliq.redis.commands import Command
from reliq.text import clamp_time
from reliq.wire_format import FailureNote, open_envelope, read_count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reliq.lua.transitions import KeyQueue
    from reliq.metrics.snapshot import ShardMaps
    from reliq.redis.session import Session

#: One command reads this many entries of a stream.
PAGE = 1000
#: If a message is not alive and Redis has no record of its end, `show` searches dead letters for this many seconds.
SEARCH_SECONDS = 0.5
#: At each end of a list, this many entries are searched for an id. A search blocks Redis for about 5 ms.
LOOK_THROUGH = 100_000
#: The marker that a cancel writes for an id that can be published again. A repeated cancel finds the marker; a publish
#: ignores it.
FREED = b"freed"


@dataclass(frozen=True, slots=True)
class MessageView(Entry):
    """
    Everything about one message, living or ended. Times are unix seconds by the server's clock.

    Attributes:
        state: its state; also `ready` if the message is in the middle of a very long list. Redis stores no body of an
            `ended` message.
        attempt: number of deliveries that count against its retries, including a running delivery; None if unknown. A
            delivery that ended with a snooze, or was returned by a stopping worker, does not count.
        body: the whole body.
        queue: name of the queue.
        suspect: whether its last lease expired, so that the message may have killed its worker.
        published: time of the publish, None if unknown; for a generated id, by the publisher's clock.
        ttl_left: seconds until its body expires; None if there is no body, or it does not expire.
        holder: the handler that runs it; None if no handler runs it, or its process does not report handlers
            (`Queue.receive`).
        taken_seconds: for how many more seconds its id stays taken after its end; None if it is not taken.
        failures: its last failures, newest first, at most ten.
        ends: its known ends, newest first; an id that is published again can have several ends.
        letters: its dead letters, newest first.
        searched_all: whether all dead letters were searched, so that `letters` is complete.
        line: for a waiting message, the key queue of its message key or of its priority; None for other messages.
        ahead: for a waiting message, the number of messages before it in its key queue; None for other messages, or if
            it is in the middle of a very long queue.
        cursor: the cursor of its last checkpoint; None without a checkpoint.
        progress: the fraction of its last `Job.progress`; None without a report. Its text is in `note`.
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
    cursor: Any = None
    progress: float | None = None
    note: str = ""

    @property
    def timeline(self) -> list[MessageEvent]:
        """The events in the message's life, oldest first. An event without a time stays after the event before it."""
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
        """
        Return the state, content, worker and history of a message.

        Raises:
            ConfigurationError: the queue is unknown, or Redis stores nothing about the message.
        """
        views = [_view(part, id) for part in self._queue(queue).homes(id)]
        known = [view for view in views if view is not None]
        if not known:
            raise ConfigurationError(
                f"queue {queue!r} has no record of a message {id[:128]!r}. It was never published, or its record was "
                "deleted: Redis keeps the last 1,000 messages that ended without an ack, and acked messages up to "
                "Queue(keep_completed=...). Or the queue has too many dead letters to search"
            )
        return min(known, key=lambda view: view.state in ("dead", "ended"))


def _view(queue: QueueSession, id: str) -> MessageView | None:
    """Return everything that a shard stores about a message; None if the shard stores nothing."""
    keys = queue.keys
    (pending,), (unack,), (word,), (left,), failures, in_garbage, value, ttl_ms, mark, mark_ms = queue.run_all(
        [
            calls.scores(keys, "pending", [id]),
            calls.scores(keys, "unack", [id]),
            commands.state_words(keys, [id]),
            commands.retries_left(keys, [id]),
            Command(("HGET", keys.errors, id), FailureNote.parse_all),
            Command(("SISMEMBER", keys.garbage, id), bool),
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
        # If the message has left its sorted set meanwhile, there is no entry: use an entry without details.
        entry = next(iter(message_entries(queue, state, [id])), Entry(id, state))
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
        cursor=header.checkpoint[2],
        progress=header.progress[0],
        note=header.progress[1],
    )


def _letters_of(
    queue: QueueSession, id: str, ends: Sequence[MessageEvent], *, is_alive: bool
) -> tuple[list[DeadLetter], bool]:
    """
    Return the dead letters of a message, and whether all of its dead letters were found.

    Read the dead letters that the events in `ends` name. If the message is not alive and `ends` is empty, search all
    dead letters of the queue for a limited time.
    """
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
    """Return how many messages a list has before an id; None if the id was not found near an end of the list."""
    searches = [
        calls.index_of(queue.keys, spot, id, newest_first=newest_first, most=LOOK_THROUGH)
        for newest_first in (False, True)
    ]
    size, *indexes = queue.run_all([calls.size(queue.keys, spot), *searches])
    return next((max(0, size - 1 - index) for index in indexes if index is not None), None)


def last_ends(session: Session, queues: Sequence[Keys], limit: int, maps: ShardMaps) -> list[tuple[Keys, MessageEvent]]:
    """
    Read the messages of queues that ended last without an ack, newest first, in one round trip.

    If Redis refuses to read a queue, its messages are omitted.
    """
    answers, _ = ask_each(session, queues, lambda keys: calls.newest_entries(keys, "ends", "+", limit), maps)
    newest = list[tuple[Keys, MessageEvent]]()
    for keys, parts in zip(queues, answers, strict=True):
        ends = [read_end(*row) for answer in parts if not isinstance(answer, Exception) for row in answer]
        newest += [(keys, end) for end in sorted(ends, key=_newest_first)[:limit]]
    return sorted(newest, key=lambda pair: _newest_first(pair[1]))


def _newest_first(end: MessageEvent) -> float:
    return -(end.at or 0.0)
