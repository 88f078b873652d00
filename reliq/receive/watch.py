"""The shards of a queue that one process looks at while it waits, and moves what comes due there."""

from __future__ import annotations

import time
from contextlib import suppress
from math import inf, isfinite
from typing import TYPE_CHECKING, Any

from reliq import commands, transitions
from reliq.errors import ReliqError
from reliq.ids import token
from reliq.transitions import NOT_WATCHING, CallNumber

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reliq.call import Call
    from reliq.client.client import Client
    from reliq.keys import Keys
    from reliq.transitions import ClaimAnswer

#: A shard is looked at this often, which bounds the delay after a lost wake token.
EACH_SHARD_SECONDS = 1.0
#: A shard that another process watches is looked at by that one; by this one in case that it was killed.
WATCHED_SHARD_SECONDS = 2.5
#: Another move is made after this time where something is still due, such as leases that are spared.
AGAIN_SECONDS = 0.1
#: A look names a length for leases, in ms, and leases nothing.
_LEASE_MS = 1000


class ShardWatch:
    """
    One process' looks at shards: it watches for the due times of those that no other process watches (see `claim`).

    Args:
        spares_leases: says of a shard whether its leases that are over are left alone.
    """

    def __init__(self, client: Client, spares_leases: Callable[[Keys], bool]) -> None:
        self._client, self._spares_leases = client, spares_leases
        self._name = token()
        self._look_at: dict[Keys, float] = {}
        self._due_at: dict[Keys, float] = {}  # of the shards that are watched here, or were until somebody was told

    def seconds(self) -> float:
        """Return how long nothing is to be done."""
        return max(0.0, min([*self._look_at.values(), *self._due_at.values()], default=0.0) - time.monotonic())

    def note(self, keys: Keys, at: float) -> None:
        """Take over that something is due in a shard: whoever put it there has ended the watch, and told it by a token."""
        self._due_at[keys] = min(at, self._due_at.get(keys, inf))

    def step(self, shards: Sequence[Keys]) -> list[Keys]:
        """
        Look at the shards whose time has come, and move what is due there; return those that have messages.

        Raises:
            ReliqError: none of them could be looked at.
        """
        for keys in self._look_at.keys() - set(shards):
            self._look_at.pop(keys)
            self._due_at.pop(keys, None)
        now = time.monotonic()
        due = {keys for keys in shards if self._due_at.get(keys, now + 1) <= now}
        asked = [keys for keys in shards if keys in due or self._look_at.get(keys, 0.0) <= now]
        calls = [self._calls(keys, is_due=keys in due) for keys in asked]
        answers = iter(self._client.run_all([call for some in calls for call in some]))
        looks = [[next(answers) for _ in some][-1] for some in calls]
        for keys, look in zip(asked, looks, strict=True):
            self._note(keys, look, has_moved=keys in due)
        failures = [look for look in looks if isinstance(look, Exception)]
        if failures and len(failures) == len(looks):
            raise failures[0]
        return [
            keys for keys, look in zip(asked, looks, strict=True) if not isinstance(look, Exception) and look.behind
        ]

    def close(self) -> None:
        """Let other processes watch; where something is to come due, one of them looks at once."""
        requests: list[Any] = []
        for keys, at in self._due_at.items():
            requests += [commands.drop_watch(keys), *(commands.push_wake_token(keys) if isfinite(at) else ())]
        with suppress(ReliqError):
            self._client.run_all(requests)

    def _calls(self, keys: Keys, *, is_due: bool) -> list[Call[Any]]:
        number = CallNumber(self._name, 1)  # a look needs no number
        look = transitions.claim(keys, number, limit=0, lease_ms=_LEASE_MS, watcher=self._name)
        if not is_due:
            return [look]
        return [transitions.promote(keys), transitions.reclaim(keys, spare_leases=self._spares_leases(keys)), look]

    def _note(self, keys: Keys, look: ClaimAnswer | Exception, *, has_moved: bool) -> None:
        """Take over when a shard is due, and when it is looked at again."""
        now = time.monotonic()
        self._due_at.pop(keys, None)
        if isinstance(look, Exception):
            self._look_at[keys] = now + EACH_SHARD_SECONDS
            return
        is_watched_here = look.promote_in_ms != NOT_WATCHING
        self._look_at[keys] = now + (EACH_SHARD_SECONDS if is_watched_here else WATCHED_SHARD_SECONDS)
        if is_watched_here:
            waits = [ms / 1000 for ms in (look.promote_in_ms, look.reclaim_in_ms) if ms >= 0]
            self._due_at[keys] = now + max(min(waits, default=inf), AGAIN_SECONDS * has_moved)
