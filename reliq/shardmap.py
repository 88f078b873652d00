"""
The map of a queue's shards, the string `map` of its shard 0: a JSON object `{"epoch":3,"n":16,"was":8,"state":"growing"}`.

    epoch   of this map; each change of it raises it
    n       how many shards there are
    was     how many there were; the same as `n` once nothing is left where only the earlier number looks for it
    state   steady, growing or shrinking

Without a map a queue has one shard, and the epoch is 0. The string `epoch` of a shard is the fence: `3`, or `3 closed`.
A publish or redrive that knows of an earlier epoch is refused there, whoever knows a later one raises it, and into a
closed shard nothing is published.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from reliq.call import Command
from reliq.errors import ConfigurationError
from reliq.hashtags import SHARDS_LIMIT
from reliq.replies import read_bytes, read_text
from reliq.rights import runs

if TYPE_CHECKING:
    from reliq.keys import Keys, Layout

MapState = Literal["steady", "growing", "shrinking"]
_Count = Annotated[int, msgspec.Meta(ge=1, le=SHARDS_LIMIT)]


@dataclass(frozen=True, slots=True)
class ShardMap:
    """
    How many shards a queue has.

    Attributes:
        epoch: of this map; 0 of a queue that never was sharded.
        n: how many there are.
        was: how many there were before; the same as `n` when nothing is on its way any more.
        state: `steady`, `growing` or `shrinking`.
    """

    epoch: Annotated[int, msgspec.Meta(ge=0, le=10**9)] = 0
    n: _Count = 1
    was: _Count = 1
    state: MapState = "steady"

    @property
    def served(self) -> int:
        """How many shards may hold messages: while there are to be fewer, as many as there were."""
        return max(self.n, self.was)

    @property
    def text(self) -> bytes:
        """The map as Redis keeps it."""
        return msgspec.json.encode(self)

    def over(self, text: bytes) -> bytes:
        """Return the map as Redis keeps it in the place of `text`, which may say more: which of several servers has it."""
        known = msgspec.json.decode(text, type=dict[str, Any]) if text else {}
        return msgspec.json.encode(known | msgspec.to_builtins(self))

    def check_is_one(self, name: str) -> None:
        """Raise ConfigurationError when queue `name`, which declares limits, has several shards."""
        if self.served > 1:
            raise ConfigurationError(
                f"queue {name!r} has {self.served} shards, and limits hold for a queue of one: leave the limits out, or "
                f"shrink the queue first with `reliq shards {name} 1`"
            )

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


@runs("map:GETRANGE")
def map_text(keys: Keys) -> Command[bytes]:
    """Read the map of a queue as Redis has it; empty without one."""
    return Command(("GETRANGE", keys.of_shard(0).map, 0, -1), read_bytes)


@runs("map:GETRANGE")  # GET would let an exporter read bodies on Redis 6.2, which binds no command to keys
def shard_map(keys: Keys) -> Command[ShardMap]:
    """Read how many shards the queue of `keys` has: one, while there is no map."""
    return Command(("GETRANGE", keys.of_shard(0).map, 0, -1), ShardMap.parse)


@runs("limits:HMGET")
def declaration(keys: Keys) -> Command[str | None]:
    """Read which limits were declared of a queue, as `Limits.declared` says them; None while it has neither keys nor limits."""
    return Command(("HMGET", keys.limits, "on", "declared"), _declared)


def _declared(reply: list[bytes | None]) -> str | None:
    on, declared = reply
    return None if on is None and declared is None else read_text(declared)
