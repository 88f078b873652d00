"""
Messages, letters and ids that stay taken go to the shard where they are looked for, when that has become another.

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
from functools import partial
from typing import TYPE_CHECKING

from reliq import commands, transitions
from reliq.admin import queries, server
from reliq.admin.discover import STEP_KEYS
from reliq.admin.places import STEP_IDS
from reliq.admin.session import PATIENCE_SECONDS
from reliq.errors import RedisUnavailableError
from reliq.ids import home
from reliq.keys import pattern
from reliq.shardmap import UNSHARDED

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from reliq.admin.queries import Index
    from reliq.admin.session import QueueSession
    from reliq.call import Call, T
    from reliq.commands import List, SortedSet
    from reliq.keys import Keys
    from reliq.shardmap import ShardMap
    from reliq.transitions import Departure, LeavingState

#: A step is confirmed by one replica within this time, or made again later.
CONFIRMED_MS = 500


class Relocator:
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
        if self._queue.run(queries.leaving(keys)):
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
        found = self._queue.run(queries.leaving(keys))
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
            for found in node.scan(partial(server.keys_scanned, wanted, count=STEP_KEYS)):
                cut = [key.partition(":dd:") for key in found]
                self._take_elsewhere([(starts[start], id) for start, _, id in cut if start in starts])
                yield

    def confirmed(self, keys: Keys, call: Call[T]) -> T:
        """Make a call about a shard, and have a replica confirm it where there is one."""
        node = self._queue.server_of(keys.ready)
        if not self._has_replica(node):
            return self._queue.run(call)
        answer, found = self._queue.client.run_confirmed(
            call, queries.at_a_replica(CONFIRMED_MS), for_seconds=PATIENCE_SECONDS
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
        while ids := self._queue.run(queries.ids_at(keys, place, 0, STEP_IDS)):
            departure = self.confirmed(keys, transitions.depart(keys, ids, state=place))
            stayed += self._finish(keys, departure)
            yield
            if stayed >= STEP_IDS:
                return

    def _finish(self, keys: Keys, departure: Departure) -> int:
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
        for found in self._queue.scan(partial(queries.ids_scanned, keys, index, count=STEP_IDS)):
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
        asked = [test(keys, id) for keys, id in strays for test in (queries.marker, queries.marker_ms)]
        told = self._queue.run_all(asked)
        rows = zip(strays, told[::2], told[1::2], strict=True)
        taken = [(keys, id, why, left) for (keys, id), why, left in rows if why is not None and left > 0]
        there = [queries.take_id(keys.of_shard(home(id, self.map.n)), id, why, left) for keys, id, why, left in taken]
        self._queue.run_all(there)
        self._queue.run_all([queries.free_id(keys, id) for keys, id, *_ in taken])

    def _has_replica(self, node: str) -> bool:
        if node not in self._replicas:
            found = self._queue.client.run_everywhere([commands.server_facts("replication")])
            facts = {name: {} if isinstance(told[0], Exception) else told[0] for name, told in found.items()}
            self._replicas |= {name: told.get("connected_slaves", "0") != "0" for name, told in facts.items()}
        return self._replicas.get(node, False)
