"""
The map of a queue's shards: the string `map` of shard 0.

It is a JSON object, `{"epoch":3,"n":16,"was":8,"state":"growing","most":16}`:

    epoch   the number of this map; each change of the map increases it
    n       how many shards there are
    was     how many shards there were before the change; equal to `n` when the change is finished
    state   steady, growing or shrinking
    most    how many shards there ever were at most; removed shards keep their totals

A queue without a map has one shard, and its epoch is 0. Each shard stores a fence, the string `epoch`: `EPOCH N WAS` or
`EPOCH N WAS closed`, for example `3 16 8`. A shard refuses a publish or redrive by a map with an earlier epoch. A later
map raises the fence. A closed shard accepts no messages.

A map is written before the first fence of its epoch. So a fence with a later epoch than the map means that Redis has
lost the map. The fence has all its fields except `most`. Removed shards keep the fence that closed them, for `most`.
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
#: A later epoch is corrupt data. The Lua prelude has the same limit.
LATEST_EPOCH = 10**9
#: How many fences are read with a map. In a Cluster their shards are a quarter of all slots apart.
WITNESSES = 4
#: Errors that mean that the stored map is not a valid map.
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
        """How many shards may hold messages; while the queue shrinks, the earlier number."""
        return max(self.n, self.was)

    @property
    def is_lost(self) -> bool:
        """Whether Redis has lost this map: it comes from a fence or from an earlier read."""
        return self.state == "lost"

    @property
    def fence(self) -> str:
        """The fence of this map, as a shard stores it."""
        return f"{self.epoch} {self.n} {self.was}"

    @property
    def ever(self) -> int:
        """How many shards have totals: removed shards keep theirs."""
        return max(self.served, self.most)

    @property
    def text(self) -> bytes:
        """The map as Redis stores it."""
        return msgspec.json.encode(self)

    def check_is_one(self, name: str) -> None:
        """Raise ConfigurationError if queue `name`, which declares limits, has several shards."""
        if self.served > 1:
            raise ConfigurationError(
                f"queue {name!r} has {self.served} shards, and limits hold for a queue of one: leave the limits out, or "
                f"shrink the queue first with `{shell_command('shards', name, '1')}`"
            )

    @classmethod
    def of(cls, epoch: int, n: int, was: int) -> ShardMap:
        """Return the map with these numbers; they determine its state."""
        return cls(epoch, n, was, "steady" if n == was else "growing" if n > was else "shrinking")

    def unless(self, found: ShardMap) -> ShardMap:
        """Return `found`, the map in Redis; or this map as a lost map if `found` has an earlier epoch."""
        return found if found.epoch >= self.epoch else replace(self, state="lost")

    def or_later(self, answers: Iterable[object]) -> ShardMap:
        """Return this map, or the map of a later epoch among the answers to `witnesses`."""
        return max((self, *(one for one in answers if isinstance(one, ShardMap))), key=lambda one: one.epoch)

    @staticmethod
    def or_fenced(found: Any, answers: Iterable[object]) -> Any:
        """Return the answer to `shard_map`, or a map from `witnesses` if Redis is unavailable or the map corrupt."""
        latest = UNSHARDED.or_later(answers)
        if latest.epoch and isinstance(found, UNREADABLE):
            return UNSHARDED
        return latest if latest.epoch and isinstance(found, RedisUnavailableError) else found

    @classmethod
    def parse(cls, text: bytes) -> ShardMap:
        """Parse a stored map, empty for one shard; raise ValueError for an invalid map."""
        return msgspec.json.decode(text, type=cls) if text else UNSHARDED

    @staticmethod
    def wanted(number: object, layout: Layout) -> int:
        """
        Check the wanted number of shards for a queue with `layout`, and return it.

        Raises:
            ConfigurationError: it is not a power of two up to 256, or the queue has the layout of the Go original.
        """
        if layout.bare and number != 1:
            raise ConfigurationError(
                f"a queue in the layout {layout} has one shard: the Go original does not support more"
            )
        if type(number) is not int or not 1 <= number <= SHARDS_LIMIT or number & (number - 1):
            raise ConfigurationError(
                f"the number of shards must be a power of two from 1 to {SHARDS_LIMIT}, not {number!r}"
            )
        return number


#: The map of a queue without a stored map.
UNSHARDED = ShardMap()
#: A corrupt map without a known fence.
CORRUPT = ShardMap(state="lost")


def map_text(keys: Keys) -> Command[bytes]:
    """Read the stored map of a queue; empty if there is none."""
    return Command(("GETRANGE", keys.of_shard(0).map, 0, -1), read_bytes)


def shard_map(keys: Keys) -> Command[ShardMap]:
    """Read how many shards the queue of `keys` has: one if there is no map."""
    # Redis 6.2 cannot limit a command to certain keys: with a right to GET, a metrics exporter could read bodies.
    return Command(("GETRANGE", keys.of_shard(0).map, 0, -1), ShardMap.parse)


def fence(keys: Keys) -> Command[ShardMap | None]:
    """Read the map from a shard's fence; UNSHARDED without a fence, None if the fence is corrupt."""
    return Command(("GETRANGE", keys.epoch, 0, -1), _fenced)


