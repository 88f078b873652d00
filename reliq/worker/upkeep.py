"""Notes the minutes of queues in Redis: whichever process meets a minute first that none has noted yet."""

from __future__ import annotations

import logging
import os
import random
import socket
import sys
import time
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from reliq.distribution import VERSION
from reliq.errors import ConfigurationError, RedisRefusedError, RedisUnavailableError, ReliqError
from reliq.events import RedisRefused, WentBack, notify
from reliq.handlers.settlement import burial
from reliq.keys import SHARDS_LIMIT, token
from reliq.lua import transitions
from reliq.redis import commands
from reliq.redis.commands import (
    BEAT_SECONDS,
    MINUTE_MS,
    SLOTS_LIMIT,
    HandlerStack,
    RunningJob,
    StackReport,
    Totals,
    Worker,
)
from reliq.text import clean_text, printable
from reliq.worker.loop import QueueBackoff

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from types import FrameType

    from reliq.admin.resharding import PendingMigration
    from reliq.keys import Keys
    from reliq.metrics.snapshot import QueueSnapshot
    from reliq.queue import Queue
    from reliq.redis.client import Client
    from reliq.redis.commands import Command, Request
    from reliq.redis.server import Connection
    from reliq.worker.claims import ServedQueues
    from reliq.worker.slots import HandlerCall, Inflight


