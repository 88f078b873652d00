"""
The shard map of a queue: how many shards the queue has.

Redis stores the map in the string `map` of shard 0, as a JSON object such as
`{"epoch":3,"n":16,"was":8,"state":"growing","most":16}`:

    epoch   the version number of the map; each change of the map increases it
    n       how many shards the queue has
    was     how many shards the queue had before the last change; equal to `n` when the change is finished
    state   steady, growing or shrinking
    most    the largest number of shards that the queue has ever had; removed shards keep their totals

A queue without a stored map has one shard, and its epoch is 0. Each shard stores a fence, a short copy of the map, in
its string `epoch`: `EPOCH N WAS` or `EPOCH N WAS closed`, for example `3 16 8`. A publish or redrive sends the fence of
the map that its process knows. If this fence has an earlier epoch than the fence of the shard, the shard refuses chosen
ids and redrives. If it has a later epoch, the shard stores it. A shard whose fence ends with `closed` accepts no
messages from publishers with the same or an earlier epoch.

A resize writes the map before the fences. So if a fence has a later epoch than the map, Redis has lost the later map.
The fence has all fields of the lost map except `most`. Removed shards keep their last fence, from which `most` can be
computed.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
import weakref
from dataclasses import dataclass, field, replace
from itertools import count
from random import SystemRandom
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import msgspec

from reliq.errors import ConfigurationError, ProtocolError, RedisRefusedError, RedisUnavailableError, WrongKeyTypeError
from reliq.keys import SHARDS_LIMIT, Keys, Layout, home
from reliq.redis.commands import Command, read_bytes, read_text
from reliq.redis.connection import ASYNCIO, Driver
from reliq.text import pluralize, shell_command

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from reliq.redis.client import Clients

logger = logging.getLogger(__name__)

MapState = Literal["steady", "growing", "shrinking", "lost"]
_Count = Annotated[int, msgspec.Meta(ge=1, le=SHARDS_LIMIT)]
#: The highest valid epoch of a shard map. A map with a higher epoch is corrupt. The Lua scripts have the same limit.
LATEST_EPOCH = 10**9
#: A read of the shard map also reads the fences (copies of the map) of this many shards, to detect that Redis has lost
#: a later map. In a Cluster, the slots of these shards are a quarter of all slots apart, usually on different nodes.
WITNESSES = 4
#: The errors that a read of the shard map raises if the value in Redis is not a valid map.
UNREADABLE = (ProtocolError, WrongKeyTypeError)
_FENCE = re.compile(rb"(\d{1,10}) (\d{1,3}) (\d{1,3})( closed)?")


@dataclass(frozen=True, slots=True)
class ShardMap:
    """
    The shard map of a queue: how many shards the queue has.

    Attributes:
        epoch: the version number of this map; 0 for a queue that was never sharded.
        n: how many shards the queue has.
        was: how many shards the queue had before the last change; equal to `n` when the change is finished.
        state: `steady`, `growing` or `shrinking`; `lost` if Redis no longer has a map of this epoch.
        most: the largest number of shards that the queue has ever had.
    """

    epoch: Annotated[int, msgspec.Meta(ge=0, le=LATEST_EPOCH)] = 0
    n: _Count = 1
    was: _Count = 1
    state: MapState = "steady"
    most: _Count = field(default=1, compare=False)

    @property
    def served(self) -> int:
        """How many shards may contain messages: `was` while the queue shrinks, otherwise `n`."""
        return max(self.n, self.was)

    @property
    def is_lost(self) -> bool:
        """Whether Redis has lost this map. This process knows the map from a fence or from an earlier read."""
        return self.state == "lost"

    @property
    def fence(self) -> str:
        """The fence of this map: the short copy that each shard stores."""
        return f"{self.epoch} {self.n} {self.was}"

    @property
    def ever(self) -> int:
        """How many shards may have totals. Removed shards are included, because they keep their totals."""
        return max(self.served, self.most)

    @property
    def text(self) -> bytes:
        """This map as the JSON that Redis stores."""
        return msgspec.json.encode(self)

    def check_is_one(self, name: str) -> None:
        """Raise ConfigurationError if the queue `name` has several shards, because a queue with limits needs one."""
        if self.served > 1:
            raise ConfigurationError(
                f"queue {name!r} has {self.served} shards, but limits need a single shard: leave the limits out, or "
                f"shrink the queue first with `{shell_command('shards', name, '1')}`"
            )

    @classmethod
    def of(cls, epoch: int, n: int, was: int) -> ShardMap:
        """Create a map: steady if `n` equals `was`, growing if `n` is larger, and shrinking if `n` is smaller."""
        return cls(epoch, n, was, "steady" if n == was else "growing" if n > was else "shrinking")

    def unless(self, found: ShardMap) -> ShardMap:
        """Return `found`, the map in Redis. If this map has a later epoch, return this map with the state `lost`."""
        return found if found.epoch >= self.epoch else replace(self, state="lost")

    def or_later(self, answers: Iterable[object]) -> ShardMap:
        """Return the map with the latest epoch among this map and the maps in `answers`, the results of `witnesses`."""
        return max((self, *(one for one in answers if isinstance(one, ShardMap))), key=lambda one: one.epoch)

    @staticmethod
    def or_fenced(found: Any, answers: Iterable[object]) -> Any:
        """
        Return `found`, or a map that replaces the error in `found`.

        An error is replaced only if a fence contains a map. If Redis was unavailable, return the latest map of the
        fences. If the map in Redis is corrupt, return UNSHARDED, which is older than every map of a fence.

        Args:
            found: the map in Redis, or the error that reading the map raised.
            answers: the results of `witnesses`: the maps in the fences of some shards.
        """
        latest = UNSHARDED.or_later(answers)
        if latest.epoch and isinstance(found, UNREADABLE):
            return UNSHARDED
        return latest if latest.epoch and isinstance(found, RedisUnavailableError) else found

    @classmethod
    def parse(cls, text: bytes) -> ShardMap:
        """Parse a stored map. For an empty text, return UNSHARDED. Raise ValueError if the map is invalid."""
        return msgspec.json.decode(text, type=cls) if text else UNSHARDED

    @staticmethod
    def wanted(number: object, layout: Layout) -> int:
        """
        Check the number of shards that the application has chosen for a queue with `layout`, and return it.

        Raises:
            ConfigurationError: the number is not a power of two up to 256, or it is not 1 for a queue with the layout
                of the Go library.
        """
        if layout.bare and number != 1:
            raise ConfigurationError(
                f"a queue in the layout {layout} has one shard: the Go library does not support more"
            )
        if type(number) is not int or not 1 <= number <= SHARDS_LIMIT or number & (number - 1):
            raise ConfigurationError(
                f"the number of shards must be a power of two from 1 to {SHARDS_LIMIT}, not {number!r}"
            )
        return number


#: The shard map of a queue for which Redis has stored no map.
UNSHARDED = ShardMap()
#: The shard map to use if the map in Redis is corrupt and no shard has a copy of it.
CORRUPT = ShardMap(state="lost")


def map_text(keys: Keys) -> Command[bytes]:
    """Read the stored shard map of a queue without parsing it; empty if Redis has stored no map."""
    return Command(("GETRANGE", keys.of_shard(0).map, 0, -1), read_bytes)


def shard_map(keys: Keys) -> Command[ShardMap]:
    """Read the shard map of a queue; UNSHARDED (one shard) if Redis has stored no map."""
    # Use GETRANGE, because the ACL user of a metrics exporter is not allowed to use GET on this Redis key.
    return Command(("GETRANGE", keys.of_shard(0).map, 0, -1), ShardMap.parse)


def fence(keys: Keys) -> Command[ShardMap | None]:
    """Read the fence of a shard (its copy of the shard map); UNSHARDED if it has none, None if it is corrupt."""
    return Command(("GETRANGE", keys.epoch, 0, -1), _fenced)


def _fenced(reply: bytes) -> ShardMap | None:
    found = _FENCE.fullmatch(reply)
    if found is None:
        return None if reply else UNSHARDED
    epoch, n, was = map(int, found.groups()[:3])
    is_possible = epoch <= LATEST_EPOCH and 1 <= n <= SHARDS_LIMIT and 1 <= was <= SHARDS_LIMIT
    return ShardMap.of(epoch, n, was) if is_possible else None


def declaration(keys: Keys) -> Command[str | None]:
    """Read the fingerprint of the limits that a queue declares; None for a queue without message keys and limits."""
    return Command(("HMGET", keys.limits, "on", "declared"), _read_declaration)


def _read_declaration(reply: list[bytes | None]) -> str | None:
    on, declared = reply
    return None if on is None and declared is None else read_text(declared)


def witnesses(keys: Keys) -> list[Command[Any]]:
    """Return commands that read the fences (copies of the shard map) of some shards, to detect a lost map."""
    return [] if keys.bare else [fence(keys.of_shard(shard)) for shard in range(WITNESSES)]


#: A process reads a shard map again after this many seconds. Shards refuse chosen ids for an outdated map.
MAP_SECONDS = 60.0
#: If Redis is unavailable when a shard map is due, the last read map is used for this many more seconds.
MAP_AGAIN_SECONDS = 1.0
#: While Redis is unavailable, the first read of a shard map is retried for this many seconds.
FIRST_MAP_SECONDS = 2.0


def believed(name: str, known: ShardMap, found: ShardMap, told: Sequence[object] = ()) -> ShardMap:
    """
    Return the shard map to use: the map in Redis, unless Redis has lost a later map.

    If this process or a shard has a map with a later epoch, log that Redis has lost it, and return the latest map with
    the state `lost`.

    Args:
        name: the name of the queue.
        known: the map that this process has read last.
        found: the map in Redis.
        told: the results of `witnesses`: the copies of the map in some shards.
    """
    map = known.or_later(told).unless(found)
    if map.is_lost and not known.is_lost:
        logger.warning(
            "queue %r: Redis has lost the map of its shards (Redis has epoch %d, the latest is %d); this process "
            "continues with %s. Restore the map: reliq check %s --repair",
            *(name, found.epoch, map.epoch, pluralize(map.served, "shard"), name),
        )
    return map


class KnownMap(NamedTuple):
    """The shard map of a queue as last read, and the monotonic time until which it may be used."""

    map: ShardMap = UNSHARDED
    until: float = 0.0


#: The `KnownMap` of a queue before its shard map has been read.
UNREAD = KnownMap()


class Shards:
    """
    The shards of a queue.

    In a process, all objects for the same queue and Redis share the shard map.

    Attributes:
        first: the names of the Redis keys of shard 0.
        entry: the queue's name in the queue registry.
        clients: the Redis clients of the queue.
        wanted: how many shards the queue must have; None if any number is allowed.
    """

    def __init__(self, keys: Keys, clients: Clients, wanted: int | None = None) -> None:
        self.first = keys
        self.entry = keys.entry
        self._keys = [keys]
        self.clients = clients
        self.wanted = wanted
        # Use weak references, because strong references would keep a closed event loop and its connections in memory.
        self._reads: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, weakref.ref[asyncio.Task[None]]]
        self._reads = weakref.WeakKeyDictionary()
        self._turns = count(SystemRandom().randrange(1 << 16))

    def keys(self, shard: int) -> Keys:
        """Return the names of the Redis keys of a shard."""
        while len(self._keys) <= shard:
            self._keys.append(self.first.of_shard(len(self._keys)))
        return self._keys[shard]

    @property
    def all(self) -> tuple[Keys, ...]:
        """The names of the Redis keys of all shards that may contain messages."""
        return tuple(self.keys(shard) for shard in range(self.map.served))

    @property
    def ever(self) -> tuple[Keys, ...]:
        """The names of the Redis keys of all shards that have ever existed."""
        return tuple(self.keys(shard) for shard in range(self.map.ever))

    @property
    def known(self) -> KnownMap:
        """The shard map that this process has read last, and the time until which it may be used."""
        known: KnownMap = self.clients.maps.get(self.entry, UNREAD)
        return known

    @property
    def map(self) -> ShardMap:
        """The shard map that this process has read last."""
        return self.known.map

    @property
    def is_due(self) -> bool:
        """Whether the shard map must be read again before its next use."""
        self.clients.connection()  # after a fork or `redirected`, this drops the maps
        return time.monotonic() >= self.known.until

    def turn(self) -> int:
        """
        Return the number of the shard for the next messages with generated ids. The shards are used in turn.

        If no shard map has been read yet, the attribute `wanted` gives the number of shards.
        """
        shards = max(self.map.n, self.wanted or 1)  # `publish_in` does not read the map
        return 0 if shards == 1 else next(self._turns) % shards

    def homes(self, id: str) -> Sequence[Keys]:
        """
        Return the shards to search for a message with this id, in the order of the search.

        The first shard is the home of the id: the shard that the current map gives to the id. During a resize, the
        message may still be in the home from before the resize, so this shard is the second. The home is searched again
        as the third, because the message may be moved to it during the search.
        """
        now = self.keys(home(id, self.map.n))
        before = self.keys(home(id, self.map.was))
        return (now,) if now is before else (now, before, now)

    async def refresh(self, driver: Driver, *, for_seconds: float = FIRST_MAP_SECONDS) -> None:
        """
        Read the shard map if it is due. If the read fails, continue with the last read map.

        Tasks of an event loop that call this at the same time share one read.

        Args:
            for_seconds: for how long to retry the first read while Redis is unavailable.

        Raises:
            ConfigurationError: the queue does not have the number of shards in `wanted`.
            RedisUnavailableError: Redis is unavailable, and no map has been read yet.
            WrongKeyTypeError, ProtocolError: another program wrote the map.
        """
        if not self.is_due:
            self.check(self.map)
            return
        if self.known is not UNREAD:
            for_seconds = 0.0  # if this read fails, the last read map is used
        if driver is not ASYNCIO:
            await self._read_or_stay(driver, for_seconds)
            return
        loop = asyncio.get_running_loop()
        known = self._reads.get(loop)
        reading = known() if known is not None else None
        if reading is None or reading.done():
            reading = loop.create_task(self._read_or_stay(driver, for_seconds))
            # If all callers are cancelled and the read fails, asyncio must not log the error. So retrieve it here.
            reading.add_done_callback(lambda read: read.cancelled() or read.exception())
            self._reads[loop] = weakref.ref(reading)
        await asyncio.wait([reading])  # a cancelled caller does not cancel the read
        reading.result()

    async def _read_or_stay(self, driver: Driver, for_seconds: float) -> None:
        try:
            await self.read(driver, for_seconds=for_seconds)
        except (RedisRefusedError, RedisUnavailableError) as error:
            # Keep the last read map and read again later. Raise the error if Redis is unavailable and no map has been
            # read yet, or if the Redis key has the wrong type.
            unknown = isinstance(error, RedisUnavailableError) and self.known is UNREAD
            if unknown or isinstance(error, WrongKeyTypeError):
                raise
            seconds = MAP_SECONDS if isinstance(error, RedisRefusedError) else MAP_AGAIN_SECONDS
            self.clients.maps[self.entry] = KnownMap(self.map, time.monotonic() + seconds)

    async def read(self, driver: Driver, *, for_seconds: float = 0.0) -> None:
        """
        Read the shard map now. If shard 0 is unavailable, use the latest map in the fences of some other shards.

        Raises:
            ConfigurationError: the queue does not have the number of shards in `wanted`.
            RedisUnavailableError: no map was found, and shard 0 or all other shards that were read are unavailable.
            RedisRefusedError: the map cannot be read.
        """
        client = self.clients.driven(driver)
        questions = [] if self.first.bare else [shard_map(self.first)]
        [found] = await client.run_all(questions, for_seconds=for_seconds) or (UNSHARDED,)
        told = await client.run_all(witnesses(self.first))
        known = self.map
        away = [one for one in (found, *told[1:]) if isinstance(one, RedisUnavailableError)]
        map = known.or_later(told)
        found = ShardMap.or_fenced(found, told)
        if isinstance(found, Exception):
            raise found
        if found == map == UNSHARDED and len(away) == WITNESSES - 1:
            raise away[0]
        found = believed(self.first.name, known, found, told)
        self.check(found)
        self.clients.maps[self.entry] = KnownMap(found, time.monotonic() + MAP_SECONDS)

    def check(self, found: ShardMap) -> None:
        """Raise ConfigurationError if the map `found` does not have the number of shards in `wanted`."""
        if self.wanted not in (None, found.n):
            name = self.first.name
            raise ConfigurationError(
                f"queue {name!r} has {pluralize(found.n, 'shard')}, not {self.wanted}: leave `shards` out, or "
                f"change their number with `{shell_command('shards', name, str(self.wanted))}`"
            )
