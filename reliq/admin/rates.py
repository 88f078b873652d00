"""The rates of queues: the minutes that workers have noted, and the rates since a note."""

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

#: Rates are counted since the newest note that is at least this many ms old, and at most this many minutes.
FRESH_MS = 20_000
STALE_MINUTES = 3


@dataclass(frozen=True, slots=True)
class MinuteStats:
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

    @property
    def rates(self) -> Rates:
        """The same in messages a second."""
        return Rates(self.published / 60, self.acked / 60, self.failed / 60, self.dead / 60, over_seconds=60.0)


def histories_of(
    session: Session, queues: Sequence[Keys], minutes: int, maps: ShardMaps
) -> dict[Keys, list[MinuteStats]]:
    """Return the last minutes of queues, the oldest first; none of a queue that refuses."""
    check_int("minutes", minutes, least=1, most=MINUTES_LIMIT)
    notes, _ = _notes(session, queues, minutes, maps)
    histories = {}
    for keys, shards in notes.items():
        found = [_minute(before, note) for shard in shards for before, note in pairwise(shard)]
        histories[keys] = found if len(shards) == 1 else _sum(found)
    return histories


def noted_rates(session: Session, queues: Mapping[Keys, QueueSnapshot], maps: ShardMaps) -> dict[Keys, Rates]:
    """Return the rates of queues since a note of about a minute ago; none of a queue without such a note of each shard."""
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
    """Return the notes of the last minutes of each shard, the oldest first, and Redis' clock; none of a shard that refuses."""
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


def _sum(found: Sequence[MinuteStats]) -> list[MinuteStats]:
    """Return the minutes of a queue from those of its shards."""
    by_minute = defaultdict[int, list[MinuteStats]](list)
    for minute in found:
        by_minute[int(minute.at // 60)].append(minute)
    return [
        MinuteStats(
            at=max(minute.at for minute in shards),
            published=sum(minute.published for minute in shards),
            acked=sum(minute.acked for minute in shards),
            failed=sum(minute.failed for minute in shards),
            dead=sum(minute.dead for minute in shards),
            waiting=sum(minute.waiting for minute in shards),
            oldest=max((minute.oldest for minute in shards if minute.oldest is not None), default=None),
        )
        for _, shards in sorted(by_minute.items())
    ]


def _minute(before: Totals, note: Totals) -> MinuteStats:
    def per_minute(number: int, earlier: int) -> int:
        return round(max(0, number - earlier) * MINUTE_MS / max(1, note.at_ms - before.at_ms))

    return MinuteStats(
        note.at_ms / 1000,
        per_minute(note.arrived, before.arrived),
        per_minute(note.acked, before.acked),
        per_minute(note.failed, before.failed),
        per_minute(note.dead, before.dead),
        note.waiting,
        None if note.due_ms is None else max(0.0, (note.at_ms - note.due_ms) / 1000),
    )
