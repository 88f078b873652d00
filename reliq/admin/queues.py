"""Queues at a glance: what is where, how late it is, how fast it moves, who works on it, and whether it is paused."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from reliq import commands, transitions
from reliq.admin import queue_queries
from reliq.admin.parts import ask_each
from reliq.admin.workers import running_in, workers_alive
from reliq.errors import RedisUnavailableError
from reliq.message import Counts, Pause
from reliq.minutes import Totals
from reliq.snapshot.snapshot import SnapshotReader

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reliq.admin.session import Session
    from reliq.keys import Keys
    from reliq.roster import Worker
    from reliq.snapshot.queue_look import QueueSnapshot
    from reliq.snapshot.shard_maps import ShardMaps
    from reliq.snapshot.snapshot import Chosen
    from reliq.snapshot.waits import Waits
    from reliq.transitions import KeyLines


@dataclass(frozen=True, slots=True)
class Rates:
    """
    How fast a queue moves, in messages a second.

    Attributes:
        arrived: published or redriven.
        acked: ended well.
        failed: deliveries that ended in an error, or by their lease.
        ended: ended otherwise: dead, expired, cancelled or purged.
        over_seconds: the time in which this was counted.
    """

    arrived: float
    acked: float
    failed: float
    ended: float
    over_seconds: float

    @classmethod
    def between(cls, before: Sequence[int], after: Sequence[int], over: float) -> Rates:
        """Return how fast a queue has moved in `over` seconds; before and after are as `Totals.sums` has them."""
        moved = (round(max(0, now - earlier) / over, 2) for earlier, now in zip(before, after, strict=True))
        arrived, acked, failed, _, ended = moved
        return cls(arrived, acked, failed, ended, over_seconds=round(over, 6))


@dataclass(frozen=True, slots=True)
class QueueView:
    """
    A queue at one moment.

    Attributes:
        layout: as `--layout` takes it: `reliq`, `hdt3213`, `hdt3213:tag`, …
        backoff: how many of unack wait after a failure, drawn from a sample when there are many; the others are
            leased by a worker.
        late: for how many seconds the first message that waits has been due; None when it does not say.
        oldest: state -> the same, for each state that says.
        rates: None when they were not asked for.
        workers, slots, busy: worker processes that claim from it, how many handlers they run at once, and how many
            of those are busy with this queue; None while the Redis of the worker registry is away.
        pause: who paused it and why; None when it is not paused.
        shards: how many shards it has, all of which are counted here.
        waiting: how many wait in the lines of their keys.
        lines: of the keys with most messages; None in a queue without keys.
        away: the shards whose Redis is away, which are not counted.
    """

    queue: str
    layout: str
    pending: int
    ready: int
    unack: int
    backoff: int
    retry: int
    garbage: int
    dead: int
    late: float | None
    oldest: Mapping[str, float]
    rates: Rates | None
    workers: int | None
    slots: int | None
    busy: int | None
    pause: Pause | None
    shards: int = 1
    waiting: int = 0
    lines: KeyLines | None = None
    away: tuple[int, ...] = ()

    @property
    def due(self) -> int:
        """How many are due and wait for a worker, or for the turn of their key."""
        return self.ready + self.retry + self.waiting

    @property
    def alive(self) -> int:
        """How many have not ended."""
        return self.pending + self.due + self.unack + self.garbage


@dataclass(frozen=True, slots=True)
class Overview:
    """
    Every queue that was asked for, who is alive, and the totals from which the next overview counts its rates.

    Attributes:
        workers: None while the Redis of their registry is away.
        left_out: how many more the registry has than are shown.
        unreadable: queues that cannot be shown, each with the reason: rights, a key of another type, a spoilt total.
        facts: INFO of the Redis; empty where this user may not read it.
        totals: the key of a queue's totals -> kind -> how many ever.
        at: by the monotonic clock.
    """

    queues: Sequence[QueueView]
    workers: Sequence[Worker] | None
    unreadable: Mapping[str, str]
    facts: Mapping[str, str]
    totals: Mapping[str, Mapping[str, int]]
    at: float
    left_out: int = 0


def overview(
    session: Session,
    chosen: Chosen,
    maps: ShardMaps,
    before: Overview | None = None,
    waits: Waits | None = None,
) -> Overview:
    """Look at queues; with `before` each says how fast it has moved since, with `waits` for how long Go's have waited."""
    look = SnapshotReader(session.client, lambda: chosen.queues, waits, maps).look()
    at = time.monotonic()
    workers: Sequence[Worker] | None = None
    with suppress(RedisUnavailableError):
        workers = workers_alive(session)
    pauses = _pauses(session, [snapshot.keys for snapshot in look.queues if snapshot.counts.paused])
    views = [
        _view(snapshot, workers, pauses.get(snapshot.keys), _rates(snapshot, at, before)) for snapshot in look.queues
    ]
    return Overview(
        views,
        workers,
        {keys.entry: why for keys, why in look.unreadable.items()},
        look.facts,
        {snapshot.keys.totals: snapshot.counts.totals for snapshot in look.queues},
        at,
        chosen.left_out,
    )


