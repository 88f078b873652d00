"""The last minutes of queues, as their workers noted them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from reliq import commands, minutes
from reliq.admin.parts import ask_each
from reliq.admin.queues import Rates, overview
from reliq.minutes import MINUTE_MS, MINUTES_LIMIT, Totals
from reliq.settings import whole

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reliq.admin.queues import Overview
    from reliq.admin.session import Session
    from reliq.keys import Keys
    from reliq.snapshot.shard_maps import ShardMaps
    from reliq.snapshot.snapshot import Chosen

#: Rates of an overview are counted since a note that is from so many to so many ms old.
FRESH_MS, STALE_MS = 20_000, 3 * MINUTE_MS


@dataclass(frozen=True, slots=True)
class Minute:
    """
    One minute of a queue; where no worker noted those before it, the mean of them.

    Attributes:
        at: its end, in unix seconds by Redis' clock.
        published, acked, failed, dead: messages that were published or redriven; that ended well; deliveries that
            ended in an error or by their lease; messages that became dead letters.
        waiting: how many were due and not delivered, at its end.
        oldest: for how many seconds the first of them had been due; None when none waited, or nobody knows.
    """

    at: float
    published: int
    acked: int
    failed: int
    dead: int
    waiting: int
    oldest: float | None


def histories_of(session: Session, queues: Sequence[Keys], last: int, maps: ShardMaps) -> dict[Keys, list[Minute]]:
    """Return the last minutes of queues, the oldest first, in one round trip; none of one that refuses."""
    whole("minutes", last, least=1, most=MINUTES_LIMIT)
    answers, (now_ms,) = ask_each(
        session, queues, lambda keys: minutes.noted(keys, range(MINUTES_LIMIT)), maps, commands.server_ms()
    )
    if isinstance(now_ms, Exception):
        raise now_ms
    told = {}
    for keys, parts in zip(queues, answers, strict=True):
        found = list[Minute]()
        for answer in parts:
            notes = [one for one in answer if _age(one, now_ms) <= last * MINUTE_MS] if isinstance(answer, list) else []
            found += [_minute(before, one) for before, one in pairwise(notes)]
        told[keys] = found if len(parts) == 1 else _summed(found)
    return told


def overview_by_notes(session: Session, chosen: Chosen, maps: ShardMaps) -> Overview:
    """Look at queues, with the rates of each since a note of about a minute ago."""
    seen = overview(session, chosen, maps)
    now_ms = session.run(commands.server_ms())
    this = now_ms // MINUTE_MS
    ring = range(this - STALE_MS // MINUTE_MS, this + 1)
    answers, _ = ask_each(session, chosen.queues, lambda keys: minutes.noted(keys, ring), maps)
    before: dict[str, Totals] = {}
    for keys, parts in zip(chosen.queues, answers, strict=True):
        notes = [_usable(answer, now_ms) for answer in parts]
        before |= {keys.totals: _together(known)} if len(known := [one for one in notes if one]) == len(parts) else {}
    return replace(
        seen,
        queues=[
            replace(view, rates=_rates(before.get(keys.totals), seen.totals.get(keys.totals, {}), now_ms))
            for keys, view in zip(_shown(chosen, seen), seen.queues, strict=True)
        ],
    )


def _usable(answer: object, now_ms: int) -> Totals | None:
    """Return the newest note that is old enough to count rates since; None when there is none."""
    notes = [one for one in answer if FRESH_MS <= _age(one, now_ms) <= STALE_MS] if isinstance(answer, list) else []
    return notes[-1] if notes else None


def _together(notes: Sequence[Totals]) -> Totals:
    """Return one note from those of a queue's shards, which were made within some minutes."""
    due = [one.due_ms for one in notes if one.due_ms is not None]
    arrived, acked, failed, dead, ended, waiting = (
        sum(numbers) for numbers in zip(*(one[1:-1] for one in notes), strict=True)
    )
    at_ms = sum(one.at_ms for one in notes) // len(notes)
    return Totals(at_ms, arrived, acked, failed, dead, ended, waiting, min(due, default=None))


def _summed(found: Sequence[Minute]) -> list[Minute]:
    """Return the minutes of a queue from those of its shards."""
    by_minute = defaultdict[int, list[Minute]](list)
    for one in found:
        by_minute[int(one.at // 60)].append(one)
    return [
        Minute(
            at=max(one.at for one in some),
            published=sum(one.published for one in some),
            acked=sum(one.acked for one in some),
            failed=sum(one.failed for one in some),
            dead=sum(one.dead for one in some),
            waiting=sum(one.waiting for one in some),
            oldest=max((one.oldest for one in some if one.oldest is not None), default=None),
        )
        for _, some in sorted(by_minute.items())
    ]


def _shown(chosen: Chosen, seen: Overview) -> list[Keys]:
    """Return the keys of the queues that an overview shows, in its order."""
    return [keys for keys in chosen.queues if keys.totals in seen.totals]


def _age(note: Totals, now_ms: int) -> float:
    """Return how many ms ago a note was made; one of the future is of no use."""
    return now_ms - note.at_ms if note.at_ms <= now_ms else float("inf")


def _minute(before: Totals, note: Totals) -> Minute:
    def per_minute(number: int, earlier: int) -> int:
        return round(max(0, number - earlier) * MINUTE_MS / max(1, note.at_ms - before.at_ms))

    return Minute(
        note.at_ms / 1000,
        per_minute(note.arrived, before.arrived),
        per_minute(note.acked, before.acked),
        per_minute(note.failed, before.failed),
        per_minute(note.dead, before.dead),
        note.waiting,
        None if note.due_ms is None else max(0.0, (note.at_ms - note.due_ms) / 1000),
    )


def _rates(before: Totals | None, totals: Mapping[str, int], now_ms: int) -> Rates | None:
    if before is None:
        return None
    return Rates.between(before.sums_then, Totals.sums(totals), (now_ms - before.at_ms) / 1000)
