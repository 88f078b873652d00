"""One queue in a snapshot: it is asked in two round trips, which it shares with other queues."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from reliq import commands, crons, transitions
from reliq.commands import LISTS
from reliq.crons import CronState
from reliq.errors import ProtocolError, RedisRefusedError, RedisUnavailableError
from reliq.ids import made_at
from reliq.message import Counts
from reliq.transitions import KeyLines
from reliq.wireformat import DUE_BYTES, envelope_due

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reliq.call import Request
    from reliq.keys import Keys
    from reliq.snapshot.held_up import HeldUp
    from reliq.snapshot.waits import Waits

#: Ids drawn from unack; their state words tell how many of all are leased and how many wait.
UNACK_SAMPLE = 200


@dataclass(frozen=True, slots=True)
class QueueSnapshot:
    """
    One queue at one moment.

    Attributes:
        oldest: state -> seconds since its first message was due; a state whose first message tells no time is left out.
        backoff: how many of unack wait after a nack.
        overdue: how many pending messages are due.
        crons: its periodic entries.
        shards: how many shards may hold messages.
        lines: of the keys with most messages; None in a queue without keys.
        held_up: for how many seconds nothing has started of the key that waits longest without a turn; None when that was
            not asked.
    """

    keys: Keys
    counts: Counts
    oldest: Mapping[str, float]
    backoff: int
    overdue: int
    crons: Sequence[CronState] = ()
    shards: int = 1
    lines: KeyLines | None = None
    held_up: float | None = None

    @classmethod
    def sum(cls, keys: Keys, shards: int, parts: Sequence[QueueSnapshot], away: tuple[int, ...]) -> QueueSnapshot:
        """Return the snapshot of a queue from those of its shards; the Redis of some may be away."""
        if len(parts) == 1 and not away:
            return parts[0]
        oldest: dict[str, float] = {}
        for part in parts:
            oldest |= {state: max(seconds, oldest.get(state, 0.0)) for state, seconds in part.oldest.items()}
        return cls(
            keys,
            Counts.sum([part.counts for part in parts], away),
            oldest,
            sum(part.backoff for part in parts),
            sum(part.overdue for part in parts),
            parts[0].crons,  # the first shard has them all
            shards,
            next((part.lines for part in parts if part.lines), None),
            max((part.held_up for part in parts if part.held_up is not None), default=None),
        )

    @property
    def queue(self) -> str:
        """The queue's name."""
        return self.keys.name

    @property
    def backlog(self) -> int:
        """How many messages wait for a worker, or for the turn of their key."""
        return self.counts.due + self.overdue


