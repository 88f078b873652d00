"""The number of shards of a queue: read it, change it, finish a change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from reliq.admin.session import AdminBase
from reliq.lua import transitions
from reliq.redis.commands import answered

if TYPE_CHECKING:
    from reliq.message import Counts
    from reliq.redis.shards import ShardMap


@dataclass(frozen=True, slots=True)
class ShardsView:
    """
    The shards of a queue.

    Attributes:
        map: how many shards there are, and were.
        counts: the counts of each shard, shard 0 first; None while the Redis of a shard is away.
        away: the numbers of the shards that did not answer.
    """

    map: ShardMap
    counts: tuple[Counts | None, ...]
    away: tuple[int, ...] = ()


class ShardActions(AdminBase):
    """Changes of the number of shards of a queue."""

    def shards(self, queue: str) -> ShardsView:
        """Return how many shards a queue has, and the counts of each; raise RedisUnavailableError when no shard answers."""
        session = self._redis.queue(queue)
        answers = session.try_all([transitions.counts(part.keys) for part in session.parts])
        _, away = answered(answers)
        counts = (None if shard in away else answer for shard, answer in enumerate(answers))
        return ShardsView(session.map, tuple(counts), away)

    def resize(self, queue: str, number: int) -> None:
        """
        Begin to have `number` shards, or go on with a change that was cut off; workers or `finish_resize` finish it.

        Publishers and workers go on meanwhile. A chosen id is accepted once, whichever map a publisher has.

        Raises:
            ConfigurationError: it is no power of two, or an earlier change is not finished.
        """
        from reliq.sharding import ShardChange  # noqa: PLC0415  few commands need it

        session = self._redis.queue(queue)
        ShardChange(session, session.keys).resize(number)

    def finish_resize(self, queue: str) -> int:
        """
        Finish a change of the number of shards; return how many messages are left, which only the earlier number finds.

        These are messages that workers have, or are about to have. While any are left, the change is not finished.
        """
        from reliq.sharding import ShardChange  # noqa: PLC0415  few commands need it

        session = self._redis.queue(queue)
        return max(ShardChange(session, session.keys).steps(count=True), default=0)
