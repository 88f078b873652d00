"""Whether a worker has nothing more to do, and what it still waits for."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from reliq import commands, transitions
from reliq.call import raise_first
from reliq.errors import ReliqError
from reliq.ids import token
from reliq.settings import BATCH_LIMIT
from reliq.text import count_of
from reliq.transitions import CallNumber
from reliq.wireformat import Backoff

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reliq.client.client import Client
    from reliq.keys import Keys
    from reliq.message import Counts
    from reliq.worker.inflight import Inflight
    from reliq.worker.served import Served

logger = logging.getLogger("reliq")

#: A drain also waits for messages that come due within this time.
SOON_SECONDS = 1.0
#: The log says at most this often why a drain waits.
REPORT_SECONDS = 10.0


class Drained:
    """Looks whether the queues are empty but for what is due later, and says from time to time what is left."""

    def __init__(self, client: Client, served: Served, inflight: Inflight) -> None:
        self._client, self._inflight = client, inflight
        self._served = served
        self._tell_at = time.monotonic() + REPORT_SECONDS

    def look(self, *, delayed: bool) -> bool:
        """Return whether nothing is left; with `delayed`, messages that are due later count."""
        try:
            left = self._left(delayed=delayed)
        except ReliqError as error:
            left = [f"for Redis: {error}"]
        if left and time.monotonic() >= self._tell_at:
            self._tell_at = time.monotonic() + REPORT_SECONDS
            logger.info("draining: waits %s", "; ".join(left))
        return not left

    def _left(self, *, delayed: bool) -> list[str]:
        """Return what is left, in words."""
        if held := len(self._inflight.deliveries()):
            return [f"for {count_of(held, 'message')} held here"]
        shards = self._served.shards()
        counts = dict(zip(shards, self._asked([transitions.counts(keys) for keys in shards]), strict=True))
        filled = {keys: one for keys, one in counts.items() if one.alive and not one.paused}
        if delayed:
            return [f"for {keys.name}: {_shown(one)}" for keys, one in filled.items()]
        return [f"for {keys.name}: {_shown(one)}" for keys, one in filled.items() if self._is_due(keys, one)]

    def _is_due(self, keys: Keys, counts: Counts) -> bool:
        """Return whether a message of a queue can run now or soon, or is leased."""
        if counts.garbage or (self._is_served_soon(keys) if counts.keyed else counts.due):
            return True
        soon = time.time() + SOON_SECONDS
        # In the order in which messages move: one that another worker promotes or claims meanwhile is counted last.
        looks = [commands.first_score(keys, "pending"), commands.held(keys), transitions.counts(keys)]
        pending, unack, last = self._asked(looks)
        has_moved = (last.due and not last.keyed) or last.garbage or min(last.unack, BATCH_LIMIT) != len(unack)
        if has_moved or (pending is not None and pending <= soon):
            return True
        words = self._asked([commands.state_words(keys, [id for id, _ in unack])])[0] if unack else []
        return any(not isinstance(word, Backoff) or due <= soon for word, (_, due) in zip(words, unack, strict=True))

    def _is_served_soon(self, keys: Keys) -> bool:
        """Return whether a message in a queue with keys may start now or soon; what sleeps for longer is due later."""
        number = CallNumber(token(), 1)
        promoted, look = self._asked(
            [
                transitions.promote(keys, keyed=True),
                transitions.claim(keys, number, limit=0, lease_ms=1, keyed=True),
            ]
        )
        return bool(promoted[0] or look.behind) or 0 <= promoted[1] <= SOON_SECONDS * 1000

    def _asked(self, requests: Sequence[Any]) -> list[Any]:
        """Return the answers to `requests`; raise the first error among them."""
        return raise_first(self._client.run_all(requests))


def _shown(counts: Counts) -> str:
    parts = {name: getattr(counts, name) for name in ("ready", "retry", "waiting", "unack", "pending", "garbage")}
    return ", ".join(f"{count} {name}" for name, count in parts.items() if count)
