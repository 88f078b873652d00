"""
The map of a queue's shards: the string `map` of shard 0.

It is a JSON object, `{"epoch":3,"n":16,"was":8,"state":"growing","most":16}`:

    epoch   the number of this map; each change of the map increases it
    n       how many shards there are
    was     how many shards there were before the change; equal to `n` when the change is finished
    state   steady, growing or shrinking
    most    how many shards there ever were at most; removed shards keep their totals

A queue without a map has one shard, and its epoch is 0. Each shard stores a fence, a copy of the map, in the string
`epoch`: `EPOCH N WAS` or `EPOCH N WAS closed`, for example `3 16 8`. A publish or redrive sends the fence of its map.
If the sent fence has an earlier epoch than the shard's fence, the shard refuses the call. If the sent fence has a later
epoch, the shard stores it. A closed shard accepts no messages.

A change writes the map before the fences. So if a fence has a later epoch than the map, Redis has lost the later map.
The fence has all fields of the lost map except `most`. Removed shards keep their last fence, so that
`most` can be computed.
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
#: The highest valid epoch; a map with a higher epoch is corrupt data. The Lua prelude has the same limit.
LATEST_EPOCH = 10**9
#: A read of the map also reads the fences (copies of the map) of this many shards, to detect that Redis has lost a
#: later map. In a Cluster, the slots of these shards are a quarter of all slots apart.
WITNESSES = 4
#: The errors of a read of the map if the value in Redis is not a valid map.
UNREADABLE = (ProtocolError, WrongKeyTypeError)
_FENCE = re.compile(rb"(\d{1,10}) (\d{1,3}) (\d{1,3})( closed)?")


@dataclass(frozen=True, slots=True)
class ShardMap:
    """
    How many shards a queue has.

    Attributes:
        epoch: the number of this map; 0 for a queue that was never sharded.
        n: how many shards there are.
        was: how many shards there were before the change; equal to `n` when no messages have to move.
        state: `steady`, `growing` or `shrinking`; `lost` when Redis no longer has a map of this epoch.
        most: how many shards there ever were at most.
    """

    epoch: Annotated[int, msgspec.Meta(ge=0, le=LATEST_EPOCH)] = 0
    n: _Count = 1
    was: _Count = 1
    state: MapState = "steady"
    most: _Count = field(default=1, compare=False)

    @property
    def served(self) -> int:
        """How many shards may have messages: `was` while the queue shrinks, otherwise `n`."""
        return max(self.n, self.was)

    @property
    def is_lost(self) -> bool:
        """Whether Redis has lost this map, which this process has from a fence or an earlier read."""
        return self.state == "lost"

    @property
    def fence(self) -> str:
        """The short copy of this map (fence) that each shard stores."""
        return f"{self.epoch} {self.n} {self.was}"

    @property
    def ever(self) -> int:
        """How many shards have totals, including removed shards."""
        return max(self.served, self.most)

    @property
    def text(self) -> bytes:
        """The map as Redis stores it."""
        return msgspec.json.encode(self)

    def check_is_one(self, name: str) -> None:
        """Raise ConfigurationError if queue `name`, which declares limits, has several shards."""
        if self.served > 1:
            raise ConfigurationError(
                f"queue {name!r} has {self.served} shards, but limits need a single shard: leave the limits out, or "
                f"shrink the queue first with `{shell_command('shards', name, '1')}`"
            )

    @classmethod
    def of(cls, epoch: int, n: int, was: int) -> ShardMap:
        """Return the map with these numbers, which determine its state."""
        return cls(epoch, n, was, "steady" if n == was else "growing" if n > was else "shrinking")

    def unless(self, found: ShardMap) -> ShardMap:
        """Return `found`, the map in Redis. If `self` has a later epoch, return `self`, marked as lost."""
        return found if found.epoch >= self.epoch else replace(self, state="lost")

    def or_later(self, answers: Iterable[object]) -> ShardMap:
        """Return this map, or a later map among `answers`, which were read from the shards' fences."""
        return max((self, *(one for one in answers if isinstance(one, ShardMap))), key=lambda one: one.epoch)

    @staticmethod
    def or_fenced(found: Any, answers: Iterable[object]) -> Any:
        """
        Return `found`: the map in Redis, or the error of reading it.

        If a fence has a map, do not return these errors: if Redis was unavailable, return the latest map of the fences;
        if the map in Redis is corrupt, return UNSHARDED.
        """
        latest = UNSHARDED.or_later(answers)
        if latest.epoch and isinstance(found, UNREADABLE):
            return UNSHARDED
        return latest if latest.epoch and isinstance(found, RedisUnavailableError) else found

    @classmethod
    def parse(cls, text: bytes) -> ShardMap:
        """Parse a stored map; an empty text means one shard. Raise ValueError for an invalid map."""
        return msgspec.json.decode(text, type=cls) if text else UNSHARDED

    @staticmethod
    def wanted(number: object, layout: Layout) -> int:
        """
        Check the wanted number of shards for a queue with `layout`, and return it.

        Raises:
            ConfigurationError: the number is not a power of two up to 256, or the queue has the layout of the Go
                library.
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


#: The map of a queue without a stored map.
UNSHARDED = ShardMap()
#: Replaces a corrupt map in Redis if no shard has a copy of the map.
CORRUPT = ShardMap(state="lost")


def map_text(keys: Keys) -> Command[bytes]:
    """Read the stored map of a queue as text; empty if Redis has no map."""
    return Command(("GETRANGE", keys.of_shard(0).map, 0, -1), read_bytes)


def shard_map(keys: Keys) -> Command[ShardMap]:
    """Read the shard map of a queue; a queue without a map has one shard."""
    # GETRANGE and not GET, so that the ACL user of a metrics exporter needs no right to GET.
    return Command(("GETRANGE", keys.of_shard(0).map, 0, -1), ShardMap.parse)


def fence(keys: Keys) -> Command[ShardMap | None]:
    """Read a shard's fence (copy of the shard map); UNSHARDED without a fence, None for a corrupt fence."""
    return Command(("GETRANGE", keys.epoch, 0, -1), _fenced)


