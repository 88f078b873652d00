"""The last minutes of queues, as their workers noted them."""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict, deque
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

from reliq.admin import calls
from reliq.admin.crons import crons_of
from reliq.admin.messages import ask_each
from reliq.admin.show import last_ends
from reliq.admin.workers import running_in, workers_alive
from reliq.errors import ConfigurationError, RedisRefusedError, RedisUnavailableError, ReliqError
from reliq.keys import QUEUES_KEY, SHARDS_LIMIT, Keys, Layout, is_name
from reliq.lua import transitions
from reliq.message import Counts, Pause
from reliq.metrics.snapshot import Selection, SnapshotReader, registered
from reliq.publish.publisher import NAMING_SECONDS
from reliq.redis import commands
from reliq.redis.commands import MINUTE_MS, MINUTES_LIMIT, Totals, answered, raise_first
from reliq.settings import check_int
from reliq.text import pluralize, whole_number

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from reliq.admin.crons import CronView
    from reliq.admin.session import QueueSession, Session
    from reliq.admin.show import FinishedMessage
    from reliq.lua.transitions import KeyQueues
    from reliq.metrics.snapshot import QueueSnapshot, ShardMaps
    from reliq.redis.commands import Request, T, Worker


#: Rates of an overview are counted since a note that is from so many to so many ms old.
FRESH_MS = 20_000
STALE_MS = 3 * MINUTE_MS


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


def histories_of(session: Session, queues: Sequence[Keys], last: int, maps: ShardMaps) -> dict[Keys, list[MinuteStats]]:
    """Return the last minutes of queues, the oldest first, in one round trip; none of one that refuses."""
    check_int("minutes", last, least=1, most=MINUTES_LIMIT)
    answers, (now_ms,) = ask_each(
        session, queues, lambda keys: commands.noted(keys, range(MINUTES_LIMIT)), maps, commands.server_ms()
    )
    if isinstance(now_ms, Exception):
        raise now_ms
    told = {}
    for keys, parts in zip(queues, answers, strict=True):
        found = list[MinuteStats]()
        for answer in parts:
            notes = [one for one in answer if _age(one, now_ms) <= last * MINUTE_MS] if isinstance(answer, list) else []
            found += [_minute(before, one) for before, one in pairwise(notes)]
        told[keys] = found if len(parts) == 1 else _summed(found)
    return told


