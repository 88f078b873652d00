"""The shards of a queue, as this process knows them: the map is read at first, once a minute, and when it has changed."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from reliq.errors import ConfigurationError, RedisRefusedError, WrongKeyTypeError
from reliq.shardmap import UNSHARDED, ShardMap, shard_map
from reliq.transport import connection as transport

if TYPE_CHECKING:
    from reliq.call import Command
    from reliq.client.aio import AsyncClient
    from reliq.client.client import Client
    from reliq.keys import Keys

#: A map is believed for this many seconds; whoever acts on an older one is told so where it matters.
MAP_SECONDS = 60.0


class Shards:
    """
    The shards of the queue of `keys`.

    Attributes:
        map: as it was read last.
        wanted: how many there must be; None: as many as there are.
    """

    def __init__(self, keys: Keys, wanted: int | None = None) -> None:
        self._keys = [keys]
        self.map, self.wanted = UNSHARDED, wanted
        self._believed_until, self._epoch = 0.0, transport.epoch

    def keys(self, shard: int) -> Keys:
        """Return the keys of a shard."""
        while len(self._keys) <= shard:
            self._keys.append(self._keys[0].of_shard(len(self._keys)))
        return self._keys[shard]

    @property
    def all(self) -> tuple[Keys, ...]:
        """The keys of every shard that may hold messages."""
        return tuple(self.keys(shard) for shard in range(self.map.served))

    @property
    def is_believed(self) -> bool:
        """Whether the map need not be read again yet: it is young, and of the Redis that connections still mean."""
        return time.monotonic() < self._believed_until and self._epoch is transport.epoch

    def refresh(self, client: Client) -> ShardMap:
        """Return the map, read again when that is due; whoever may not read it keeps the one that it knows."""
        if not self.is_believed:
            try:
                return self.read(client)
            except RedisRefusedError as error:
                self._stay(error)
        return self.map

    async def arefresh(self, client: AsyncClient) -> ShardMap:
        """As `refresh`, in async code."""
        if not self.is_believed:
            try:
                return await self.aread(client)
            except RedisRefusedError as error:
                self._stay(error)
        return self.map

    def read(self, client: Client) -> ShardMap:
        """
        Return the map, read now.

        Raises:
            ConfigurationError: there are not as many shards as are wanted.
            RedisUnavailableError, RedisRefusedError: it cannot be read.
        """
        return self._learn(UNSHARDED if self._keys[0].bare else client.run(self._question()))

    async def aread(self, client: AsyncClient) -> ShardMap:
        """As `read`, in async code."""
        return self._learn(UNSHARDED if self._keys[0].bare else await client.run(self._question()))

    def note(self, found: ShardMap) -> None:
        """Take over a map that was read, however many shards are wanted."""
        self.map, self._believed_until = found, time.monotonic() + MAP_SECONDS
        self._epoch = transport.epoch

    def _question(self) -> Command[ShardMap]:
        return shard_map(self._keys[0])

    def _learn(self, found: ShardMap) -> ShardMap:
        if self.wanted not in (None, found.n):
            raise ConfigurationError(
                f"queue {self._keys[0].name!r} has {found.n} shards, not {self.wanted}; leave `shards` out, or change "
                f"their number: reliq shards {self._keys[0].name} {self.wanted}"
            )
        self.note(found)
        return found

    def _stay(self, error: RedisRefusedError) -> None:
        if isinstance(error, WrongKeyTypeError):
            raise error
        self._believed_until = time.monotonic() + MAP_SECONDS