def _fenced(reply: bytes) -> ShardMap | None:
    found = _FENCE.fullmatch(reply)
    if found is None:
        return None if reply else UNSHARDED
    epoch, n, was = map(int, found.groups()[:3])
    is_possible = epoch <= LATEST_EPOCH and 1 <= n <= SHARDS_LIMIT and 1 <= was <= SHARDS_LIMIT
    return ShardMap.of(epoch, n, was) if is_possible else None


def declaration(keys: Keys) -> Command[str | None]:
    """Read the declared limits of a queue, as in `Limits.declared`; None for a queue without keys and limits."""
    return Command(("HMGET", keys.limits, "on", "declared"), _read_declaration)


def _read_declaration(reply: list[bytes | None]) -> str | None:
    on, declared = reply
    return None if on is None and declared is None else read_text(declared)


def witnesses(keys: Keys) -> list[Command[Any]]:
    """Return the commands that read the fences which show whether Redis has lost a queue's map."""
    return [] if keys.bare else [fence(keys.of_shard(shard)) for shard in range(WITNESSES)]


#: A map is used for this many seconds before it is read again; shards refuse calls by an outdated map.
MAP_SECONDS = 60.0
#: After a failed read, the known map is used for this many more seconds.
MAP_AGAIN_SECONDS = 1.0
#: The first read of a map is retried for this many seconds while Redis is unavailable.
FIRST_MAP_SECONDS = 2.0


def believed(name: str, known: ShardMap, found: ShardMap, told: Sequence[object] = ()) -> ShardMap:
    """
    Return the map in Redis, or a later map that is `known` or in a fence, as a lost map.

    Args:
        told: the answers to `witnesses`.
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
    """The map of a queue in one Redis as last read, and until when it is used, by the monotonic clock."""

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
        # Weak references: a strong one would keep a closed loop and its connections alive.
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
        """The map as last read by any object of this queue."""
        known: KnownMap = self.clients.maps.get(self.entry, UNREAD)
        return known

    @property
    def map(self) -> ShardMap:
        """The map as last read."""
        return self.known.map

    @property
    def is_due(self) -> bool:
        """Whether the map must be read before its next use."""
        self.clients.connection()  # drops the maps of another Redis
        return time.monotonic() >= self.known.until

    def turn(self) -> int:
        """Return the shard for the next messages with generated ids, in rotation over at least the wanted shards."""
        shards = max(self.map.n, self.wanted or 1)  # a publish in a transaction has not read the map
        return 0 if shards == 1 else next(self._turns) % shards

    def homes(self, id: str) -> Sequence[Keys]:
        """
        Return the shards to search for a message with this id, in order.

        That is its home shard. During a change: also its earlier home, then the home again, because a message may move.
        """
        now = self.keys(home(id, self.map.n))
        before = self.keys(home(id, self.map.was))
        return (now,) if now is before else (now, before, now)

    async def refresh(self, driver: Driver, *, for_seconds: float = FIRST_MAP_SECONDS) -> None:
        """
        Read the map if it is due. If the read fails, keep the known map.

        Tasks of one event loop share one read.

        Args:
            for_seconds: for how long the first read is retried while Redis is unavailable.

        Raises:
            ConfigurationError: the queue does not have the wanted number of shards.
            RedisUnavailableError: Redis is unavailable, and no map is known yet.
            WrongKeyTypeError, ProtocolError: another program wrote the map.
        """
        if not self.is_due:
            self.check(self.map)
            return
        if self.known is not UNREAD:
            for_seconds = 0.0  # no caller waits for a repeated read
        if driver is not ASYNCIO:
            await self._read_or_stay(driver, for_seconds)
            return
        loop = asyncio.get_running_loop()
        known = self._reads.get(loop)
        reading = known() if known is not None else None
        if reading is None or reading.done():
            reading = loop.create_task(self._read_or_stay(driver, for_seconds))
            # All waiting callers may be cancelled before the read fails.
            reading.add_done_callback(lambda read: read.cancelled() or read.exception())
            self._reads[loop] = weakref.ref(reading)
        await asyncio.wait([reading])  # cancelling one caller does not cancel the read of the others
        reading.result()

    async def _read_or_stay(self, driver: Driver, for_seconds: float) -> None:
        try:
            await self.read(driver, for_seconds=for_seconds)
        except (RedisRefusedError, RedisUnavailableError) as error:
            # Use the known map for a while.
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
            RedisUnavailableError: shard 0 is unavailable or has no map, and no fence shows whether there was a map.
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
