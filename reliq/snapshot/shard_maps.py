"""How many shards queues have, as a look has read it: the maps go along with a look, once a minute."""

from __future__ import annotations

import time
from itertools import islice
from typing import TYPE_CHECKING, Any

from reliq.errors import ProtocolError, RedisRefusedError, RedisUnavailableError, WrongKeyTypeError
from reliq.keys import Keys
from reliq.shardmap import UNSHARDED, WITNESSES, ShardMap, shard_map, witnesses
from reliq.text import typed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reliq.call import Command

#: A look reads a map again after this many seconds.
MAPS_SECONDS = 60.0


class ShardMaps:
    """
    The maps of queues that are looked at again and again.

    Args:
        whole: whether queues are meant with all of their shards; else each by the shard that its keys name.

    Attributes:
        lost: the registry's entries of queues whose map Redis has lost.
    """

    def __init__(self, *, whole: bool = True) -> None:
        self._whole = whole
        self.lost = set[str]()
        self._read_at: dict[str, float] = {}
        self._shards: dict[str, list[Keys]] = {}
        self._served: dict[str, int] = {}

    def due(self, queues: Sequence[Keys]) -> list[Keys]:
        """Return those of `queues` whose maps are to be read."""
        if not self._whole:
            return []
        old = time.monotonic() - MAPS_SECONDS
        return [keys for keys in queues if not keys.bare and self._read_at.get(keys.entry, old) <= old]

    def questions(self, queues: Sequence[Keys]) -> list[Command[Any]]:
        """Return what reads the maps of `queues`, and the fences that show whether one is lost."""
        return [one for keys in queues for one in (shard_map(keys), *witnesses(keys))]

    def learn(self, queues: Sequence[Keys], answers: Sequence[Any]) -> dict[Keys, Exception]:
        """
        Take the answers to `questions`; return which queues cannot be read, with the error.

        A map that this user may not read changes nothing: the rule of an earlier version knows of none. Nor does one whose
        Redis is away, when it was read before.
        """
        refused = dict[Keys, Exception]()
        each = iter(answers)
        for keys in queues:
            answer, *told = islice(each, 1 + WITNESSES)
            answer = ShardMap.or_fenced(answer, told)
            if isinstance(answer, RedisUnavailableError) and keys.entry in self._read_at:
                continue
            if isinstance(answer, WrongKeyTypeError | ProtocolError | RedisUnavailableError):
                refused[keys] = named(answer, keys)
            elif isinstance(answer, ShardMap):
                map = UNSHARDED.or_later(told).unless(answer)
                self._note(keys, map)
                self.lost.discard(keys.entry)
                if map.is_lost:
                    self.lost.add(keys.entry)
                    continue  # it is read again at the next look
            elif not isinstance(answer, RedisRefusedError):
                raise answer
            self._read_at[keys.entry] = time.monotonic()
        return refused

    def shards(self, keys: Keys) -> list[Keys]:
        """Return the keys of every shard of a queue, and of those that are no more, as far as it is known."""
        return self._shards.get(keys.entry, [keys]) if self._whole else [keys]

    def served(self, keys: Keys) -> int:
        """Return how many shards of a queue may hold messages, as far as it is known."""
        return self._served.get(keys.entry, 1)

    def keep(self, queues: Sequence[Keys]) -> None:
        """Forget every queue but these."""
        entries = {keys.entry for keys in queues}
        self._read_at = {entry: at for entry, at in self._read_at.items() if entry in entries}
        self._shards = {entry: known for entry, known in self._shards.items() if entry in entries}
        self._served = {entry: known for entry, known in self._served.items() if entry in entries}
        self.lost &= entries

    def _note(self, keys: Keys, found: ShardMap) -> None:
        self._served[keys.entry] = found.served
        if found.ever == 1:
            self._shards.pop(keys.entry, None)
        elif len(self._shards.get(keys.entry, ())) != found.ever:
            self._shards[keys.entry] = [keys.of_shard(shard) for shard in range(found.ever)]


def named(error: Exception, keys: Keys) -> Exception:
    """Return why a map cannot be read, with its key where Redis has said something that is none."""
    if not isinstance(error, ProtocolError):
        return error
    return ProtocolError(
        f"the Redis key {keys.map!r} does not say how many shards the queue has; something else wrote it. "
        f"Mend it: {typed('check', keys.name, options=['--repair'], layout=keys.layout)}"
    )
