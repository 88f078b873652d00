"""
The number of shards of a queue, and the change of that number while the queue is in use.

A change takes three steps. A process may die after any of them; the same call made again goes on:

1. The next map replaces the map that was read. From then on publishers ask the old home shard of a chosen id before they
   publish the id in its new home shard.
2. Every shard stores the fence of the map, and the shards that are to go are closed.
3. Messages, dead letters and taken ids that only the earlier number finds are moved. When nothing is left, the change is
   finished. Workers take this step too (`reliq.worker.upkeep`).

Shards lie in different slots of a Cluster, so no single script can move a message. A move takes three calls, and several
processes may make the same calls at once:

1. `depart` holds a batch of messages of a shard under a number, with all their data. No worker gets them. While the batch
   is there the shard holds no other batch, so the next process goes on with this one.
2. `arrive` writes them in the shards where they belong. Each shard stores the last number of every other shard, so a
   repeated or late call changes nothing.
3. `leave` removes them from the old shard. A message cancelled meanwhile, which was answered `running`, is cancelled in
   its new shard.

Where a server has replicas, one of them confirms each step before the next: a failover takes back no half of a move.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from reliq.admin import calls
from reliq.admin.calls import STEP_IDS
from reliq.admin.queues import STEP_KEYS
from reliq.admin.session import PATIENCE_SECONDS
from reliq.errors import ConfigurationError, RedisRefusedError, RedisUnavailableError
from reliq.keys import SHARDS_LIMIT, home, pattern
from reliq.lua import transitions
from reliq.redis import commands
from reliq.redis.commands import answered, raise_first
from reliq.redis.shards import CORRUPT, LATEST_EPOCH, UNSHARDED, WITNESSES, ShardMap, fence, map_text
from reliq.text import pluralize, shell_command

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from reliq.admin.calls import Index
    from reliq.admin.session import QueueSession
    from reliq.keys import Keys
    from reliq.lua.transitions import LeavingState, MigrationBatch
    from reliq.message import Counts
    from reliq.redis.commands import Call, List, SortedSet, T


#: A step is confirmed by one replica within this time, or made again later.
CONFIRMED_MS = 500


@dataclass(frozen=True, slots=True)
class ShardsView:
    """
    The shards of a queue.

    Attributes:
        map: how many shards there are, and were.
        counts: the counts of each shard, shard 0 first; None for a shard whose Redis is away.
        away: the numbers of the shards whose Redis is away.
    """

    map: ShardMap
    counts: tuple[Counts | None, ...]
    away: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PendingMigration:
    """
    The messages that only the earlier number of shards finds: while there are any, a change is not finished.

    Attributes:
        alive: messages that a worker has, or that wait for one in a shard that stays.
    """

    alive: int = 0

    def __bool__(self) -> bool:
        """Return whether there are any."""
        return bool(self.alive)

    def __str__(self) -> str:
        """Return a description in one line."""
        return f"{pluralize(self.alive, 'message')} that workers have or are about to have"


def shards_of(queue: QueueSession) -> ShardsView:
    """Return the map and the counts of each shard; raise RedisUnavailableError when none answers."""
    answers = queue.try_all([transitions.counts(part.keys) for part in queue.parts])
    _, away = answered(answers)
    counts = (None if shard in away else answer for shard, answer in enumerate(answers))
    return ShardsView(queue.map, tuple(counts), away)


class ShardChange:
    """
    The shards of a queue, and the change of their number.

    Attributes:
        queue: its session.
        first: the keys of shard 0.
        map: how many shards there are, and were.
    """

    def __init__(self, queue: QueueSession) -> None:
        self.queue = queue
        self.first = queue.keys.of_shard(0)
        self.map = UNSHARDED
        self._migrator = ShardMigrator(queue)
        self.look(WITNESSES)

    def look(self, shards: int) -> None:
        """Read the map; when it is lost, what the fences of `shards` shards, and of all that it names, have of it."""
        self._text, *fences = self.queue.run_all([map_text(self.first), *map(fence, self._shards(shards))])
        try:
            stored = ShardMap.parse(self._text)
        except ValueError:
            stored = CORRUPT
        self.map = stored.or_later(fences).unless(stored)
        if self.map.served > shards:
            self.look(self.map.served)

    def resize(self, number: int) -> None:
        """
        Begin to have `number` shards, or go on with a change that was cut off.

        Raises:
            ConfigurationError: it is no power of two, the queue has the Go layout, an earlier change is not finished, or
                another process has changed the number meanwhile.
        """
        number = ShardMap.wanted(number, self.first.layout)
        self.look(number)
        self.restore()
        now = self.map
        if number == now.n:
            return
        if now.epoch == LATEST_EPOCH:
            raise ConfigurationError(
                f"the shards of {self.queue.name!r} have epoch {LATEST_EPOCH}, the last one, and keep their number: "
                f"something else wrote that; move the messages to another queue"
            )
        if now.was != now.n:
            raise ConfigurationError(
                f"the change of {self.queue.name!r} from {now.was} to {now.n} shards is not finished: "
                + shell_command("shards", self.queue.name, options=["--finish"])
            )
        pause = self.queue.run(calls.paused(self.first))
        left_ms = self.queue.run(calls.pause_ms(self.first))
        if pause is not None:  # the new shards are paused before any message comes into them
            new = [self.first.of_shard(shard) for shard in range(now.n, number)]
            self.queue.run_all([commands.pause(keys, pause, left_ms if left_ms > 0 else None) for keys in new])
        self.write(ShardMap.of(now.epoch + 1, number, now.n))
        self.fence()

    def restore(self) -> None:
        """Write the map again when Redis has lost it, and every fence."""
        if self.map.is_lost:
            answers = self.queue.try_all(list(map(fence, self._shards(SHARDS_LIMIT))))
            # A user may have no rights on shards that the queue never had.
            fences = raise_first([answer for answer in answers if not isinstance(answer, RedisRefusedError)])
            last = self.map.or_later(fences)
            most = max(known.served for known in (last, *fences) if known is not None)
            self.write(replace(ShardMap.of(last.epoch, last.n, last.was), most=most))
        self.fence()

    def steps(self, shards: Collection[int] | None = None, *, count: bool = False) -> Iterator[PendingMigration]:
        """
        Go on with a change, and finish it when nothing is left; yield after each step what is known to be left.

        Args:
            shards: the shards out of which messages are moved, None for all; with 0 among them the change is finished.
            count: whether all that is left is counted; else one message is enough to know.
        """
        self.restore()
        now = self.map
        migrator = self._migrator
        migrator.map = now
        if now.was == now.n:
            return
        old = [keys for keys in self._shards(now.served) if keys.shard < now.was]
        left = PendingMigration()
        for keys in old:
            for _ in migrator.move(keys) if shards is None or keys.shard in shards else ():
                yield left
        if shards is not None and 0 not in shards:
            return
        for keys in old:
            before = left.alive
            for strays in migrator.strays(keys, is_enough=None if count else 1):
                left = PendingMigration(before + strays)
                yield left
            if left and not count:
                return
        if not left:
            # A message that ends meanwhile leaves a taken id, so the taken ids come last.
            for _ in migrator.move_taken(old):
                yield left
            self.write(ShardMap(now.epoch, now.n, now.n, "steady"))

    def write(self, after: ShardMap) -> None:
        """Write the next map; raise ConfigurationError when another process has written one, or the queue has keys."""
        after = replace(after, most=max(after.ever, self.map.ever))
        stored = self._migrator.confirmed(self.first, transitions.remap(self.first, self._text, after.text))
        if stored == transitions.REMAP_KEYED:
            raise ConfigurationError(
                f"queue {self.queue.name!r} has keys or limits, and keeps its one shard: their messages wait in one place; "
                "give what has no key a queue of its own, and shard that"
            )
        if stored != after.text:
            raise ConfigurationError(
                f"somebody else has changed the shards of {self.queue.name!r} meanwhile; look again: "
                + shell_command("shards", self.queue.name)
            )
        self._text = stored
        self.map = after

    def fence(self) -> None:
        """Write the fence of every shard, and close the shards that are to go."""
        for keys in self._shards(self.map.served) if self.map.epoch else ():
            closing = keys.shard >= self.map.n
            self._migrator.confirmed(keys, transitions.ask(keys, [], fence=self.map.fence, closing=closing))

    def _shards(self, number: int) -> list[Keys]:
        return [self.first.of_shard(shard) for shard in range(1 if self.first.bare else number)]


class ShardMigrator:
    """
    Moves what belongs in other shards by the map of a queue. Its methods yield after each round trip or two.

    Each of them may raise what Redis refused, or that it is away; called again, it goes on.

    Attributes:
        map: by which it moves.
    """

    def __init__(self, queue: QueueSession, map: ShardMap = UNSHARDED) -> None:
        self._queue = queue
        self.map = map
        self._replicas: dict[str, bool] = {}

    def move(self, keys: Keys) -> Iterator[None]:
        """Move the messages that wait in a shard, and its dead letters, to where they belong."""
        if self._queue.run(calls.leaving(keys)):
            self._finish(keys, self.confirmed(keys, transitions.depart(keys, [], state="pending")))
        indexes: tuple[SortedSet, ...] = ("pending", "unack")
        for state in indexes:
            for ids in self._stray_ids(keys, state):
                yield from self._move(keys, state, ids)
        if keys.shard >= self.map.n:  # in the others workers take the messages of the lists
            yield from self._move_list(keys, "ready")
            yield from self._move_list(keys, "retry")
        after = "-"
        while letters := self._queue.run(commands.letters_between(keys, after, "+", count=STEP_IDS)):
            yield from self._move(keys, "dead", [row.letter for row in letters if self._is_stray(keys, row.id)])
            after = f"({letters[-1].letter}"

    def strays(self, keys: Keys, *, is_enough: int | None = None) -> Iterator[int]:
        """Yield the number of messages of a shard that are alive and belong elsewhere, as it grows, to `is_enough`."""
        number = self._queue.run(calls.leaving(keys))
        indexes: tuple[Index, ...] = ("retries_left", "garbage")
        for index in indexes:
            for ids in self._stray_ids(keys, index):
                number += len(ids)
                yield number
                if is_enough is not None and number >= is_enough:
                    return
        yield number

    def move_taken(self, shards: Sequence[Keys]) -> Iterator[None]:
        """Have the ids that stay taken in `shards` taken where they belong; it walks over all keys of the servers."""
        starts = {keys.dedup("")[:-4]: keys for keys in shards}
        wanted = pattern(self._queue.keys.dedup("").partition("}")[0].partition("#")[0]) + "*:dd:*"
        for node in self._queue.each().values():
            for names in node.scan(partial(calls.keys_scanned, wanted, count=STEP_KEYS)):
                parts = [name.partition(":dd:") for name in names]
                marks = [(starts[start], id) for start, _, id in parts if start in starts]
                strays = [(keys, id) for keys, id in marks if self._is_stray(keys, id)]
                reads = [read(keys, id) for keys, id in strays for read in (calls.marker, calls.marker_ms)]
                answers = self._queue.run_all(reads)
                rows = zip(strays, answers[::2], answers[1::2], strict=True)
                taken = [(keys, id, why, ms) for (keys, id), why, ms in rows if why is not None and ms > 0]
                self._queue.run_all([calls.take_id(self._home(keys, id), id, why, ms) for keys, id, why, ms in taken])
                self._queue.run_all([calls.free_id(keys, id) for keys, id, *_ in taken])
                yield

    def confirmed(self, keys: Keys, call: Call[T]) -> T:
        """Make a call about a shard, and have a replica confirm it where there is one."""
        node = self._queue.server_of(keys.ready)
        if node not in self._replicas:
            servers = self._queue.client.run_everywhere([commands.server_facts("replication")])
            for name, [facts] in servers.items():
                known = {} if isinstance(facts, Exception) else facts
                self._replicas[name] = known.get("connected_slaves", "0") != "0"
        if not self._replicas.get(node, False):
            return self._queue.run(call)
        answer, confirmation = self._queue.client.run_confirmed(
            call, calls.at_a_replica(CONFIRMED_MS), for_seconds=PATIENCE_SECONDS
        )
        if isinstance(confirmation, Exception) or not confirmation.durable:
            raise RedisUnavailableError(f"no replica of {node or 'the server'} confirms the change of the shards")
        return answer

    def _move(self, keys: Keys, state: LeavingState, names: list[str]) -> Iterator[None]:
        """Move messages or letters of a state, as many at a time as a call takes."""
        while names:
            departure = self.confirmed(keys, transitions.depart(keys, names, state=state))
            self._finish(keys, departure)
            yield
            gone = {name.partition(" ")[0] if departure.letters else name for name in departure.records}
            rest = [name for name in names if name not in gone]
            names = rest if len(rest) < len(names) else []

    def _move_list(self, keys: Keys, place: List) -> Iterator[None]:
        """Move the messages in a list of a shard that is to go, from its oldest end, until no more of them go."""
        stayed = 0
        while ids := self._queue.run(calls.ids_at(keys, place, 0, STEP_IDS)):
            departure = self.confirmed(keys, transitions.depart(keys, ids, state=place))
            stayed += self._finish(keys, departure)
            yield
            if stayed >= STEP_IDS:
                return

    def _finish(self, keys: Keys, departure: MigrationBatch) -> int:
        """Have a departure arrive and leave; return how many of it stay, because their ids live where they belong."""
        by_home = defaultdict[int, list[str]](list)
        for name in departure.records:
            by_home[home(departure.id_of(name), self.map.n)].append(name)
        staying = set(by_home.pop(keys.shard, []))
        for shard, names in by_home.items():
            target = keys.of_shard(shard)
            answers = self.confirmed(target, transitions.arrive(target, departure, names, origin=keys.shard))
            if "late" in answers:  # another process has ended this departure
                return 0
            staying |= {name for name, answer in zip(names, answers, strict=True) if answer == "alive"}
        for id in self._queue.run(transitions.leave(keys, departure, staying)):
            self._queue.run(transitions.cancel(self._home(keys, id), [id]))
        return len(staying)

    def _stray_ids(self, keys: Keys, index: Index) -> Iterator[list[str]]:
        """Yield the ids of an index that belong elsewhere."""
        for ids in self._queue.scan(partial(calls.ids_scanned, keys, index, count=STEP_IDS)):
            yield [id for id in ids if self._is_stray(keys, id)]

    def _home(self, keys: Keys, id: str) -> Keys:
        return keys.of_shard(home(id, self.map.n))

    def _is_stray(self, keys: Keys, id: str) -> bool:
        return home(id, self.map.n) != keys.shard
