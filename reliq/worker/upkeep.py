"""
Background tasks of a worker process.

- The scheduler promotes scheduled messages when they are due, and reclaims messages whose leases have expired.
- The ticker publishes periodic jobs.
- The janitor writes dead letters, repairs errors in the data of queues, moves messages while the number of shards
  changes, and writes the history of queues once a minute.
- The heartbeat writes the worker record, which lists the running jobs. If an operator requests it, the heartbeat also
  writes their call stacks.
"""

from __future__ import annotations

import logging
import os
import random
import socket
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from traceback import walk_stack
from typing import TYPE_CHECKING, Any, NamedTuple

from tenacity import wait_exponential

from reliq.distribution import VERSION
from reliq.errors import ConfigurationError, RedisRefusedError, RedisUnavailableError, ReliqError
from reliq.events import CountersRegressed, RedisRefused, ScheduleReplaced, notify
from reliq.handlers.settlement import burial
from reliq.keys import SHARDS_LIMIT, Keys, token
from reliq.lua import transitions
from reliq.lua.transitions import NOTHING_DUE, ClaimAnswer, Tick, TickStatus
from reliq.publish import NAMING_SECONDS
from reliq.redis import commands
from reliq.redis.commands import BEAT_SECONDS
from reliq.settings import BATCH_LIMIT, milliseconds, seconds_after
from reliq.text import chunked, clean_text, printable
from reliq.worker.loop import LONGEST_SLEEP_SECONDS, REPLY_LAG_SECONDS, QueueBackoff

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from types import FrameType

    from reliq.handlers.handler import Handler
    from reliq.handlers.registration import Periodic
    from reliq.keys import Keys
    from reliq.redis.client import Client
    from reliq.redis.server import Connection
    from reliq.worker.claims import ServedQueues
    from reliq.worker.slots import HandlerCall, HeldDelivery, Inflight


logger = logging.getLogger(__name__)

#: How often to check again whether expired leases that must not be reclaimed yet may now be reclaimed.
SPARED_SECONDS = 0.25
#: The approximate limit of messages that one round trip promotes or reclaims in all queues together. Redis serves no
#: other client meanwhile.
MOVE_LIMIT = 2 * BATCH_LIMIT
#: Even if a round trip serves many queues, it may promote or reclaim this many messages of each queue.
LEAST_MOVED = 20
#: A process registers its periodic jobs, and reads the runs that operators request, at least this often.
TICKER_SECONDS = 5.0
#: The maximum number of ticks (due runs of periodic jobs) that one round trip publishes.
TICKS_TOGETHER = 100
#: After exceptions, the body function of a periodic job is called again with these delays: 1 s, 2 s, 4 s, … 1 minute.
BODY_BACKOFF = wait_exponential(max=60)


