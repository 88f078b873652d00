"""`QueueAdmin`: changes of a queue as a whole, for programs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reliq import commands
from reliq.admin.crons import forget_cron, pause_cron, resume_cron, run_cron
from reliq.admin.limits import set_limits
from reliq.admin.message_keys import pause_key, resume_key
from reliq.admin.reader import Reader
from reliq.admin.shards import Resharder, shards_of
from reliq.call import of_every_shard
from reliq.control import pausing
from reliq.settings import seconds

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reliq.admin.shard_change import Leftover
    from reliq.admin.shards import ShardsView
    from reliq.limits import Limits
    from reliq.message import Duration


class QueueAdmin(Reader):
    """An operator's changes of a queue as a whole: its pause, shards and periodic entries."""

    def pause(self, queue: str, *, reason: str = "", for_: Duration | None = None, by: str = "") -> None:
        """
        Have consumers stop claiming within a second, for `for_` seconds or until `resume`; running handlers finish.

        Args:
            by: who pauses it; by default user@host of this process.

        Raises:
            RedisUnavailableError: Redis is away; of a queue with several shards it says which are paused all the same.
        """
        parts = self._redis.queue(queue).parts
        answers = parts[0].try_all([pausing(part.keys, reason, for_, by) for part in parts])
        of_every_shard(queue, "paused", answers)

    def resume(self, queue: str) -> bool:
        """Have consumers claim again; return whether the queue was paused, or put to sleep by `RateLimited`."""
        parts = self._redis.queue(queue).parts
        answers = parts[0].try_all([request for part in parts for request in commands.resume_queue(part.keys)])
        pauses, sleeps = (of_every_shard(queue, "resumed", answers[at::4]) for at in (0, 1))
        return any(pauses) or any(sleeps)

    def set_limits(
        self,
        queue: str,
        *,
        ordered: bool | None = None,
        per_key: int | None = None,
        rate: str | None = None,
        burst: int | None = None,
        key_rate: str | None = None,
        key_burst: int | None = None,
        concurrency: int | None = None,
        key_weights: Mapping[str, int] | None = None,
        clear: Sequence[str] = (),
    ) -> Limits:
        """
        Change limits while the queue is in use, within a second, for many keys within seconds; return all that hold then.

        They hold until a worker starts whose code declares other limits than the worker before it. A new rate has its usual
        burst unless `burst` says another.

        Args:
            ordered, per_key, rate, burst, key_rate, key_burst, concurrency: as those of `Queue`; None leaves one as it is.
            key_weights: the weights of some keys; those of others stay.
            clear: names of limits that are to hold no more; of one weight `weight:KEY`, of all `key_weights`.

        Raises:
            ConfigurationError: one is not allowed, or the queue can have none, as one of Go's or of several shards.
        """
        changes = {
            "ordered": ordered,
            "per_key": per_key,
            "rate": rate,
            "burst": burst,
            "key_rate": key_rate,
            "key_burst": key_burst,
            "concurrency": concurrency,
            "key_weights": key_weights,
        }
        return set_limits(self._redis.queue(queue), self._redis.publisher(queue), changes, clear)

    def pause_key(self, queue: str, key: str, *, for_: Duration | None = None) -> None:
        """Have no message of one key start, for `for_` seconds or until `resume_key`; what runs goes on."""
        pause_key(self._redis.queue(queue), key, for_)

    def resume_key(self, queue: str, key: str) -> bool:
        """Have a key served again that is paused, or that a handler or its rate put to sleep; return whether it was."""
        return resume_key(self._redis.queue(queue), key)

    def shards(self, queue: str) -> ShardsView:
        """Return how many shards a queue has, and the counts of each that answers."""
        return shards_of(self._redis.queue(queue))

    def resize(self, queue: str, number: int) -> None:
        """
        Begin to have `number` shards, or go on with a change that was cut off; workers end it, or `finish_resize`.

        Publishers and workers go on meanwhile. A chosen id is accepted once, whichever number a publisher knows of.

        Raises:
            ConfigurationError: it is no power of two, or an earlier change is not finished.
        """
        Resharder(self._redis.queue(queue)).resize(number)

    def finish_resize(self, queue: str) -> Leftover:
        """End a change of the number of shards, and return nothing; or what only the earlier number finds."""
        return Resharder(self._redis.queue(queue)).finish()

    def run_cron(self, queue: str, name: str, *, wait: Duration = 15.0) -> str:
        """
        Have a worker publish the message of a periodic entry at once, in its pause too; return the message's id.

        Raises:
            ConfigurationError: the queue has no such entry, no worker has it, or none has published within `wait`.
        """
        return run_cron(self._redis.queue(queue), name, seconds("wait", wait))

    def pause_cron(self, queue: str, name: str, *, reason: str = "", by: str = "") -> None:
        """Have the ticks of a periodic entry skipped, and counted, until `resume_cron`; `by` is user@host by default."""
        pause_cron(self._redis.queue(queue), name, reason, by)

    def resume_cron(self, queue: str, name: str) -> bool:
        """Have the next tick of a periodic entry published; return whether it was paused."""
        return resume_cron(self._redis.queue(queue), name)

    def forget_cron(self, queue: str, name: str) -> None:
        """Remove what Redis knows of a periodic entry that is no more in the code; raise while a worker has it."""
        forget_cron(self._redis.queue(queue), name)
