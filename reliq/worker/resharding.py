"""Changes of the number of shards go on, and end, without an operator: the janitors of workers take the steps."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from reliq.admin.shard_change import ShardChange
from reliq.errors import ConfigurationError, RedisUnavailableError, ReliqError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from reliq.admin.session import QueueSession
    from reliq.admin.shard_change import Leftover
    from reliq.keys import Keys
    from reliq.worker.served import Served

logger = logging.getLogger(__name__)

#: The other work of a janitor waits so long for the steps of changes.
CHANGES_SECONDS = 0.1


class ShardChanges:
    """
    The changes of the queues of one worker, a little at a time.

    Args:
        session: returns a session of the queue of some keys.
    """

    def __init__(self, served: Served, session: Callable[[Keys], QueueSession]) -> None:
        self._served, self._session = served, session
        self._under_way: dict[str, Iterator[Leftover]] = {}

    def begin(self, shards: Iterable[Keys]) -> None:
        """Begin a round: move what is to leave these shards; who has the first of a queue ends the change if it can."""
        ours: dict[str, list[Keys]] = {}
        for keys in shards:
            if self._served.is_changing(keys.name) and keys.name not in self._under_way:
                ours.setdefault(keys.name, []).append(keys)
        for name, some in ours.items():
            self._under_way[name] = self._steps(some)

    def step(self) -> bool:
        """Take some steps; return whether there are more."""
        until = time.monotonic() + CHANGES_SECONDS
        while self._under_way and time.monotonic() < until:
            for name, steps in list(self._under_way.items()):
                try:
                    if next(steps, None) is not None:
                        continue
                except (RedisUnavailableError, ConfigurationError) as error:  # somebody else may have ended it
                    logger.debug("%s: the change of its shards goes on later: %s", name, error)
                except ReliqError as error:
                    logger.warning("%s: the change of its shards waits for `reliq shards --finish`: %s", name, error)
                del self._under_way[name]
        return bool(self._under_way)

    def _steps(self, shards: list[Keys]) -> Iterator[Leftover]:
        first = shards[0].of_shard(0)
        yield from ShardChange(self._session(first)).steps({keys.shard for keys in shards})
