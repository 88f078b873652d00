"""Takes an empty queue out of Redis: its name out of the registry, and what it has left behind."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from reliq import commands, transitions
from reliq.admin import queue_queries
from reliq.errors import ConfigurationError
from reliq.foreign import whole_number
from reliq.message import Counts
from reliq.publish.registry import NAMING_SECONDS
from reliq.text import count_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reliq.admin.session import QueueSession
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
    if queue.is_sharded:  # one shard after another goes, so nothing may be in any
        counts = Counts.sum(queue.run_all([transitions.counts(part.keys) for part in queue.parts]))
        _check_empty(queue, counts.alive, counts.dead, letters=letters)
    gone = 0
    for part in reversed(queue.parts):  # the map goes last: until then all that is left is found again
        alive, kept = part.run(transitions.forget(part.keys, letters=letters))
        _check_empty(queue, alive, kept, letters=letters)
        part.run(queue_queries.drop_move(part.keys))
        gone += kept
    queue.run(queue_queries.unregister(keys))
    return gone


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
