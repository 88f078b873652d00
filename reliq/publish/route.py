"""The shards to which the orders of one publish go, until each has its receipt."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from reliq import transitions
from reliq.errors import ConfigurationError, PublishFailed, RedisRefusedError
from reliq.ids import home, of_shard
from reliq.message import Receipt
from reliq.publish.orders import ShardPart, has_lines
from reliq.text import typed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from reliq.call import Call
    from reliq.client.shards import Shards
    from reliq.publish.orders import Order
    from reliq.transitions import AskStatus

#: A message with a generated id tries so many shards that cannot be reached before it waits for one.
DETOURS = 2
#: A publish reads the map so often because a shard knows a later one.
LOOKS = 5


class Route:
    """
    Where `orders` go by the map as it is now.

    Attributes:
        is_stale: a shard knows a later map: it is to be read.
        left: how many orders have no receipt yet.
    """

    __slots__ = (
        "_confirmed",
        "_detours",
        "_looks",
        "_map",
        "_orders",
        "_receipts",
        "_shards",
        "_whole",
        "is_stale",
        "left",
    )

    def __init__(self, shards: Shards, orders: list[Order], confirmed: int = 0, *, is_stale: bool = False) -> None:
        self._shards, self._map, self._orders = shards, shards.map, orders
        self._receipts: dict[int, Receipt] = {}
        self._whole: list[Receipt] | None = None  # all receipts at once, of a publish that went in one part
        self.left, self.is_stale = len(orders), is_stale
        self._confirmed, self._looks, self._detours = confirmed, 0, DETOURS

    @property
    def receipts(self) -> list[Receipt]:
        """The receipts, in the order of the orders."""
        return self._whole if self._whole is not None else [self._receipts[at] for at in range(len(self._orders))]

    @property
    def unsent(self) -> list[Order]:
        """The orders that have no receipt yet."""
        return [one for at, one in enumerate(self._orders) if at not in self._receipts]

    @property
    def confirmed(self) -> int:
        """How many are published, with those of earlier calls."""
        return self._confirmed + sum(one.status == "published" for one in self._receipts.values())

    @contextmanager
    def telling_rest(self) -> Iterator[None]:
        """Have the failure of a part tell all that has no receipt yet."""
        try:
            yield
        except PublishFailed as failed:
            failed.orders = self.unsent
            raise

    def looked(self) -> None:
        """
        Go by the map that was read.

        Raises:
            RedisRefusedError: a shard again and again knows a later map than there is.
        """
        self._looks += self.is_stale
        if self._looks > LOOKS:
            name = self._shards.first.name
            raise RedisRefusedError(
                f"a shard of queue {name!r} knows a later map of the shards than {self._shards.first.map!r} is, of epoch "
                f"{self._map.epoch}: a failover may have lost that write; have an operator write it again: "
                + typed("check", name, options=["--repair"])
            )
        if self._map.n == 1 < self._shards.map.n:  # orders that were made before the map was known
            self._move([at for at, one in enumerate(self._orders) if one.is_generated], self._shards.turn())
        self._map, self.is_stale = self._shards.map, False

    def parts(self) -> list[ShardPart]:
        """
        Return the orders that have no receipt yet, by the shard that they go to.

        Raises:
            ConfigurationError: there are several shards, and one of the orders has a key.
        """
        shards, map, orders = self._shards, self._map, self._orders
        if map.served > 1 and has_lines(orders):
            check_one_shard(shards)
        found: dict[tuple[int, int], list[int]] = {}
        for at, one in enumerate(orders):
            if at not in self._receipts:
                found.setdefault(self._homes(one), []).append(at)
        return [
            ShardPart(
                [orders[at] for at in places],
                places,
                shards.keys(now),
                map,
                None if now == before else shards.keys(before),
                may_detour=map.n > 1 and self._detours > 0 and orders[places[0]].is_generated,
            )
            for (now, before), places in found.items()
        ]

    def _homes(self, order: Order) -> tuple[int, int]:
        """Return the shard of an order, and the one that may have its id already: for a generated id there is no other."""
        now = home(order.id, self._map.n)
        return now, now if order.is_generated else home(order.id, self._map.was)

    def question(self, part: ShardPart) -> Call[list[AskStatus]]:
        """Return the call that asks the old home of a part which of its ids are free."""
        ids = list(dict.fromkeys(one.id for one in part.orders))
        old, replace = part.old_home or part.keys, part.orders[0].terms.replace
        return transitions.ask(old, ids, fence=part.map.fence, replace=replace)

    def asked(self, part: ShardPart, answers: Sequence[AskStatus]) -> ShardPart:
        """Note what an old home has answered; return the part without the orders that may not be published."""
        ids = dict.fromkeys(one.id for one in part.orders)
        told = dict(zip(ids, answers, strict=True))
        self.is_stale = self.is_stale or "stale" in answers
        free, terms = [], part.orders[0].terms
        due = (time.time() * 1000 + terms.delay_ms if terms.at_ms is None else terms.at_ms) / 1000
        for place, one in zip(part.places, part.orders, strict=True):
            answer = told[one.id]
            if answer == "free":
                free.append(place)
            elif answer != "stale":
                self._receipts[place] = Receipt(one.id, answer, due)
                self.left -= 1
        return part._replace(orders=[self._orders[at] for at in free], places=free)

    def answered(self, part: ShardPart, done: list[Receipt] | None) -> None:
        """
        Note the receipts of a shard.

        Args:
            done: for all of a part's orders; none when they must go by a later map; None when the shard could not be
                reached: they go to the one whose turn it is, and their ids say so.
        """
        if done is None:
            self._detours -= 1
            shard = self._shards.turn()
            self._move(part.places, self._shards.turn() if shard == part.keys.shard else shard)
            return
        self._receipts.update(zip(part.places, done, strict=False))
        self.left -= len(done)
        self.is_stale = self.is_stale or not done

    def _move(self, places: Sequence[int], shard: int) -> None:
        for at in places:
            self._orders[at] = self._orders[at]._replace(id=of_shard(self._orders[at].id, shard))


def check_one_shard(shards: Shards) -> None:
    """Raise ConfigurationError when a queue has several shards: messages with keys are in one."""
    if (count := max(shards.map.served, shards.wanted or 1)) > 1:
        raise ConfigurationError(
            f"queue {shards.first.name!r} has {count} shards: keys, priorities and limits need a queue of one shard"
        )
