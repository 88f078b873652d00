"""Queues of a Redis: their list, their counts at one moment, their pause, and their removal."""

from __future__ import annotations

import math
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from reliq.admin import calls
from reliq.admin.rates import noted_rates
from reliq.admin.session import AdminBase
from reliq.admin.workers import running_in, workers_alive
from reliq.errors import ConfigurationError, RedisRefusedError, RedisUnavailableError
from reliq.keys import QUEUES_KEY, SHARDS_LIMIT, Keys, Layout, is_name
from reliq.lua import transitions
from reliq.message import Counts, Pause
from reliq.metrics.snapshot import QueueSnapshot, Rates, Selection, SnapshotReader, registered
from reliq.publish import NAMING_SECONDS
from reliq.queue import pausing
from reliq.redis import commands
from reliq.redis.commands import Command, Totals, answered, of_every_shard, raise_first, read_ids
from reliq.text import pluralize, whole_number

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reliq.admin.session import QueueSession
    from reliq.message import Duration
    from reliq.metrics.snapshot import ShardMaps
    from reliq.redis.commands import Worker
    from reliq.redis.session import Session

#: Keys in one step; it keeps Redis busy for less than a millisecond.
STEP_KEYS = 1000
#: A queue is found by keys with these ends, of these types: every queue that holds a message, also in the Go layout, has
#: a hash of retries left; a drained queue may have its dead letters alone.
KEY_ENDINGS = {":retry:cnt": "hash", ":dead": "stream"}
#: The pattern matches both ends, and little else.
_PATTERN = "*:[dr]e[at][dr]*"


@dataclass(frozen=True, slots=True)
class Overview:
    """
    Queues at one moment, and the workers that are alive.

    Attributes:
        workers: None while the Redis of their registry is away.
        unreadable: queue -> why it cannot be shown: rights, a key of another type, a malformed total.
        facts: INFO of the Redis; empty where this user may not read it.
        at: by the monotonic clock.
        left_out: how many more queues the registry has than are shown.
    """

    queues: Sequence[QueueSnapshot]
    workers: Sequence[Worker] | None
    unreadable: Mapping[str, str]
    facts: Mapping[str, str]
    at: float
    left_out: int = 0


class QueueReads(AdminBase):
    """Queues at one moment."""

    def queues(self, names: Sequence[str] = (), *, scan: bool = False) -> Overview:
        """
        Return the queues named, or all of the registry, with their counts, lateness, workers and rates of the last minute.

        Args:
            names: in this admin's layout.
            scan: also find queues that no registry names, in any layout, by a walk over all keys in short steps.
        """
        session = self._redis.session()
        return overview(session, chosen(session, self._named(names), scan=scan), self._maps())

    def account(self, queue: str) -> Counts:
        """
        Return the counts of a queue, at one moment in each shard; `missing` is 0 where all that came in is accounted for.

        In a layout of the Go original the totals count the work of reliq alone: a program in Go counts nothing.
        """
        session = self._redis.queue(queue)
        return Counts.sum(*answered(session.try_all([transitions.counts(keys) for keys in session.counted])))

    def paused(self, queue: str) -> Pause | None:
        """Return a queue's pause; None when it is not paused."""
        return self._redis.session().run(calls.paused(self.redis_keys(queue)))


