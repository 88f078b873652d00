"""Since when, at least, messages wait whose bodies tell no time: in the layouts of the Go original."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from reliq import commands

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reliq.call import Command
    from reliq.keys import Keys

#: Messages of a queue that are remembered at most; of more, every second one is forgotten.
MARKS_LIMIT = 64


@dataclass(frozen=True, slots=True)
class Mark:
    """
    A message that was the last in a list at one look.

    Attributes:
        left: its retries left then, as Redis holds them.
        seen_ms: when it was seen, by Redis' clock.
    """

    state: str
    id: str
    left: bytes
    seen_ms: float


@dataclass(slots=True)
class Waits:
    """
    Remembers from look to look which messages stood last in the lists of a queue.

    One of them that has moved nowhere since has waited since then, at least: a claim, by whoever makes it, puts it into
    unack, and another delivery spends one of its retries. The first look at a queue tells nothing.
    """

    marks: dict[str, list[Mark]] = field(default_factory=dict)

    def questions(self, keys: Keys) -> list[Command[Any]]:
        """Return what is to be asked before a look: what stands last, and where those are that were remembered."""
        if not keys.bare:
            return []
        last = [commands.end_of(keys, "ready", newest=True), commands.end_of(keys, "retry", newest=True)]
        ids = [mark.id for mark in self.marks.get(keys.entry, ())]
        if not ids:
            return last
        return [
            *last,
            commands.scores(keys, "pending", ids),
            commands.scores(keys, "unack", ids),
            commands.retries_left(keys, ids),
        ]

    def since(self, keys: Keys, answers: Sequence[Any], now_ms: float) -> dict[str, float]:
        """Return since when, in ms, each list is known to have something that waits; forget what has moved."""
        if keys.entry not in self.marks:
            return {}
        places = [[] if isinstance(answer, Exception) else answer for answer in answers[2:]]
        rows = zip(self.marks[keys.entry], *places, strict=False) if places else ()
        still = [mark for mark, pending, unack, left in rows if pending is None and unack is None and left == mark.left]
        self.marks[keys.entry] = still
        return {"ready": now_ms, "retry": now_ms} | {mark.state: mark.seen_ms for mark in reversed(still)}

    def keep(self, queues: Sequence[Keys]) -> None:
        """Forget every queue but these."""
        entries = {keys.entry for keys in queues}
        self.marks = {entry: marks for entry, marks in self.marks.items() if entry in entries}

    def remember(self, keys: Keys, last: dict[str, str], lefts: Sequence[Any], now_ms: float) -> None:
        """Keep in mind what stands last in each list, with its retries left."""
        marks = self.marks.setdefault(keys.entry, [])
        known = {mark.id for mark in marks}
        for (state, id), left in zip(last.items(), lefts, strict=False):
            if id not in known and left is not None:
                marks.append(Mark(state, id, left, now_ms))
        if len(marks) > MARKS_LIMIT:
            del marks[1::2]
