"""Takes an empty queue out of Redis: its name out of the registry, and what it has left behind."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

from reliq import commands, transitions
from reliq.admin import queue_queries
from reliq.call import raise_first
from reliq.errors import ConfigurationError, RedisRefusedError
from reliq.foreign import whole_number
from reliq.hashtags import SHARDS_LIMIT
from reliq.publish.registry import NAMING_SECONDS
from reliq.text import count_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reliq.admin.session import QueueSession
    from reliq.call import Request, T
    from reliq.keys import Keys
    from reliq.roster import Worker


def forget(queue: QueueSession, workers: Sequence[Worker], *, letters: bool) -> int:
    """
    Remove a queue in which nothing is alive; return how many dead letters went with it.

    What is kept for single ids (which chosen ids are taken, numbers of calls) goes by its time to live.

    Raises:
        ConfigurationError: the queue is in use, and by what.
    """
    keys = queue.keys
    if serving := [f"{one.host} pid {one.pid}" for one in workers if keys.name in one.queues]:
        raise ConfigurationError(f"queue {keys.name!r} is served by a worker: {', '.join(serving[:5])}; stop it first")
    _check_unnamed(queue)
    # Also those of which no map knows any more: it may be lost.
    shards = [keys] if keys.bare else [keys.of_shard(shard) for shard in range(SHARDS_LIMIT)]
    found = _of_each(queue, shards, partial(transitions.forget, letters=letters, look=True))
    _check_empty(queue, sum(alive for alive, _ in found), sum(kept for _, kept in found), letters=letters)
    gone = 0
    for some in (shards[1:], shards[:1]):  # the map goes last
        for alive, kept in _of_each(queue, some, partial(transitions.forget, letters=letters)):
            _check_empty(queue, alive, kept, letters=letters)
            gone += kept
        _of_each(queue, some, queue_queries.drop_move)
    queue.run(queue_queries.unregister(keys))
    return gone


def _of_each(queue: QueueSession, shards: Sequence[Keys], make: Callable[[Keys], Request[T]]) -> list[T]:
    """Make a request of each shard; a user may have no rights on those that the queue never had."""
    answers = zip(shards, queue.try_all(list(map(make, shards))), strict=True)
    return raise_first(
        [one for keys, one in answers if keys.shard < queue.map.ever or not isinstance(one, RedisRefusedError)]
    )


def _check_empty(queue: QueueSession, alive: int, kept: int, *, letters: bool) -> None:
    """Raise ConfigurationError when a queue has a message, or a dead letter that is to stay."""
    if alive:
        raise ConfigurationError(
            f"queue {queue.name!r} has {count_of(alive, 'message')}; purge it first (what is in no state: `reliq check --repair`)"
        )
    if kept and not letters:
        raise ConfigurationError(f"queue {queue.name!r} has {count_of(kept, 'dead letter')}; forget it with --letters")


def _check_unnamed(queue: QueueSession) -> None:
    """
    Raise ConfigurationError when a process named the queue a moment ago.

    It names a queue no more often than each NAMING_SECONDS, so what it published meanwhile would be in no registry.
    """
    told = queue.run(queue_queries.registered_at(queue.keys))
    named, now_ms = whole_number(told), queue.run(commands.server_ms())
    left = 0 if named is None else math.ceil(NAMING_SECONDS + 1 - (now_ms / 1000 - named))
    if 0 < left <= NAMING_SECONDS + 1:
        raise ConfigurationError(
            f"queue {queue.name!r} was in use less than {NAMING_SECONDS:.0f} s ago; forget it in {left} s"
        )
