"""One look at queues in Redis: two round trips, whatever their number and length."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from reliq import reads, transitions
from reliq.call import Command, id_text
from reliq.doors.ids import made_at
from reliq.errors import RedisRefusedError
from reliq.keys import QUEUES_KEY, Keys

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from reliq.doors.blocking import BlockingDoor
    from reliq.message import Counts

#: So many of unack are looked at to tell leases from waits.
SAMPLE = 200
#: What of a value is read: the due time is at its start.
HEAD_BYTES = 40
SECTIONS = ("memory", "persistence", "stats", "clients")

_DUE = re.compile(rb'RELIQ/1 \{"d":(\d+)')


@dataclass(frozen=True, slots=True)
class Sight:
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
class Look:
    """What was seen of Redis: its queues, its own facts (empty where it hides them), and how long it took."""

    queues: Sequence[Sight]
    facts: Mapping[str, str]
    seconds: float


@dataclass(slots=True)
class _Draft:
    """One queue between the two round trips."""

    keys: Keys
    counts: Counts
    due_ms: dict[str, float] = field(default_factory=dict)
    heads: dict[str, str] = field(default_factory=dict)
    sample: list[str] = field(default_factory=list)


class Looker:
    """
    Looks at queues through one door.

    Args:
        queues: says which; None means all that the registry has, for one round trip more.
    """

    def __init__(self, door: BlockingDoor, queues: Callable[[], Sequence[Keys]] | None = None) -> None:
        self._door, self._queues = door, queues

    def look(self) -> Look:
        """
        Return what Redis says now.

        Raises:
            RedisUnavailableError, RedisRefusedError: it says nothing.
        """
        started = time.monotonic()
        queues: Sequence[Keys] = self._door.run(registered()) if self._queues is None else self._queues()
        now_ms, facts, drafts = self._first_trip(queues)
        heads, words = self._second_trip(drafts)
        sights = [_sight(draft, now_ms, heads, words) for draft in drafts]
        return Look(sights, facts, time.monotonic() - started)

    def _first_trip(self, queues: Sequence[Keys]) -> tuple[float, dict[str, str], list[_Draft]]:
        """Ask for all that can be asked at once."""
        general: list[Any] = [_time(), *map(reads.server_facts, SECTIONS)]
        each = [_questions(keys) for keys in queues]
        answers = self._door.run_all([*general, *(question for questions in each for question in questions)])
        facts: dict[str, str] = {}
        for section in answers[1 : len(general)]:
            facts |= section if isinstance(section, dict) else {}
        rows = iter(answers[len(general) :])
        drafts = [_draft(keys, [next(rows) for _ in questions]) for keys, questions in zip(queues, each, strict=True)]
        return _known(answers[0]), facts, [draft for draft in drafts if draft is not None]

    def _second_trip(self, drafts: Sequence[_Draft]) -> tuple[dict[str, bytes], dict[str, list[Any]]]:
        """Read the starts of the lists' first messages, and the state words of what was drawn from unack."""
        heads = {draft.keys.msg(id): id for draft in drafts for id in draft.heads.values()}
        words = {draft.keys.lease: draft.sample for draft in drafts if draft.sample}
        asked = [Command(("GETRANGE", key, 0, HEAD_BYTES), bytes) for key in heads]
        asked_words = [Command(("HMGET", key, *ids), list[Any]) for key, ids in words.items()]
        if not asked and not asked_words:
            return {}, {}
        answers = self._door.run_all([*asked, *asked_words])
        found = {key: one for key, one in zip(heads, answers, strict=False) if isinstance(one, bytes)}
        told = {key: one for key, one in zip(words, answers[len(asked) :], strict=True) if isinstance(one, list)}
        return found, told


def registered() -> Command[Sequence[Keys]]:
    """Return the queues that workers and producers have noted in the registry; what is no name is passed over."""
    return Command(
        ("HKEYS", QUEUES_KEY),
        lambda reply: [keys for entry in sorted(map(id_text, reply)) if (keys := Keys.registered(entry)) is not None],
    )


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


def _draft(keys: Keys, answers: list[Any]) -> _Draft | None:
    """Return what was answered; None when Redis refused, so that a queue with a spoilt key hides no other."""
    if any(isinstance(answer, RedisRefusedError) for answer in answers):
        return None
    counts, pending, unack, ready, retry, sample = map(_known, answers)
    draft = _Draft(keys, counts, sample=sample)
    draft.due_ms = {state: due for state, due in (("pending", pending), ("unack", unack)) if due is not None}
    draft.heads = {state: id for state, id in (("ready", ready), ("retry", retry)) if id}
    return draft


def _sight(draft: _Draft, now_ms: float, heads: Mapping[str, bytes], words: Mapping[str, list[Any]]) -> Sight:
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
    waiting = sum(word == b"nacked" for word in drawn)
    return Sight(draft.keys, draft.counts, oldest, round(draft.counts.unack * waiting / max(1, len(drawn))))


def _due_of(head: bytes, id: str) -> float | None:
    """Return a message's due time in ms; of a bare body, when its id was made."""
    match = _DUE.match(head)
    return float(match[1]) if match else made_at(id)


def _known(answer: Any) -> Any:
    """Return an answer, or raise what Redis refused."""
    if isinstance(answer, Exception):
        raise answer
    return answer


def _score(reply: Any) -> float | None:
    return float(reply[1]) * 1000 if reply else None


def _text(reply: Any) -> str:
    return id_text(reply) if reply else ""
