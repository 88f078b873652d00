"""One look at queues in Redis: a few round trips, whatever their number and length."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from reliq import reads, transitions
from reliq.call import Command, id_text
from reliq.errors import ProtocolError, RedisRefusedError
from reliq.foreign import moment
from reliq.ids import made_at
from reliq.keys import QUEUES_KEY, Keys
from reliq.snapshot.waits import Waits
from reliq.wireformat import DUE_BYTES, StateWord, envelope_due

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from reliq.client.client import Client
    from reliq.message import Counts

#: So many of unack are looked at to tell leases from waits.
SAMPLE = 200
#: So many are asked of every queue.
QUESTIONS = 6
SECTIONS = ("memory", "persistence", "stats", "clients")
#: So many queues of the registry are looked at: anybody who may publish may write names there.
QUEUES_LIMIT = 2000


@dataclass(frozen=True, slots=True)
class QueueSnapshot:
    """
    What was seen of one queue.

    Attributes:
        oldest: state -> seconds since its first message was due.
        backoff: how many of unack wait after a nack.
    """

    keys: Keys
    counts: Counts
    oldest: Mapping[str, float]
    backoff: int

    @property
    def queue(self) -> str:
        """The queue's name."""
        return self.keys.name


@dataclass(frozen=True, slots=True)
class Snapshot:
    """
    What was seen of Redis.

    Attributes:
        unreadable: queues that say nothing, each with the reason.
        left_out: how many more queues the registry has.
        facts: what Redis says of itself; empty where it hides it.
        seconds: how long it took.
    """

    queues: Sequence[QueueSnapshot]
    unreadable: Mapping[Keys, str]
    left_out: int
    facts: Mapping[str, str]
    seconds: float


@dataclass(frozen=True, slots=True)
class Chosen:
    """
    The queues to look at.

    Attributes:
        left_out: how many more the registry has.
        cursor: where in the registry the next choice goes on; 0 at its start.
    """

    queues: Sequence[Keys]
    left_out: int = 0
    cursor: int = 0


@dataclass(slots=True)
class _Draft:
    """One queue between the two round trips."""

    keys: Keys
    counts: Counts
    due_ms: dict[str, float] = field(default_factory=dict)
    heads: dict[str, str] = field(default_factory=dict)
    last: dict[str, str] = field(default_factory=dict)
    sample: list[str] = field(default_factory=list)


class SnapshotReader:
    """
    Looks at queues through one client.

    Args:
        queues: says which; None means those that the registry has. Of too many, those come first that the last look
            saw anything of; the rest takes turns.
        waits: what earlier looks saw waiting; None begins anew.
    """

    def __init__(
        self,
        client: Client,
        queues: Callable[[], Sequence[Keys]] | None = None,
        waits: Waits | None = None,
    ) -> None:
        self._client, self._queues, self._waits = client, queues, waits or Waits()
        self._in_use: list[Keys] = []
        self._cursor = 0

    def look(self, clock_ms: float | None = None) -> Snapshot:
        """
        Return what Redis says now; `clock_ms` stands for its clock.

        Raises:
            RedisUnavailableError, RedisRefusedError: it says nothing.
        """
        started = time.monotonic()
        chosen = (
            Chosen(self._queues()) if self._queues else registered(self._client, lambda: self._in_use, self._cursor)
        )
        queues = chosen.queues
        now_ms, facts, drafts = self._first_trip(queues, clock_ms)
        heads, words = self._second_trip([draft for draft in drafts if isinstance(draft, _Draft)], now_ms)
        self._waits.keep(queues)
        sights = [_sight(draft, now_ms, heads, words) for draft in drafts if isinstance(draft, _Draft)]
        unreadable = {keys: why for keys, why in zip(queues, drafts, strict=True) if isinstance(why, str)}
        if chosen.left_out:
            self._in_use = [*unreadable, *(one.keys for one in sights if one.counts.totals or one.counts.alive)]
            self._cursor = chosen.cursor
        return Snapshot(sights, unreadable, chosen.left_out, facts, time.monotonic() - started)

    def _first_trip(
        self, queues: Sequence[Keys], clock_ms: float | None
    ) -> tuple[float, dict[str, str], list[_Draft | str]]:
        """Ask for all that can be asked at once."""
        general: list[Any] = [_time(), *map(reads.server_facts, SECTIONS)]
        each = [[*_questions(keys), *self._waits.questions(keys)] for keys in queues]
        answers = self._client.run_all([*general, *(question for questions in each for question in questions)])
        facts: dict[str, str] = {}
        for section in answers[1 : len(general)]:
            facts |= section if isinstance(section, dict) else {}
        rows = iter(answers[len(general) :])
        now_ms = _known(answers[0]) if clock_ms is None else clock_ms
        told = [(keys, [next(rows) for _ in questions]) for keys, questions in zip(queues, each, strict=True)]
        return now_ms, facts, [self._draft(keys, answers, now_ms) for keys, answers in told]

    def _draft(self, keys: Keys, answers: list[Any], now_ms: float) -> _Draft | str:
        """Return what was answered, or why nothing can be read, so that a queue with a spoilt key hides no other."""
        for answer in answers[:QUESTIONS]:
            if isinstance(answer, RedisRefusedError | ProtocolError):
                return str(answer)
        counts, pending, unack, ready, retry, sample = map(_known, answers[:QUESTIONS])
        draft = _Draft(keys, counts, sample=sample)
        draft.due_ms = {state: due for state, due in (("pending", pending), ("unack", unack)) if due is not None}
        if keys.bare:
            last = zip(("ready", "retry"), answers[QUESTIONS:], strict=False)
            draft.last = {state: id for state, id in last if isinstance(id, str) and id}
            draft.due_ms |= self._waits.since(keys, answers[QUESTIONS:], now_ms)
        else:
            draft.heads = {state: id for state, id in (("ready", ready), ("retry", retry)) if id}
        return draft

    def _second_trip(self, drafts: Sequence[_Draft], now_ms: float) -> tuple[dict[str, bytes], dict[str, list[Any]]]:
        """Read the starts of the lists' first messages, the state words of what was drawn from unack, and retries left."""
        heads = {draft.keys.msg(id): id for draft in drafts for id in draft.heads.values()}
        words = {draft.keys.lease: draft.sample for draft in drafts if draft.sample}
        bare = [draft for draft in drafts if draft.last]
        asked: list[Any] = [Command(("GETRANGE", key, 0, DUE_BYTES - 1), bytes) for key in heads]
        asked += [Command(("HMGET", key, *ids), list) for key, ids in words.items()]
        asked += [Command(("HMGET", draft.keys.counts, *draft.last.values()), list) for draft in bare]
        answers = iter(self._client.run_all(asked) if asked else ())
        found = {key: one for key, one in zip(heads, answers, strict=False) if isinstance(one, bytes)}
        told = {key: one for key, one in zip(words, answers, strict=False) if isinstance(one, list)}
        for draft, lefts in zip(bare, answers, strict=True):
            self._waits.remember(draft.keys, draft.last, lefts if isinstance(lefts, list) else [], now_ms)
        return found, told


