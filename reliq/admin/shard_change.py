"""
A change of the number of shards goes on, whoever began it, and ends: who knows the rights of a consumer may do that.

`admin.shards` begins it. Each step may be the last before its process dies, and several processes may take them at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from reliq import transitions
from reliq.admin.relocate import Relocator
from reliq.call import raise_first
from reliq.errors import ConfigurationError, RedisRefusedError
from reliq.hashtags import SHARDS_LIMIT
from reliq.shardmap import CORRUPT, UNSHARDED, WITNESSES, ShardMap, fence, map_text
from reliq.text import count_of, typed

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from reliq.admin.session import QueueSession
    from reliq.keys import Keys


@dataclass(frozen=True, slots=True)
class Leftover:
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
        return f"{count_of(self.alive, 'message')} that workers have or are about to have"


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
        self._mover, self.map = Relocator(queue), UNSHARDED
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

    def steps(self, shards: Collection[int] | None = None, *, count: bool = False) -> Iterator[Leftover]:
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
        left = Leftover()
        for keys in old:
            for _ in mover.move(keys) if shards is None or keys.shard in shards else ():
                yield left
        if shards is not None and 0 not in shards:
            return
        for keys in old:  # what ends meanwhile leaves an id that is taken: those come last
            before = left.alive
            for found in mover.strays(keys, is_enough=None if count else 1):
                left = Leftover(before + found)
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
                + typed("shards", self.queue.name)
            )
        self._text, self.map = found, after

    def fence(self) -> None:
        """Write the fence of every shard, and close the shards that are to go."""
        for keys in self.all() if self.map.epoch else ():
            closing = keys.shard >= self.map.n
            self._mover.confirmed(keys, transitions.ask(keys, [], fence=self.map.fence, closing=closing))

    def _shards(self, number: int) -> list[Keys]:
        return [self.first.of_shard(shard) for shard in range(1 if self.first.bare else number)]
