"""Whole queues: counts, rates and shards; pause, resume, resize and delete."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

from reliq.admin import calls
from reliq.admin.session import AdminBase, ask_each
from reliq.admin.workers import info_of, refusal_of_writes, running_in, workers_alive
from reliq.errors import ConfigurationError, RedisRefusedError, RedisUnavailableError
from reliq.keys import QUEUES_KEY, SHARDS_LIMIT, Keys, Layout, is_name
from reliq.lua import transitions
from reliq.message import Counts, Duration, Pause
from reliq.metrics.snapshot import QueueSnapshot, Rates, Selection, ShardMaps, SnapshotReader, registered
from reliq.publish import NAMING_SECONDS
from reliq.queue import pausing
from reliq.redis import commands
from reliq.redis.commands import Command, Totals, Worker, answered, of_every_shard, raise_first, read_ids
from reliq.settings import check_int
from reliq.sharding import ShardChange
from reliq.text import pluralize, whole_number

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reliq.redis.session import Session
    from reliq.redis.shards import ShardMap

#: Number of Redis keys in one step of a SCAN, which blocks Redis for less than a millisecond.
STEP_KEYS = 1000
#: A scan finds queues by Redis keys with these endings and types. Every queue with messages has a key with the first
#: ending, also in the Go layout. A queue that has only dead letters has a key with the second ending.
KEY_ENDINGS = {":retry:cnt": "hash", ":dead": "stream"}
#: A glob pattern that matches the Redis keys with either ending, and few other keys.
_PATTERN = "*:[dr]e[at][dr]*"
#: Rates are computed from the current totals of a queue, and from the newest totals that workers stored at least
#: FRESH_MS and at most STALE_MINUTES ago.
FRESH_MS = 20_000
STALE_MINUTES = 3


@dataclass(frozen=True, slots=True)
class Overview:
    """
    Queues at one moment, and the workers that are alive.

    Attributes:
        queues: the counts of each queue.
        workers: the records of the workers; None if unknown.
        unreadable: why each queue without counts could not be read: no rights, a Redis key of another type, or a
            malformed total.
        servers: INFO of each Redis server, by the server's name; without the sections that this user may not read.
        at: when the counts were read, in seconds of `time.monotonic()`.
        left_out: number of registered queues that are not included, because there are too many.
        unknown: why `workers` is None, for example because Redis does not answer or refuses writes; empty if `workers`
            is not None.
    """

    queues: Sequence[QueueSnapshot]
    workers: Sequence[Worker] | None
    unreadable: Mapping[str, str]
    servers: Mapping[str, Mapping[str, str]]
    at: float
    left_out: int = 0
    unknown: str = ""


@dataclass(frozen=True, slots=True)
class ShardsView:
    """
    The shards of a queue.

    Attributes:
        map: the shard map of the queue, with the number of shards now and before an unfinished change.
        counts: the counts of each shard, beginning with shard 0; None for a shard whose Redis does not answer.
        away: the numbers of the shards that did not answer.
    """

    map: ShardMap
    counts: tuple[Counts | None, ...]
    away: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class MinuteStats:
    """
    Figures of a queue for one minute.

    The figures are computed from totals that workers store each minute. If workers stored no totals for some minutes,
    each figure is a mean per minute.

    Attributes:
        at: end of the minute, in unix seconds by the server's clock.
        published: number of messages that were published or redriven.
        acked: number of messages that were acked.
        failed: number of deliveries that failed or whose lease expired.
        dead: number of messages that became dead letters.
        waiting: number of messages that were due but not delivered when the minute ended.
        oldest: for how many seconds the oldest of the waiting messages had been due; None if no message waited, or if
            this time was not stored.
    """

    at: float
    published: int
    acked: int
    failed: int
    dead: int
    waiting: int
    oldest: float | None


class QueueReads(AdminBase):
    """The methods that read the counts and pauses of queues."""

    def queues(self, names: Sequence[str] = (), *, scan: bool = False) -> Overview:
        """
        Return the counts, lateness, workers and rates of queues; by default of all registered queues.

        The rates are for about the last minute.

        Args:
            names: names of the queues to return, in this admin's layout; empty for all registered queues.
            scan: also return unregistered queues, in any layout, by scanning all Redis keys in short steps.
        """
        session = self._session()
        return overview(session, chosen(session, self._named(names), scan=scan), self._maps())

    def account(self, queue: str) -> Counts:
        """
        Return the counts of a queue; `missing` is 0 if each published message has ended or is alive.

        All counts of a shard are read at one moment. In a layout of the Go library, the totals include only the work of
        reliq, because programs in Go do not update the totals.
        """
        session = self._queue(queue)
        return Counts.sum(*answered(session.try_all([transitions.counts(keys) for keys in session.counted])))

    def shards(self, queue: str) -> ShardsView:
        """
        Return the number of shards of a queue, and the counts of each shard.

        Raises:
            RedisUnavailableError: no shard answers.
        """
        session = self._queue(queue)
        answers = session.try_all([transitions.counts(part.keys) for part in session.parts])
        _, away = answered(answers)
        counts = (None if shard in away else answer for shard, answer in enumerate(answers))
        return ShardsView(session.map, tuple(counts), away)

    def paused(self, queue: str) -> Pause | None:
        """Return who paused a queue, when and why; None if it is not paused."""
        return self._session().run(calls.paused(self.redis_keys(queue)))


class QueueActions(AdminBase):
    """The methods that pause, resume and delete whole queues."""

    def pause(self, queue: str, *, reason: str = "", for_: Duration | None = None, by: str = "") -> None:
        """
        Pause a queue: consumers stop claiming within a second, and running handlers finish.

        Args:
            queue: name of the queue.
            reason: why the queue is paused, for other operators.
            for_: seconds until the queue resumes; None for no end before `resume`.
            by: name of the operator who pauses the queue; by default user@host of this process.

        Raises:
            RedisUnavailableError: Redis does not answer. For a queue with several shards, the error names the shards
                that were paused.
        """
        parts = self._queue(queue).parts
        answers = parts[0].try_all([pausing(part.keys, reason, for_, by) for part in parts])
        of_every_shard(queue, "paused", answers)

    def resume(self, queue: str) -> bool:
        """Resume a queue; return whether it was paused, or throttled by `RateLimited`."""
        parts = self._queue(queue).parts
        answers = parts[0].try_all([request for part in parts for request in commands.resume_queue(part.keys)])
        pauses = of_every_shard(queue, "resumed", answers[0::4])
        sleeps = of_every_shard(queue, "resumed", answers[1::4])
        return any(pauses) or any(sleeps)

    def delete_queue(self, queue: str, *, letters: bool = False) -> int:
        """
        Delete a queue without living messages, and its registry entry.

        Two kinds of Redis keys are not deleted, but expire by their TTL: the keys that store the reply of a client's
        last script call, and the keys that keep the chosen ids of ended messages taken.

        Args:
            queue: name of the queue.
            letters: also delete the queue's dead letters.

        Returns:
            The number of deleted dead letters.

        Raises:
            ConfigurationError: the queue has messages or a worker, was in use less than a minute ago, or has dead
                letters and `letters` is not set.
        """
        session = self._queue(queue)
        keys = session.keys
        if serving := [
            f"{worker.host} pid {worker.pid}" for worker in workers_alive(session) if keys.name in worker.queues
        ]:
            raise ConfigurationError(
                f"queue {keys.name!r} is served by a worker: {', '.join(serving[:5])}; stop it first"
            )
        # A process registers its queue at most once in NAMING_SECONDS. If an operator deleted the queue within this
        # time, the process could publish to a queue without a registry entry.
        named = whole_number(session.run(Command(("HGET", QUEUES_KEY, keys.entry), lambda reply: reply or b"")))
        now_ms = session.run(commands.server_ms())
        left = 0 if named is None else math.ceil(NAMING_SECONDS + 1 - (now_ms / 1000 - named))
        if 0 < left <= NAMING_SECONDS + 1:
            raise ConfigurationError(
                f"queue {keys.name!r} was in use less than {NAMING_SECONDS:.0f} s ago; it can be deleted in {left} s"
            )

        def forget(shards: Sequence[Keys], *, look: bool) -> int:
            requests = [transitions.forget(shard, letters=letters, look=look) for shard in shards]
            answers = zip(shards, session.try_all(requests), strict=True)
            found = raise_first(
                [
                    answer
                    for shard, answer in answers
                    # Ignore refusals for shards that the queue never had: the Redis user may have no rights on them.
                    if shard.shard < session.map.ever or not isinstance(answer, RedisRefusedError)
                ]
            )
            alive = sum(alive for alive, _ in found)
            kept: int = sum(kept for _, kept in found)
            if alive:
                raise ConfigurationError(
                    f"queue {keys.name!r} has {pluralize(alive, 'message')}; purge it first, or if no state lists any "
                    "message, run `reliq check --repair`"
                )
            if kept and not letters:
                raise ConfigurationError(
                    f"queue {keys.name!r} has {pluralize(kept, 'dead letter')}; delete it with --letters"
                )
            return kept

        # Check and delete all possible shards, because Redis may have lost the map with the number of shards.
        shards = [keys] if keys.bare else [keys.of_shard(shard) for shard in range(SHARDS_LIMIT)]
        forget(shards, look=True)
        # delete shard 0 last, because it stores the shard map
        gone = forget(shards[1:], look=False) + forget(shards[:1], look=False)
        session.run(calls.unregister(keys))
        return gone

    def resize(self, queue: str, number: int) -> None:
        """
        Start a change to `number` shards, or continue an interrupted change to the same number.

        Publishers and workers continue during the change. Workers or `finish_resize` finish the change. Ids are
        deduplicated as before, even while some publishers use the old shard map.

        Raises:
            ConfigurationError: `number` is not a power of two, or a change to another number is not finished.
        """
        session = self._queue(queue)
        ShardChange(session, session.keys).resize(number)

    def finish_resize(self, queue: str) -> int:
        """
        Move messages to their new shards; return how many messages are left in their old shards.

        Messages that are leased to workers cannot be moved. Call this again until it returns 0; then the change is
        finished.
        """
        session = self._queue(queue)
        return max(ShardChange(session, session.keys).steps(count=True), default=0)


def chosen(session: Session, named: Sequence[Keys], *, scan: bool = False) -> Selection:
    """
    Return the queues in `named`; if it is empty, return the registered queues, sorted by name.

    With `scan`, also scan all Redis keys, and include the unregistered queues that the scan finds.
    """
    if named:
        return Selection(named)

    def served() -> list[Keys]:
        return [Keys(name) for name in {name for one in workers_alive(session) for name in one.queues} if is_name(name)]

    try:
        known = registered(session.client, served)
    except RedisUnavailableError as error:
        why = f"the Redis of the queue registry, {QUEUES_KEY}, is away ({error}); name the queues to show"
        raise RedisUnavailableError(why) if session.client.has_many else error from None
    found = {keys.totals: keys for keys in known.queues}
    if scan:
        found |= {keys.totals: keys for keys in _scanned(session)}
    return Selection(sorted(found.values(), key=lambda keys: keys.name), known.left_out)


def _scanned(session: Session) -> list[Keys]:
    """
    Return every queue that has a message or a dead letter, in any layout, sorted by name.

    All Redis keys of each server are scanned in short steps, so that Redis serves other clients between the steps.
    """
    found: dict[str, Keys] = {}
    for server_session in session.each().values():
        for keys in server_session.scan(partial(calls.keys_scanned, _PATTERN, count=STEP_KEYS)):
            ending = [(key, end) for key in keys for end in KEY_ENDINGS if key.endswith(end)]
            types = session.try_all([Command(("TYPE", key), bytes.decode) for key, _ in ending])
            for (key, end), kind in zip(ending, types, strict=True):
                base = key.removesuffix(end)
                if kind == KEY_ENDINGS[end] and base not in found and (queue := _queue(session, base)) is not None:
                    found[base] = queue
    queues = {keys.totals: keys for keys in found.values()}  # the scan finds a queue once for each shard
    return sorted(queues.values(), key=lambda keys: (keys.name, keys.layout.prefix))


def _queue(session: Session, base: str) -> Keys | None:
    """Return the queue whose Redis keys start with `base`; None if no queue can have such keys."""
    tagged = base.startswith("{") and base.endswith("}")
    parts = (base[1:-1] if tagged else base).split(":")
    if tagged and parts[0] == Layout.RELIQ.prefix:
        name = ":".join(parts[1:]).partition("#")[0]  # remove the shard number, which follows the name
        return Keys(name) if is_name(name) else None
    candidates = list[Keys]()
    for at in [1] if parts[0] == "dp" else range(1, len(parts)):
        with suppress(ConfigurationError):
            layout = Layout.hdt3213(hash_tag=tagged, prefix=":".join(parts[:at]))
            candidates.append(Keys(":".join(parts[at:]), layout))
    if len(candidates) < 2:  # noqa: PLR2004
        return next(iter(candidates), None)
    # Prefix and name may both contain colons. Of the possible queues, choose the queue that has the body of a message.
    ids = session.run(Command(("HRANDFIELD", candidates[0].retries_left, 1), read_ids))
    bodies = session.try_all([calls.has_value(keys, id) for keys in candidates for id in ids])
    return next((keys for keys, has in zip(candidates, bodies, strict=False) if has is True), candidates[0])


def overview(session: Session, selection: Selection, maps: ShardMaps, *, since: Overview | None = None) -> Overview:
    """
    Read the counts of queues, and compute their rates since the earlier overview `since`.

    Without `since`, compute the rates since the totals that workers stored about a minute ago.
    """
    snapshot = SnapshotReader(session.client, lambda: selection.queues, maps).look()
    servers = info_of(session)
    at = time.monotonic()
    workers: Sequence[Worker] | None = None
    unknown = "the Redis of their registry is away"
    with suppress(RedisUnavailableError):
        workers = workers_alive(session)
        unknown = "" if workers else refusal_of_writes(servers)
    if unknown:
        workers = None
    paused = [keys for keys, queue in snapshot.queues.items() if queue.paused]
    answers = session.try_all(
        [request for keys in paused for request in (calls.paused(keys), Command(("PTTL", keys.paused), int))]
    )
    pauses = {
        keys: replace(pause, until=time.time() + ttl_ms / 1000 if ttl_ms > 0 else None)
        for keys, pause, ttl_ms in zip(paused, answers[::2], answers[1::2], strict=True)
        if isinstance(pause, Pause) and isinstance(ttl_ms, int)
    }
    noted = noted_rates(session, snapshot.queues, maps) if since is None else {}
    earlier = {(queue.queue, queue.layout): queue for queue in since.queues} if since else {}
    queues = []
    for keys, queue in snapshot.queues.items():
        rates = noted.get(keys)
        before = earlier.get((queue.queue, queue.layout))
        if since and before and not before.away and not queue.away:
            rates = Rates.between(Totals.sums(before.totals), Totals.sums(queue.totals), max(0.001, at - since.at))
        mine = [worker for worker in workers or () if queue.queue in worker.queues]
        queues.append(
            replace(
                queue,
                rates=rates,
                workers=None if workers is None else len(mine),
                slots=None if workers is None else sum(worker.slots for worker in mine),
                busy=None if workers is None else len(running_in(mine, queue.queue)),
                pause=pauses.get(keys),
            )
        )
    unreadable = {keys.entry: why for keys, why in snapshot.unreadable.items()}
    return Overview(queues, workers, unreadable, servers, at, selection.left_out, unknown)


def histories_of(
    session: Session, queues: Sequence[Keys], minutes: int, maps: ShardMaps
) -> dict[Keys, list[MinuteStats]]:
    """
    Return the figures of each queue for the last minutes, oldest first.

    If Redis refuses to read a queue, the list of this queue is empty.
    """
    check_int("minutes", minutes, least=1, most=commands.MINUTES_LIMIT)
    notes, _ = _notes(session, queues, minutes, maps)
    histories = {}
    for keys, shards in notes.items():
        by_minute = defaultdict[int, list[tuple[Totals, Totals]]](list)
        for shard in shards:
            for before, note in pairwise(shard):
                by_minute[note.at_ms // commands.MINUTE_MS].append((before, note))
        histories[keys] = [_minute(by_minute[minute]) for minute in sorted(by_minute)]
    return histories


def noted_rates(session: Session, queues: Mapping[Keys, QueueSnapshot], maps: ShardMaps) -> dict[Keys, Rates]:
    """
    Return the rates of queues over about the last minute.

    The rates are computed from the current totals, and from earlier totals that workers stored in Redis. The result
    omits a queue if the earlier totals of one of its shards are missing.
    """
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
    """
    Return the totals that workers stored for each shard in the last minutes, and the server's time in unix ms.

    The totals of a shard are in a list, oldest first. If Redis refuses to read a shard, its list is empty.
    """
    now_ms = session.run(commands.server_ms())
    this = now_ms // commands.MINUTE_MS
    ring = range(this - minutes, this + 1)[-commands.MINUTES_LIMIT :]
    answers, _ = ask_each(session, queues, lambda keys: commands.noted(keys, ring), maps)
    notes = {
        keys: [
            [note for note in shard if 0 <= now_ms - note.at_ms <= minutes * commands.MINUTE_MS]
            if isinstance(shard, list)
            else []
            for shard in shards
        ]
        for keys, shards in zip(queues, answers, strict=True)
    }
    return notes, now_ms


def _minute(shards: Sequence[tuple[Totals, Totals]]) -> MinuteStats:
    """
    Return the figures of a queue for one minute.

    Args:
        shards: for each shard, the totals that were stored before and after the minute.
    """

    def moved(total: str) -> int:
        sums = [
            (max(0, getattr(note, total) - getattr(before, total)), max(1, note.at_ms - before.at_ms))
            for before, note in shards
        ]
        return sum(round(more * commands.MINUTE_MS / over_ms) for more, over_ms in sums)

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