def registered(client: Client, first: Callable[[], Sequence[Keys]], cursor: int = 0) -> Chosen:
    """Return the queues that workers and producers have noted in the registry: of too many, `first` and some others."""
    size = client.run(Command(("HLEN", QUEUES_KEY), int))
    if size <= QUEUES_LIMIT:
        names, at = _page(client, 0, QUEUES_LIMIT)
        while at:
            more, at = _page(client, at, QUEUES_LIMIT)
            names |= more
    else:
        names = {keys.entry: None for keys in first()[:QUEUES_LIMIT]}
        more, at = _page(client, cursor, max(QUEUES_LIMIT - len(names), QUEUES_LIMIT // 10))
        names |= more
    queues = [keys for name in sorted(names) if (keys := Keys.registered(name)) is not None]
    return Chosen(queues, max(0, size - len(names)), at)


def _page(client: Client, cursor: int, count: int) -> tuple[dict[str, None], int]:
    """Return about so many names of the registry, and where the next are."""
    command: Command[Any] = Command(("HSCAN", QUEUES_KEY, cursor, "COUNT", count), list)
    at, entries = client.run(command)
    return dict.fromkeys(map(id_text, entries[::2])), int(at)


def _time() -> Command[float]:
    return Command(("TIME",), lambda reply: int(reply[0]) * 1000 + int(reply[1]) / 1000)


def _questions(keys: Keys) -> list[Any]:
    return [
        transitions.counts(keys),
        Command(("ZRANGE", keys.pending, 0, 0, "WITHSCORES"), _score),
        Command(("ZRANGE", keys.unack, 0, 0, "WITHSCORES"), _score),
        Command(("LINDEX", keys.ready, -1), _text),
        Command(("LINDEX", keys.retry, -1), _text),
        Command(("ZRANDMEMBER", keys.unack, SAMPLE), lambda reply: [id_text(one) for one in reply]),
    ]


def _sight(draft: _Draft, now_ms: float, heads: Mapping[str, bytes], words: Mapping[str, list[Any]]) -> QueueSnapshot:
    due_ms = dict(draft.due_ms)
    for state, id in draft.heads.items():
        due = _due_of(heads.get(draft.keys.msg(id), b""), id)
        if due is not None:
            due_ms[state] = due
    oldest = {state: max(0.0, (now_ms - due) / 1000) for state, due in due_ms.items()}
    # Of an empty state nothing is late; of one whose first message does not tell its due time nothing is known.
    sizes = {state: getattr(draft.counts, state) for state in ("pending", "ready", "unack", "retry")}
    oldest |= {state: 0.0 for state, size in sizes.items() if not size and state not in oldest}
    drawn = words.get(draft.keys.lease, [])
    waiting = sum(StateWord.parse(word).waits for word in drawn)
    return QueueSnapshot(draft.keys, draft.counts, oldest, round(draft.counts.unack * waiting / max(1, len(drawn))))


def _due_of(head: bytes, id: str) -> float | None:
    """Return a message's due time in ms; of a bare body, when its id was made."""
    due = envelope_due(head)
    return made_at(id) if due is None else due


def _known(answer: Any) -> Any:
    """Return an answer, or raise what Redis refused."""
    if isinstance(answer, Exception):
        raise answer
    return answer


def _score(reply: Any) -> float | None:
    return moment(float(reply[1])) * 1000 if reply else None


def _text(reply: Any) -> str:
    return id_text(reply) if reply else ""
