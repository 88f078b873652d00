"""The calls of a `publish_many`, as they fill up."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any

from reliq.errors import ConfigurationError, PublishFailed
from reliq.ids import home
from reliq.outgoing import Outgoing
from reliq.settings import BATCH_LIMIT, MIB, whole

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reliq.publish.orders import Order, Writer

#: One call carries at most this many bytes of bodies, unless a single body has more.
CHUNK_BYTES = 8 * MIB


class ShardCalls:
    """The calls of a `publish_many` that fill up, one for each shard; together they have no more bytes than one may."""

    def __init__(self, writer: Writer, size: int) -> None:
        self._writer, self._size, self._bytes = writer, whole("chunk", size, least=1, most=BATCH_LIMIT), 0
        self._held: dict[int, list[Order]] = {}
        self._full: list[Order] = []
        self._newest: list[Order] = []

    @contextmanager
    def telling_rest(self) -> Iterator[None]:
        """Have a PublishFailed tell also what was read and not sent."""
        try:
            yield
        except PublishFailed as failed:
            failed.orders = [*failed.orders, *self._full, *chain(*self._held.values()), *self._newest]
            raise

    def sent(self) -> None:
        """Note that the call that was yielded is being sent: from now on its failure tells what is in it."""
        self._full = []

    def read(self, items: Iterable[Any]) -> Iterator[list[Order]]:
        """
        Yield the orders of `items` call by call; bodies that are no `Outgoing` go on the queue's terms.

        One call goes to one shard: generated ids take them in turn, chosen ones wait until their shard's call is full.
        """
        if isinstance(items, str | bytes | Mapping | Outgoing) or not isinstance(items, Iterable):
            raise ConfigurationError(f"items must be an iterable of bodies or Outgoing, not {type(items).__name__}")
        writer, shards, held, last = self._writer, self._writer.shards, self._held, self._size - 1
        shard = shards.turn()
        for item in items:
            order = writer.special(item, shard) if isinstance(item, Outgoing) else writer.order(item, {}, shard)
            place, size = shard if order.is_generated else home(order.id, shards.map.n), len(order.value)
            some = held.get(place)
            if some and len(some) < last and order.terms is some[0].terms and self._bytes + size <= CHUNK_BYTES:
                some.append(order)  # as nearly all: its call has room, and is not filled by it
                self._bytes += size
                continue
            for full in self._add(place, order):
                yield full
                shard = shards.turn()
        yield from self._rest()

    def _add(self, shard: int, order: Order) -> Iterator[list[Order]]:
        """Add an order to its shard's call; yield what is full, or has no room for it."""
        self._newest = [order]
        if self._bytes + len(order.value) > CHUNK_BYTES:
            yield from self._rest()
        if shard in self._held and order.terms != self._held[shard][0].terms:
            yield self._take(shard)
        some = self._held.setdefault(shard, [])
        some.append(order)
        self._newest = []
        self._bytes += len(order.value)
        if len(some) == self._size:
            yield self._take(shard)

    def _rest(self) -> Iterator[list[Order]]:
        """Yield all that there are, full or not."""
        while self._held:
            yield self._take(next(iter(self._held)))

    def _take(self, shard: int) -> list[Order]:
        self._bytes -= sum(len(order.value) for order in self._held[shard])
        self._full = self._held.pop(shard)
        return self._full