def _fenced(reply: bytes) -> ShardMap | None:
    found = _FENCE.fullmatch(reply)
    if found is None:
        return None if reply else UNSHARDED
    epoch, n, was = map(int, found.groups()[:3])
    is_possible = epoch <= LATEST_EPOCH and 1 <= n <= SHARDS_LIMIT and 1 <= was <= SHARDS_LIMIT
    return ShardMap.of(epoch, n, was) if is_possible else None


def declaration(keys: Keys) -> Command[str | None]:
    """Read the fingerprint of a queue's declared limits; None for a queue without keys and limits."""
    return Command(("HMGET", keys.limits, "on", "declared"), _read_declaration)


def _read_declaration(reply: list[bytes | None]) -> str | None:
    on, declared = reply
    return None if on is None and declared is None else read_text(declared)


def witnesses(keys: Keys) -> list[Command[Any]]:
    """Return commands that read the fences (copies of the map) of some shards, to detect a lost map."""
    return [] if keys.bare else [fence(keys.of_shard(shard)) for shard in range(WITNESSES)]


#: A map is used for this many seconds before it is read again; shards refuse calls with an outdated map.
MAP_SECONDS = 60.0
#: After a failed read, the last read map is used for this many more seconds.
MAP_AGAIN_SECONDS = 1.0
#: The first read of a map is retried for this many seconds while Redis is unavailable.
FIRST_MAP_SECONDS = 2.0


