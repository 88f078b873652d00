"""The story of one message: when it was published, how each delivery ended as far as it is known, and what came of it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from reliq.admin import calls
from reliq.admin.calls import KeyQueueState
from reliq.admin.messages import ask_each
from reliq.admin.workers import running_in, workers_alive
from reliq.errors import ConfigurationError
from reliq.keys import Keys, made_at
from reliq.lua import transitions
from reliq.message import BARE, Header
from reliq.redis import commands
from reliq.redis.commands import id_text
from reliq.settings import check_int, check_is_one_of
from reliq.text import clamp_time, whole_number
from reliq.wire_format import Delayed, FailureNote, StateWord, open_envelope, read_count

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from reliq.admin.calls import Stream
    from reliq.admin.session import QueueSession, Session
    from reliq.admin.workers import Running
    from reliq.lua.transitions import KeyQueue
    from reliq.message import Letter, Priority
    from reliq.metrics.snapshot import ShardMaps
    from reliq.redis.commands import List


TimelineKind = Literal["published", "failed", "claimed", "due", "dead", "expired", "cancelled", "purged", "acked"]


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
    """Return what a view of a message says, in the order of time; what has no time stays behind what it followed."""
    events = [_published_event(view), *_failed(view), *_ended(view), *_present(view)]
    times, last = list[float](), 0.0
    for event in events:
        last = last if event.at is None else event.at
        times.append(last)
    ordered = sorted(zip(times, events, strict=True), key=lambda pair: pair[0])
    return Timeline(view.queue, view.id, view.state, [event for _, event in ordered])


def _published_event(view: MessageView) -> TimelineEvent:
    return TimelineEvent(view.published, "published")


def _failed(view: MessageView) -> Iterator[TimelineEvent]:
    for note in reversed(view.failures):
        at = None if note.at_ms is None else note.at_ms / 1000
        took = None if note.took_ms is None else note.took_ms / 1000
        yield TimelineEvent(at, "failed", note.attempt, note.by, note.reason, note.raised, note.error, took)


def _present(view: MessageView) -> Iterator[TimelineEvent]:
    holder = view.holder
    if holder is not None:
        yield TimelineEvent(holder.started, "claimed", holder.attempt, f"{holder.host}:{holder.pid}")
    elif view.state == "leased":
        yield TimelineEvent(None, "claimed", view.deliveries)
    elif view.due is not None and view.state in ("pending", "backoff"):
        yield TimelineEvent(view.due, "due")


def _ended(view: MessageView) -> Iterator[TimelineEvent]:
    for end in reversed(view.ends):
        yield TimelineEvent(end.at, end.kind, end.attempt, "", end.reason, "", end.error, end.took)
    known = {end.letter for end in view.ends}
    for letter in reversed(view.letters):
        if letter.letter not in known:
            yield TimelineEvent(letter.died, "dead", letter.attempts, "", letter.reason, letter.raised, letter.error)


FinishedKind = Literal["dead", "expired", "cancelled", "purged", "acked"]
END_KINDS: tuple[FinishedKind, ...] = ("dead", "expired", "cancelled", "purged", "acked")

#: One list has at most this many ends.
ENDS_LIMIT = 100_000
#: Entries in one read of a stream.
PAGE = 1000
#: The first read of a search is one letter, for it may be of any size; each later read has at most twice as many as the
#: one before, and as many as these bytes are expected to hold.
PAGE_BYTES = 500_000
#: When no end says where a letter is, all letters are searched for at most this many seconds.
SEARCH_SECONDS = 0.5


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
    found: list[FinishedMessage] = []
    for part in queue.parts:
        met = 0
        for page in _pages(part, "history" if kind == "acked" else "ends"):
            ends = [end for end in page if kind in (None, end.kind)]
            found, met = found + ends, met + len(ends)
            if met >= limit:
                break
    return (sorted(found, key=lambda end: -end.at) if queue.is_sharded else found)[:limit]


def last_ends(
    session: Session, queues: Sequence[Keys], limit: int, maps: ShardMaps
) -> list[tuple[Keys, FinishedMessage]]:
    """Return the last abnormal ends of several queues in one round trip, newest first; none of one that refuses."""
    answers, _ = ask_each(session, queues, lambda keys: calls.newest_entries(keys, "ends", "+", limit), maps)
    found = list[tuple[Keys, FinishedMessage]]()
    for keys, parts in zip(queues, answers, strict=True):
        ends = [_end(*row) for answer in parts if not isinstance(answer, Exception) for row in answer]
        found += [(keys, end) for end in sorted(ends, key=lambda end: -end.at)[:limit]]
    return sorted(found, key=lambda pair: -pair[1].at)


def ends_of_one(queue: QueueSession, id: str) -> list[FinishedMessage]:
    """Return every end of one id that is remembered, newest first: an id can be published again after its end."""
    streams: tuple[Stream, ...] = ("ends", "history")
    found = [end for stream in streams for page in _pages(queue, stream) for end in page if end.id == id]
    return sorted(found, key=lambda end: -end.at)


def letters_of_one(queue: QueueSession, ends: Sequence[FinishedMessage]) -> list[Letter]:
    """Return the dead letters that remembered ends of one id left, newest first, as far as they are still there."""
    asked = [commands.letters_between(queue.keys, end.letter, end.letter, count=1) for end in ends if end.letter]
    answers = queue.try_all(asked)
    return [letter for answer in answers if not isinstance(answer, Exception) for letter in answer]


def letter_searched(queue: QueueSession, id: str) -> tuple[list[Letter], bool]:
    """Look through the letters for one of `id`, newest first, for a moment; say also whether that was all of them."""
    until = time.monotonic() + SEARCH_SECONDS
    last, count = "+", 1
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


def _pages(queue: QueueSession, stream: Stream) -> Iterator[list[FinishedMessage]]:
    """Read a stream from its newest entry on."""
    last = "+"
    while True:
        rows = queue.run(calls.newest_entries(queue.keys, stream, last, PAGE))
        yield [_end(name, fields) for name, fields in rows]
        if len(rows) < PAGE:
            return
        last = f"({rows[-1][0].decode()}"


def _end(name: bytes, fields: list[bytes]) -> FinishedMessage:
    told = dict(zip(fields[::2], fields[1::2], strict=False))
    kind: Any = told.get(b"kind", b"").decode("utf-8", "replace")
    id, at = id_text(told.get(b"id", b"")), clamp_time(int(name.split(b"-")[0]) / 1000)
    if kind == "acked":
        took = whole_number(told.get(b"note", b""))
        return FinishedMessage(id, kind, at, took=None if took is None else took / 1000)
    note = FailureNote.parse(told.get(b"note"))
    letter = told.get(b"letter", b"").decode("utf-8", "replace")
    return FinishedMessage(id, kind, at, note.reason, note.attempt, note.error, letter=letter)


MessageState = Literal[
    "pending", "ready", "waiting", "retry", "ready or retry", "leased", "backoff", "garbage", "dead", "finished"
]

#: An id is looked for among this many entries from either end of a list; that keeps Redis busy for some 5 ms.
LOOK_THROUGH = 100_000
#: The mark of an id that a cancel has freed: by it a repeated cancel is known, and a publish passes it over.
FREED = b"freed"


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


@dataclass(frozen=True, slots=True)
class _Traces:
    """All that the structures say of an id, read in one round trip; scores in unix seconds, times to live in ms."""

    pending: float | None
    unack: float | None
    word: StateWord
    left: bytes | None
    failures: Sequence[FailureNote]
    in_garbage: bool
    value: bytes | None
    ttl_ms: int
    mark: bytes | None
    mark_ms: int

    @property
    def alive(self) -> bool:
        return self.pending is not None or self.unack is not None or self.left is not None or self.in_garbage

    @property
    def taken_seconds(self) -> float | None:
        """For how long the id stays taken after its end."""
        return self.mark_ms / 1000 if self.mark_ms > 0 and self.mark not in (None, FREED) else None


def view_of(queue: QueueSession, id: str) -> MessageView:
    """Return where a message is and what it holds; raise ConfigurationError when nothing is known of it."""
    ended, unknown = list[MessageView](), list[ConfigurationError]()
    for part in queue.homes(id):
        try:
            view = MessageReader(part, id).view()
        except ConfigurationError as error:
            unknown.append(error)
            continue
        if view.state not in ("dead", "finished"):
            return view
        ended.append(view)
    if ended:
        return ended[0]
    raise unknown[0]


class MessageReader:
    """Reads all that a queue knows of one id."""

    def __init__(self, queue: QueueSession, id: str) -> None:
        self._queue, self._keys, self._id = queue, queue.keys, id

    def view(self) -> MessageView:
        """Return where the message is and what it holds; raise ConfigurationError when nothing is known of it."""
        traces, ends = self._traces(), ends_of_one(self._queue, self._id)
        letters, searched_all = letters_of_one(self._queue, ends), True
        if not traces.alive and not ends:
            letters, searched_all = letter_searched(self._queue, self._id)
        if traces.alive:
            view = self._of_living(traces)
        elif letters:
            view = _of_letter(letters[0])
            view["failures"] = self._queue.run(calls.letter_failures(self._keys, letters[0].letter))
        elif ends or traces.mark is not None:
            view = {"state": "finished", "published": _published(self._id, BARE)}
        else:
            raise self._unknown(searched_all=searched_all)
        return MessageView(
            self._queue.name,
            self._id,
            **view,
            taken_seconds=traces.taken_seconds,
            ends=ends,
            letters=letters,
            searched_all=searched_all,
        )

    def _unknown(self, *, searched_all: bool) -> ConfigurationError:
        letters = "" if searched_all else ", or it is a dead letter among too many to look through here"
        return ConfigurationError(
            f"queue {self._queue.name!r} knows no message {self._id[:128]!r}: it never was, or its end is no longer "
            f"remembered (the last 1,000 abnormal ends are, and as many acked ones as Queue(history=...) says){letters}"
        )

    def _traces(self) -> _Traces:
        keys, id = self._keys, self._id
        (pending,), (unack,), (word,), (left,), *rest = self._queue.run_all(
            [
                commands.scores(keys, "pending", [id]),
                commands.scores(keys, "unack", [id]),
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
        return _Traces(pending, unack, word, left, *rest)

    def _of_living(self, traces: _Traces) -> dict[str, Any]:
        header, body = (BARE, None) if traces.value is None else open_envelope(traces.value, bare=self._keys.bare)
        (left, line), note = read_count(traces.left), next(iter(traces.failures), FailureNote())
        ahead = self._ahead(traces, line)
        state = self._state(traces, line, ahead, never_failed=left is not None and left == header.retries)
        deliveries = note.attempt
        if left is not None and header.retries is not None:
            deliveries = max(0, header.retries - left + (state in ("leased", "backoff")))
        return {
            "state": state,
            "due": _due(state, traces, header),
            "leased_until": traces.unack if state == "leased" else None,
            "deliveries": deliveries,
            "retries_left": left,
            "ttl_left": traces.ttl_ms / 1000 if traces.ttl_ms >= 0 else None,
            "cancelled": traces.word.cancelled,
            "suspect": traces.word.deaths > 0,
            "reason": note.reason,
            "error": note.error,
            "failures": traces.failures,
            "published": _published(self._id, header),
            "headers": header.headers,
            "body": body,
            "holder": self._holder() if state == "leased" else None,
            "key": header.key or "",
            "priority": header.priority,
            "line": self._line(line) if state == "waiting" else None,
            "ahead": ahead,
        }

    def _holder(self) -> Running | None:
        """Return the handler that runs the message, as its worker says."""
        running = running_in(workers_alive(self._queue), self._queue.name)
        return next((row for row in running if row.id == self._id), None)

    def _ahead(self, traces: _Traces, line: str) -> int | None:
        """Return how many messages come before the message in its line; None when it is not met there."""
        if not line or traces.pending is not None or traces.unack is not None or traces.in_garbage:
            return None
        spot = KeyQueueState(line)
        looks = [
            calls.index_of(self._keys, spot, self._id, newest_first=newest_first, most=LOOK_THROUGH)
            for newest_first in (False, True)
        ]
        size, *found = self._queue.run_all([calls.size(self._keys, spot), *looks])
        return next((max(0, size - 1 - at) for at in found if at is not None), None)

    def _line(self, line: str) -> KeyQueue | None:
        """Return what the key of the message does."""
        return next(iter(self._queue.run(transitions.lines(self._keys, of=[line])).largest), None) if line else None

    def _state(self, traces: _Traces, line: str, ahead: int | None, *, never_failed: bool) -> MessageState:
        if traces.pending is not None:
            return "pending"
        if traces.unack is not None:
            return "backoff" if traces.word.waits else "leased"
        if traces.in_garbage:
            return "garbage"
        if ahead is not None:
            return "waiting"
        if never_failed and not line:
            return "ready"  # to retry goes only what has spent a retry
        found = self._list()
        return "waiting" if line and found == "ready or retry" else found

    def _list(self) -> MessageState:
        """Return which list has the id; `ready or retry` when it is deeper in a list than is looked."""
        places: tuple[List, ...] = ("retry", "ready")
        for newest_first in (False, True):
            for place in places:
                look = calls.index_of(self._keys, place, self._id, newest_first=newest_first, most=LOOK_THROUGH)
                if self._queue.run(look) is not None:
                    return place
        return "ready or retry"


def _due(state: MessageState, traces: _Traces, header: Header) -> float | None:
    if state == "pending":
        return traces.pending
    if state == "backoff":
        return traces.unack
    ms = traces.word.due_ms if isinstance(traces.word, Delayed) else header.due
    return None if ms is None else clamp_time(ms / 1000)


def _published(id: str, header: Header) -> float | None:
    at = made_at(id) if header.enqueued is None else header.enqueued
    return None if at is None else clamp_time(at / 1000)


def _of_letter(letter: Letter) -> dict[str, Any]:
    return {
        "state": "dead",
        "due": None if letter.header.due is None else clamp_time(letter.header.due / 1000),
        "deliveries": letter.attempts,
        "reason": letter.reason,
        "error": letter.error,
        "published": _published(letter.id, letter.header),
        "headers": letter.header.headers,
        "body": letter.payload,
        "key": letter.header.key or "",
        "priority": letter.header.priority,
    }