class QueueActions(AdminBase):
    """Changes of whole queues."""

    def pause(self, queue: str, *, reason: str = "", for_: Duration | None = None, by: str = "") -> None:
        """
        Have consumers stop claiming within a second, for `for_` seconds or until `resume`; running handlers finish.

        Args:
            by: the name that is shown; by default user@host of this process.

        Raises:
            RedisUnavailableError: Redis is away; for a queue with several shards the error names the paused shards.
        """
        parts = self._redis.queue(queue).parts
        answers = parts[0].try_all([pausing(part.keys, reason, for_, by) for part in parts])
        of_every_shard(queue, "paused", answers)

    def resume(self, queue: str) -> bool:
        """Have consumers claim again; return whether the queue was paused, or put to sleep by `RateLimited`."""
        parts = self._redis.queue(queue).parts
        answers = parts[0].try_all([request for part in parts for request in commands.resume_queue(part.keys)])
        pauses = of_every_shard(queue, "resumed", answers[0::4])
        sleeps = of_every_shard(queue, "resumed", answers[1::4])
        return any(pauses) or any(sleeps)

    def delete_queue(self, queue: str, *, letters: bool = False) -> int:
        """
        Remove a queue in which nothing is alive, and its name in the registry; return how many dead letters went with it.

        State of single ids (which chosen ids are taken, numbers of calls) goes by its time to live.

        Raises:
            ConfigurationError: it has messages, dead letters (without `letters`) or a worker, or was in use less than a
                minute ago.
        """
        session = self._redis.queue(queue)
        keys = session.keys
        if serving := [
            f"{worker.host} pid {worker.pid}" for worker in workers_alive(session) if keys.name in worker.queues
        ]:
            raise ConfigurationError(
                f"queue {keys.name!r} is served by a worker: {', '.join(serving[:5])}; stop it first"
            )
        # A process names a queue at most each NAMING_SECONDS: messages that it published meanwhile would be in no registry.
        named = whole_number(session.run(Command(("HGET", QUEUES_KEY, keys.entry), lambda reply: reply or b"")))
        now_ms = session.run(commands.server_ms())
        left = 0 if named is None else math.ceil(NAMING_SECONDS + 1 - (now_ms / 1000 - named))
        if 0 < left <= NAMING_SECONDS + 1:
            raise ConfigurationError(
                f"queue {keys.name!r} was in use less than {NAMING_SECONDS:.0f} s ago; delete it in {left} s"
            )

        def forget(shards: Sequence[Keys], *, look: bool) -> int:
            requests = [transitions.forget(shard, letters=letters, look=look) for shard in shards]
            answers = zip(shards, session.try_all(requests), strict=True)
            found = raise_first(
                [
                    answer
                    for shard, answer in answers
                    # A user may have no rights on shards that the queue never had.
                    if shard.shard < session.map.ever or not isinstance(answer, RedisRefusedError)
                ]
            )
            _check_empty(session, sum(alive for alive, _ in found), sum(kept for _, kept in found), letters=letters)
            return sum(kept for _, kept in found)

        # All shards that there can be: the map may be lost.
        shards = [keys] if keys.bare else [keys.of_shard(shard) for shard in range(SHARDS_LIMIT)]
        forget(shards, look=True)
        gone = forget(shards[1:], look=False) + forget(shards[:1], look=False)  # the map goes last
        session.run(calls.unregister(keys))
        return gone


def chosen(session: Session, named: Sequence[Keys], *, scan: bool = False) -> Selection:
    """Return the queues named; without names the queues of the registry, and with `scan` those found by a scan, by name."""
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
    Return every queue that holds a message or a dead letter, in whatever layout, by name.

    Each server walks over all its keys, a step at a time, so that others are served meanwhile.
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
    queues = {keys.totals: keys for keys in found.values()}  # shards of one queue are found by several keys
    return sorted(queues.values(), key=lambda keys: (keys.name, keys.layout.prefix))


def _queue(session: Session, base: str) -> Keys | None:
    """Return the queue whose keys begin with `base`; None when that is no name of a queue."""
    tagged = base.startswith("{") and base.endswith("}")
    parts = (base[1:-1] if tagged else base).split(":")
    if tagged and parts[0] == Layout.RELIQ.prefix:
        name = ":".join(parts[1:]).partition("#")[0]  # the number of the shard comes after it
        return Keys(name) if is_name(name) else None
    candidates = list[Keys]()
    for at in [1] if parts[0] == "dp" else range(1, len(parts)):
        with suppress(ConfigurationError):
            layout = Layout.hdt3213(hash_tag=tagged, prefix=":".join(parts[:at]))
            candidates.append(Keys(":".join(parts[at:]), layout))
    if len(candidates) < 2:  # noqa: PLR2004
        return next(iter(candidates), None)
    # Prefix and name may both have colons: take the queue in which a message has a body.
    ids = session.run(Command(("HRANDFIELD", candidates[0].retries_left, 1), read_ids))
    bodies = session.try_all([calls.has_value(keys, id) for keys in candidates for id in ids])
    return next((keys for keys, has in zip(candidates, bodies, strict=False) if has is True), candidates[0])


def overview(
    session: Session,
    selection: Selection,
    maps: ShardMaps,
    *,
    since: Overview | None = None,
) -> Overview:
    """Read the counts of queues; the rates are those since an earlier overview, or since a worker's note."""
    snapshot = SnapshotReader(session.client, lambda: selection.queues, maps).look()
    at = time.monotonic()
    workers: Sequence[Worker] | None = None
    with suppress(RedisUnavailableError):
        workers = workers_alive(session)
    paused = [keys for keys, queue in snapshot.queues.items() if queue.paused]
    answers = session.try_all([request(keys) for keys in paused for request in (calls.paused, calls.pause_ms)])
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
    return Overview(queues, workers, unreadable, snapshot.facts, at, selection.left_out)


def _check_empty(queue: QueueSession, alive: int, kept: int, *, letters: bool) -> None:
    """Raise ConfigurationError when a queue has a message, or a dead letter that is to stay."""
    if alive:
        raise ConfigurationError(
            f"queue {queue.name!r} has {pluralize(alive, 'message')}; purge it first (messages without a state: `reliq check --repair`)"
        )
    if kept and not letters:
        raise ConfigurationError(f"queue {queue.name!r} has {pluralize(kept, 'dead letter')}; delete it with --letters")
