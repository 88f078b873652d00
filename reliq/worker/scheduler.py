"""
What a worker does at due times: the scheduler promotes and reclaims messages, the ticker publishes periodic jobs.

Both wait for the next due time in this process, not in Redis.
"""

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
from reliq.lua.transitions import NOTHING_DUE, ClaimAnswer, Tick, TickStatus
from reliq.publish import NAMING_SECONDS
from reliq.redis import commands
from reliq.settings import BATCH_LIMIT, milliseconds, seconds_after
from reliq.text import chunked
from reliq.worker.loop import LONGEST_SLEEP_SECONDS, REPLY_LAG_SECONDS, QueueBackoff

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from reliq.handlers.handler import Handler
    from reliq.handlers.registration import Periodic
    from reliq.keys import Keys
    from reliq.redis.client import Client
    from reliq.redis.commands import Call, Request


logger = logging.getLogger(__name__)

#: Leases that are over but spared are looked at this often.
SPARED_SECONDS = 0.25
#: One round trip moves at most this many messages over all queues, because Redis serves no other client meanwhile.
MOVE_LIMIT = 2 * BATCH_LIMIT
#: One queue moves at least this many, however many queues share the round trip.
LEAST_MOVED = 20
#: A process registers its periodic jobs at least this often, and reads which runs were asked for.
TICKER_SECONDS = 5.0
#: One round trip makes at most this many ticks.
TICKS_TOGETHER = 100
#: When a body cannot be made, the next try waits for 1 s, 2 s, 4 s, … and at most a minute.
BODY_BACKOFF = wait_exponential(max=60)


class DueMove(NamedTuple):
    """Which shard's `verb` is next."""

    keys: Keys
    verb: str


