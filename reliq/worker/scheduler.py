"""Waits for the next due time in this process, not in Redis, and moves what is due: promote and reclaim."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from tenacity import wait_exponential

from reliq.errors import RedisUnavailableError
from reliq.events import Superseded, notify
from reliq.lua import transitions
from reliq.lua.transitions import NOTHING_DUE
from reliq.publish.publisher import NAMING_SECONDS
from reliq.redis import commands
from reliq.settings import BATCH_LIMIT, milliseconds, seconds_after
from reliq.text import chunked
from reliq.worker.loop import LONGEST_SLEEP_SECONDS, REPLY_LAG_SECONDS, QueueBackoff

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from reliq.handlers.handler import Handler
    from reliq.handlers.registration import Periodic
    from reliq.keys import Keys
    from reliq.lua.transitions import ClaimAnswer, Tick, TickStatus
    from reliq.redis.client import Client
    from reliq.redis.commands import Call, Command


#: Leases that are over but spared are looked at this often.
SPARED_SECONDS = 0.25
#: One round trip moves at most this many messages over all queues, because Redis serves nobody else meanwhile.
MOVE_LIMIT = 2 * BATCH_LIMIT
#: One queue moves at least this many, however many queues share the round trip.
LEAST_MOVED = 20


class DueMove(NamedTuple):
    """Which shard's `verb` is next."""

    keys: Keys
    verb: str


