"""The map of a queue's shards, the string `map` of its shard 0.

It is a JSON object, `{"epoch":3,"n":16,"was":8,"state":"growing","most":16}`:

    epoch   of this map; each change of it raises it
    n       how many shards there are
    was     how many there were; the same as `n` once nothing is left where only the earlier number looks for it
    state   steady, growing or shrinking
    most    how many there ever were: those that are no more keep their totals

Without a map a queue has one shard, and the epoch is 0. The string `epoch` of a shard is its fence, `EPOCH N WAS` or
`EPOCH N WAS closed`, for example `3 16 8`. A publish or redrive by a map of an earlier epoch is refused there, a later
map raises it, and into a closed shard nothing is published.

A map is written before the first fence of its epoch. So a fence with a later epoch than the map means that Redis has
lost the map; the fence has all of it but `most`. Shards that are no more keep the fence that closed them, which has `most`.
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
#: Every later epoch is corrupt data. The Lua prelude has the same limit.
LATEST_EPOCH = 10**9
#: The fences of so many shards are read with a map. In a Cluster they are a quarter of all slots apart.
WITNESSES = 4
#: Redis has something as the map that is none.
UNREADABLE = (ProtocolError, WrongKeyTypeError)
_FENCE = re.compile(rb"(\d{1,10}) (\d{1,3}) (\d{1,3})( closed)?")


@dataclass(frozen=True, slots=True)
class ShardMap:
    """
    How many shards a queue has.

    Attributes:
        epoch: of this map; 0 of a queue that never was sharded.
        n: how many there are.
        was: how many there were before; the same as `n` when nothing is on its way any more.
        state: `steady`, `growing` or `shrinking`; `lost` when Redis has no map of this epoch any more.
        most: the highest number there ever was.
    """

    epoch: Annotated[int, msgspec.Meta(ge=0, le=LATEST_EPOCH)] = 0
    n: _Count = 1
    was: _Count = 1
    state: MapState = "steady"
    most: _Count = field(default=1, compare=False)

    @property
    def served(self) -> int:
        """How many shards may hold messages: while there are to be fewer, as many as there were."""
        return max(self.n, self.was)

    @property
    def is_lost(self) -> bool:
        """Whether Redis has lost this map: it is known from a fence, or was read earlier."""
        return self.state == "lost"

    @property
    def fence(self) -> str:
        """The fence that a shard stores of this map."""
        return f"{self.epoch} {self.n} {self.was}"

    @property
    def ever(self) -> int:
        """How many shards have totals: those that are no more keep theirs."""
        return max(self.served, self.most)

    @property
    def text(self) -> bytes:
        """The map as Redis keeps it."""
        return msgspec.json.encode(self)

    def check_is_one(self, name: str) -> None:
        """Raise ConfigurationError when queue `name`, which declares limits, has several shards."""
        if self.served > 1:
            raise ConfigurationError(
                f"queue {name!r} has {self.served} shards, and limits hold for a queue of one: leave the limits out, or "
                f"shrink the queue first with `{shell_command('shards', name, '1')}`"
            )

    @classmethod
    def of(cls, epoch: int, n: int, was: int) -> ShardMap:
        """Return the map with the state that its numbers say."""
        return cls(epoch, n, was, "steady" if n == was else "growing" if n > was else "shrinking")

    def unless(self, found: ShardMap) -> ShardMap:
        """Return the map `found` in Redis, or this map as a lost one when `found` has an earlier epoch."""
        return found if found.epoch >= self.epoch else replace(self, state="lost")

    def or_later(self, answers: Iterable[object]) -> ShardMap:
        """Return this map, or the map of a later epoch that is among the answers to `witnesses`."""
        return max((self, *(one for one in answers if isinstance(one, ShardMap))), key=lambda one: one.epoch)

    @staticmethod
    def or_fenced(found: Any, answers: Iterable[object]) -> Any:
        """Return the answer to `shard_map`; if `witnesses` have a map, that while Redis is away, and none for a corrupt one."""
        latest = UNSHARDED.or_later(answers)
        if latest.epoch and isinstance(found, UNREADABLE):
            return UNSHARDED
        return latest if latest.epoch and isinstance(found, RedisUnavailableError) else found

    @classmethod
    def parse(cls, text: bytes) -> ShardMap:
        """Return the map that Redis keeps, that of one shard for an empty text; raise ValueError for what is none."""
        return msgspec.json.decode(text, type=cls) if text else UNSHARDED

    @staticmethod
    def wanted(number: object, layout: Layout) -> int:
        """
        Return how many shards a queue of `layout` is to have.

        Raises:
            ConfigurationError: it is no power of two up to 256, or the queue is one of the Go original.
        """
        if layout.bare and number != 1:
            raise ConfigurationError(
                f"a queue in the layout {layout} has one shard: the Go original knows of no others"
            )
        if type(number) is not int or not 1 <= number <= SHARDS_LIMIT or number & (number - 1):
            raise ConfigurationError(
                f"the number of shards must be a power of two from 1 to {SHARDS_LIMIT}, not {number!r}"
            )
        return number


#: The map of a queue that has none.
UNSHARDED = ShardMap()
#: A corrupt map of which no fence is known.
CORRUPT = ShardMap(state="lost")


def map_text(keys: Keys) -> Command[bytes]:
    """Read the map of a queue as Redis has it; empty without one."""
    return Command(("GETRANGE", keys.of_shard(0).map, 0, -1), read_bytes)


def shard_map(keys: Keys) -> Command[ShardMap]:
    """Read how many shards the queue of `keys` has: one, while there is no map."""
    # On Redis 6.2, which binds no command to keys, a right to GET would let an exporter read bodies.
    return Command(("GETRANGE", keys.of_shard(0).map, 0, -1), ShardMap.parse)


def fence(keys: Keys) -> Command[ShardMap | None]:
    """Read the map of which a shard has the fence; UNSHARDED without a fence, None when the fence is corrupt."""
    return Command(("GETRANGE", keys.epoch, 0, -1), _fenced)


def _fenced(reply: bytes) -> ShardMap | None:
    found = _FENCE.fullmatch(reply)
    if found is None:
        return None if reply else UNSHARDED
    epoch, n, was = map(int, found.groups()[:3])
    is_possible = epoch <= LATEST_EPOCH and 1 <= n <= SHARDS_LIMIT and 1 <= was <= SHARDS_LIMIT
    return ShardMap.of(epoch, n, was) if is_possible else None


def declaration(keys: Keys) -> Command[str | None]:
    """Read which limits were declared of a queue, as `Limits.declared` says them; None while it has neither keys nor limits."""
    return Command(("HMGET", keys.limits, "on", "declared"), _read_declaration)


def _read_declaration(reply: list[bytes | None]) -> str | None:
    on, declared = reply
    return None if on is None and declared is None else read_text(declared)


def witnesses(keys: Keys) -> list[Command[Any]]:
    """Return the commands that read the fences which show whether Redis has lost the map of a queue."""
    return [] if keys.bare else [fence(keys.of_shard(shard)) for shard in range(WITNESSES)]


#: A map is believed for this many seconds; whoever acts on an older one is told so where it matters.
MAP_SECONDS = 60.0
#: After a read that failed, the map that is known is believed for this many seconds.
MAP_AGAIN_SECONDS = 1.0
#: The first read of a map tries for this many seconds while Redis is away.
FIRST_MAP_SECONDS = 2.0


def believed(name: str, known: ShardMap, found: ShardMap, told: Sequence[object] = ()) -> ShardMap:
    """
    Return the map that Redis has, or the map of a later epoch, as a lost one, that is `known` or that fences have.

    Args:
        told: the answers to `shardmap.fences`.
    """
    map = known.or_later(told).unless(found)
    if map.is_lost and not known.is_lost:
        logger.warning(
            "queue %r: Redis has lost the map of its shards (Redis has epoch %d, the latest is %d); this process goes on "
            "with %s. Write the map again: reliq check %s --repair",
            *(name, found.epoch, map.epoch, pluralize(map.served, "shard"), name),
        )
    return map


class KnownMap(NamedTuple):
    """The map of a queue in one Redis as this process knows it, and until when it is believed, by the monotonic clock."""

    map: ShardMap = UNSHARDED
    until: float = 0.0


#: Of a queue whose map was never read.
UNREAD = KnownMap()


class Shards:
    """
    The shards of the queue of `keys`; all of its objects in a process that have one Redis share what they read.

    Attributes:
        first: the keys of shard 0.
        entry: the queue's name in the registry.
        clients: of the queue.
        wanted: how many shards there must be, if that matters.
    """

    def __init__(self, keys: Keys, clients: Clients, wanted: int | None = None) -> None:
        self.first = keys
        self.entry = keys.entry
        self._keys = [keys]
        self.clients = clients
        self.wanted = wanted
        # Neither a loop nor its task is kept alive from here: a closed loop's connections would be too.
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
        """The keys of every shard that there ever was."""
        return tuple(self.keys(shard) for shard in range(self.map.ever))

    @property
    def known(self) -> KnownMap:
        """The map as any object of this queue has read it last."""
        known: KnownMap = self.clients.maps.get(self.entry, UNREAD)
        return known

    @property
    def map(self) -> ShardMap:
        """The map as it was read last."""
        return self.known.map

    @property
    def is_due(self) -> bool:
        """Whether the map is to be read before it is gone by."""
        self.clients.connection()  # which forgets what another Redis has said
        return time.monotonic() >= self.known.until

    def turn(self) -> int:
        """Return the shard for the next messages with generated ids: one after another; of as many as are wanted at least."""
        shards = max(self.map.n, self.wanted or 1)  # who publishes in a transaction has not asked Redis for the map
        return 0 if shards == 1 else next(self._turns) % shards

    def homes(self, id: str) -> Sequence[Keys]:
        """
        Return the shards to be asked for a message of this id, one after another.

        It is its home; while that changes also where it was, and the home again: the message may move meanwhile.
        """
        now = self.keys(home(id, self.map.n))
        before = self.keys(home(id, self.map.was))
        return (now,) if now is before else (now, before, now)

    async def refresh(self, driver: Driver, *, for_seconds: float = FIRST_MAP_SECONDS) -> None:
        """
        Read the map again when that is due. When that fails, or is not allowed, what is known stays.

        Tasks of one event loop that want it at a time share one read.

        Args:
            for_seconds: for how long the first read is tried while Redis is away.

        Raises:
            ConfigurationError: there are not as many shards as are wanted.
            RedisUnavailableError: Redis is away, and nothing is known of it yet.
            WrongKeyTypeError, ProtocolError: something else wrote the map.
        """
        if not self.is_due:
            self.check(self.map)
            return
        if self.known is not UNREAD:
            for_seconds = 0.0  # nothing waits for a read that only looks again
        if driver is not ASYNCIO:
            await self._read_or_stay(driver, for_seconds)
            return
        loop = asyncio.get_running_loop()
        known = self._reads.get(loop)
        reading = known() if known is not None else None
        if reading is None or reading.done():
            reading = loop.create_task(self._read_or_stay(driver, for_seconds))
            # All who want it may have gone before it fails.
            reading.add_done_callback(lambda read: read.cancelled() or read.exception())
            self._reads[loop] = weakref.ref(reading)
        await asyncio.wait([reading])  # who is cancelled here cancels it for nobody else
        reading.result()

    async def _read_or_stay(self, driver: Driver, for_seconds: float) -> None:
        try:
            await self.read(driver, for_seconds=for_seconds)
        except (RedisRefusedError, RedisUnavailableError) as error:
            # The map that is known is kept for a while.
            unknown = isinstance(error, RedisUnavailableError) and self.known is UNREAD
            if unknown or isinstance(error, WrongKeyTypeError):
                raise
            seconds = MAP_SECONDS if isinstance(error, RedisRefusedError) else MAP_AGAIN_SECONDS
            self.clients.maps[self.entry] = KnownMap(self.map, time.monotonic() + seconds)

    async def read(self, driver: Driver, *, for_seconds: float = 0.0) -> None:
        """
        Read the map now, and try so long while Redis is away; where shard 0 is away, take it from the fences of the others.

        Raises:
            ConfigurationError: there are not as many shards as are wanted.
            RedisUnavailableError: shard 0 is away or has no map, and no fence says whether there was a map.
            RedisRefusedError: it cannot be read.
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
        """Raise ConfigurationError when there are not as many shards as are wanted."""
        if self.wanted not in (None, found.n):
            name = self.first.name
            raise ConfigurationError(
                f"queue {name!r} has {pluralize(found.n, 'shard')}, not {self.wanted}: leave `shards` out, or "
                f"change their number with `{shell_command('shards', name, str(self.wanted))}`"
            )