class Scheduler:
    """
    Promote due messages, and reclaim messages with expired leases, in the shards that this process watches.

    Redis stores one process as the watcher of each shard, so that not all processes send the same script calls.

    After a start or an outage, expired leases are not reclaimed for a third of the lease time, because their workers
    may still run and renew them. They are also not reclaimed while renewals of this process are overdue in the shard.
    Otherwise, a process that was suspended could reclaim its own leases.

    Args:
        client: the client for all script calls.
        handlers: the handlers of this process.
        buried: called after a reclaimed message had no retry left, to write its dead letter.
        is_behind: returns whether renewals or outcomes of this process are overdue in a shard.
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
        # By shard and script (promote or reclaim), the monotonic time of the next script call.
        self._due: dict[tuple[Keys, str], float] = {}
        self._backoff = QueueBackoff("scheduler", client.observers)
        self._spared_at: dict[Keys | None, float] = {}  # by shard (None: all): when `spare` was last called
        self.spare(None)
        self.wake: Callable[[], None] = lambda: None

    def spare(self, keys: Keys | None) -> None:
        """After an outage, reclaim no leases for a third of the lease time in the shard `keys`; None for all shards."""
        self._spared_at[keys] = time.monotonic()

    def watches(self, keys: Keys) -> bool:
        """Return whether this process is the watcher of a shard and has stored a due time of it."""
        with self._lock:
            return any(shard is keys for shard, _ in self._due)

    def forget(self, keys: Keys) -> None:
        """Stop watching a shard, because this process does not serve it any more."""
        with self._lock:
            for move in [move for move in self._due if move[0] is keys]:
                del self._due[move]
        self._spared_at.pop(keys, None)

    def note(self, keys: Keys, answer: ClaimAnswer, at: float) -> None:
        """
        Store the due times that Redis returned with its reply to a claim.

        If another process watches the shard, forget the stored due times of the shard.

        Args:
            keys: the shard.
            answer: the reply, with the milliseconds until the next promote and the next reclaim.
            at: the monotonic time from which these milliseconds count.
        """
        sooner = False
        with self._lock:
            for verb, wait_ms in (("promote", answer.promote_in_ms), ("reclaim", answer.reclaim_in_ms)):
                move = keys, verb
                before = self._due.pop(move, None)
                if wait_ms >= 0:
                    self._due[move] = at + wait_ms / 1000
                    sooner = sooner or before is None or self._due[move] < before
        if sooner:
            self.wake()

    def step(self) -> float:
        """Promote and reclaim the messages that are due; return the seconds until the next due time."""
        now = time.monotonic()
        with self._lock:
            due = {move: at for move, at in self._due.items() if at <= now}
        limit = max(LEAST_MOVED, min(BATCH_LIMIT, MOVE_LIMIT // max(1, len(due))))
        calls: list[commands.Call[Any]] = []
        for keys, verb in due:
            if verb == "promote":
                calls.append(transitions.promote(keys, limit=limit))
            else:
                calls.append(transitions.reclaim(keys, limit=limit, spare_leases=self._spares(keys)))
        sent_at = time.monotonic()
        answers = self._client.run_all(calls)
        answered_at = min(time.monotonic(), sent_at + REPLY_LAG_SECONDS)
        for move, answer in zip(due, answers, strict=True):
            wait = self._seconds_until_next(*move, answer, limit)
            with self._lock:
                if self._due.get(move) != due[move]:  # meanwhile the reply to a claim has set a newer due time
                    continue
                if wait is None:
                    del self._due[move]
                else:
                    self._due[move] = answered_at + wait
        with self._lock:
            return max(0.0, min(self._due.values(), default=now + LONGEST_SLEEP_SECONDS) - time.monotonic())

    def _seconds_until_next(self, keys: Keys, verb: str, answer: Any, limit: int) -> float | None:
        """
        Return the seconds until the next script call for the shard; None if no message becomes due later.

        Args:
            keys: the shard.
            verb: the script: "promote" or "reclaim".
            answer: Redis' reply to the last script call, or its error.
            limit: how many messages the last script call could move at most. If it moved this many, the next one is due
                now.
        """
        if isinstance(answer, Exception):
            self._backoff.note(keys, answer)
            if isinstance(answer, RedisUnavailableError):
                self.spare(keys)
            return self._backoff.seconds_of(keys)
        self._backoff.over(keys)
        if verb == "reclaim" and answer.buried:
            self._buried()
        moved, next_ms = answer if verb == "promote" else (answer.count, answer.next_in_ms)
        if moved >= limit:
            return 0.0
        if next_ms == NOTHING_DUE:
            return None
        if next_ms == 0 and verb == "reclaim" and self._spares(keys):
            return SPARED_SECONDS
        # Redis returns a negative number for a due time that is too far in the future.
        return min(next_ms / 1000, LONGEST_SLEEP_SECONDS) if next_ms >= 0 else LONGEST_SLEEP_SECONDS

    def _spares(self, keys: Keys) -> bool:
        spared_at = max(self._spared_at.get(shard, 0.0) for shard in (None, keys))
        return time.monotonic() < spared_at + self._lease_seconds.get(keys.name, 0.0) / 3 or self._is_behind(keys)


@dataclass(slots=True)
class Registered:
    """
    The state of a periodic job that Redis returned when the job was registered.

    Attributes:
        entry: the periodic job.
        now_ms: the time of the registration by the Redis clock, in Unix ms.
        last: the planned time of the last handled tick, in Unix seconds.
        asked: when an operator requested a run, in Unix ms; None without a request.
    """

    entry: Periodic
    now_ms: int
    last: int
    asked: int | None


class DueTick(NamedTuple):
    """
    A due run of a periodic job.

    Attributes:
        row: the periodic job and its state in Redis.
        at: the planned time in Unix seconds; None for a run that an operator requested.
        call: the script call that publishes the message.
    """

    row: Registered
    at: int | None
    call: commands.Call[TickStatus]


class Ticker:
    """
    Register periodic jobs in Redis and publish their due ticks (planned runs).

    Each step needs one round trip to register all jobs, and one to publish their ticks.

    There is no leader. Every process tries to publish each tick, and Redis accepts it only once. Only the clock of
    Redis decides which ticks are due. If processes declare different schedules for a job, the schedule of the process
    that started last is used. After Redis has lost its data, the jobs are registered as new jobs.
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
        """Publish due ticks; return the seconds until the next round."""
        began = time.monotonic()
        rows = self._register()
        self._publish([tick for row in rows for tick in self._due(row)])
        waits = [self._seconds_until_next(row) for row in rows]
        if self._registering.until:
            waits.append(self._registering.seconds())
        return max(0.0, min(waits, default=TICKER_SECONDS) - (time.monotonic() - began))

    def _register(self) -> list[Registered]:
        """Register all periodic jobs; return the jobs, without those whose schedule a newer process has replaced."""
        groups = [group for group in self._groups if not self._registering.waits(group[0].queue.keys)]
        requests: list[commands.Request[Any]] = []
        for group in groups:
            schedules = [(entry.name, str(entry.schedule)) for entry in group]
            is_first = group[0].name not in self._started
            requests.append(transitions.register(group[0].queue.keys, schedules, newest=is_first))
        if time.monotonic() >= self._named_until:
            # Once a minute, add the queues to the queue registry. The janitor adds only queues that have a handler.
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
                elif entry.name not in self._superseded:  # report a replaced schedule only once
                    self._superseded.add(entry.name)
                    notify(self._client.observers, [ScheduleReplaced(entry.queue.name, entry.name)])
        return rows

    def _due(self, row: Registered) -> Iterator[DueTick]:
        """Yield the due ticks of a periodic job; stop at a tick whose body function raises."""
        entry = row.entry
        keys = entry.queue.keys
        settings = entry.queue.settings
        failures, retry_at = self._failures.get(entry.name, (0, 0.0))
        if self._ticking.waits(keys) or retry_at > time.monotonic():
            return

        def call(tick: Tick) -> commands.Call[TickStatus]:
            return transitions.tick(keys, tick, ttl_ms=milliseconds(settings.ttl), retries=settings.retries)

        try:
            if (coming := self._next_tick(row)) is not None and coming * 1000 <= row.now_ms:
                for planned in entry.plan(row.last, row.now_ms // 1000):
                    yield DueTick(row, planned.at, call(entry.tick(planned)))
            if row.asked is not None:
                yield DueTick(row, None, call(entry.run(row.asked)))
        except BaseException as error:  # an error in application code must not delay other jobs
            self._handle_body_failure(entry, failures + 1, error)
        else:
            self._failures.pop(entry.name, None)

    def _handle_body_failure(self, entry: Periodic, failures: int, error: BaseException) -> None:
        """
        Log that the body function of a periodic job raised `error`, and let it be called again later.

        The test kit overrides this method, to raise the error in the test.
        """
        self._failures[entry.name] = (failures, time.monotonic() + seconds_after(BODY_BACKOFF, failures))
        if failures & (failures - 1) == 0:  # log only the 1st, 2nd, 4th, … failure
            text = "queue %s: the body function of %s failed (attempt %d); its tick waits and is retried"
            logger.error(text, entry.queue.name, entry, failures, exc_info=error)

    def _publish(self, due: Sequence[DueTick]) -> None:
        """Publish the messages of the ticks `due`, and remember the last handled tick of each periodic job."""
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
        """
        Return the seconds from the job's registration until its next tick, or until the retry of a failed tick.

        The result is at most TICKER_SECONDS, even while ticks fail. If the job were registered less often, the admin
        commands would show it as a job without a worker.
        """
        coming = self._next_tick(row)
        wait = TICKER_SECONDS if coming is None else coming - row.now_ms / 1000
        now = time.monotonic()
        _, retry_at = self._failures.get(row.entry.name, (0, now))
        return min(TICKER_SECONDS, max(wait, retry_at - now, self._ticking.seconds_of(row.entry.queue.keys)))

    def _next_tick(self, row: Registered) -> int | None:
        """Return the Unix time of the next tick to handle; None if the schedule has no more ticks."""
        known = self._next.get(row.entry.name)
        if known is None or known[0] != row.last:
            known = self._next[row.entry.name] = (row.last, row.entry.schedule.next_after(row.last))
        return known[1]


#: The janitor tidies each queue at least this often. Between two rounds it waits a random time, 50 to 100 % of this.
ROUND_SECONDS = 30.0
#: About this many worker processes tidy each shard of a sharded queue in each round.
TIDIERS = 2
#: The maximum number of dead letters that one script call of `collect` writes. The limit is low, because the script
#: reads the bodies of the messages.
COLLECT_LIMIT = 20
#: How long one step of the janitor moves messages to other shards before it does its other work.
CHANGES_SECONDS = 0.1
#: If a call stack has more frames, only this many of the innermost frames are reported.
STACK_FRAMES = 40
#: The text of a frame is cut to this many characters.
FRAME_CHARACTERS = 300
#: The maximum number of characters of all call stacks in a report.
REPORT_CHARACTERS = 60_000
#: The interval between two attempts to write the worker record while Redis is unavailable.
BEAT_AGAIN_SECONDS = 1.0
#: Each time a process has written its worker record this many times, it counts the workers.
COUNT_BEATS = 4
#: Each time a process has written its worker record this many times, it removes the records of workers that have not
#: written theirs for an hour.
FORGET_BEATS = 12

#: reliq has its own random generator, so that an application that seeds the module `random` gets the expected numbers.
_chance = random.SystemRandom()


class HistoryRollup:
    """
    Write the history of each queue to Redis, with one entry for each minute.

    Once a minute, every process reads the current entry of each queue. If the entry is missing, the process takes a
    snapshot of the queue and writes the entry. Two processes may write the same entry with nearly the same values. If
    Redis refuses the commands, entries are missing in the history, without other consequences.
    """

    def __init__(self, client: Client, shards: Callable[[], Iterable[Keys]]) -> None:
        from reliq.metrics.snapshot import ShardMaps, SnapshotReader  # noqa: PLC0415  a satellite

        self._client = client
        self._shards = shards
        self._unnoted = list[Any]()
        self._reader = SnapshotReader(client, lambda: self._unnoted, ShardMaps(whole=False))
        self._minute = -1

    def step(self, now_ms: int) -> None:
        """
        Write the missing entries of all queues for the current minute.

        `now_ms` is the time of the Redis clock, in Unix ms.
        """
        minute = now_ms // commands.MINUTE_MS
        if minute == self._minute:
            return
        shards = list(self._shards())
        answers = self._client.run_all([commands.noted(keys, [minute]) for keys in shards])
        self._unnoted = [
            keys
            for keys, notes in zip(shards, answers, strict=True)
            if isinstance(notes, list) and not any(note.at_ms // commands.MINUTE_MS == minute for note in notes)
        ]
        if self._unnoted:
            requests: list[commands.Request[Any]] = []
            for keys, queue in self._reader.look(now_ms).queues.items():
                due = queue.due
                ages = [queue.oldest[state] for state in ("ready", "retry") if state in queue.oldest]
                due_ms = now_ms - round(max(ages) * 1000) if due and ages else None
                totals = commands.Totals(now_ms, *commands.Totals.sums(queue.totals), due, due_ms)
                requests += commands.note(keys, totals)
            self._client.run_all(requests)
        self._minute = minute


class Janitor:
    """
    Write dead letters, repair errors in the data of queues, and move messages when the number of shards changes.

    A round without such work needs only one round trip. In each round, a worker process tidies (repairs) only a part of
    the shards of a sharded queue. Other processes tidy the other shards.

    Args:
        client: the client for all script calls.
        served: the queues and their shards.
        connection: the connection to Redis for changes of the number of shards.
        workers: returns the number of worker processes.
    """

    def __init__(
        self, client: Client, served: ServedQueues, connection: Connection, workers: Callable[[], int] = lambda: 1
    ) -> None:
        self._client = client
        self._served = served
        self._connection = connection
        self._workers = workers
        # By queue name, an iterator that moves messages to other shards.
        self._migrations: dict[str, Iterator[int]] = {}
        self._next = _chance.randrange(SHARDS_LIMIT)  # the number of the first shard that the next round tidies
        self._cursors: dict[Keys, tuple[int, int]] = {}
        self._history = HistoryRollup(client, served.shards)
        self._claims: dict[Keys, int] = {}
        self._backoff = QueueBackoff("janitor", client.observers)
        self._round_at = 0.0

    def step(self) -> float:
        """
        Write the dead letters of some messages that have failed for good, and tidy shards if a round is due.

        Returns:
            The seconds until the next step.
        """
        shards = self._served.shards()
        if time.monotonic() >= self._round_at:
            self._round_at = time.monotonic() + ROUND_SECONDS * _chance.uniform(0.5, 1)
            shards = self._next_part(shards)
            self._tidy(list(shards))
            changing: dict[str, list[Keys]] = {}
            for keys in shards:
                if self._served.is_changing(keys.name) and keys.name not in self._migrations:
                    changing.setdefault(keys.name, []).append(keys)
            self._migrations |= {name: self._migrate(part) for name, part in changing.items()}
        is_migrating = self._step_migrations()
        if self._collect(shards) or is_migrating:
            return 0.0
        return max(0.0, self._round_at - time.monotonic())

    def _next_part(self, shards: dict[Keys, Handler]) -> dict[Keys, Handler]:
        """
        Return those of `shards` that this process tidies in this round.

        In each round, it tidies the next few shards of each queue.
        """
        first = self._next
        counts = Counter(keys.name for keys in shards)
        shares = {name: -(-TIDIERS * count // self._workers()) for name, count in counts.items()}
        self._next += max(shares.values())
        return {
            keys: handler
            for keys, handler in shards.items()
            if (keys.shard - first) % counts[keys.name] < shares[keys.name]
        }

    def _tidy(self, shards: Sequence[Keys]) -> None:
        """
        Repair errors in the data of `shards` with the script `tidy`.

        Also add the queues to the queue registry and write their history. If the number of claims that Redis has
        counted in a shard has decreased, Redis has lost data. Then notify observers.
        """
        calls: list[commands.Request[Any]] = []
        for keys in shards:
            cursor, lease_cursor = self._cursors.get(keys, (0, 0))
            calls.append(transitions.tidy(keys, cursor=cursor, lease_cursor=lease_cursor))
        calls += [commands.claims(keys) for keys in shards]
        naming = commands.register([handler.queue.keys.entry for handler in self._served.handlers], int(time.time()))
        now_ms, *answers, named = self._client.run_all([commands.server_ms(), *calls, naming])
        if isinstance(named, RedisRefusedError):
            notify(self._client.observers, [RedisRefused("", "janitor", str(named))])
            logger.error("worker: cannot add the queues to the queue registry; retrying: %s", named)
        for keys, cursors, claims in zip(shards, answers[: len(shards)], answers[len(shards) :], strict=True):
            if isinstance(cursors, Exception):
                self._backoff.note(keys, cursors)
            else:
                self._cursors[keys] = cursors[:2]
            if not isinstance(claims, Exception):
                before = self._claims.get(keys, 0)
                self._claims[keys] = claims
                if claims < before:
                    notify(self._client.observers, [CountersRegressed(keys.name, before, claims)])
        if not isinstance(now_ms, Exception):
            self._history.step(now_ms)

    def _migrate(self, shards: list[Keys]) -> Iterator[int]:
        """
        Change the number of shards of a queue: at each iteration, move some messages out of its shards `shards`.

        If `shards` includes the first shard of the queue, also finish the change.
        """
        from reliq.redis.session import Session  # noqa: PLC0415  rarely needed
        from reliq.sharding import ShardChange  # noqa: PLC0415

        session = Session(self._connection.wire(), self._connection.clock)
        yield from ShardChange(session, shards[0]).steps({keys.shard for keys in shards})

    def _step_migrations(self) -> bool:
        """Move messages to other shards for about CHANGES_SECONDS; return whether a move is not finished yet."""
        until = time.monotonic() + CHANGES_SECONDS
        while self._migrations and time.monotonic() < until:
            for name, steps in list(self._migrations.items()):
                try:
                    if next(steps, None) is not None:
                        continue
                except (RedisUnavailableError, ConfigurationError) as error:
                    # Another process may have finished the change.
                    logger.debug("queue %s: the change of shards is interrupted and will be continued: %s", name, error)
                except ReliqError as error:
                    logger.warning(
                        "queue %s: the change of shards has stopped; continue it with `reliq shards --finish`: %s",
                        name,
                        error,
                    )
                del self._migrations[name]
        return bool(self._migrations)

    def _collect(self, shards: dict[Keys, Handler]) -> bool:
        """
        Write dead letters for messages in the state garbage; return whether more such messages may remain.

        Each call handles at most COLLECT_LIMIT messages of each shard.
        """
        served = [keys for keys in shards if not self._backoff.waits(keys)]
        if not served:
            return False
        garbage: dict[Keys, Any] = {}
        answers = self._client.run_all([commands.garbage(keys, COLLECT_LIMIT) for keys in served])
        for keys, ids in zip(served, answers, strict=True):
            if isinstance(ids, Exception):
                self._backoff.note(keys, ids)
            elif ids:
                garbage[keys] = ids
        if not garbage:
            return False
        answers = self._client.run_all(
            [burial(keys, shards[keys].queue.settings, ids) for keys, ids in garbage.items()]
        )
        for keys, answer in zip(garbage, answers, strict=True):
            if isinstance(answer, Exception):
                self._backoff.note(keys, answer)
            else:
                self._backoff.over(keys)
        return not all(isinstance(answer, Exception) for answer in answers)


def stack_report(runs: Sequence[HandlerCall], loop_thread: int) -> commands.StackReport:
    """
    Return the call stacks of the handlers in `runs`.

    If a coroutine handler runs, the report also contains the stack of the event loop's thread `loop_thread`.
    """
    stacks = []
    if any(run.task is not None for run in runs):
        stacks.append(commands.HandlerStack("", "", thread_stack(loop_thread)))
    for run in sorted(runs, key=lambda run: run.started_at):
        first = run.deliveries[0]
        stacks.append(commands.HandlerStack(first.queue, _printable_id(first), call_stack(run)))
    reported: list[commands.HandlerStack] = []
    room = REPORT_CHARACTERS
    for stack in stacks[: commands.SLOTS_LIMIT + 1]:
        room -= sum(map(len, stack.frames)) + len(stack.id)
        if room < 0:
            break
        reported.append(stack)
    return commands.StackReport(round(time.time(), 3), tuple(reported), len(stacks) - len(reported))


def call_stack(run: HandlerCall) -> tuple[str, ...]:
    """
    Return the call stack of a handler, without the frames of reliq that called the handler.

    The format is the same as in `thread_stack`.
    """
    frames = _thread_frames(run.thread) if run.task is None else _task_frames(run.task)
    names = [str(frame.f_globals.get("__name__", "")) for frame in frames]
    while names and (names[-1] == "threading" or names[-1].startswith("reliq.")):
        names.pop()
    return _format_frames(frames[: len(names)])


def thread_stack(thread: int) -> tuple[str, ...]:
    """
    Return the call stack of a thread, the innermost frame last.

    Each frame is a text `file:line function`.
    """
    return _format_frames(_thread_frames(thread))


def _thread_frames(thread: int) -> list[FrameType]:
    """Return the frames of a thread, the innermost frame first."""
    frame = sys._current_frames().get(thread)  # noqa: SLF001  the documented way to see other threads
    return [] if frame is None else [at for at, _ in walk_stack(frame)]


def _task_frames(task: Any) -> list[FrameType]:
    """
    Return the frames of an asyncio task, the innermost first.

    Awaitables without frames are left out.
    """
    frames = []
    awaitable = task.get_coro()
    while awaitable is not None:
        frame = _first_of(awaitable, "cr_frame", "gi_frame", "ag_frame")
        if frame is not None:
            frames.append(frame)
        awaitable = _first_of(awaitable, "cr_await", "gi_yieldfrom", "ag_await")
    return frames[::-1]


def _first_of(awaitable: Any, *names: str) -> Any:
    """Return the value of the first attribute in `names` that is set; coroutines and generators have different ones."""
    return next(filter(None, (getattr(awaitable, name, None) for name in names)), None)


def _format_frames(innermost_first: Sequence[FrameType]) -> tuple[str, ...]:
    codes = [(frame.f_code, frame.f_lineno) for frame in innermost_first[:STACK_FRAMES]]
    texts = (f"{code.co_filename}:{line} {code.co_qualname}" for code, line in reversed(codes))
    return tuple(printable(clean_text(text, FRAME_CHARACTERS)) for text in texts)


def _printable_id(held: HeldDelivery) -> str:
    """Return the message id as text that JSON can encode. Other publishers may write ids with any bytes."""
    return held.delivery.id.encode("utf-8", "replace").decode()


class Heartbeat:
    """
    Write the worker record of this process, and remove it at a clean shutdown.

    The round trip that writes the record also reads the shard maps of the queues, the number of workers, and whether an
    operator has requested the call stacks of running handlers.

    Args:
        client: the client for all commands.
        served: the queues and their shards.
        inflight: the deliveries of this process.
        last_claim_at: returns the monotonic time of the last completed claim round.
        report: returns the call stacks of the running handlers.

    Attributes:
        wake: called to start the next step now, when an operator has requested call stacks.
    """

    def __init__(
        self,
        client: Client,
        served: ServedQueues,
        inflight: Inflight,
        last_claim_at: Callable[[], float],
        report: Callable[[], commands.StackReport],
    ) -> None:
        self._client = client
        self._served = served
        self._inflight = inflight
        self._last_claim_at = last_claim_at
        self._report = report
        self.wake: Callable[[], None] = lambda: None
        self._workers = 1
        self._requests = 0  # how often operators have requested call stacks
        self._answered = 0  # how many of these requests are answered
        self._id = token()
        self._queues = tuple(handler.queue.name for handler in served.handlers)
        self._host = socket.gethostname()
        self._started = time.time()
        self._beat_at = float("-inf")
        self._beats = 0

    def step(self) -> float:
        """
        Write the call stacks if an operator has requested them, and the worker record if it is due.

        Ignore errors of commands that Redis refuses.

        Returns:
            The seconds until the next step.
        """
        if self._answered < self._requests:
            requests = self._requests
            (answer,) = self._client.run_all([commands.write_report(self._id, self._report())])
            if isinstance(answer, RedisUnavailableError):
                return BEAT_AGAIN_SECONDS
            self._answered = requests
        self._served.write_limits(self._client)
        rest = self._beat_at + BEAT_SECONDS - time.monotonic()
        if rest > 0:
            return rest
        began = time.monotonic()
        record = self._record()
        questions = self._served.questions()
        calls: list[commands.Command[Any]] = [*record, *questions]
        if self._beats % COUNT_BEATS == 1 and any(map(self._served.is_sharded, self._queues)):
            calls.append(commands.workers_alive(time.time(), self._note_workers))
        answers = self._client.run_all(calls)
        self._served.take(answers[len(record) :][: len(questions)])
        if any(isinstance(answer, RedisUnavailableError) for answer in answers[: len(record)]):
            return BEAT_AGAIN_SECONDS
        self._beat_at = began
        return BEAT_SECONDS

    def workers(self) -> int:
        """Return the last count of worker processes; 1 if no queue is sharded, because then they are not counted."""
        return self._workers

    def leave(self) -> None:
        """Remove the worker record from Redis, at shutdown."""
        with suppress(ReliqError):
            self._client.run_all([*commands.remove_worker(self._id)])

    def _record(self) -> list[commands.Command[None]]:
        """Return the commands that write the worker record, and read and delete a request for call stacks."""
        runs = sorted(self._inflight.runs(), key=lambda run: run.started_at)
        now = time.time()
        epoch = now - time.monotonic()  # the Unix time at which the monotonic clock started
        running = []
        for run in runs[: commands.SLOTS_LIMIT]:
            first = run.deliveries[0]
            started = round(run.started_at + epoch, 3)
            running.append(commands.RunningJob(first.queue, _printable_id(first), first.delivery.attempt, started))
        record = commands.Worker(
            id=self._id,
            host=self._host,
            pid=os.getpid(),
            version=VERSION,
            queues=self._queues,
            slots=self._inflight.concurrency,
            busy=len(runs),
            started=round(self._started, 3),
            last_claim=round(self._last_claim_at() + epoch, 3),
            seen=round(now, 3),
            running=tuple(running),
        )
        *writes, forget_silent = commands.write_worker(record)
        self._beats += 1
        if self._beats % FORGET_BEATS == 1:
            writes.append(forget_silent)
        return [*writes, commands.take_request(self._id, self._note_request)]

    def _note_workers(self, count: int) -> None:
        self._workers = max(1, count)

    def _note_request(self) -> None:
        self._requests += 1
        self.wake()
