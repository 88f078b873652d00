"""Wake tokens of shards in several slots: a wait for each, which goes on while others are worked on."""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from reliq import commands
from reliq.errors import ReliqError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from reliq.client.client import Client
    from reliq.client.standing import StandingWaits
    from reliq.keys import Keys

logger = logging.getLogger(__name__)

#: A wait in Redis that no token ends is begun anew after this time.
STAND_SECONDS = 180.0
#: A wait that failed is begun anew after this time; meanwhile looks find what comes.
STAND_AGAIN_SECONDS = 1.0


class Tokens:
    """The waits of one process for the tokens of its shards; `poke` may be called by other threads."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._waits: StandingWaits[Keys] = client.standing_waits()
        self._again_at: dict[Keys, float] = {}
        self.poke = self._waits.poke

    def expect(self, shards: Iterable[Keys]) -> None:
        """Wait for the tokens of shards."""
        for keys in shards:
            if not (self._waits.stands(keys) or time.monotonic() < self._again_at.get(keys, 0.0)):
                try:
                    self._waits.begin(keys, keys.wake, commands.wake_token(keys, STAND_SECONDS), STAND_SECONDS)
                except ReliqError as error:
                    self._failed(keys, error)

    def came(self, seconds: float) -> set[Keys]:
        """Wait so long for tokens or a poke; return the shards whose tokens have come."""
        found = set()
        for keys, answer in self._waits.answers(seconds):
            if isinstance(answer, Exception):
                self._failed(keys, answer)
            elif answer:
                found.add(keys)
        return found

    def pass_on(self, shards: Iterable[Keys]) -> None:
        """Give tokens that cannot be used here to other processes."""
        if requests := [request for keys in shards for request in commands.push_wake_token(keys)]:
            with suppress(ReliqError):
                self._client.run_all(requests)

    def forget(self, keys: Keys) -> None:
        """Wait for a shard no more: it is none of ours."""
        self._waits.end(keys)
        self._again_at.pop(keys, None)

    def close(self) -> None:
        """Wait for nothing more, and pass on what has come meanwhile."""
        self.pass_on(self._waits.close())

    def _failed(self, keys: Keys, error: Exception) -> None:
        logger.debug("queue %s: the wait for a token failed: %s", keys.name, error)
        self._again_at[keys] = time.monotonic() + STAND_AGAIN_SECONDS
