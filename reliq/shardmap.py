"""
The map of a queue's shards, the string `map` of its shard 0.

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

import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from reliq.call import Command
from reliq.errors import ConfigurationError, ProtocolError, RedisUnavailableError, WrongKeyTypeError
from reliq.hashtags import SHARDS_LIMIT
from reliq.replies import read_bytes, read_text
from reliq.rights import runs
from reliq.text import typed

if TYPE_CHECKING:
    from collections.abc import Iterable

    from reliq.keys import Keys, Layout

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
                f"shrink the queue first with `{typed('shards', name, '1')}`"
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


@runs("map:GETRANGE")
def map_text(keys: Keys) -> Command[bytes]:
    """Read the map of a queue as Redis has it; empty without one."""
    return Command(("GETRANGE", keys.of_shard(0).map, 0, -1), read_bytes)


@runs("map:GETRANGE")  # GET would let an exporter read bodies on Redis 6.2, which binds no command to keys
def shard_map(keys: Keys) -> Command[ShardMap]:
    """Read how many shards the queue of `keys` has: one, while there is no map."""
    return Command(("GETRANGE", keys.of_shard(0).map, 0, -1), ShardMap.parse)


@runs("epoch:GETRANGE")
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


@runs("limits:HMGET")
def declaration(keys: Keys) -> Command[str | None]:
    """Read which limits were declared of a queue, as `Limits.declared` says them; None while it has neither keys nor limits."""
    return Command(("HMGET", keys.limits, "on", "declared"), _declared)


def _declared(reply: list[bytes | None]) -> str | None:
    on, declared = reply
    return None if on is None and declared is None else read_text(declared)


def witnesses(keys: Keys) -> list[Command[Any]]:
    """Return the commands that read the fences which show whether Redis has lost the map of a queue."""
    return [] if keys.bare else [fence(keys.of_shard(shard)) for shard in range(WITNESSES)]
