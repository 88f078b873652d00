"""
One message, or what is left of it: where it is, what it holds, how its deliveries ended, and how it ended itself.

The streams `ends` (of messages that were not acked) and `history` (of acked ones, where the queue keeps them) remember ends.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, get_args

from reliq.admin import calls
from reliq.admin.calls import KeyQueueState
from reliq.admin.session import ask_each
from reliq.admin.workers import running_in, workers_alive
from reliq.errors import ConfigurationError
from reliq.keys import Keys, made_at
from reliq.lua import transitions
from reliq.message import BARE, Header
from reliq.redis import commands
from reliq.redis.commands import id_text
from reliq.settings import check_int, check_is_one_of
from reliq.text import clamp_time, whole_number
from reliq.wire_format import Delayed, FailureNote, open_envelope, read_count

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from reliq.admin.calls import Stream
    from reliq.admin.session import QueueSession, Session
    from reliq.admin.workers import Running
    from reliq.lua.transitions import KeyQueue
    from reliq.message import Letter, Priority
    from reliq.metrics.snapshot import ShardMaps
    from reliq.redis.commands import List


FinishedKind = Literal["dead", "expired", "cancelled", "purged", "acked"]
END_KINDS: tuple[FinishedKind, ...] = get_args(FinishedKind)
MessageState = Literal[
    "pending", "ready", "waiting", "retry", "ready or retry", "leased", "backoff", "garbage", "dead", "finished"
]
TimelineKind = Literal["published", "failed", "claimed", "due", "dead", "expired", "cancelled", "purged", "acked"]

#: One list has at most this many ends.
ENDS_LIMIT = 100_000
#: Entries in one read of a stream.
PAGE = 1000
#: The first read of a search is one letter, for it may be of any size; each later read has at most twice as many as the
#: one before, and as many as these bytes are expected to hold.
PAGE_BYTES = 500_000
#: When no end says where a letter is, all letters are searched for at most this many seconds.
SEARCH_SECONDS = 0.5
#: An id is searched for among this many entries from either end of a list; that keeps Redis busy for some 5 ms.
LOOK_THROUGH = 100_000
#: The mark of an id that a cancel has freed: a repeated cancel finds it, and a publish ignores it.
FREED = b"freed"


@dataclass(frozen=True, slots=True)
class FinishedMessage:
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
    kind: FinishedKind
    at: float
    reason: str = ""
    attempt: int | None = None
    error: str = ""
    took: float | None = None
    letter: str = ""


def check_ends(kind: str | None, limit: int) -> None:
    """Raise ConfigurationError when there is no such kind of end, or the limit is not 1 to 100,000."""
    check_int("limit", limit, least=1, most=ENDS_LIMIT)
    if kind is not None:
        check_is_one_of("kind", kind, END_KINDS)


def ends_of(queue: QueueSession, *, kind: str | None, limit: int) -> list[FinishedMessage]:
    """Return the last abnormal ends, or the last ends of one kind, newest first."""
    ends: list[FinishedMessage] = []
    for part in queue.parts:
        of_kind = (end for end in _ends_in(part, "history" if kind == "acked" else "ends") if kind in (None, end.kind))
        ends += islice(of_kind, limit)
    return (sorted(ends, key=lambda end: -end.at) if queue.is_sharded else ends)[:limit]


def last_ends(
    session: Session, queues: Sequence[Keys], limit: int, maps: ShardMaps
) -> list[tuple[Keys, FinishedMessage]]:
    """Return the last abnormal ends of several queues in one round trip, newest first; none of one that refuses."""
    answers, _ = ask_each(session, queues, lambda keys: calls.newest_entries(keys, "ends", "+", limit), maps)
    newest = list[tuple[Keys, FinishedMessage]]()
    for keys, parts in zip(queues, answers, strict=True):
        ends = [_end(*row) for answer in parts if not isinstance(answer, Exception) for row in answer]
        newest += [(keys, end) for end in sorted(ends, key=lambda end: -end.at)[:limit]]
    return sorted(newest, key=lambda pair: -pair[1].at)


def _search_letter(queue: QueueSession, id: str) -> tuple[list[Letter], bool]:
    """Look through the letters for one of `id`, newest first, for a moment; say also whether that was all of them."""
    until = time.monotonic() + SEARCH_SECONDS
    last = "+"
    count = 1
    wanted = id.encode("utf-8", "surrogateescape")
    while time.monotonic() < until:
        rows = queue.run(calls.newest_entries(queue.keys, "dead", last, count))
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


def _ends_in(queue: QueueSession, stream: Stream) -> Iterator[FinishedMessage]:
    """Read a stream from its newest entry on."""
    last = "+"
    while True:
        rows = queue.run(calls.newest_entries(queue.keys, stream, last, PAGE))
        yield from (_end(name, fields) for name, fields in rows)
        if len(rows) < PAGE:
            return
        last = f"({rows[-1][0].decode()}"


def _end(name: bytes, fields: list[bytes]) -> FinishedMessage:
    values = dict(zip(fields[::2], fields[1::2], strict=False))
    id = id_text(values.get(b"id", b""))
    kind: Any = values.get(b"kind", b"").decode("utf-8", "replace")
    at = clamp_time(int(name.split(b"-")[0]) / 1000)
    if kind == "acked":
        took_ms = whole_number(values.get(b"note", b""))
        return FinishedMessage(id, kind, at, took=None if took_ms is None else took_ms / 1000)
    note = FailureNote.parse(values.get(b"note"))
    letter = values.get(b"letter", b"").decode("utf-8", "replace")
    return FinishedMessage(id, kind, at, note.reason, note.attempt, note.error, letter=letter)


@dataclass(frozen=True, slots=True)
class MessageView:
    """
    A message, or what is left of it. Times are unix seconds by Redis' clock.

    Attributes:
        state: where it is. `leased` and `backoff` are the two ways to be in unack; `ready or retry` is somewhere
            deep in a long list; `dead` is a dead letter; `finished` has ended and left no body.
        due: when it is or was due, or is to be delivered again.
        leased_until: when its lease ends unless its worker renews it.
        deliveries: how many deliveries count against its retries, the one that runs included: one that was snoozed,
            or released by a worker that stopped, spends none and leaves no trace. None when that is unknown.
        retries_left: None when it has ended.
        ttl_left: seconds until its body expires; None when it has none or never does.
        cancelled: it was cancelled and ends where it is met next.
        suspect: its last delivery ended by its lease, so it may be what killed its worker.
        reason, error: of its last failure; empty when there was none.
        failures: each that is kept, the newest first: at most ten.
        published: when; by its maker's clock for a generated id, by Redis' for another. None when nobody knows.
        headers: those its publisher gave it.
        body: its bytes; None when they are gone.
        holder: the handler that runs it; None when none does, or its process does not say (`Queue.receive`).
        taken_seconds: for how long its id stays taken after its end; None when it is not.
        ends: how it ended, newest first, as far as it is remembered; an id can end more than once.
        letters: its dead letters, newest first.
        searched_all: whether no dead letter of it can have been missed.
        key: empty when it has none.
        line: of a message that waits, what its key does, or the messages of its priority; None for any other.
        ahead: how many messages come before it in that line; None where it is deeper than is looked.
    """

    queue: str
    id: str
    state: MessageState
    due: float | None = None
    leased_until: float | None = None
    deliveries: int | None = None
    retries_left: int | None = None
    ttl_left: float | None = None
    cancelled: bool = False
    suspect: bool = False
    reason: str = ""
    error: str = ""
    failures: Sequence[FailureNote] = ()
    published: float | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None
    holder: Running | None = None
    taken_seconds: float | None = None
    ends: Sequence[FinishedMessage] = ()
    letters: Sequence[Letter] = ()
    searched_all: bool = True
    key: str = ""
    priority: Priority = "normal"
    line: KeyQueue | None = None
    ahead: int | None = None


def view_of(queue: QueueSession, id: str) -> MessageView:
    """Return where a message is and what it holds; raise ConfigurationError when nothing is known of it."""
    ended = list[MessageView]()
    unknown = list[ConfigurationError]()
    for part in queue.homes(id):
        try:
            view = _view(part, id)
        except ConfigurationError as error:
            unknown.append(error)
            continue
        if view.state not in ("dead", "finished"):
            return view
        ended.append(view)
    if ended:
        return ended[0]
    raise unknown[0]


def _view(queue: QueueSession, id: str) -> MessageView:
    """Return what a shard knows of a message; raise ConfigurationError when it knows nothing."""
    keys = queue.keys
    (pending,), (unack,), (word,), (left,), failures, in_garbage, value, ttl_ms, mark, mark_ms = queue.run_all(
        [
            calls.scores(keys, "pending", [id]),
            calls.scores(keys, "unack", [id]),
            commands.state_words(keys, [id]),
            commands.retries_left(keys, [id]),
            calls.failures(keys, id),
            calls.is_in_garbage(keys, id),
            calls.value(keys, id),
            calls.ttl_ms(keys, id),
            calls.marker(keys, id),
            calls.marker_ms(keys, id),
        ]
    )
    is_alive = pending is not None or unack is not None or left is not None or in_garbage
    streams: tuple[Stream, ...] = ("ends", "history")
    ends = [end for stream in streams for end in _ends_in(queue, stream) if end.id == id]
    ends.sort(key=lambda end: -end.at)
    searched_all = True
    if is_alive or ends:
        requests = [commands.letters_between(keys, end.letter, end.letter, count=1) for end in ends if end.letter]
        answers = queue.try_all(requests)
        letters = [letter for answer in answers if not isinstance(answer, Exception) for letter in answer]
    else:
        letters, searched_all = _search_letter(queue, id)
    known: dict[str, Any] = {
        "queue": queue.name,
        "id": id,
        "taken_seconds": mark_ms / 1000 if mark_ms > 0 and mark not in (None, FREED) else None,
        "ends": ends,
        "letters": letters,
        "searched_all": searched_all,
    }
    if not is_alive:
        return _ended_view(queue, known, has_mark=mark is not None)
    header, body = (BARE, None) if value is None else open_envelope(value, bare=keys.bare)
    retries_left, key_queue = read_count(left)
    note = next(iter(failures), FailureNote())
    ahead: int | None = None
    state: MessageState
    if pending is not None:
        state = "pending"
    elif unack is not None:
        state = "backoff" if word.waits else "leased"
    elif in_garbage:
        state = "garbage"
    elif key_queue and (ahead := _count_ahead(queue, key_queue, id)) is not None:
        state = "waiting"
    elif not key_queue and retries_left is not None and retries_left == header.retries:
        state = "ready"  # only messages that have spent a retry go to retry
    else:
        state = _list_of(queue, id)
        if key_queue and state == "ready or retry":
            state = "waiting"
    if state == "pending":
        due = pending
    elif state == "backoff":
        due = unack
    else:
        due_ms = word.due_ms if isinstance(word, Delayed) else header.due
        due = None if due_ms is None else clamp_time(due_ms / 1000)
    deliveries = note.attempt
    if retries_left is not None and header.retries is not None:
        deliveries = max(0, header.retries - retries_left + (state in ("leased", "backoff")))
    running = running_in(workers_alive(queue), queue.name) if state == "leased" else []
    lines = queue.run(transitions.key_queues(keys, of=[key_queue])).largest if state == "waiting" and key_queue else ()
    return MessageView(
        **known,
        state=state,
        due=due,
        leased_until=unack if state == "leased" else None,
        deliveries=deliveries,
        retries_left=retries_left,
        ttl_left=ttl_ms / 1000 if ttl_ms >= 0 else None,
        cancelled=word.cancelled,
        suspect=word.deaths > 0,
        reason=note.reason,
        error=note.error,
        failures=failures,
        published=_published(id, header),
        headers=header.headers,
        body=body,
        holder=next((job for job in running if job.id == id), None),
        key=header.key or "",
        priority=header.priority,
        line=next(iter(lines), None),
        ahead=ahead,
    )


def _ended_view(queue: QueueSession, known: dict[str, Any], *, has_mark: bool) -> MessageView:
    """Return what is left of a message that has ended; raise ConfigurationError when nothing is."""
    id: str = known["id"]
    if known["letters"]:
        letter: Letter = known["letters"][0]
        failures = queue.run(calls.letter_failures(queue.keys, letter.letter))
        return MessageView(
            **known,
            state="dead",
            due=None if letter.header.due is None else clamp_time(letter.header.due / 1000),
            deliveries=letter.attempts,
            reason=letter.reason,
            error=letter.error,
            failures=failures,
            published=_published(id, letter.header),
            headers=letter.header.headers,
            body=letter.payload,
            key=letter.header.key or "",
            priority=letter.header.priority,
        )
    if known["ends"] or has_mark:
        return MessageView(**known, state="finished", published=_published(id, BARE))
    letters = "" if known["searched_all"] else ", or it is a dead letter among too many to look through here"
    raise ConfigurationError(
        f"queue {queue.name!r} knows no message {id[:128]!r}: it never was, or its end is no longer "
        f"remembered (the last 1,000 abnormal ends are, and as many acked ones as Queue(history=...) says){letters}"
    )


def _published(id: str, header: Header) -> float | None:
    at_ms = made_at(id) if header.enqueued is None else header.enqueued
    return None if at_ms is None else clamp_time(at_ms / 1000)


def _count_ahead(queue: QueueSession, key_queue: str, id: str) -> int | None:
    """Return how many messages come before this one in its key queue; None when it is not met there."""
    spot = KeyQueueState(key_queue)
    size, *indexes = queue.run_all(
        [
            calls.size(queue.keys, spot),
            calls.index_of(queue.keys, spot, id, newest_first=False, most=LOOK_THROUGH),
            calls.index_of(queue.keys, spot, id, newest_first=True, most=LOOK_THROUGH),
        ]
    )
    return next((max(0, size - 1 - index) for index in indexes if index is not None), None)


def _list_of(queue: QueueSession, id: str) -> MessageState:
    """Return which list has the id; `ready or retry` when it is deeper in a list than LOOK_THROUGH."""
    places: tuple[List, ...] = ("retry", "ready")
    for newest_first in (False, True):
        for place in places:
            request = calls.index_of(queue.keys, place, id, newest_first=newest_first, most=LOOK_THROUGH)
            if queue.run(request) is not None:
                return place
    return "ready or retry"


@dataclass(frozen=True, slots=True)
class TimelineEvent:
    """
    Something that happened to a message.

    Attributes:
        at: when, in unix seconds, by Redis' clock but for `published` of a generated id, and `claimed`; None when
            nobody knows.
        kind: `published`; `failed`, a delivery; `claimed`, the delivery that runs; `due`, the next delivery; or how it
            ended, as `FinishedMessage` says.
        attempt: which delivery, 1 for the first; None when nobody knows.
        by: the process that ran the handler, as host:pid; empty when nobody says.
        reason: of a failure, one of `DEATH_REASONS`.
        raised: class and place of the exception, which hold no piece of a body; empty when nothing was raised.
        error: its text; it may hold a piece of the body.
        took: for how many seconds the handler ran; None when nobody says.
    """

    at: float | None
    kind: TimelineKind
    attempt: int | None = None
    by: str = ""
    reason: str = ""
    raised: str = ""
    error: str = ""
    took: float | None = None


@dataclass(frozen=True, slots=True)
class Timeline:
    """
    A message from its publish on.

    Attributes:
        state: as `MessageView` has it.
        events: the oldest first; of failures the newest ten.
    """

    queue: str
    id: str
    state: MessageState
    events: Sequence[TimelineEvent]


def story_of(view: MessageView) -> Timeline:
    """Return what a view of a message says, in the order of time; an event without a time follows the event before it."""
    events = [TimelineEvent(view.published, "published")]
    for note in reversed(view.failures):
        at = None if note.at_ms is None else note.at_ms / 1000
        took = None if note.took_ms is None else note.took_ms / 1000
        events.append(TimelineEvent(at, "failed", note.attempt, note.by, note.reason, note.raised, note.error, took))
    events += [
        TimelineEvent(end.at, end.kind, end.attempt, "", end.reason, "", end.error, end.took)
        for end in reversed(view.ends)
    ]
    known = {end.letter for end in view.ends}
    events += [
        TimelineEvent(letter.died, "dead", letter.attempts, "", letter.reason, letter.raised, letter.error)
        for letter in reversed(view.letters)
        if letter.letter not in known
    ]
    if view.holder is not None:
        by = f"{view.holder.host}:{view.holder.pid}"
        events.append(TimelineEvent(view.holder.started, "claimed", view.holder.attempt, by))
    elif view.state == "leased":
        events.append(TimelineEvent(None, "claimed", view.deliveries))
    elif view.due is not None and view.state in ("pending", "backoff"):
        events.append(TimelineEvent(view.due, "due"))
    times = list[float]()
    for event in events:
        times.append(event.at if event.at is not None else times[-1] if times else 0.0)
    ordered = sorted(zip(times, events, strict=True), key=lambda pair: pair[0])
    return Timeline(view.queue, view.id, view.state, [event for _, event in ordered])
