"""Messages, letters and ids that stay taken go to the shard where they are looked for, when that has become another.

Shards lie in different slots of a Cluster, so it is not one script. Each step may be the last before its process dies,
and several processes may take the same steps at once:

1. `depart` holds some messages of a shard under a number, and keeps all that is known of them. No worker gets them, and
   as long as these are there it holds no others: whoever comes next goes on with them;
2. `arrive` has them in the shards where they belong. Each of those knows the last number of each other shard: what comes
   again changes nothing, and what comes too late neither;
3. `leave` removes them where they were. What was cancelled meanwhile, which was answered `running`, is cancelled where
   it is now.

Where a server has replicas one of them confirms a step before the next: a failover takes back no half of a move.
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
from reliq.redis.commands import raise_first
from reliq.redis.shards import CORRUPT, UNSHARDED, WITNESSES, ShardMap, fence, map_text
from reliq.text import pluralize, shell_command

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from reliq.admin.calls import Index
    from reliq.admin.session import QueueSession
    from reliq.keys import Keys
    from reliq.lua.transitions import LeavingState, MigrationBatch
    from reliq.redis.commands import Call, List, SortedSet, T


#: A step is confirmed by one replica within this time, or made again later.
CONFIRMED_MS = 500


class ShardMigrator:
    """
    Moves what the map of a queue has in other shards. Its methods yield after each round trip or two.

    Attributes:
        map: by which it moves.

    Every one of them may raise what Redis refused, or that it is away; made again, it goes on.
    """

    def __init__(self, queue: QueueSession, map: ShardMap = UNSHARDED) -> None:
        self._queue, self.map = queue, map
        self._replicas: dict[str, bool] = {}

    def move(self, keys: Keys) -> Iterator[None]:
        """Move the messages that wait in a shard, and its letters, to where they belong."""
        if self._queue.run(calls.leaving(keys)):
            self._finish(keys, self.confirmed(keys, transitions.depart(keys, [], state="pending")))
        indexes: tuple[SortedSet, ...] = ("pending", "unack")
        for state in indexes:
            for ids in self._scanned(keys, state):
                yield from self._move(keys, state, ids)
        if keys.shard >= self.map.n:  # in the others workers take what is in the lists
            yield from self._move_list(keys, "ready")
            yield from self._move_list(keys, "retry")
        for letters in self._letters(keys):
            yield from self._move(keys, "dead", letters)

    def strays(self, keys: Keys, *, is_enough: int | None = None) -> Iterator[int]:
        """Yield the number of messages of a shard that are alive and belong elsewhere, as it grows, to `is_enough`."""
        found = self._queue.run(calls.leaving(keys))
        indexes: tuple[Index, ...] = ("retries_left", "garbage")
        for index in indexes:
            for ids in self._scanned(keys, index):
                found += len(ids)
                yield found
                if is_enough is not None and found >= is_enough:
                    return
        yield found

    def move_taken(self, shards: Sequence[Keys]) -> Iterator[None]:
        """Have the ids that stay taken in `shards` taken where they belong; it walks over all keys of the servers."""
        starts = {keys.dedup("")[:-4]: keys for keys in shards}
        wanted = pattern(self._queue.keys.dedup("").partition("}")[0].partition("#")[0]) + "*:dd:*"
        for node in self._queue.each().values():
            for found in node.scan(partial(calls.keys_scanned, wanted, count=STEP_KEYS)):
                cut = [key.partition(":dd:") for key in found]
                self._take_elsewhere([(starts[start], id) for start, _, id in cut if start in starts])
                yield

    def confirmed(self, keys: Keys, call: Call[T]) -> T:
        """Make a call about a shard, and have a replica confirm it where there is one."""
        node = self._queue.server_of(keys.ready)
        if not self._has_replica(node):
            return self._queue.run(call)
        answer, found = self._queue.client.run_confirmed(
            call, calls.at_a_replica(CONFIRMED_MS), for_seconds=PATIENCE_SECONDS
        )
        if isinstance(found, Exception) or not found.durable:
            raise RedisUnavailableError(f"no replica of {node or 'the server'} confirms the change of the shards")
        return answer

    def _move(self, keys: Keys, state: LeavingState, names: Sequence[str]) -> Iterator[None]:
        """Move messages or letters of a state, as many at a time as a call takes."""
        left = list(names)
        while left:
            departure = self.confirmed(keys, transitions.depart(keys, left, state=state))
            self._finish(keys, departure)
            yield
            gone = {name.partition(" ")[0] if departure.letters else name for name in departure.records}
            rest = [name for name in left if name not in gone]
            left = rest if len(rest) < len(left) else []

    def _move_list(self, keys: Keys, place: List) -> Iterator[None]:
        """Move what is in a list of a shard that is to go, from its oldest end, until nothing more goes."""
        stayed = 0
        while ids := self._queue.run(calls.ids_at(keys, place, 0, STEP_IDS)):
            departure = self.confirmed(keys, transitions.depart(keys, ids, state=place))
            stayed += self._finish(keys, departure)
            yield
            if stayed >= STEP_IDS:
                return

    def _finish(self, keys: Keys, departure: MigrationBatch) -> int:
        """Have a departure arrive and leave; return how many of it stay, because their ids live where they belong."""
        names = defaultdict[int, list[str]](list)
        for name in departure.records:
            names[home(departure.id_of(name), self.map.n)].append(name)
        staying = set(names.pop(keys.shard, []))
        for shard, some in names.items():
            call = transitions.arrive(keys.of_shard(shard), departure, some, origin=keys.shard)
            answers = self.confirmed(keys.of_shard(shard), call)
            if "late" in answers:  # somebody else has ended this departure
                return 0
            staying |= {name for name, answer in zip(some, answers, strict=True) if answer == "alive"}
        cancelled = self._queue.run(transitions.leave(keys, departure, staying))
        for id in cancelled:
            self._queue.run(transitions.cancel(keys.of_shard(home(id, self.map.n)), [id]))
        return len(staying)

    def _scanned(self, keys: Keys, index: Index) -> Iterator[list[str]]:
        """Yield the ids of an index that belong elsewhere."""
        for found in self._queue.scan(partial(calls.ids_scanned, keys, index, count=STEP_IDS)):
            yield [id for id in found if self._is_stray(keys, id)]

    def _letters(self, keys: Keys) -> Iterator[list[str]]:
        after = "-"
        while some := self._queue.run(commands.letters_between(keys, after, "+", count=STEP_IDS)):
            yield [one.letter for one in some if self._is_stray(keys, one.id)]
            after = f"({some[-1].letter}"

    def _is_stray(self, keys: Keys, id: str) -> bool:
        return home(id, self.map.n) != keys.shard

    def _take_elsewhere(self, marks: Sequence[tuple[Keys, str]]) -> None:
        strays = [(keys, id) for keys, id in marks if self._is_stray(keys, id)]
        asked = [test(keys, id) for keys, id in strays for test in (calls.marker, calls.marker_ms)]
        told = self._queue.run_all(asked)
        rows = zip(strays, told[::2], told[1::2], strict=True)
        taken = [(keys, id, why, left) for (keys, id), why, left in rows if why is not None and left > 0]
        there = [calls.take_id(keys.of_shard(home(id, self.map.n)), id, why, left) for keys, id, why, left in taken]
        self._queue.run_all(there)
        self._queue.run_all([calls.free_id(keys, id) for keys, id, *_ in taken])

    def _has_replica(self, node: str) -> bool:
        if node not in self._replicas:
            found = self._queue.client.run_everywhere([commands.server_facts("replication")])
            facts = {name: {} if isinstance(told[0], Exception) else told[0] for name, told in found.items()}
            self._replicas |= {name: told.get("connected_slaves", "0") != "0" for name, told in facts.items()}
        return self._replicas.get(node, False)


@dataclass(frozen=True, slots=True)
class PendingMigration:
    """
    A change of the number of shards is not finished while there is this, which only the earlier number finds.

    Attributes:
        alive: messages that a worker has, or that wait for one in a shard that stays.
    """

    alive: int = 0

    def __bool__(self) -> bool:
        """Return whether there is anything."""
        return bool(self.alive)

    def __str__(self) -> str:
        """Return in one line what there is."""
        return f"{pluralize(self.alive, 'message')} that workers have or are about to have"


class ShardChange:
    """
    The shards of a queue, and the change of their number that is under way.

    Attributes:
        queue: its session.
        first: the keys of shard 0.
        map: how many there are, and were.
    """

    def __init__(self, queue: QueueSession) -> None:
        self.queue, self.first = queue, queue.keys.of_shard(0)
        self._mover, self.map = ShardMigrator(queue), UNSHARDED
        self.look(WITNESSES)

    def look(self, shards: int) -> None:
        """Read the map, or what the fences of so many shards and of all that it names have of a lost map."""
        self._text, *told = self.queue.run_all([map_text(self.first), *map(fence, self._shards(shards))])
        try:
            found = ShardMap.parse(self._text)
        except ValueError:
            found = CORRUPT
        self.map = found.or_later(told).unless(found)
        if self.map.served > shards:
            self.look(self.map.served)

    def restore(self) -> None:
        """Write the map again when Redis has lost it, and every fence."""
        if self.map.is_lost:
            told = self.queue.try_all(list(map(fence, self._shards(SHARDS_LIMIT))))
            # A user may have no rights on shards that the queue never had.
            kept = raise_first([one for one in told if not isinstance(one, RedisRefusedError)])
            last = self.map.or_later(kept)
            most = max(one.served for one in (last, *kept) if one is not None)
            self.write(replace(ShardMap.of(last.epoch, last.n, last.was), most=most))
        self.fence()

    def steps(self, shards: Collection[int] | None = None, *, count: bool = False) -> Iterator[PendingMigration]:
        """
        Go on with a change, and finish it when nothing is left; yield after each step what is known to be left.

        Args:
            shards: those out of which messages are moved, None for all; with 0 among them the change is finished.
            count: whether all that is left is counted; else one message is enough to know.
        """
        self.restore()
        now, mover = self.map, self._mover
        mover.map = now
        if now.was == now.n:
            return
        old = [keys for keys in self.all() if keys.shard < now.was]
        left = PendingMigration()
        for keys in old:
            for _ in mover.move(keys) if shards is None or keys.shard in shards else ():
                yield left
        if shards is not None and 0 not in shards:
            return
        for keys in old:  # what ends meanwhile leaves an id that is taken: those come last
            before = left.alive
            for found in mover.strays(keys, is_enough=None if count else 1):
                left = PendingMigration(before + found)
                yield left
            if left and not count:
                return
        if not left:
            for _ in mover.move_taken(old):
                yield left
            self.write(ShardMap(now.epoch, now.n, now.n, "steady"))

    def all(self) -> list[Keys]:
        """Return the keys of every shard that may hold messages."""
        return self._shards(self.map.served)

    def write(self, after: ShardMap) -> None:
        """Write the next map; raise ConfigurationError when somebody else has written one, or the queue has keys."""
        after = replace(after, most=max(after.ever, self.map.ever))
        text = after.text
        found = self._mover.confirmed(self.first, transitions.remap(self.first, self._text, text))
        if found == transitions.REMAP_KEYED:
            raise ConfigurationError(
                f"queue {self.queue.name!r} has keys or limits, and keeps its one shard: their messages wait in one place; "
                "give what has no key a queue of its own, and shard that"
            )
        if found != text:
            raise ConfigurationError(
                f"somebody else has changed the shards of {self.queue.name!r} meanwhile; look again: "
                + shell_command("shards", self.queue.name)
            )
        self._text, self.map = found, after

    def fence(self) -> None:
        """Write the fence of every shard, and close the shards that are to go."""
        for keys in self.all() if self.map.epoch else ():
            closing = keys.shard >= self.map.n
            self._mover.confirmed(keys, transitions.ask(keys, [], fence=self.map.fence, closing=closing))

    def _shards(self, number: int) -> list[Keys]:
        return [self.first.of_shard(shard) for shard in range(1 if self.first.bare else number)]
