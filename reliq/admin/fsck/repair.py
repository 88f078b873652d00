"""
Decides where an id with a fault belongs: no clock, no Redis.

Nothing is guessed. A message that is in two places stays in the one that is further on; one that is in none goes back
to where its envelope says, or, when it has none, to the dead letters; what is nobody's goes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from reliq.admin.fsck.state import CLOCK_SLACK_MS, fits, is_count, is_time, place_of
from reliq.failure_note import FailureNote
from reliq.wireformat import count_text

if TYPE_CHECKING:
    from reliq.admin.fsck.state import IdState
    from reliq.call import Arg

#: Further on comes first: a copy that waits behind one that is held would only be delivered once more.
FURTHER_ON = ("unack", "retry", "ready", "line", "pending", "garbage")

RepairKind = Literal["", "stray", "expired", "cancelled", "dead"]


@dataclass(frozen=True, slots=True)
class Repair:
    """
    How a repair leaves an id.

    Attributes:
        place: where it belongs, `=` where it is, empty for nowhere; `line` is that of its key.
        due_ms: its score there.
        left: its retry count, `=` as it is, empty for none.
        word: `=` for the state word as it is, empty for none.
        kind: how it ends, `stray` when no message ends with it, empty when it lives on.
        note: of its dead letter: reason, attempt and error.
    """

    place: str = "="
    due_ms: int = 0
    left: str = "="
    word: str = "="
    kind: RepairKind = ""
    note: str = ""

    def args(self, digest: str) -> tuple[Arg, ...]:
        """Return it as the script `check` takes it, for the state of a digest."""
        return (digest, self.place, self.due_ms, self.left, self.word, self.kind, self.note)


def repair_of(state: IdState, now_ms: int, *, bare: bool) -> Repair | None:
    """
    Return where an id that has a fault belongs; None when it is better left to the next claim or reclaim.

    An id in two places or in none must have been looked for in both lists.
    """
    places = len(state.scored) + state.listed
    if places == 0:
        return _of_a_stray(state, now_ms, bare=bare)
    place = _place_kept(state) if places > 1 else place_of(state)
    if place == "garbage":
        right = places == 1 and state.left is None and not state.has_word
        return None if right else Repair(place="garbage", left="", word="")
    return _of_a_living(state, place, now_ms, moves=places > 1)


def _place_kept(state: IdState) -> str:
    """Return which of its places an id keeps: garbage only when it has no retry count, so that it had ended."""
    if state.garbage and state.left is None:
        return "garbage"
    there = {*state.scored, *({_list_of(state)} if state.listed else ())}
    return next(place for place in FURTHER_ON if place in there)


def _list_of(state: IdState) -> str:
    """Return the list in which an id belongs that waits in any."""
    return "line" if state.key else "retry" if state.retry else "ready"


def _of_a_stray(state: IdState, now_ms: int, *, bare: bool) -> Repair | None:
    if state.left is None and state.body != "string":
        return _gone("stray") if state.body == "none" else None  # what lies there is nobody's, least of all ours
    if state.is_cancelled:
        return _gone("cancelled")
    if state.body != "string":
        return _gone("expired")
    due = state.due_ms
    if bare or state.left is None or due is None or not is_time(due, now_ms):
        return _gone("dead", "it was in no place of its queue, and nothing says where it belongs")
    left, word = _left(state), "=" if fits(state.word, "pending") else ""
    if due > now_ms:
        return Repair("pending", due, left, word)
    return Repair(_list_of(state), 0, left, word)


def _of_a_living(state: IdState, place: str, now_ms: int, *, moves: bool) -> Repair | None:
    """Return the repair of an id that goes on living in `place`, or ends because its body or due time is missing."""
    kind_of_place = "list" if place in ("ready", "retry", "line", "list") else place
    waits = place == "pending" or (place == "unack" and state.word.waits)
    if waits and state.body != "string":
        return _gone("expired")
    left = _left(state)
    word = "=" if fits(state.word, kind_of_place) else ""
    if kind_of_place == "list":
        belongs = moves or (is_count(state.left) and (state.other or (state.key and not state.line)))
        repair = Repair(_list_of(state) if belongs else "=", 0, left, word)
        return repair if repair != Repair() else None
    score_ms = ((state.pending if place == "pending" else state.unack) or 0.0) * 1000
    due = _due(state, place, score_ms, now_ms)
    if due is None:
        return _gone("dead", "its due time was no time, and nothing says when it is due")
    if moves or not math.isfinite(score_ms) or due != round(score_ms):
        return Repair(place, due, left, word)
    repair = Repair(left=left, word=word)
    return repair if repair != Repair() else None


def _due(state: IdState, place: str, score_ms: float, now_ms: int) -> int | None:
    """Return the score, in ms, that an id should have; None when nothing says."""
    if place == "unack" and state.lease_ms is not None:
        latest = now_ms + state.lease_ms
        return round(score_ms) if is_time(score_ms, latest + CLOCK_SLACK_MS, ahead_ms=0) else latest
    if is_time(score_ms, now_ms):
        return round(score_ms)
    if state.due_ms is not None and is_time(state.due_ms, now_ms):
        return state.due_ms
    return now_ms if place == "unack" else None


def _left(state: IdState) -> str:
    """Return the count that an id should have: 0, one more delivery, when its own is none."""
    return "=" if is_count(state.left) else count_text(0, state.key or state.at)


def _gone(kind: RepairKind, why: str = "") -> Repair:
    note = str(FailureNote("lost", None, why)) if why else ""
    return Repair(place="", left="", word="", kind=kind, note=note)
