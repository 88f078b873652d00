"""
How many shards a queue has, and the change of that number on a live queue.

A change is three steps, and each of them may be the last before the process dies; made again, all goes on. The third is
taken by workers too (`admin.shard_change`):

1. the next map is written over the one that was read: from then on publishers ask the old home of a chosen id before
   they publish it at its new one;
2. every shard is told the epoch of the map. Those that are to go are closed;
3. what is where only the earlier number looks for it is moved; when nothing is left, the change is finished.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from reliq import commands, transitions
from reliq.admin import queries, queue_queries
from reliq.admin.shard_change import Leftover, ShardChange
from reliq.errors import ConfigurationError
from reliq.shardmap import ShardMap

if TYPE_CHECKING:
    from reliq.message import Counts


@dataclass(frozen=True, slots=True)
class ShardsView:
    """
    The shards of a queue.

    Attributes:
        map: how many there are, and were.
        counts: of each of them, shard 0 first.
    """

    map: ShardMap
    counts: tuple[Counts, ...]


class Resharder(ShardChange):
    """Begins changes of the number of shards of a queue."""

    def view(self) -> ShardsView:
        """Return the map and the counts of each shard."""
        return ShardsView(self.map, tuple(self.queue.run_all(list(map(transitions.counts, self.all())))))

    def resize(self, number: int) -> None:
        """
        Begin to have `number` shards, or go on with what was cut off.

        Raises:
            ConfigurationError: it is no power of two, the queue is one of the Go original, an earlier change is not
                finished, or somebody else has changed the number meanwhile.
        """
        number, now = ShardMap.wanted(number, self.first.layout), self.map
        known = self._latest_known(max(number, now.served))
        if known > now.epoch:  # a failover has lost the map: whatever it said, every shard is asked as in a growth
            self.write(ShardMap(known + 1, number, 1, "growing" if number > 1 else "steady"))
        elif number != now.n:
            if now.was != now.n:
                raise ConfigurationError(
                    f"the change of {self.queue.name!r} from {now.was} to {now.n} shards is not finished: "
                    f"reliq shards {self.queue.name} --finish"
                )
            self._pause_new(number)
            self.write(ShardMap(now.epoch + 1, number, now.n, "growing" if number > now.n else "shrinking"))
        self.fence()

    def _latest_known(self, shards: int) -> int:
        """Return the epoch of the latest map that any of so many shards knows of."""
        asked = [] if self.first.bare else [queries.fence(self.first.of_shard(shard)) for shard in range(shards)]
        return max(self.queue.run_all(asked), default=0)

    def finish(self) -> Leftover:
        """Move what is to be elsewhere; finish the change when nothing is left, else return what is."""
        left = Leftover()
        for left in self.steps(count=True):  # noqa: B007  the last one counts
            pass
        return left

    def _pause_new(self, number: int) -> None:
        """Pause the shards that are new, when the queue is paused, before anything comes into them."""
        pause, left_ms = (
            self.queue.run(commands.paused(self.first)),
            self.queue.run(queue_queries.pause_ms(self.first)),
        )
        if pause is not None:
            new = [self.first.of_shard(shard) for shard in range(self.map.n, number)]
            self.queue.run_all([commands.pause(keys, pause, left_ms if left_ms > 0 else None) for keys in new])