class QueueLook:
    """
    One look at one queue: three times requests and the taking of their answers, then `snapshot`.

    Args:
        waits: what earlier looks saw waiting; a bare body does not say since when it does.
        held_up: what earlier looks saw of keys without a turn; None does not ask for them.

    Attributes:
        refusal: why nothing can be read of the queue; empty when there is no reason.
        is_away: whether it is that Redis is away.
    """

    def __init__(self, keys: Keys, waits: Waits, held_up: HeldUp | None = None) -> None:
        self.keys, self._waits, self._held_up = keys, waits, held_up
        self.refusal, self.is_away = "", False
        self._told: dict[str, Any] = {}
        self._due_ms: dict[str, float] = {}
        self._newest: dict[str, str] = {}
        self._waiting = 0.0
        self._now_ms = 0.0
        self._overdue = 0
        self._crons = list[CronState]()
        self._lines: KeyLines | None = None
        self._held_seconds: float | None = None

    def first_requests(self) -> list[Request[Any]]:
        """Return what can be asked at once."""
        periodic = [] if self.keys.shard else [crons.cron_states(self.keys)]
        return [*self._questions().values(), *periodic, *self._waits.questions(self.keys)]

    def take_first(self, answers: Sequence[Any], now_ms: float) -> None:
        """Take the answers to `first_requests`; a queue with a spoilt key, or whose server is away, hides no other."""
        self._told, self._now_ms = dict(zip(self._questions(), answers, strict=False)), now_ms
        periodic = answers[len(self._told)] if not self.keys.shard else []
        self._crons = periodic if isinstance(periodic, list) else []
        for answer in self._told.values():
            if isinstance(answer, RedisRefusedError | ProtocolError | RedisUnavailableError):
                self.refusal, self.is_away = str(answer), isinstance(answer, RedisUnavailableError)
                return
            if isinstance(answer, Exception):
                raise answer
        scores = {place: self._told[place] for place in ("pending", "unack")}
        self._due_ms = {place: 1000 * score for place, score in scores.items() if score is not None}
        if self.keys.bare:
            waits = answers[len(self._told) + 1 :]
            newest = zip(LISTS, waits, strict=False)
            self._newest = {place: id for place, id in newest if isinstance(id, str) and id}
            self._due_ms |= self._waits.since(self.keys, waits, now_ms)

    def second_requests(self) -> list[Request[Any]]:
        """Return what the first answers lead to: due times of first messages, state words, retries left."""
        if self.refusal:
            return []
        asked: list[Request[Any]] = [commands.body_start(self.keys, id, DUE_BYTES) for id in self._heads().values()]
        if self._told["sample"]:
            asked.append(commands.state_words(self.keys, self._told["sample"]))
        if self._newest:
            asked.append(commands.retries_left(self.keys, [*self._newest.values()]))
        if self._is_overdue:
            asked.append(commands.due_count(self.keys, self._now_ms / 1000))
        if self._told["counts"].keyed:
            asked.append(transitions.lines(self.keys))
            if self._held_up:
                asked.append(self._held_up.question(self.keys))
        return asked

    def take_second(self, answers: Sequence[Any], now_ms: float) -> None:
        """Take the answers to `second_requests`; one that was refused is passed over."""
        rest = iter(answers)
        for place, id in self._heads().items():
            self._take_due(place, id, next(rest))
        if self._told["sample"] and isinstance(words := next(rest), list):
            self._waiting = sum(word.waits for word in words) / len(words)
        if self._newest:
            lefts = next(rest)
            self._waits.remember(self.keys, self._newest, lefts if isinstance(lefts, list) else [], now_ms)
        if self._is_overdue and isinstance(overdue := next(rest), int):
            self._overdue = overdue
        if self._told["counts"].keyed and isinstance(lines := next(rest), KeyLines):
            self._lines = lines
        first = next(rest, None)
        if self._held_up and isinstance(first, dict):
            self._held_seconds = self._held_up.take(self.keys, first, now_ms)

    def third_requests(self) -> list[Request[Any]]:
        """Return what the second answers lead to: the due time of the message whose turn is next."""
        return [commands.body_start(self.keys, self._lines.next, DUE_BYTES)] if self._lines and self._lines.next else []

    def take_third(self, answers: Sequence[Any]) -> None:
        """Take the answers to `third_requests`."""
        for answer in answers:
            self._take_due("waiting", self._lines.next if self._lines else "", answer)

    def snapshot(self, now_ms: float) -> QueueSnapshot:
        """Return what was seen; an empty state has nothing late."""
        counts: Counts = self._told["counts"]
        oldest = {place: max(0.0, (now_ms - due) / 1000) for place, due in self._due_ms.items()}
        for place in ("pending", "unack", *LISTS):
            if not getattr(counts, place):
                oldest.setdefault(place, 0.0)
        waiting = round(counts.unack * self._waiting)
        return QueueSnapshot(
            self.keys,
            counts,
            oldest,
            waiting,
            self._overdue,
            self._crons,
            lines=self._lines,
            held_up=self._held_seconds,
        )

    def _take_due(self, place: str, id: str, start: Any) -> None:
        """Note since when the first message of a place has been due, by the start of its value, or else by its id."""
        due = envelope_due(start) if isinstance(start, bytes) else None
        due = made_at(id) if due is None else due
        if due is not None:
            self._due_ms[place] = due

    @property
    def _is_overdue(self) -> bool:
        """Whether the first pending message is due: the rest is asked about only then."""
        return self._due_ms.get("pending", self._now_ms + 1) <= self._now_ms

    def _questions(self) -> dict[str, Request[Any]]:
        return {
            "counts": transitions.counts(self.keys),
            "pending": commands.first_score(self.keys, "pending"),
            "unack": commands.first_score(self.keys, "unack"),
            "ready": commands.end_of(self.keys, "ready"),
            "retry": commands.end_of(self.keys, "retry"),
            "sample": commands.held_sample(self.keys, UNACK_SAMPLE),
        }

    def _heads(self) -> dict[str, str]:
        """Return the first message of each list whose bodies tell when they are due."""
        return {} if self.keys.bare else {place: self._told[place] for place in LISTS if self._told[place]}