def with_rates(session: Session, chosen: Chosen, maps: ShardMaps, interval: float) -> Overview:
    """Snapshot, count again after `interval` seconds, and tell how fast the queues have moved in between."""
    before: dict[str, Mapping[str, int]] = {}
    answers, _ = ask_each(session, chosen.queues, transitions.counts, maps)
    at = time.monotonic()
    for keys, parts in zip(chosen.queues, answers, strict=True):
        if all(isinstance(part, Counts) for part in parts):
            before[keys.totals] = Counts.sum(parts).totals
    time.sleep(interval)
    return overview(session, chosen, maps, Overview((), (), {}, {}, before, at))


def _pauses(session: Session, paused: Sequence[Keys]) -> dict[Keys, Pause]:
    """Return the pause of each of `paused`; its end is the one that Redis has."""
    told = session.try_all([commands.paused(keys) for keys in paused])
    lasting = session.try_all([queue_queries.pause_ms(keys) for keys in paused])
    pauses = {}
    for keys, pause, ttl_ms in zip(paused, told, lasting, strict=True):
        if isinstance(pause, Pause) and isinstance(ttl_ms, int):
            pauses[keys] = replace(pause, until=time.time() + ttl_ms / 1000 if ttl_ms > 0 else None)
    return pauses


def _rates(snapshot: QueueSnapshot, at: float, before: Overview | None) -> Rates | None:
    """Return how fast a queue has moved; None when `before` does not have it, or one of both is partial."""
    was = before.totals.get(snapshot.keys.totals) if before is not None else None
    if was is None or before is None or snapshot.counts.away or any(view.away for view in before.queues):
        return None
    return Rates.between(Totals.sums(was), Totals.sums(snapshot.counts.totals), max(0.001, at - before.at))


def _view(
    snapshot: QueueSnapshot, workers: Sequence[Worker] | None, pause: Pause | None, rates: Rates | None
) -> QueueView:
    counts: Counts = snapshot.counts
    mine = None if workers is None else [worker for worker in workers if snapshot.queue in worker.queues]
    return QueueView(
        queue=snapshot.queue,
        layout=str(snapshot.keys.layout),
        pending=counts.pending,
        ready=counts.ready,
        unack=counts.unack,
        backoff=snapshot.backoff,
        retry=counts.retry,
        garbage=counts.garbage,
        dead=counts.dead,
        late=_late(snapshot),
        oldest=snapshot.oldest,
        rates=rates,
        workers=None if mine is None else len(mine),
        slots=None if mine is None else sum(worker.slots for worker in mine),
        busy=None if mine is None else len(running_in(mine, snapshot.queue)),
        pause=pause,
        shards=snapshot.shards,
        waiting=counts.waiting,
        lines=snapshot.lines,
        away=counts.away,
    )


def _late(snapshot: QueueSnapshot) -> float | None:
    """Return for how long the first message has been due; None when nothing is late but what tells no time."""
    untold = any(
        size and state not in snapshot.oldest
        for state, size in (("ready", snapshot.counts.ready), ("retry", snapshot.counts.retry))
    )
    late = max(snapshot.oldest.values(), default=0.0)
    return None if untold and not late else late
