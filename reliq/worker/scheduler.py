"""Waits for the next due time in this process, not in Redis, and moves what is due: promote and reclaim."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from reliq import transitions
from reliq.errors import RedisUnavailableError
from reliq.settings import BATCH_LIMIT
from reliq.transitions import NOTHING_DUE
from reliq.worker.loop import LONGEST_SLEEP_SECONDS, REPLY_LAG_SECONDS, QueueBackoff

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reliq.call import Call
    from reliq.client.client import Client
    from reliq.handlers.handler import Handler
    from reliq.keys import Keys
    from reliq.transitions import ClaimAnswer

#: Leases that are over but spared are looked at this often.
SPARED_SECONDS = 0.25
#: One round trip moves at most this many messages over all queues, because Redis serves nobody else meanwhile.
MOVE_LIMIT = 2 * BATCH_LIMIT
#: One queue moves at least this many, however many queues share the round trip.
LEAST_MOVED = 20


class DueMove(NamedTuple):
    """Which shard's `verb` is next."""

    keys: Keys
    verb: str


class Scheduler:
    """
    Knows the next due time of the shards this process watches (rule: one watcher for each).

    After a start or an outage nobody's lease is taken back for a third of it: its worker may be
    alive and about to renew it. No lease of a shard is taken back either while this process is
    behind with what it holds of it: Redis, which hung, could do that before the renewal that
    waits beside it.
    """

    def __init__(
        self,
        client: Client,
        handlers: Sequence[Handler],
        buried: Callable[[], None],
        is_behind: Callable[[Keys], bool] = lambda _keys: False,
        is_keyed: Callable[[str], bool] = lambda _name: False,
    ) -> None:
        self._client, self._buried, self._is_behind, self._is_keyed = client, buried, is_behind, is_keyed
        self._lease_seconds = {handler.queue.name: handler.lease_seconds for handler in handlers}
        self._lock = threading.Lock()
        self._due: dict[DueMove, float] = {}
        self._backoff = QueueBackoff("scheduler", client.observers)
        self._spared_at: dict[Keys | None, float] = {}  # None: every shard
        self.spare(None)
        self.wake: Callable[[], None] = lambda: None

    def spare(self, keys: Keys | None) -> None:
        """Reclaim no lease of a shard, or of any with None, for a third of its length: its server was away."""
        self._spared_at[keys] = time.monotonic()

    def watches(self, keys: Keys) -> bool:
        """Return whether this process waits for a due time of a shard."""
        with self._lock:
            return any(move.keys is keys for move in self._due)

    def forget(self, keys: Keys) -> None:
        """Wait for no due time of a shard any more."""
        with self._lock:
            for move in [move for move in self._due if move.keys is keys]:
                del self._due[move]
        self._spared_at.pop(keys, None)

    def note(self, keys: Keys, answer: ClaimAnswer, at: float) -> None:
        """Update the next due times from the answer of a claim at `at`; drop them when another process watches."""
        sooner = False
        with self._lock:
            for verb, wait_ms in (("promote", answer.promote_in_ms), ("reclaim", answer.reclaim_in_ms)):
                move = DueMove(keys, verb)
                before = self._due.pop(move, None)
                if wait_ms >= 0:
                    self._due[move] = at + wait_ms / 1000
                    sooner = sooner or before is None or self._due[move] < before
        if sooner:
            self.wake()

    def step(self) -> float:
        """Move what is due; return the wait until the next due time."""
        now = time.monotonic()
        with self._lock:
            due = {move: at for move, at in self._due.items() if at <= now}
        if due:
            self._move(due)
        with self._lock:
            return max(0.0, min(self._due.values(), default=now + LONGEST_SLEEP_SECONDS) - time.monotonic())

    def _move(self, due: dict[DueMove, float]) -> None:
        limit = max(LEAST_MOVED, min(BATCH_LIMIT, MOVE_LIMIT // len(due)))
        sent_at = time.monotonic()
        answers = self._client.run_all([self._call(move, limit) for move in due])
        at = min(time.monotonic(), sent_at + REPLY_LAG_SECONDS)
        for move, answer in zip(due, answers, strict=True):
            wait = self._wait(move, answer, limit)
            self._set_next(move, due[move], None if wait is None else at + wait)

    def _set_next(self, move: DueMove, was: float, at: float | None) -> None:
        """Set the next time, unless a claim has set a newer one meanwhile."""
        with self._lock:
            if self._due.get(move) != was:
                return
            if at is None:
                del self._due[move]
            else:
                self._due[move] = at

    def _call(self, move: DueMove, limit: int) -> Call[Any]:
        keyed = self._is_keyed(move.keys.name)
        if move.verb == "promote":
            return transitions.promote(move.keys, limit=limit, keyed=keyed)
        return transitions.reclaim(move.keys, limit=limit, spare_leases=self._spares(move.keys), keyed=keyed)

    def _wait(self, move: DueMove, answer: Any, limit: int) -> float | None:
        """Return the seconds until `move`, which moved `limit` at most, is due again; None when nothing is."""
        if isinstance(answer, Exception):
            self._backoff.note(move.keys, answer)
            if isinstance(answer, RedisUnavailableError):
                self.spare(move.keys)
            return self._backoff.seconds_of(move.keys)
        self._backoff.over(move.keys)
        if move.verb == "reclaim" and answer.buried:
            self._buried()
        moved, next_ms = answer if move.verb == "promote" else (answer.count, answer.next_in_ms)
        if moved >= limit:
            return 0.0
        if next_ms == NOTHING_DUE:
            return None
        if next_ms == 0 and move.verb == "reclaim" and self._spares(move.keys):
            return SPARED_SECONDS
        return _bounded(next_ms)

    def _spares(self, keys: Keys) -> bool:
        spared_at = max(self._spared_at.get(one, 0.0) for one in (None, keys))
        return time.monotonic() < spared_at + self._lease_seconds[keys.name] / 3 or self._is_behind(keys)


def _bounded(wait_ms: int) -> float:
    """Return a wait in seconds; a score so far ahead that Redis cannot answer it as a number is less than none."""
    return min(wait_ms / 1000, LONGEST_SLEEP_SECONDS) if wait_ms >= 0 else LONGEST_SLEEP_SECONDS
