"""Who is claimed from in one round, and how much: queues by their weights, a few shards of each in turn."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from reliq.settings import BATCH_LIMIT
from reliq.worker.claims import fair_shares

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reliq.worker.claims import Capacity, FairOrder, Offer, QueueClaims

#: An application that seeds `random` keeps its numbers: this one has none of its state.
_chance = random.SystemRandom()
#: A shard that another process watches is looked at every twenty seconds where there are many workers, and more often
#: where there are few: in each second at least one look is made at it, and about two.
SELDOM_SECONDS, SECONDS_PER_WORKER = 20.0, 4 / 3


def shared_out(hot: Sequence[Offer], order: FairOrder) -> list[Offer]:
    """
    Divide the free slots by the weights of the queues, and what a queue gets among its shards.

    A claim that has no answer yet is made again.
    """
    queues: dict[str, list[Offer]] = {}
    for offer in hot:
        queues.setdefault(offer[0].name, []).append(offer)
    places = order.order(list(queues))
    parts = [offers[0][1] for offers in queues.values()]
    if len(queues) > 1:
        weights = [offers[0][0].handler.settings.weight for offers in queues.values()]
        parts = fair_shares(parts, weights, list(places.values()))
    asked: list[Offer] = []
    for offers, part in zip(queues.values(), parts, strict=True):
        shards = [one for one, _ in offers]
        asked += taken_in_turn(shards, part) if len(shards) > 1 else [(shards[0], part)]
    return [(one, part) for one, part in asked if one.has_room(part) or one.unsure]


def taken_in_turn(shards: Sequence[QueueClaims], capacity: Capacity) -> list[Offer]:
    """
    Divide what can be claimed of a queue among those of its shards that may have work.

    A script costs nearly the same for one message as for many, so one shard that has enough gets all, and the others
    have their turns in the next rounds. Where nobody knows how much there is, all get the same.
    """
    asked: list[Offer] = []
    left = capacity
    ordered = sorted(shards, key=lambda one: one.turn)
    for at, one in enumerate(ordered):
        same = -(-left.messages // (len(ordered) - at))
        part = left.part(min(one.asked or one.behind or same, left.messages, BATCH_LIMIT))
        asked.append((one, part))
        left = left.without(part)
    claimed = [one for one, part in asked if part.messages]
    for turn, one in enumerate(reversed(claimed), ordered[-1].turn + 1):
        one.turn = turn  # of these the last comes first next time: it took no suspects
    return asked


def seconds_between_looks(workers: int) -> float:
    """Return after how many seconds one of so many processes looks again at a shard that another one watches."""
    seconds = min(SELDOM_SECONDS, max(1.0, (workers - 1) * SECONDS_PER_WORKER))
    return seconds * _chance.uniform(0.75, 1.25)


class SeldomLooks:
    """
    When one process looks at shards that others watch: at all of them in one round, so that they share round trips.

    Args:
        workers: returns how many processes there are.
    """

    def __init__(self, workers: Callable[[], int]) -> None:
        self._workers, self._next_at = workers, 0.0

    def next(self, now: float) -> float:
        """Return the time of the next round."""
        if self._next_at <= now:
            self._next_at = now + seconds_between_looks(self._workers())
        return self._next_at