class Scheduler:
    """
    Knows the next due time of the shards this process watches (rule: one watcher for each).

    After a start or an outage nobody's lease is taken back for a third of it: its worker may be
    alive and about to renew it. No lease of a shard is taken back either while this process is
    behind with what it holds of it: Redis, which hung, could do that before the renewal that
    waits beside it.
    """

    def __init__(
        self,
        client: Client,
        handlers: Sequence[Handler],
        buried: Callable[[], None],
        is_behind: Callable[[Keys], bool] = lambda _keys: False,
        is_keyed: Callable[[str], bool] = lambda _name: False,
    ) -> None:
        self._client, self._buried, self._is_behind, self._is_keyed = client, buried, is_behind, is_keyed
        self._lease_seconds = {handler.queue.name: handler.lease_seconds for handler in handlers}
        self._lock = threading.Lock()
        self._due: dict[DueMove, float] = {}
        self._backoff = QueueBackoff("scheduler", client.observers)
        self._spared_at: dict[Keys | None, float] = {}  # None: every shard
        self.spare(None)
        self.wake: Callable[[], None] = lambda: None

    def spare(self, keys: Keys | None) -> None:
        """Reclaim no lease of a shard, or of any with None, for a third of its length: its server was away."""
        self._spared_at[keys] = time.monotonic()

    def watches(self, keys: Keys) -> bool:
        """Return whether this process waits for a due time of a shard."""
        with self._lock:
            return any(move.keys is keys for move in self._due)

    def forget(self, keys: Keys) -> None:
        """Wait for no due time of a shard any more."""
        with self._lock:
            for move in [move for move in self._due if move.keys is keys]:
                del self._due[move]
        self._spared_at.pop(keys, None)

    def note(self, keys: Keys, answer: ClaimAnswer, at: float) -> None:
        """Update the next due times from the answer of a claim at `at`; drop them when another process watches."""
        sooner = False
        with self._lock:
            for verb, wait_ms in (("promote", answer.promote_in_ms), ("reclaim", answer.reclaim_in_ms)):
                move = DueMove(keys, verb)
                before = self._due.pop(move, None)
                if wait_ms >= 0:
                    self._due[move] = at + wait_ms / 1000
                    sooner = sooner or before is None or self._due[move] < before
        if sooner:
            self.wake()

    def step(self) -> float:
        """Move what is due; return the wait until the next due time."""
        now = time.monotonic()
        with self._lock:
            due = {move: at for move, at in self._due.items() if at <= now}
        if due:
            self._move(due)
        with self._lock:
            return max(0.0, min(self._due.values(), default=now + LONGEST_SLEEP_SECONDS) - time.monotonic())

    def _move(self, due: dict[DueMove, float]) -> None:
        limit = max(LEAST_MOVED, min(BATCH_LIMIT, MOVE_LIMIT // len(due)))
        sent_at = time.monotonic()
        answers = self._client.run_all([self._call(move, limit) for move in due])
        at = min(time.monotonic(), sent_at + REPLY_LAG_SECONDS)
        for move, answer in zip(due, answers, strict=True):
            wait = self._wait(move, answer, limit)
            self._set_next(move, due[move], None if wait is None else at + wait)

    def _set_next(self, move: DueMove, was: float, at: float | None) -> None:
        """Set the next time, unless a claim has set a newer one meanwhile."""
        with self._lock:
            if self._due.get(move) != was:
                return
            if at is None:
                del self._due[move]
            else:
                self._due[move] = at

    def _call(self, move: DueMove, limit: int) -> Call[Any]:
        keyed = self._is_keyed(move.keys.name)
        if move.verb == "promote":
            return transitions.promote(move.keys, limit=limit, keyed=keyed)
        return transitions.reclaim(move.keys, limit=limit, spare_leases=self._spares(move.keys), keyed=keyed)

    def _wait(self, move: DueMove, answer: Any, limit: int) -> float | None:
        """Return the seconds until `move`, which moved `limit` at most, is due again; None when nothing is."""
        if isinstance(answer, Exception):
            self._backoff.note(move.keys, answer)
            if isinstance(answer, RedisUnavailableError):
                self.spare(move.keys)
            return self._backoff.seconds_of(move.keys)
        self._backoff.over(move.keys)
        if move.verb == "reclaim" and answer.buried:
            self._buried()
        moved, next_ms = answer if move.verb == "promote" else (answer.count, answer.next_in_ms)
        if moved >= limit:
            return 0.0
        if next_ms == NOTHING_DUE:
            return None
        if next_ms == 0 and move.verb == "reclaim" and self._spares(move.keys):
            return SPARED_SECONDS
        return _bounded(next_ms)

    def _spares(self, keys: Keys) -> bool:
        spared_at = max(self._spared_at.get(one, 0.0) for one in (None, keys))
        return time.monotonic() < spared_at + self._lease_seconds[keys.name] / 3 or self._is_behind(keys)


def _bounded(wait_ms: int) -> float:
    """Return a wait in seconds; a score so far ahead that Redis cannot answer it as a number is less than none."""
    return min(wait_ms / 1000, LONGEST_SLEEP_SECONDS) if wait_ms >= 0 else LONGEST_SLEEP_SECONDS


logger = logging.getLogger(__name__)

#: A process says at least this often that it is there, and hears of runs that somebody asked for.
TICKER_SECONDS = 5.0
#: One round trip makes at most this many ticks.
TICKS_TOGETHER = 100
#: When a body cannot be made, the next try waits for 1 s, 2 s, 4 s, … and at most a minute.
BODY_BACKOFF = wait_exponential(max=60)


@dataclass(slots=True)
class Seen:
    """
    An entry whose schedule is in force, as a look has seen it.

    Attributes:
        last: the tick up to which all is done, in unix seconds.
        asked: which run somebody asked for; None when nobody did.
    """

    entry: Periodic
    now_ms: int
    last: int
    asked: int | None


class Due(NamedTuple):
    """A tick `at` to be made, or a run that was asked for, of which `at` is None."""

    seen: Seen
    at: int | None
    call: Call[TickStatus]


class Ticker:
    """
    Looks at all entries in one round trip, and makes what is due in the next.

    Nobody leads, and no clock but Redis' counts. A look registers the entries too: the process that started last
    decides their schedules, and in a Redis that has lost its data they are as new.
    """

    def __init__(self, client: Client, entries: Sequence[Periodic]) -> None:
        self._client = client
        self._groups = list(_groups(entries))
        self._started = set[str]()
        self._named_until = 0.0
        self._superseded = set[str]()
        self._looks, self._ticks = (QueueBackoff("ticker", client.observers) for _ in range(2))
        self._next: dict[str, tuple[int, int | None]] = {}
        self._failures: dict[str, tuple[int, float]] = {}

    def step(self) -> float:
        """Make what is due; return the wait for the next look."""
        looked_at = time.monotonic()
        seen = self._look()
        self._make([due for one in seen for due in self._due(one)])
        waits = [self._wait(one) for one in seen]
        if self._looks.until:
            waits.append(self._looks.seconds())
        return max(0.0, min(waits, default=TICKER_SECONDS) - (time.monotonic() - looked_at))

    def _look(self) -> list[Seen]:
        """Register every entry; return those whose schedule is in force."""
        groups = [group for group in self._groups if not self._looks.waits(group[0].queue.keys)]
        answers = self._client.run_all([*map(self._registering, groups), *self._naming()])
        found = []
        for group, answer in zip(groups, answers, strict=False):
            if isinstance(answer, Exception):
                self._looks.note(group[0].queue.keys, answer)
                continue
            self._looks.over(group[0].queue.keys)
            self._started |= {one.name for one in group}
            now_ms, states = answer
            for entry, state in zip(group, states, strict=True):
                self._note_force(entry, is_ours=state is not None)
                if state is not None:
                    found.append(Seen(entry, now_ms, state.last, state.asked))
        return found

    def _registering(self, group: Sequence[Periodic]) -> Call[Any]:
        rows = [(one.name, str(one.schedule)) for one in group]
        return transitions.register(group[0].queue.keys, rows, newest=group[0].name not in self._started)

    def _naming(self) -> list[Command[None]]:
        """Return what names the queues in the registry, once in a minute: no worker need have handlers for them."""
        if time.monotonic() < self._named_until:
            return []
        self._named_until = time.monotonic() + NAMING_SECONDS
        return [commands.register([group[0].queue.keys.entry for group in self._groups], int(time.time()))]

    def _note_force(self, entry: Periodic, *, is_ours: bool) -> None:
        """Tell once that another schedule is in force."""
        if is_ours:
            self._superseded.discard(entry.name)
        elif entry.name not in self._superseded:
            self._superseded.add(entry.name)
            notify(self._client.observers, [Superseded(entry.queue.name, entry.name)])

    def _due(self, seen: Seen) -> Iterator[Due]:
        """Yield what is to be made of an entry now; where its body cannot be made, what comes before."""
        entry = seen.entry
        if self._ticks.waits(entry.queue.keys) or self._failures.get(entry.name, (0, 0.0))[1] > time.monotonic():
            return
        try:
            if (coming := self._next_of(seen)) is not None and coming * 1000 <= seen.now_ms:
                for planned in entry.plan(seen.last, seen.now_ms // 1000):
                    yield Due(seen, planned.at, _call(entry, entry.tick(planned)))
            if seen.asked is not None:
                yield Due(seen, None, _call(entry, entry.run(seen.asked)))
        except BaseException as error:  # a body is the user's code, and one that fails holds up no other entry
            self._note_failure(entry, error)
        else:
            self._failures.pop(entry.name, None)

    def _note_failure(self, entry: Periodic, error: BaseException) -> None:
        failures = self._failures.get(entry.name, (0, 0.0))[0] + 1
        self._failures[entry.name] = (failures, time.monotonic() + seconds_after(BODY_BACKOFF, failures))
        if failures & (failures - 1) == 0:  # the 1st, 2nd, 4th, 8th, ...
            text = "queue %s: the body of %s failed for the %d. time; its tick waits"
            logger.error(text, entry.queue.name, entry, failures, exc_info=error)

    def _make(self, due: Sequence[Due]) -> None:
        """Make the calls; note how far each entry is then."""
        for some in chunked(due, TICKS_TOGETHER):
            answers = self._client.run_all([one.call for one in some])
            for one, answer in zip(some, answers, strict=True):
                keys = one.seen.entry.queue.keys
                if isinstance(answer, Exception):
                    self._ticks.note(keys, answer)
                    continue
                self._ticks.over(keys)
                if one.at is not None and answer not in ("superseded", "unknown"):
                    one.seen.last = one.at

    def _wait(self, seen: Seen) -> float:
        """Return the seconds from the look to the next tick of an entry, or to the next try at one that failed."""
        coming, now = self._next_of(seen), time.monotonic()
        wait = TICKER_SECONDS if coming is None else min(TICKER_SECONDS, coming - seen.now_ms / 1000)
        failed = self._failures.get(seen.entry.name, (0, now))[1] - now
        return max(wait, failed, self._ticks.seconds_of(seen.entry.queue.keys))

    def _next_of(self, seen: Seen) -> int | None:
        """Return the first tick that is not done; None when none comes."""
        known = self._next.get(seen.entry.name)
        if known is None or known[0] != seen.last:
            known = self._next[seen.entry.name] = (seen.last, seen.entry.schedule.next_after(seen.last))
        return known[1]


def _call(entry: Periodic, tick: Tick) -> Call[TickStatus]:
    keys, settings = entry.queue.keys, entry.queue.settings
    return transitions.tick(keys, tick, ttl_ms=milliseconds(settings.ttl), retries=settings.retries)


def _groups(entries: Sequence[Periodic]) -> Iterator[list[Periodic]]:
    """Yield the entries of each queue, in pieces that one call takes."""
    queues: dict[str, list[Periodic]] = {}
    for one in entries:
        queues.setdefault(one.queue.name, []).append(one)
    for group in queues.values():
        yield from chunked(group, BATCH_LIMIT)
