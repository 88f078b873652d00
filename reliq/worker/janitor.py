"""Collects what has ended, sweeps what foreign consumers left, goes on with changes of shards, and keeps the registry."""

from __future__ import annotations

import logging
import random
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from reliq import commands, transitions
from reliq.errors import RedisRefusedError
from reliq.events import RedisRefused, WentBack, notify
from reliq.hashtags import SHARDS_LIMIT
from reliq.settlement import burial
from reliq.worker.loop import QueueBackoff
from reliq.worker.minute_notes import MinuteNotes
from reliq.worker.resharding import ShardChanges

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reliq.admin.session import QueueSession
    from reliq.call import Request
    from reliq.client.client import Client
    from reliq.keys import Keys
    from reliq.queue import Queue
    from reliq.worker.served import Served

#: An application that seeds `random` keeps its numbers: this one has none of its state.
_chance = random.SystemRandom()
logger = logging.getLogger(__name__)

#: Every queue is tidied at least this often; processes spread over the second half of it by chance.
ROUND_SECONDS = 30.0
#: In the time of a round each shard of a sharded queue is tidied by about so many of its workers.
TIDIERS = 2
#: One collect takes at most this many messages, because it reads their bodies.
COLLECT_LIMIT = 20


class Janitor:
    """
    One look at every queue, in one round trip while there is nothing to do.

    The workers of a sharded queue share its shards: in a round each takes the next of them.

    Args:
        session: returns a session of the queue of some keys, for changes of the number of its shards.
        workers: returns how many worker processes there are.
    """

    def __init__(
        self,
        client: Client,
        served: Served,
        session: Callable[[Keys], QueueSession],
        workers: Callable[[], int] = lambda: 1,
    ) -> None:
        self._client, self._served, self._workers = client, served, workers
        self._changes = ShardChanges(served, session)
        self._next = _chance.randrange(SHARDS_LIMIT)  # the shard of each queue to go on with
        self._cursors: dict[Keys, tuple[int, int]] = {}
        self._minutes = MinuteNotes(client, self._shards)
        self._claims: dict[Keys, int] = {}
        self._backoff = QueueBackoff("janitor", client.observers)
        self._round_at = 0.0

    def step(self) -> float:
        """Collect some garbage of every queue, now and then tidy a part; return the wait for the next look."""
        shards = self._shards()
        if time.monotonic() >= self._round_at:
            self._round_at = time.monotonic() + ROUND_SECONDS * _chance.uniform(0.5, 1)
            shards = self._our_part()
            self._tidy(list(shards))
            self._changes.begin(shards)
        is_more = self._changes.step()
        if self._collect(shards) or is_more:
            return 0.0
        return max(0.0, self._round_at - time.monotonic())

    def _shards(self) -> dict[Keys, Queue[Any]]:
        return {keys: handler.queue for keys, handler in self._served.shards().items()}

    def _our_part(self) -> dict[Keys, Queue[Any]]:
        """Return the shards that this process tidies in this round, the next ones of each queue."""
        first, shards = self._next, self._shards()
        numbers = Counter(keys.name for keys in shards)
        ours = {name: -(-TIDIERS * number // self._workers()) for name, number in numbers.items()}
        self._next += max(ours.values())
        return {
            keys: queue for keys, queue in shards.items() if (keys.shard - first) % numbers[keys.name] < ours[keys.name]
        }

    def _tidy(self, shards: Sequence[Keys]) -> None:
        """Name every queue in the registry, tidy a part of `shards`, see that each account goes forward, note the minute."""
        calls: list[Request[Any]] = []
        for keys in shards:
            cursor, lease_cursor = self._cursors.get(keys, (0, 0))
            calls.append(transitions.tidy(keys, cursor=cursor, lease_cursor=lease_cursor))
        calls += [commands.claims(keys) for keys in shards]
        naming = commands.register([handler.queue.keys.entry for handler in self._served.handlers], int(time.time()))
        now_ms, *answers = self._client.run_all([commands.server_ms(), *calls, naming])
        if isinstance(registered := answers.pop(), RedisRefusedError):
            notify(self._client.observers, [RedisRefused("", "janitor", str(registered))])
            logger.error("the janitor cannot name its queues in the registry: %s", registered)
        for keys, answer, count in zip(shards, answers[: len(shards)], answers[len(shards) :], strict=True):
            if isinstance(answer, Exception):
                self._backoff.note(keys, answer)
            else:
                self._cursors[keys] = answer[:2]
            if not isinstance(count, Exception):
                self._compare(keys, count)
        if not isinstance(now_ms, Exception):
            self._minutes.step(now_ms)

    def _compare(self, keys: Keys, claims: int) -> None:
        """Notify observers when the account of a queue went back."""
        before, self._claims[keys] = self._claims.get(keys, 0), claims
        if claims < before:
            notify(self._client.observers, [WentBack(keys.name, before, claims)])

    def _collect(self, shards: dict[Keys, Queue[Any]]) -> bool:
        """Turn a part of each shard's garbage into dead letters; return whether there may be more."""
        asked = [keys for keys in shards if not self._backoff.waits(keys)]
        if not asked:
            return False
        found = self._client.run_all([commands.garbage(keys, COLLECT_LIMIT) for keys in asked])
        for keys, ids in zip(asked, found, strict=True):
            if isinstance(ids, Exception):
                self._backoff.note(keys, ids)
        full = {keys: ids for keys, ids in zip(asked, found, strict=True) if ids and not isinstance(ids, Exception)}
        if not full:
            return False
        collected = self._client.run_all([burial(keys, shards[keys].settings, ids) for keys, ids in full.items()])
        for keys, answer in zip(full, collected, strict=True):
            if isinstance(answer, Exception):
                self._backoff.note(keys, answer)
            else:
                self._backoff.over(keys)
        return not all(isinstance(answer, Exception) for answer in collected)