class HistoryRollup:
    """
    The notes of the shards that `shards` returns.

    A note is read once a minute and queue; who finds none looks at the queue and writes it. Two may do so at a time, and
    write nearly the same. A queue that refuses has no notes, and nothing else of it depends on them.
    """

    def __init__(self, client: Client, shards: Callable[[], Iterable[Keys]]) -> None:
        from reliq.metrics.snapshot import SnapshotReader  # noqa: PLC0415  a satellite

        self._client, self._shards = client, shards
        self._unnoted = list[Any]()
        self._reader = SnapshotReader(client, lambda: self._unnoted)
        self._minute = -1

    def step(self, now_ms: int) -> None:
        """Note the minute of `now_ms`, by Redis' clock, where nobody has."""
        minute = now_ms // MINUTE_MS
        if minute == self._minute:
            return
        asked_of = list(self._shards())
        answers = self._client.run_all([commands.noted(keys, [minute]) for keys in asked_of])
        self._unnoted = [
            keys
            for keys, answer in zip(asked_of, answers, strict=True)
            if isinstance(answer, list) and not any(one.at_ms // MINUTE_MS == minute for one in answer)
        ]
        if self._unnoted:
            looks = self._reader.look(now_ms).queues
            asked: list[Request[Any]] = [
                one for look in looks for one in commands.note(look.keys, _totals(look, now_ms))
            ]
            self._client.run_all(asked)
        self._minute = minute


def _totals(look: QueueSnapshot, now_ms: int) -> Totals:
    late = [look.oldest[place] for place in ("ready", "retry") if place in look.oldest]
    due_ms = now_ms - round(max(late) * 1000) if look.counts.due and late else None
    return Totals(now_ms, *Totals.sums(look.counts.totals), look.counts.due, due_ms)


logger = logging.getLogger(__name__)

#: The other work of a janitor waits so long for the steps of changes.
CHANGES_SECONDS = 0.1


class ShardChanges:
    """The changes of the queues of one worker, a little at a time."""

    def __init__(self, served: ServedQueues, connection: Connection) -> None:
        self._served, self._connection = served, connection
        self._under_way: dict[str, Iterator[PendingMigration]] = {}

    def begin(self, shards: Iterable[Keys]) -> None:
        """Begin a round: move what is to leave these shards; who has the first of a queue ends the change if it can."""
        ours: dict[str, list[Keys]] = {}
        for keys in shards:
            if self._served.is_changing(keys.name) and keys.name not in self._under_way:
                ours.setdefault(keys.name, []).append(keys)
        for name, some in ours.items():
            self._under_way[name] = self._steps(some)

    def step(self) -> bool:
        """Take some steps; return whether there are more."""
        until = time.monotonic() + CHANGES_SECONDS
        while self._under_way and time.monotonic() < until:
            for name, steps in list(self._under_way.items()):
                try:
                    if next(steps, None) is not None:
                        continue
                except (RedisUnavailableError, ConfigurationError) as error:  # somebody else may have ended it
                    logger.debug("%s: the change of its shards goes on later: %s", name, error)
                except ReliqError as error:
                    logger.warning("%s: the change of its shards waits for `reliq shards --finish`: %s", name, error)
                del self._under_way[name]
        return bool(self._under_way)

    def _steps(self, shards: list[Keys]) -> Iterator[PendingMigration]:
        from reliq.admin.resharding import ShardChange  # noqa: PLC0415  a satellite
        from reliq.admin.session import QueueSession  # noqa: PLC0415

        session = QueueSession(self._connection.wire(), shards[0].of_shard(0), self._connection.clock)
        yield from ShardChange(session).steps({keys.shard for keys in shards})


#: An application that seeds `random` keeps its numbers: this one has none of its state.
_chance = random.SystemRandom()

#: Every queue is tidied at least this often; processes spread over the second half of it by chance.
ROUND_SECONDS = 30.0
#: In the time of a round each shard of a sharded queue is tidied by about so many of its workers.
TIDIERS = 2
#: One collect takes at most this many messages, because it reads their bodies.
COLLECT_LIMIT = 20


class Janitor:
    """
    One look at every queue, in one round trip while there is nothing to do.

    The workers of a sharded queue share its shards: in a round each takes the next of them.

    Args:
        connection: makes sessions for changes of the number of shards.
        workers: returns how many worker processes there are.
    """

    def __init__(
        self,
        client: Client,
        served: ServedQueues,
        connection: Connection,
        workers: Callable[[], int] = lambda: 1,
    ) -> None:
        self._client, self._served, self._workers = client, served, workers
        self._changes = ShardChanges(served, connection)
        self._next = _chance.randrange(SHARDS_LIMIT)  # the shard of each queue to go on with
        self._cursors: dict[Keys, tuple[int, int]] = {}
        self._minutes = HistoryRollup(client, self._shards)
        self._claims: dict[Keys, int] = {}
        self._backoff = QueueBackoff("janitor", client.observers)
        self._round_at = 0.0

    def step(self) -> float:
        """Collect some garbage of every queue, now and then tidy a part; return the wait for the next look."""
        shards = self._shards()
        if time.monotonic() >= self._round_at:
            self._round_at = time.monotonic() + ROUND_SECONDS * _chance.uniform(0.5, 1)
            shards = self._our_part()
            self._tidy(list(shards))
            self._changes.begin(shards)
        is_more = self._changes.step()
        if self._collect(shards) or is_more:
            return 0.0
        return max(0.0, self._round_at - time.monotonic())

    def _shards(self) -> dict[Keys, Queue[Any]]:
        return {keys: handler.queue for keys, handler in self._served.shards().items()}

    def _our_part(self) -> dict[Keys, Queue[Any]]:
        """Return the shards that this process tidies in this round, the next ones of each queue."""
        first, shards = self._next, self._shards()
        numbers = Counter(keys.name for keys in shards)
        ours = {name: -(-TIDIERS * number // self._workers()) for name, number in numbers.items()}
        self._next += max(ours.values())
        return {
            keys: queue for keys, queue in shards.items() if (keys.shard - first) % numbers[keys.name] < ours[keys.name]
        }

    def _tidy(self, shards: Sequence[Keys]) -> None:
        """Name every queue in the registry, tidy a part of `shards`, see that each account goes forward, note the minute."""
        calls: list[Request[Any]] = []
        for keys in shards:
            cursor, lease_cursor = self._cursors.get(keys, (0, 0))
            calls.append(transitions.tidy(keys, cursor=cursor, lease_cursor=lease_cursor))
        calls += [commands.claims(keys) for keys in shards]
        naming = commands.register([handler.queue.keys.entry for handler in self._served.handlers], int(time.time()))
        now_ms, *answers = self._client.run_all([commands.server_ms(), *calls, naming])
        if isinstance(registered := answers.pop(), RedisRefusedError):
            notify(self._client.observers, [RedisRefused("", "janitor", str(registered))])
            logger.error("the janitor cannot name its queues in the registry: %s", registered)
        for keys, answer, count in zip(shards, answers[: len(shards)], answers[len(shards) :], strict=True):
            if isinstance(answer, Exception):
                self._backoff.note(keys, answer)
            else:
                self._cursors[keys] = answer[:2]
            if not isinstance(count, Exception):
                self._compare(keys, count)
        if not isinstance(now_ms, Exception):
            self._minutes.step(now_ms)

    def _compare(self, keys: Keys, claims: int) -> None:
        """Notify observers when the account of a queue went back."""
        before, self._claims[keys] = self._claims.get(keys, 0), claims
        if claims < before:
            notify(self._client.observers, [WentBack(keys.name, before, claims)])

    def _collect(self, shards: dict[Keys, Queue[Any]]) -> bool:
        """Turn a part of each shard's garbage into dead letters; return whether there may be more."""
        asked = [keys for keys in shards if not self._backoff.waits(keys)]
        if not asked:
            return False
        found = self._client.run_all([commands.garbage(keys, COLLECT_LIMIT) for keys in asked])
        for keys, ids in zip(asked, found, strict=True):
            if isinstance(ids, Exception):
                self._backoff.note(keys, ids)
        full = {keys: ids for keys, ids in zip(asked, found, strict=True) if ids and not isinstance(ids, Exception)}
        if not full:
            return False
        collected = self._client.run_all([burial(keys, shards[keys].settings, ids) for keys, ids in full.items()])
        for keys, answer in zip(full, collected, strict=True):
            if isinstance(answer, Exception):
                self._backoff.note(keys, answer)
            else:
                self._backoff.over(keys)
        return not all(isinstance(answer, Exception) for answer in collected)


#: A stack tells its innermost frames.
STACK_FRAMES = 40
#: Characters of one frame, and of all stacks of a report: a page must be able to show it, and Redis to hold it.
FRAME_CHARACTERS, REPORT_CHARACTERS = 300, 60_000


def stack_report(runs: Sequence[HandlerCall], loop_thread: int) -> StackReport:
    """Return where each of `runs` stands, and the thread of the event loop where a coroutine is among them."""
    of_thread = sys._current_frames()  # noqa: SLF001  the documented way to see other threads
    found = [_stack_of(run, of_thread.get(run.thread)) for run in sorted(runs, key=lambda run: run.started_at)]
    if any(run.task is not None for run in runs):
        found.insert(0, HandlerStack("", "", _told(list(_outwards(of_thread.get(loop_thread))))))
    told: list[HandlerStack] = []
    room = REPORT_CHARACTERS
    for stack in found[: SLOTS_LIMIT + 1]:
        room -= sum(map(len, stack.frames)) + len(stack.id)
        if room < 0:
            break
        told.append(stack)
    return StackReport(round(time.time(), 3), tuple(told), len(found) - len(told))


def _stack_of(run: HandlerCall, frame: FrameType | None) -> HandlerStack:
    first = run.deliveries[0]
    frames = list(_outwards(frame)) if run.task is None else list(awaiting(run.task))[::-1]
    return HandlerStack(first.queue, first.delivery.id.encode("utf-8", "replace").decode(), _told(frames))


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield the frames of a thread, the innermost first, up to the handler: what called that is ours."""
    found = []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    while found and _is_ours(found[-1]):
        found.pop()
    yield from found


def awaiting(task: Any) -> Iterator[FrameType]:
    """Yield the frames of a task, from the handler to what it awaits; a foreign awaitable may have none."""
    one = task.get_coro()
    while one is not None:
        frame = getattr(one, "cr_frame", None) or getattr(one, "gi_frame", None) or getattr(one, "ag_frame", None)
        if frame is not None and not _is_ours(frame):
            yield frame
        one = getattr(one, "cr_await", None) or getattr(one, "gi_yieldfrom", None) or getattr(one, "ag_await", None)


def _is_ours(frame: FrameType) -> bool:
    name = str(frame.f_globals.get("__name__", ""))
    return name == "threading" or name.startswith("reliq.")


def _told(innermost_first: Sequence[FrameType]) -> tuple[str, ...]:
    return tuple(
        printable(clean_text(f"{one.f_code.co_filename}:{one.f_lineno} {one.f_code.co_qualname}", FRAME_CHARACTERS))
        for one in innermost_first[:STACK_FRAMES]
    )[::-1]


#: While the server that has the record is away and others answer, the record is written again this often.
BEAT_AGAIN_SECONDS = 1.0
#: A record that is due within this time is sent with a call that is made anyway.
EARLY_SECONDS = 1.0
#: Workers are counted with each fourth record, and those that were silent for an hour forgotten with each twelfth.
COUNT_BEATS, FORGET_BEATS = 4, 12


class Heartbeat:
    """
    Writes this process' record, and takes it away at a clean stop.

    A request for stacks is taken along with it, and what this process must know of others: how many shards its queues
    have by now, which have keys, and how many workers there are.

    Args:
        last_claim_at: says when the last claim round was completed, by the monotonic clock.
        report: says where the handlers stand.

    Attributes:
        wake: lets the next step begin now.
    """

    def __init__(
        self,
        client: Client,
        served: ServedQueues,
        inflight: Inflight,
        last_claim_at: Callable[[], float],
        report: Callable[[], StackReport],
    ) -> None:
        self._client, self._inflight, self._last_claim_at, self._report = client, inflight, last_claim_at, report
        self.wake: Callable[[], None] = lambda: None
        self._workers = 1
        self._served = served
        self._asked = self._told = 0  # how many requests were taken, and which was the last that has its answer
        self._queues = tuple(handler.queue.name for handler in served.handlers)
        self._id, self._host, self._version = token(), socket.gethostname(), VERSION
        self._started = time.time()
        self._beat_at, self._beats = float("-inf"), 0

    def step(self) -> float:
        """Write what is asked for and due; return the wait until it is. Where Redis refuses it, the work goes on without."""
        if self._told < self._asked:
            asked = self._asked
            if not self._run([commands.write_report(self._id, self._report())]):
                return BEAT_AGAIN_SECONDS
            self._told = asked
        self._served.write_limits(self._client)
        rest = self._beat_at + BEAT_SECONDS - time.monotonic()
        if rest > 0:
            return rest
        began = time.monotonic()
        if not self._run(self._beat(), self._questions()):
            return BEAT_AGAIN_SECONDS
        self._beat_at = began
        return BEAT_SECONDS

    def soon(self) -> list[Command[Any]]:
        """Return what writes the record, to go along with a call that is made anyway; nothing when it is not yet time."""
        if self._beat_at + BEAT_SECONDS - EARLY_SECONDS > time.monotonic():
            return []
        self._beat_at = time.monotonic()
        return [*self._beat(), *self._questions()]

    def workers(self) -> int:
        """Return how many worker processes there are; 1 while nobody need know."""
        return self._workers

    def leave(self) -> None:
        """Take the record away."""
        with suppress(ReliqError):
            self._client.run_all([*commands.remove_worker(self._id)])

    def _beat(self) -> list[Command[None]]:
        *written, silent_go = commands.write_worker(self._record())
        self._beats += 1
        seldom = [silent_go] if self._beats % FORGET_BEATS == 1 else []
        return [*written, *seldom, commands.take_request(self._id, self._note_request)]

    def _questions(self) -> list[Command[Any]]:
        """Return what asks for the shards and keys of the queues, and for the number of workers where a queue is sharded."""
        questions = self._served.questions()
        if self._beats % COUNT_BEATS == 1 and any(map(self._served.is_sharded, self._queues)):
            questions.append(commands.workers_alive(time.time(), self._note_workers))
        return questions

    def _note_workers(self, count: int) -> None:
        self._workers = max(1, count)

    def _note_request(self) -> None:
        self._asked += 1
        self.wake()

    def _run(self, requests: Sequence[Command[None]], questions: Sequence[Command[Any]] = ()) -> bool:
        """Make requests, and ask questions; return whether the servers that have the record were there."""
        answers = self._client.run_all([*requests, *questions])[: len(requests)]
        return not any(isinstance(answer, RedisUnavailableError) for answer in answers)

    def _record(self) -> Worker:
        running = sorted(self._inflight.runs(), key=lambda run: run.started_at)
        now, ticks = time.time(), time.monotonic()
        return Worker(
            id=self._id,
            host=self._host,
            pid=os.getpid(),
            version=self._version,
            queues=self._queues,
            slots=self._inflight.concurrency,
            busy=len(running),
            started=round(self._started, 3),
            last_claim=round(now - (ticks - self._last_claim_at()), 3),
            seen=round(now, 3),
            running=tuple(_slot(run, now - ticks) for run in running[:SLOTS_LIMIT]),
        )


def _slot(run: HandlerCall, epoch: float) -> RunningJob:
    """Return the record of a slot, for a batch that of its first message; the monotonic clock began at unix time `epoch`."""
    first = run.deliveries[0]
    # An id of a foreign publisher may be any bytes; JSON holds text alone.
    id = first.delivery.id.encode("utf-8", "replace").decode()
    return RunningJob(first.queue, id, first.delivery.attempt, round(run.started_at + epoch, 3))