class Scheduler:
    """
    Keeps the next due times of the shards that this process watches; each shard has one watcher.

    After a start or an outage no lease is reclaimed for a third of its length: its worker may be alive and about to
    renew it. No lease of a shard is reclaimed either while this process is behind with its own deliveries of the shard:
    a Redis that hung could reclaim them before it serves the renewal that waits beside.
    """

    def __init__(
        self,
        client: Client,
        handlers: Sequence[Handler],
        buried: Callable[[], None],
        is_behind: Callable[[Keys], bool] = lambda _keys: False,
    ) -> None:
        self._client = client
        self._buried = buried
        self._is_behind = is_behind
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
        limit = max(LEAST_MOVED, min(BATCH_LIMIT, MOVE_LIMIT // max(1, len(due))))
        calls: list[Call[Any]] = []
        for move in due:
            if move.verb == "promote":
                calls.append(transitions.promote(move.keys, limit=limit))
            else:
                calls.append(transitions.reclaim(move.keys, limit=limit, spare_leases=self._spares(move.keys)))
        sent_at = time.monotonic()
        answers = self._client.run_all(calls)
        answered_at = min(time.monotonic(), sent_at + REPLY_LAG_SECONDS)
        for move, answer in zip(due, answers, strict=True):
            wait = self._seconds_until_next(move, answer, limit)
            with self._lock:
                if self._due.get(move) != due[move]:  # a claim has set a newer time meanwhile
                    continue
                if wait is None:
                    del self._due[move]
                else:
                    self._due[move] = answered_at + wait
        with self._lock:
            return max(0.0, min(self._due.values(), default=now + LONGEST_SLEEP_SECONDS) - time.monotonic())

    def _seconds_until_next(self, move: DueMove, answer: Any, limit: int) -> float | None:
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
        # A score so far ahead that Redis cannot answer it as a number is less than none.
        return min(next_ms / 1000, LONGEST_SLEEP_SECONDS) if next_ms >= 0 else LONGEST_SLEEP_SECONDS

    def _spares(self, keys: Keys) -> bool:
        spared_at = max(self._spared_at.get(shard, 0.0) for shard in (None, keys))
        return time.monotonic() < spared_at + self._lease_seconds.get(keys.name, 0.0) / 3 or self._is_behind(keys)


@dataclass(slots=True)
class Registered:
    """
    A periodic job whose schedule is in force, as Redis had it when it was registered.

    Attributes:
        last: the tick up to which all is done, in unix seconds.
        asked: the run that was asked for; None without.
    """

    entry: Periodic
    now_ms: int
    last: int
    asked: int | None


class DueTick(NamedTuple):
    """A tick `at` to be made, or a run that was asked for, of which `at` is None."""

    row: Registered
    at: int | None
    call: Call[TickStatus]


class Ticker:
    """
    Registers all periodic jobs in one round trip, and publishes what is due in the next.

    There is no leader, and only Redis' clock counts. The process that started last decides the schedules, and in a Redis
    that has lost its data the jobs are registered as new.
    """

    def __init__(self, client: Client, entries: Sequence[Periodic]) -> None:
        self._client = client
        by_queue: dict[str, list[Periodic]] = {}
        for entry in entries:
            by_queue.setdefault(entry.queue.name, []).append(entry)
        self._groups = [group for of_queue in by_queue.values() for group in chunked(of_queue, BATCH_LIMIT)]
        self._started = set[str]()
        self._named_until = 0.0
        self._superseded = set[str]()
        self._registering = QueueBackoff("ticker", client.observers)
        self._ticking = QueueBackoff("ticker", client.observers)
        self._next: dict[str, tuple[int, int | None]] = {}
        self._failures: dict[str, tuple[int, float]] = {}

    def step(self) -> float:
        """Publish what is due; return the wait for the next round."""
        began = time.monotonic()
        rows = self._register()
        self._publish([tick for row in rows for tick in self._due(row)])
        waits = [self._seconds_until_next(row) for row in rows]
        if self._registering.until:
            waits.append(self._registering.seconds())
        return max(0.0, min(waits, default=TICKER_SECONDS) - (time.monotonic() - began))

    def _register(self) -> list[Registered]:
        """Register every job; return those whose schedule is in force."""
        groups = [group for group in self._groups if not self._registering.waits(group[0].queue.keys)]
        requests: list[Request[Any]] = []
        for group in groups:
            schedules = [(entry.name, str(entry.schedule)) for entry in group]
            is_first = group[0].name not in self._started
            requests.append(transitions.register(group[0].queue.keys, schedules, newest=is_first))
        if time.monotonic() >= self._named_until:
            # A queue of periodic jobs needs no handler, so this names it in the queue registry, once in a minute.
            self._named_until = time.monotonic() + NAMING_SECONDS
            requests.append(commands.register([group[0].queue.keys.entry for group in self._groups], int(time.time())))
        rows = []
        for group, answer in zip(groups, self._client.run_all(requests), strict=False):
            keys = group[0].queue.keys
            if isinstance(answer, Exception):
                self._registering.note(keys, answer)
                continue
            self._registering.over(keys)
            self._started |= {entry.name for entry in group}
            now_ms, states = answer
            for entry, state in zip(group, states, strict=True):
                if state is not None:
                    self._superseded.discard(entry.name)
                    rows.append(Registered(entry, now_ms, state.last, state.asked))
                elif entry.name not in self._superseded:  # another schedule is in force: report it once
                    self._superseded.add(entry.name)
                    notify(self._client.observers, [Superseded(entry.queue.name, entry.name)])
        return rows

    def _due(self, row: Registered) -> Iterator[DueTick]:
        """Yield what is due of a job now; where its body cannot be made, what comes before."""
        entry = row.entry
        keys = entry.queue.keys
        settings = entry.queue.settings
        failures, retry_at = self._failures.get(entry.name, (0, 0.0))
        if self._ticking.waits(keys) or retry_at > time.monotonic():
            return

        def call(tick: Tick) -> Call[TickStatus]:
            return transitions.tick(keys, tick, ttl_ms=milliseconds(settings.ttl), retries=settings.retries)

        try:
            if (coming := self._next_tick(row)) is not None and coming * 1000 <= row.now_ms:
                for planned in entry.plan(row.last, row.now_ms // 1000):
                    yield DueTick(row, planned.at, call(entry.tick(planned)))
            if row.asked is not None:
                yield DueTick(row, None, call(entry.run(row.asked)))
        except BaseException as error:  # a body is the user's code, and one that fails holds up no other job
            self._handle_body_failure(entry, failures + 1, error)
        else:
            self._failures.pop(entry.name, None)

    def _handle_body_failure(self, entry: Periodic, failures: int, error: BaseException) -> None:
        """Log a body that cannot be made, and have its tick wait; the ticker of the testing kit raises the error instead."""
        self._failures[entry.name] = (failures, time.monotonic() + seconds_after(BODY_BACKOFF, failures))
        if failures & (failures - 1) == 0:  # the 1st, 2nd, 4th, 8th, ...
            text = "queue %s: the body of %s failed for the %d. time; its tick waits"
            logger.error(text, entry.queue.name, entry, failures, exc_info=error)

    def _publish(self, due: Sequence[DueTick]) -> None:
        """Make the calls; note how far each job is then."""
        for ticks in chunked(due, TICKS_TOGETHER):
            answers = self._client.run_all([tick.call for tick in ticks])
            for tick, answer in zip(ticks, answers, strict=True):
                keys = tick.row.entry.queue.keys
                if isinstance(answer, Exception):
                    self._ticking.note(keys, answer)
                    continue
                self._ticking.over(keys)
                if tick.at is not None and answer not in ("superseded", "unknown"):
                    tick.row.last = tick.at

    def _seconds_until_next(self, row: Registered) -> float:
        """Return the seconds from the registration to the next tick of a job, or to the next try of a failed one."""
        coming = self._next_tick(row)
        wait = TICKER_SECONDS if coming is None else min(TICKER_SECONDS, coming - row.now_ms / 1000)
        now = time.monotonic()
        _, retry_at = self._failures.get(row.entry.name, (0, now))
        return max(wait, retry_at - now, self._ticking.seconds_of(row.entry.queue.keys))

    def _next_tick(self, row: Registered) -> int | None:
        """Return the first tick that is not done; None when none comes."""
        known = self._next.get(row.entry.name)
        if known is None or known[0] != row.last:
            known = self._next[row.entry.name] = (row.last, row.entry.schedule.next_after(row.last))
        return known[1]