def believed(name: str, known: ShardMap, found: ShardMap, told: Sequence[object] = ()) -> ShardMap:
    """
    Return `found`, the map in Redis. If `known` or a shard's copy is later, return the latest map, marked as lost.

    Args:
        told: the answers to `witnesses`, which contain the copies of the map in some shards.
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
    """The last read map of a queue, and the monotonic time until which it may be used."""

    map: ShardMap = UNSHARDED
    until: float = 0.0


#: The value before the first read of a queue's map.
UNREAD = KnownMap()


class Shards:
    """
    The shards of a queue; all objects for the same queue and Redis in a process share the map.

    Attributes:
        first: the keys of shard 0.
        entry: the queue's name in the registry.
        clients: the clients of the queue.
        wanted: how many shards the queue must have; None for any number.
    """

    def __init__(self, keys: Keys, clients: Clients, wanted: int | None = None) -> None:
        self.first = keys
        self.entry = keys.entry
        self._keys = [keys]
        self.clients = clients
        self.wanted = wanted
        # Weak references: strong references would keep a closed loop and its connections alive.
        self._reads: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, weakref.ref[asyncio.Task[None]]]
        self._reads = weakref.WeakKeyDictionary()
        self._turns = count(SystemRandom().randrange(1 << 16))

    def keys(self, shard: int) -> Keys:
        """Return the keys of a shard."""
        while len(self._keys) <= shard:
            self._keys.append(self.first.of_shard(len(self._keys)))
        return self._keys[shard]

    @property
    def all(self) -> tuple[Keys, ...]:
        """The keys of every shard that may hold messages."""
        return tuple(self.keys(shard) for shard in range(self.map.served))

    @property
    def ever(self) -> tuple[Keys, ...]:
        """The keys of every shard that ever existed."""
        return tuple(self.keys(shard) for shard in range(self.map.ever))

    @property
    def known(self) -> KnownMap:
        """The shard map as last read in this process, and until when it may be used."""
        known: KnownMap = self.clients.maps.get(self.entry, UNREAD)
        return known

    @property
    def map(self) -> ShardMap:
        """The shard map as last read from Redis."""
        return self.known.map

    @property
    def is_due(self) -> bool:
        """Whether the map must be read before its next use."""
        self.clients.connection()  # drops the maps after a fork or a redirection
        return time.monotonic() >= self.known.until

    def turn(self) -> int:
        """
        Return the shard for the next messages with generated ids. The shards take turns.

        If no map has been read yet, use the wanted number of shards.
        """
        shards = max(self.map.n, self.wanted or 1)  # `publish_in` does not wait for Redis, so it may have no map
        return 0 if shards == 1 else next(self._turns) % shards

    def homes(self, id: str) -> Sequence[Keys]:
        """
        Return the shards to search for a message with this id, in order.

        The first shard is the home of the id. While the number of shards changes, the id also has an earlier home.
        Search the earlier home second, and then the home again, because the message may be moved during the search.
        """
        now = self.keys(home(id, self.map.n))
        before = self.keys(home(id, self.map.was))
        return (now,) if now is before else (now, before, now)

    async def refresh(self, driver: Driver, *, for_seconds: float = FIRST_MAP_SECONDS) -> None:
        """
        Read the map if it is due. If the read fails, keep the last read map.

        Concurrent tasks of one event loop share one read.

        Args:
            for_seconds: for how long the first read is retried while Redis is unavailable.

        Raises:
            ConfigurationError: the queue does not have the wanted number of shards.
            RedisUnavailableError: Redis is unavailable, and no map has been read yet.
            WrongKeyTypeError, ProtocolError: another program wrote the map.
        """
        if not self.is_due:
            self.check(self.map)
            return
        if self.known is not UNREAD:
            for_seconds = 0.0  # do not retry: if the read fails, the last read map is used
        if driver is not ASYNCIO:
            await self._read_or_stay(driver, for_seconds)
            return
        loop = asyncio.get_running_loop()
        known = self._reads.get(loop)
        reading = known() if known is not None else None
        if reading is None or reading.done():
            reading = loop.create_task(self._read_or_stay(driver, for_seconds))
            # Retrieve the error, so that asyncio does not log it if all callers were cancelled.
            reading.add_done_callback(lambda read: read.cancelled() or read.exception())
            self._reads[loop] = weakref.ref(reading)
        await asyncio.wait([reading])  # if one caller is cancelled, the read continues for the other callers
        reading.result()

    async def _read_or_stay(self, driver: Driver, for_seconds: float) -> None:
        try:
            await self.read(driver, for_seconds=for_seconds)
        except (RedisRefusedError, RedisUnavailableError) as error:
            # Keep the last read map and read again later, unless there is no map or the key has the wrong type.
            unknown = isinstance(error, RedisUnavailableError) and self.known is UNREAD
            if unknown or isinstance(error, WrongKeyTypeError):
                raise
            seconds = MAP_SECONDS if isinstance(error, RedisRefusedError) else MAP_AGAIN_SECONDS
            self.clients.maps[self.entry] = KnownMap(self.map, time.monotonic() + seconds)

    async def read(self, driver: Driver, *, for_seconds: float = 0.0) -> None:
        """
        Read the map now. If shard 0 is unavailable, take the map from the fences of other shards.

        Raises:
            ConfigurationError: the queue does not have the wanted number of shards.
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
        """Raise ConfigurationError if the queue does not have the wanted number of shards."""
        if self.wanted not in (None, found.n):
            name = self.first.name
            raise ConfigurationError(
                f"queue {name!r} has {pluralize(found.n, 'shard')}, not {self.wanted}: leave `shards` out, or "
                f"change their number with `{shell_command('shards', name, str(self.wanted))}`"
            )