def overview_by_notes(session: Session, chosen: Selection, maps: ShardMaps) -> Overview:
    """Look at queues, with the rates of each since a note of about a minute ago."""
    seen = overview(session, chosen, maps)
    now_ms = session.run(commands.server_ms())
    this = now_ms // MINUTE_MS
    ring = range(this - STALE_MS // MINUTE_MS, this + 1)
    answers, _ = ask_each(session, chosen.queues, lambda keys: commands.noted(keys, ring), maps)
    before: dict[str, Totals] = {}
    for keys, parts in zip(chosen.queues, answers, strict=True):
        notes = [_usable(answer, now_ms) for answer in parts]
        before |= {keys.totals: _together(known)} if len(known := [one for one in notes if one]) == len(parts) else {}
    return replace(
        seen,
        queues=[
            replace(view, rates=_rates_of(before.get(keys.totals), seen.totals.get(keys.totals, {}), now_ms))
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


def _summed(found: Sequence[MinuteStats]) -> list[MinuteStats]:
    """Return the minutes of a queue from those of its shards."""
    by_minute = defaultdict[int, list[MinuteStats]](list)
    for one in found:
        by_minute[int(one.at // 60)].append(one)
    return [
        MinuteStats(
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


def _shown(chosen: Selection, seen: Overview) -> list[Keys]:
    """Return the keys of the queues that an overview shows, in its order."""
    return [keys for keys in chosen.queues if keys.totals in seen.totals]


def _age(note: Totals, now_ms: int) -> float:
    """Return how many ms ago a note was made; one of the future is of no use."""
    return now_ms - note.at_ms if note.at_ms <= now_ms else float("inf")


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


def _rates_of(before: Totals | None, totals: Mapping[str, int], now_ms: int) -> Rates | None:
    if before is None:
        return None
    return Rates.between(before.sums_then, Totals.sums(totals), (now_ms - before.at_ms) / 1000)


@dataclass(frozen=True, slots=True)
class Account:
    """
    published + redriven = acked + dead + expired + cancelled + purged + alive, or not.

    In a layout of the Go original it is what reliq itself did: a program in Go counts nothing.

    Attributes:
        missing: how many came in and have neither ended nor are alive; below zero, how many ended too many; None
            where nobody can know, for programs in Go may share the queue.
        balanced: whether that is none; None where nobody can know.
        away: the shards whose Redis is away, which are not counted.
    """

    queue: str
    published: int
    redriven: int
    acked: int
    dead: int
    expired: int
    cancelled: int
    purged: int
    alive: int
    missing: int | None
    balanced: bool | None
    away: tuple[int, ...] = ()
    layout: str = "reliq"


def accounts_of(session: Session, queues: Sequence[Keys], maps: ShardMaps) -> tuple[list[Account], Mapping[str, str]]:
    """Return the account of each queue, in one round trip, and which cannot be read, with the reason."""
    answers, _ = ask_each(session, queues, transitions.counts, maps)
    accounts = list[Account]()
    unreadable = dict[str, str]()
    for keys, parts in zip(queues, answers, strict=True):
        try:
            accounts.append(balance(keys, Counts.sum(*answered(parts))))
        except ReliqError as error:
            unreadable[keys.entry] = str(error)
    return accounts, unreadable


def balance(keys: Keys, counts: Counts) -> Account:
    """Return the account of a queue by its counts."""
    kinds = ("published", "redriven", "acked", "dead", "expired", "cancelled", "purged")
    numbers = {kind: counts.totals.get(kind, 0) for kind in kinds}
    missing = None if keys.bare else counts.missing
    balanced = None if missing is None else missing == 0
    return Account(
        keys.name,
        **numbers,
        alive=counts.alive,
        missing=missing,
        balanced=balanced,
        away=counts.away,
        layout=str(keys.layout),
    )


#: Keys in one step; it keeps Redis busy for less than a millisecond.
STEP_KEYS = 1000
#: A queue is known by keys with these ends, of these types: every queue that holds a message has its retries left,
#: whoever wrote it; a drained queue may have its dead letters alone.
KEY_ENDINGS = {":retry:cnt": "hash", ":dead": "stream"}
#: The pattern matches both ends, and little else.
_PATTERN = "*:[dr]e[at][dr]*"


def chosen(session: Session, named: Sequence[Keys], *, scan: bool = False) -> Selection:
    """Return the queues named; without names those of the registry, and with `scan` those of a scan, by name."""
    if named:
        return Selection(named)
    try:
        known = registered(session.client, lambda: _served(session))
    except RedisUnavailableError as error:
        why = f"the Redis of the queue registry, {QUEUES_KEY}, is away ({error}); name the queues to show"
        raise RedisUnavailableError(why) if session.client.has_many else error from None
    found = {keys.totals: keys for keys in known.queues}
    if scan:
        found |= {keys.totals: keys for keys in scanned(session)}
    return Selection(sorted(found.values(), key=lambda keys: keys.name), known.left_out)


def _served(session: Session) -> list[Keys]:
    """Return the queues that workers serve."""
    return [Keys(name) for name in {name for one in workers_alive(session) for name in one.queues} if is_name(name)]


def scanned(session: Session) -> list[Keys]:
    """
    Return every queue that holds a message or a dead letter, in whatever layout, by name.

    Each server walks over all its keys, a step at a time, so that others are served meanwhile.
    """
    found: dict[str, Keys] = {}
    for server_session in session.each().values():
        for keys in server_session.scan(partial(calls.keys_scanned, _PATTERN, count=STEP_KEYS)):
            for base in _bases(session, keys) - found.keys():
                if (queue := _queue(session, base)) is not None:
                    found[base] = queue
    queues = {keys.totals: keys for keys in found.values()}  # shards of one queue are found by several keys
    return sorted(queues.values(), key=lambda keys: (keys.name, keys.layout.prefix))


def _bases(session: Session, keys: list[str]) -> set[str]:
    """Return the beginnings of those of `keys` by whose ends a queue is known."""
    ending = [(key, end) for key in keys for end in KEY_ENDINGS if key.endswith(end)]
    types = session.try_all([calls.type_of_key(key) for key, _ in ending])
    return {key.removesuffix(end) for (key, end), kind in zip(ending, types, strict=True) if kind == KEY_ENDINGS[end]}


def _queue(session: Session, base: str) -> Keys | None:
    """Return the queue whose keys begin with `base`; None when no queue can be called so."""
    tagged = base.startswith("{") and base.endswith("}")
    parts = (base[1:-1] if tagged else base).split(":")
    if tagged and parts[0] == Layout.RELIQ.prefix:
        name = ":".join(parts[1:]).partition("#")[0]  # behind it stands which shard
        return Keys(name) if is_name(name) else None
    splits = [1] if parts[0] == "dp" else range(1, len(parts))
    candidates = [
        keys for at in splits if (keys := _keys(":".join(parts[at:]), ":".join(parts[:at]), tagged=tagged)) is not None
    ]
    return _with_bodies(session, candidates) if len(candidates) > 1 else next(iter(candidates), None)


def _keys(name: str, prefix: str, *, tagged: bool) -> Keys | None:
    try:
        return Keys(name, Layout.hdt3213(hash_tag=tagged, prefix=prefix))
    except ConfigurationError:
        return None


def _with_bodies(session: Session, candidates: list[Keys]) -> Keys:
    """Return the one whose message has a body, else the first: prefix and name may both have colons."""
    keys = candidates[0]
    ids = session.run(calls.any_id(keys))
    asked = [calls.has_value(keys, id) for keys in candidates for id in ids]
    bodies = session.try_all(asked)
    return next((keys for keys, has in zip(candidates, bodies, strict=False) if has is True), keys)


def forget(queue: QueueSession, workers: Sequence[Worker], *, letters: bool) -> int:
    """
    Remove a queue in which nothing is alive; return how many dead letters went with it.

    What is kept for single ids (which chosen ids are taken, numbers of calls) goes by its time to live.

    Raises:
        ConfigurationError: the queue is in use, and by what.
    """
    keys = queue.keys
    if serving := [f"{one.host} pid {one.pid}" for one in workers if keys.name in one.queues]:
        raise ConfigurationError(f"queue {keys.name!r} is served by a worker: {', '.join(serving[:5])}; stop it first")
    _check_unnamed(queue)
    # Also those of which no map knows any more: it may be lost.
    shards = [keys] if keys.bare else [keys.of_shard(shard) for shard in range(SHARDS_LIMIT)]
    found = _of_each(queue, shards, partial(transitions.forget, letters=letters, look=True))
    _check_empty(queue, sum(alive for alive, _ in found), sum(kept for _, kept in found), letters=letters)
    gone = 0
    for some in (shards[1:], shards[:1]):  # the map goes last
        for alive, kept in _of_each(queue, some, partial(transitions.forget, letters=letters)):
            _check_empty(queue, alive, kept, letters=letters)
            gone += kept
        _of_each(queue, some, calls.drop_move)
    queue.run(calls.unregister(keys))
    return gone


def _of_each(queue: QueueSession, shards: Sequence[Keys], make: Callable[[Keys], Request[T]]) -> list[T]:
    """Make a request of each shard; a user may have no rights on those that the queue never had."""
    answers = zip(shards, queue.try_all(list(map(make, shards))), strict=True)
    return raise_first(
        [one for keys, one in answers if keys.shard < queue.map.ever or not isinstance(one, RedisRefusedError)]
    )


def _check_empty(queue: QueueSession, alive: int, kept: int, *, letters: bool) -> None:
    """Raise ConfigurationError when a queue has a message, or a dead letter that is to stay."""
    if alive:
        raise ConfigurationError(
            f"queue {queue.name!r} has {pluralize(alive, 'message')}; purge it first (what is in no state: `reliq check --repair`)"
        )
    if kept and not letters:
        raise ConfigurationError(f"queue {queue.name!r} has {pluralize(kept, 'dead letter')}; forget it with --letters")


def _check_unnamed(queue: QueueSession) -> None:
    """
    Raise ConfigurationError when a process named the queue a moment ago.

    It names a queue no more often than each NAMING_SECONDS, so what it published meanwhile would be in no registry.
    """
    told = queue.run(calls.registered_at(queue.keys))
    named = whole_number(told)
    now_ms = queue.run(commands.server_ms())
    left = 0 if named is None else math.ceil(NAMING_SECONDS + 1 - (now_ms / 1000 - named))
    if 0 < left <= NAMING_SECONDS + 1:
        raise ConfigurationError(
            f"queue {queue.name!r} was in use less than {NAMING_SECONDS:.0f} s ago; forget it in {left} s"
        )


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
        late: for how many seconds the first message that waits has been due; None when it is unknown, as in Go's layout.
        oldest: state -> the same; in Go's layout without ready and retry, unless they are empty.
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
    lines: KeyQueues | None = None
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
    chosen: Selection,
    maps: ShardMaps,
    before: Overview | None = None,
) -> Overview:
    """Look at queues; with `before` each says how fast it has moved since."""
    look = SnapshotReader(session.client, lambda: chosen.queues, maps).look()
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


def with_rates(session: Session, chosen: Selection, maps: ShardMaps, interval: float) -> Overview:
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
    told = session.try_all([calls.paused(keys) for keys in paused])
    lasting = session.try_all([calls.pause_ms(keys) for keys in paused])
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
    """Return for how long the first message has been due; None when nothing is known to be late and a message has no age."""
    has_unknown = any(
        size and state not in snapshot.oldest
        for state, size in (("ready", snapshot.counts.ready), ("retry", snapshot.counts.retry))
    )
    late = max(snapshot.oldest.values(), default=0.0)
    return None if has_unknown and not late else late


#: A trend has the rates of this many looks.
TREND_LOOKS = 120
#: It begins with this many minutes that workers have noted.
NOTED_MINUTES = 60
#: From a queue this many ends are read, and as many errors of messages that are to be delivered again.
SAMPLE = 40


@dataclass(frozen=True, slots=True)
class RateHistory:
    """How many messages a second arrived and were acked: of the minutes before the first look, then of each look."""

    arrived: Sequence[float]
    acked: Sequence[float]


@dataclass(frozen=True, slots=True)
class Failure:
    """
    One kind of failure in a queue.

    Attributes:
        ended: how a message ended, or None for an error of messages that are alive.
        reason, error: of the last failure.
        count, sampled: how many of a sample of such messages have it, and how many were looked at.
        raised: class and place of the exception, of messages that are alive; empty when nothing was raised.
    """

    queue: str
    ended: FinishedMessage | None
    reason: str
    error: str
    count: int = 1
    sampled: int = 1
    raised: str = ""


@dataclass(frozen=True, slots=True)
class QueueSample:
    """
    One look.

    Attributes:
        trends: queue -> how its rates went.
        ends: the newest abnormal ends first.
        errors: what living messages failed with, from a sample of each queue, the most frequent first.
        crons: periodic entries, those first that tick next.
    """

    overview: Overview
    trends: Mapping[str, RateHistory]
    ends: Sequence[Failure]
    errors: Sequence[Failure]
    crons: Sequence[CronView] = ()


class Watcher:
    """
    Makes an overview at each `look`, all of them in one thread: `ReadOnlyAdmin.overview` is for several.

    Args:
        queues: says which; asked anew for each look.
        maps: how many shards they have.
    """

    def __init__(self, session: Session, queues: Callable[[], Selection], maps: ShardMaps) -> None:
        self._session = session
        self._queues = queues
        self._maps = maps
        self._last: Overview | None = None
        self._rates: dict[str, tuple[deque[float], deque[float]]] = {}

    def look(self) -> QueueSample:
        """
        Return the queues as they are now; rates are those since the last look, and the first look has none.

        Raises:
            RedisUnavailableError, RedisRefusedError: Redis does not answer, or refuses.
        """
        chosen = self._queues()
        queues = chosen.queues
        before = self._last
        self._last = now = overview(self._session, chosen, self._maps, before)
        if before is None:
            self._rates = _noted(self._session, queues, self._maps)
        for view in now.queues:
            if view.rates is not None:
                arrived, acked = self._rates.setdefault(
                    view.queue, (deque(maxlen=TREND_LOOKS), deque(maxlen=TREND_LOOKS))
                )
                arrived.append(view.rates.arrived)
                acked.append(view.rates.acked)
        return QueueSample(
            now,
            {queue: RateHistory(tuple(arrived), tuple(acked)) for queue, (arrived, acked) in self._rates.items()},
            [
                Failure(keys.name, end, end.reason, end.error)
                for keys, end in last_ends(self._session, queues, SAMPLE, self._maps)
            ],
            self._errors(queues),
            sorted(crons_of(self._session, queues), key=lambda one: one.next or 0),
        )

    def _errors(self, queues: Sequence[Keys]) -> list[Failure]:
        """Return the last errors of a sample of messages that are alive, equal errors counted together."""
        answers, _ = ask_each(self._session, queues, lambda keys: calls.failure_sample(keys, SAMPLE), self._maps)
        samples = [[note for part in parts if isinstance(part, list) for note in part] for parts in answers]
        failures = [
            Failure(keys.name, None, reason, error, count, len(notes), raised)
            for keys, notes in zip(queues, samples, strict=True)
            for (reason, error, raised), count in Counter(
                (note.reason, note.error, note.raised) for note in notes
            ).most_common()
        ]
        return sorted(failures, key=lambda one: -one.count)


def _noted(session: Session, queues: Sequence[Keys], maps: ShardMaps) -> dict[str, tuple[deque[float], deque[float]]]:
    """Return the rates of the minutes that workers have noted, so that a first look has a past."""
    told = {
        keys.name: minutes for keys, minutes in histories_of(session, queues, NOTED_MINUTES, maps).items() if minutes
    }
    return {
        name: (
            deque((one.published / 60 for one in minutes), maxlen=TREND_LOOKS),
            deque((one.acked / 60 for one in minutes), maxlen=TREND_LOOKS),
        )
        for name, minutes in told.items()
    }
