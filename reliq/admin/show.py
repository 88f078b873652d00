"""One message: where it is, what it holds, what went wrong, who has it; and what became of it when it is gone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from reliq.admin.ends import End, ends_of_one, letter_searched, letters_of_one
from reliq.admin.workers import running_in, workers_alive
from reliq.call import Command
from reliq.errors import ConfigurationError
from reliq.foreign import moment, whole_number
from reliq.message import BARE, Header
from reliq.wireformat import Delayed, FailureNote, StateWord, open_envelope

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reliq.admin.workers import Running
    from reliq.client.client import Client
    from reliq.keys import Keys
    from reliq.message import Letter

State = Literal["pending", "ready", "retry", "ready or retry", "leased", "backoff", "garbage", "dead", "gone"]

#: So many of a list are looked through from either end for an id; it keeps Redis busy for some 5 ms.
LOOK_THROUGH = 200_000
#: The mark of an id that a cancel has freed: a repeated cancel is told by it, a publish passes it over.
FREED = b"freed"


@dataclass(frozen=True, slots=True)
class MessageView:
    """
    A message, or what is left of it. Times are unix seconds by Redis' clock.

    Attributes:
        state: where it is. `leased` and `backoff` are the two ways to be in unack; `ready or retry` is somewhere
            deep in a long list; `dead` is a dead letter; `gone` has ended and left no body.
        due: when it is or was due, or is to be delivered again.
        leased_until: when its lease ends unless its worker renews it.
        deliveries: how many times it was delivered, the one that runs included; None when nobody knows.
        retries_left: None when it has ended.
        ttl_left: seconds until its body expires; None when it has none or never does.
        cancelled: it was cancelled and ends where it is met next.
        suspect: its last delivery ended by its lease, so it may be what killed its worker.
        reason, error: of its last failure; empty when there was none.
        headers: those its publisher gave it.
        body: its bytes; None when they are gone.
        holder: the handler that runs it; None when none does, or its process does not say (`Queue.receive`).
        taken_seconds: for how long its id stays taken after its end; None when it is not.
        ends: how it ended, newest first, as far as it is remembered; an id can end more than once.
        letters: its dead letters, newest first.
        searched_all: whether no dead letter of it can have been missed.
    """

    queue: str
    id: str
    state: State
    due: float | None = None
    leased_until: float | None = None
    deliveries: int | None = None
    retries_left: int | None = None
    ttl_left: float | None = None
    cancelled: bool = False
    suspect: bool = False
    reason: str = ""
    error: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None
    holder: Running | None = None
    taken_seconds: float | None = None
    ends: Sequence[End] = ()
    letters: Sequence[Letter] = ()
    searched_all: bool = True


@dataclass(frozen=True, slots=True)
class _Traces:
    """What the structures say of an id, in one round trip; scores in unix seconds, times to live in ms."""

    pending: float | None
    unack: float | None
    word: StateWord
    left: str | None
    note: FailureNote
    in_garbage: bool
    value: bytes | None
    ttl_ms: int
    mark: bytes | None
    mark_ms: int

    @property
    def alive(self) -> bool:
        return self.pending is not None or self.unack is not None or self.left is not None or self.in_garbage


def inspected(client: Client, keys: Keys, id: str, for_seconds: float) -> MessageView:
    """Return what is known of message `id`; raise ConfigurationError when nothing is."""
    traces = _traces(client, keys, id, for_seconds)
    ends = ends_of_one(client, keys, id, for_seconds)
    letters, searched_all = letters_of_one(client, keys, ends, for_seconds), True
    if not traces.alive and not ends:
        letters, searched_all = letter_searched(client, keys, id, for_seconds)
    if traces.alive:
        view = _of_living(client, keys, id, traces, for_seconds)
    elif letters:
        view = _of_letter(letters[0])
    elif ends or traces.mark is not None:
        view = {"state": "gone"}
    else:
        raise _unknown(keys, id, searched_all=searched_all)
    taken = traces.mark_ms / 1000 if traces.mark_ms > 0 and traces.mark not in (None, FREED) else None
    return MessageView(
        keys.name, id, **view, taken_seconds=taken, ends=ends, letters=letters, searched_all=searched_all
    )


def _unknown(keys: Keys, id: str, *, searched_all: bool) -> ConfigurationError:
    letters = "" if searched_all else ", or it is a dead letter among too many to look through here"
    return ConfigurationError(
        f"queue {keys.name!r} knows no message {id[:128]!r}: it never was, or its end is no longer remembered "
        f"(the last 1,000 abnormal ends are, and as many acked ones as Queue(history=...) says){letters}"
    )


def _traces(client: Client, keys: Keys, id: str, for_seconds: float) -> _Traces:
    answers = client.run_all(
        [
            Command(("ZSCORE", keys.pending, id), _number),
            Command(("ZSCORE", keys.unack, id), _number),
            Command(("HGET", keys.lease, id), StateWord.parse),
            Command(("HGET", keys.counts, id), lambda reply: None if reply is None else _text(reply)),
            Command(("HGET", keys.errors, id), FailureNote.parse),
            Command(("SISMEMBER", keys.garbage, id), bool),
            Command(("GET", keys.msg(id)), lambda reply: reply),
            Command(("PTTL", keys.msg(id)), int),
            Command(("GET", keys.dd(id)), lambda reply: reply),
            Command(("PTTL", keys.dd(id)), int),
        ],
        for_seconds=for_seconds,
    )
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    return _Traces(*answers)


def _of_living(client: Client, keys: Keys, id: str, traces: _Traces, for_seconds: float) -> dict[str, Any]:
    header, body = (BARE, None) if traces.value is None else open_envelope(traces.value, bare=keys.bare)
    left = whole_number(traces.left or "")
    never_failed = left is not None and left == header.retries
    state = _state(client, keys, id, traces, for_seconds, never_failed=never_failed)
    deliveries = traces.note.attempt
    if left is not None and header.retries is not None:
        deliveries = max(0, header.retries - left + (state in ("leased", "backoff")))
    running = running_in(workers_alive(client, for_seconds), keys.name) if state == "leased" else []
    return {
        "state": state,
        "due": _due(state, traces, header),
        "leased_until": traces.unack if state == "leased" else None,
        "deliveries": deliveries,
        "retries_left": left,
        "ttl_left": traces.ttl_ms / 1000 if traces.ttl_ms >= 0 else None,
        "cancelled": traces.word.cancelled,
        "suspect": traces.word.deaths > 0,
        "reason": traces.note.reason,
        "error": traces.note.error,
        "headers": header.headers,
        "body": body,
        "holder": next((row for row in running if row.id == id), None),
    }


def _state(client: Client, keys: Keys, id: str, traces: _Traces, for_seconds: float, *, never_failed: bool) -> State:
    if traces.pending is not None:
        return "pending"
    if traces.unack is not None:
        return "backoff" if traces.word.waits else "leased"
    if traces.in_garbage:
        return "garbage"
    if never_failed:
        return "ready"  # to retry goes only what has spent a retry
    places: list[State] = ["retry", "ready"]
    for rank in ("-1", "1"):  # what is claimed next stands last
        for place in places:
            key = keys.ready if place == "ready" else keys.retry
            command = Command(("LPOS", key, id, "RANK", rank, "MAXLEN", LOOK_THROUGH), lambda reply: reply is not None)
            if client.run(command, for_seconds=for_seconds):
                return place
    return "ready or retry"


def _due(state: State, traces: _Traces, header: Header) -> float | None:
    if state == "pending":
        return traces.pending
    if state == "backoff":
        return traces.unack
    ms = traces.word.due_ms if isinstance(traces.word, Delayed) else header.due
    return None if ms is None else moment(ms / 1000)


def _of_letter(letter: Letter) -> dict[str, Any]:
    return {
        "state": "dead",
        "due": None if letter.header.due is None else moment(letter.header.due / 1000),
        "deliveries": letter.attempts,
        "reason": letter.reason,
        "error": letter.error,
        "headers": letter.header.headers,
        "body": letter.payload,
    }


def _number(reply: bytes | None) -> float | None:
    return None if reply is None else moment(float(reply))


def _text(reply: bytes | None) -> str:
    return "" if reply is None else reply.decode("utf-8", "replace")
