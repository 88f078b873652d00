"""Takes an empty queue out of Redis: its name out of the registry, and what it has left behind."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from reliq import transitions
from reliq.admin import pieces
from reliq.admin.existing import check_known
from reliq.call import Command
from reliq.errors import ConfigurationError
from reliq.foreign import whole_number
from reliq.keys import QUEUES_KEY
from reliq.publish.registry import NAMING_SECONDS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reliq.client.client import Client
    from reliq.keys import Keys
    from reliq.roster import Worker


def forget(client: Client, keys: Keys, workers: Sequence[Worker], *, letters: bool, for_seconds: float) -> int:
    """
    Remove a queue in which nothing is alive; return how many dead letters went with it.

    What is kept for single ids (which chosen ids are taken, numbers of calls) goes by its time to live.

    Raises:
        ConfigurationError: there is no such queue, or it is in use, and by what.
    """
    check_known(client, keys, for_seconds)
    if serving := [f"{one.host} pid {one.pid}" for one in workers if keys.name in one.queues]:
        raise ConfigurationError(f"queue {keys.name!r} is served by a worker: {', '.join(serving[:5])}; stop it first")
    _check_unnamed(client, keys, for_seconds)
    alive, kept = client.run(transitions.forget(keys, letters=letters), for_seconds=for_seconds)
    if alive:
        raise ConfigurationError(
            f"queue {keys.name!r} has {alive} message(s); purge them first (what is in no state: `reliq check --repair`)"
        )
    if kept and not letters:
        raise ConfigurationError(f"queue {keys.name!r} has {kept} dead letter(s); --letters removes them too")
    client.run(Command(("UNLINK", keys.moving), int), for_seconds=for_seconds)
    client.run(Command(("HDEL", QUEUES_KEY, keys.entry), int), for_seconds=for_seconds)
    return kept


def _check_unnamed(client: Client, keys: Keys, for_seconds: float) -> None:
    """
    Raise ConfigurationError when a process named the queue a moment ago.

    It names a queue no more often than each NAMING_SECONDS, so what it published meanwhile would be in no registry.
    """
    told = client.run(Command(("HGET", QUEUES_KEY, keys.entry), lambda reply: reply or b""), for_seconds=for_seconds)
    named, now_ms = whole_number(told), client.run(pieces.server_ms(), for_seconds=for_seconds)
    left = 0 if named is None else math.ceil(NAMING_SECONDS + 1 - (now_ms / 1000 - named))
    if 0 < left <= NAMING_SECONDS + 1:
        raise ConfigurationError(
            f"queue {keys.name!r} was in use less than {NAMING_SECONDS:.0f} s ago; forget it in {left} s"
        )
