"""Rates of queues from the notes that workers write each minute: a figure for each minute, and the rate since a note."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from reliq.admin.session import ask_each
from reliq.metrics.snapshot import Rates
from reliq.redis import commands
from reliq.redis.commands import MINUTE_MS, MINUTES_LIMIT, Totals
from reliq.settings import check_int

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reliq.keys import Keys
    from reliq.metrics.snapshot import QueueSnapshot, ShardMaps
    from reliq.redis.session import Session

#: A rate starts at the newest note that is at least this many ms and at most this many minutes old.
FRESH_MS = 20_000
STALE_MINUTES = 3


@dataclass(frozen=True, slots=True)
class MinuteStats:
    """
    One minute of a queue; after minutes without a note, their mean.

    Attributes:
        at: end of the minute, in unix seconds of the Redis clock.
        published: messages that were published or redriven.
        acked: messages that were acked.
        failed: deliveries that failed, or lost their lease.
        dead: messages that became dead letters.
        waiting: messages that were due and not delivered, at the end of the minute.
        oldest: for how many seconds the oldest of these had been due; None when none waited, or the note lacks it.
    """

    at: float
    published: int
    acked: int
    failed: int
    dead: int
    waiting: int
    oldest: float | None


def histories_of(
    session: Session, queues: Sequence[Keys], minutes: int, maps: ShardMaps
) -> dict[Keys, list[MinuteStats]]:
    """Return the last minutes of queues, the oldest first; none of a queue that Redis refuses to show."""
    check_int("minutes", minutes, least=1, most=MINUTES_LIMIT)
    notes, _ = _notes(session, queues, minutes, maps)
    histories = {}
    for keys, shards in notes.items():
        by_minute = defaultdict[int, list[tuple[Totals, Totals]]](list)
        for shard in shards:
            for before, note in pairwise(shard):
                by_minute[note.at_ms // MINUTE_MS].append((before, note))
        histories[keys] = [_minute(by_minute[minute]) for minute in sorted(by_minute)]
    return histories


def noted_rates(session: Session, queues: Mapping[Keys, QueueSnapshot], maps: ShardMaps) -> dict[Keys, Rates]:
    """Return the rates of queues since a note of about a minute ago; skip a queue when a shard lacks such a note."""
    notes, now_ms = _notes(session, list(queues), STALE_MINUTES, maps)
    rates = {}
    for keys, shards in notes.items():
        old = [[note for note in shard if now_ms - note.at_ms >= FRESH_MS] for shard in shards]
        if all(old):
            newest = [shard[-1] for shard in old]
            before = [sum(sums) for sums in zip(*(note.sums_then for note in newest), strict=True)]
            at_ms = sum(note.at_ms for note in newest) / len(newest)
            rates[keys] = Rates.between(before, Totals.sums(queues[keys].totals), (now_ms - at_ms) / 1000)
    return rates


def _notes(
    session: Session, queues: Sequence[Keys], minutes: int, maps: ShardMaps
) -> tuple[dict[Keys, list[list[Totals]]], int]:
    """Return the last notes of each shard, the oldest first, and the time of Redis in unix ms; none of a refused shard."""
    now_ms = session.run(commands.server_ms())
    this = now_ms // MINUTE_MS
    ring = range(this - minutes, this + 1)[-MINUTES_LIMIT:]
    answers, _ = ask_each(session, queues, lambda keys: commands.noted(keys, ring), maps)
    notes = {
        keys: [
            [note for note in shard if 0 <= now_ms - note.at_ms <= minutes * MINUTE_MS]
            if isinstance(shard, list)
            else []
            for shard in shards
        ]
        for keys, shards in zip(queues, answers, strict=True)
    }
    return notes, now_ms


def _minute(shards: Sequence[tuple[Totals, Totals]]) -> MinuteStats:
    """Return a minute of a queue, from the note of each shard and the note before it."""

    def moved(total: str) -> int:
        sums = [
            (max(0, getattr(note, total) - getattr(before, total)), max(1, note.at_ms - before.at_ms))
            for before, note in shards
        ]
        return sum(round(more * MINUTE_MS / over_ms) for more, over_ms in sums)

    notes = [note for _, note in shards]
    ages_ms = [max(0, note.at_ms - note.due_ms) for note in notes if note.due_ms is not None]
    return MinuteStats(
        at=max(note.at_ms for note in notes) / 1000,
        published=moved("arrived"),
        acked=moved("acked"),
        failed=moved("failed"),
        dead=moved("dead"),
        waiting=sum(note.waiting for note in notes),
        oldest=max(ages_ms) / 1000 if ages_ms else None,
    )
