"""One message: where it is, what it holds, what went wrong, who has it; and what became of it when it is gone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from reliq import commands, transitions
from reliq.admin import queries
from reliq.admin.ends import End, ends_of_one, letter_searched, letters_of_one
from reliq.admin.places import LinePlace
from reliq.admin.workers import running_in, workers_alive
from reliq.errors import ConfigurationError
from reliq.failure_note import FailureNote
from reliq.foreign import moment
from reliq.ids import made_at
from reliq.message import BARE, Header
from reliq.wireformat import Delayed, StateWord, open_envelope, read_count

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reliq.admin.session import QueueSession
    from reliq.admin.workers import Running
    from reliq.commands import List
    from reliq.message import Letter, Priority
    from reliq.transitions import KeyLine

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
    ends: Sequence[End] = ()
    letters: Sequence[Letter] = ()
    searched_all: bool = True
    key: str = ""
    priority: Priority = "normal"
    line: KeyLine | None = None
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
            view["failures"] = self._queue.run(queries.letter_failures(self._keys, letters[0].letter))
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
                queries.failures(keys, id),
                queries.is_in_garbage(keys, id),
                queries.value(keys, id),
                queries.ttl_ms(keys, id),
                queries.marker(keys, id),
                queries.marker_ms(keys, id),
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
        spot = LinePlace(line)
        looks = [
            queries.index_of(self._keys, spot, self._id, newest_first=newest_first, most=LOOK_THROUGH)
            for newest_first in (False, True)
        ]
        size, *found = self._queue.run_all([queries.size(self._keys, spot), *looks])
        return next((max(0, size - 1 - at) for at in found if at is not None), None)

    def _line(self, line: str) -> KeyLine | None:
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
                look = queries.index_of(self._keys, place, self._id, newest_first=newest_first, most=LOOK_THROUGH)
                if self._queue.run(look) is not None:
                    return place
        return "ready or retry"


def _due(state: MessageState, traces: _Traces, header: Header) -> float | None:
    if state == "pending":
        return traces.pending
    if state == "backoff":
        return traces.unack
    ms = traces.word.due_ms if isinstance(traces.word, Delayed) else header.due
    return None if ms is None else moment(ms / 1000)


def _published(id: str, header: Header) -> float | None:
    at = made_at(id) if header.enqueued is None else header.enqueued
    return None if at is None else moment(at / 1000)


def _of_letter(letter: Letter) -> dict[str, Any]:
    return {
        "state": "dead",
        "due": None if letter.header.due is None else moment(letter.header.due / 1000),
        "deliveries": letter.attempts,
        "reason": letter.reason,
        "error": letter.error,
        "published": _published(letter.id, letter.header),
        "headers": letter.header.headers,
        "body": letter.payload,
        "key": letter.header.key or "",
        "priority": letter.header.priority,
    }
