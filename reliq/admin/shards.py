"""
How many shards a queue has, and the change of that number on a live queue.

A change is three steps, and each of them may be the last before the process dies; made again, all goes on. The third is
taken by workers too (`admin.shard_change`):

1. the next map is written over the one that was read: from then on publishers ask the old home of a chosen id before
   they publish it at its new one;
2. every shard stores the map with its fence. Those that are to go are closed;
3. what is where only the earlier number looks for it is moved; when nothing is left, the change is finished.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from reliq.admin import calls
from reliq.admin.resharding import PendingMigration, ShardChange
from reliq.errors import ConfigurationError
from reliq.lua import transitions
from reliq.redis import commands
from reliq.redis.commands import answered
from reliq.redis.shards import LATEST_EPOCH, ShardMap
from reliq.text import shell_command

if TYPE_CHECKING:
    from reliq.admin.session import QueueSession
    from reliq.message import Counts


@dataclass(frozen=True, slots=True)
class ShardsView:
    """
    The shards of a queue.

    Attributes:
        map: how many there are, and were.
        counts: of each of them, shard 0 first; None of a shard whose Redis is away.
        away: the numbers of those.
    """

    map: ShardMap
    counts: tuple[Counts | None, ...]
    away: tuple[int, ...] = ()


def shards_of(queue: QueueSession) -> ShardsView:
    """Return the map and the counts of each shard; raise RedisUnavailableError when none answers."""
    answers = queue.try_all([transitions.counts(part.keys) for part in queue.parts])
    _, away = answered(answers)
    return ShardsView(queue.map, tuple(None if at in away else one for at, one in enumerate(answers)), away)


class Resharder(ShardChange):
    """Begins changes of the number of shards of a queue."""

    def resize(self, number: int) -> None:
        """
        Begin to have `number` shards, or go on with what was cut off.

        Raises:
            ConfigurationError: it is no power of two, the queue is one of the Go original, an earlier change is not
                finished, or somebody else has changed the number meanwhile.
        """
        number = ShardMap.wanted(number, self.first.layout)
        self.look(number)
        self.restore()
        now = self.map
        if number != now.n:
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
            self._pause_new(number)
            self.write(ShardMap.of(now.epoch + 1, number, now.n))
            self.fence()

    def finish(self) -> PendingMigration:
        """Move what is to be elsewhere; finish the change when nothing is left, else return what is."""
        left = PendingMigration()
        for left in self.steps(count=True):  # noqa: B007  the last one counts
            pass
        return left

    def _pause_new(self, number: int) -> None:
        """Pause the shards that are new, when the queue is paused, before anything comes into them."""
        pause, left_ms = (
            self.queue.run(commands.paused(self.first)),
            self.queue.run(calls.pause_ms(self.first)),
        )
        if pause is not None:
            new = [self.first.of_shard(shard) for shard in range(self.map.n, number)]
            self.queue.run_all([commands.pause(keys, pause, left_ms if left_ms > 0 else None) for keys in new])
