"""Collects what has ended, sweeps what foreign consumers left, and keeps the registry."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Any

from reliq import commands, transitions
from reliq.events import WentBack, notify
from reliq.settings import milliseconds
from reliq.worker.loop import QueueBackoff
from reliq.worker.minute_notes import MinuteNotes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reliq.call import Request
    from reliq.client.client import Client
    from reliq.queue import Queue

#: Every queue is tidied at least this often; processes spread over the second half of it by chance.
ROUND_SECONDS = 30.0
#: One collect takes at most this many messages, because it reads their bodies.
COLLECT_LIMIT = 20


class Janitor:
    """One look at every queue, in one round trip while there is nothing to do."""

    def __init__(self, client: Client, queues: Sequence[Queue[Any]]) -> None:
        self._client, self._queues = client, {queue.name: queue for queue in queues}
        self._cursors = {queue.name: (0, 0) for queue in queues}
        self._minutes = MinuteNotes(client, [queue.keys for queue in queues])
        self._claims: dict[str, int] = {}
        self._backoff = QueueBackoff("janitor", client.observers)
        self._round_at = 0.0

    def step(self) -> float:
        """Collect some garbage of every queue, now and then tidy a part; return the wait for the next look."""
        if time.monotonic() >= self._round_at:
            self._round_at = time.monotonic() + ROUND_SECONDS * random.uniform(0.5, 1)
            self._tidy()
        if self._collect():
            return 0.0
        return max(0.0, self._round_at - time.monotonic())

    def _tidy(self) -> None:
        """Name every queue in the registry, tidy a part of each, see that its account goes forward, and note its minute."""
        calls: list[Request[Any]] = [
            transitions.tidy(queue.keys, cursor=self._cursors[name][0], lease_cursor=self._cursors[name][1])
            for name, queue in self._queues.items()
        ]
        calls += [commands.claims(queue.keys) for queue in self._queues.values()]
        naming = commands.register([queue.keys.entry for queue in self._queues.values()], int(time.time()))
        now_ms, *answers = self._client.run_all([commands.server_ms(), *calls, naming])
        if isinstance(registered := answers.pop(), Exception):
            self._backoff.note("", registered)
        tidied, claims = answers[: len(self._queues)], answers[len(self._queues) :]
        for name, answer, count in zip(self._queues, tidied, claims, strict=True):
            if isinstance(answer, Exception):
                self._backoff.note(name, answer)
            else:
                self._cursors[name] = answer[:2]
            if not isinstance(count, Exception):
                self._compare(name, count)
        if not isinstance(now_ms, Exception):
            self._minutes.step(now_ms)

    def _compare(self, name: str, claims: int) -> None:
        """Notify observers when the account of a queue went back."""
        before, self._claims[name] = self._claims.get(name, 0), claims
        if claims < before:
            notify(self._client.observers, [WentBack(name, before, claims)])

    def _collect(self) -> bool:
        """Turn a part of each queue's garbage into dead letters; return whether there may be more."""
        names = [name for name in self._queues if not self._backoff.waits(name)]
        if not names:
            return False
        found = self._client.run_all([commands.garbage(self._queues[name].keys, COLLECT_LIMIT) for name in names])
        for name, ids in zip(names, found, strict=True):
            if isinstance(ids, Exception):
                self._backoff.note(name, ids)
        full = {name: ids for name, ids in zip(names, found, strict=True) if ids and not isinstance(ids, Exception)}
        if not full:
            return False
        collected = self._client.run_all([self._collecting(self._queues[name], ids) for name, ids in full.items()])
        for name, answer in zip(full, collected, strict=True):
            if isinstance(answer, Exception):
                self._backoff.note(name, answer)
            else:
                self._backoff.over(name)
        return not all(isinstance(answer, Exception) for answer in collected)

    def _collecting(self, queue: Queue[Any], ids: list[str]) -> Request[Any]:
        settings = queue.settings
        letters_ms = milliseconds(settings.letters_ttl)
        return transitions.collect(queue.keys, ids, letters_max=settings.letters_max, letters_ms=letters_ms)
