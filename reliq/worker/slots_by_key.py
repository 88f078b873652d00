"""The slots of a batch handler whose batches hold messages of one key each."""

from __future__ import annotations

import time
from collections import Counter, deque
from typing import TYPE_CHECKING

from reliq.worker.slots import QueueSlots

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reliq.handlers.handler import Handler
    from reliq.worker.delivery import HeldDelivery


class SlotsByKey(QueueSlots):
    """
    As `QueueSlots`: a call takes messages of one key, and those without a key are called together.

    A batch that is full starts before one that lingers, unless that one has lingered for long enough.
    """

    def __init__(self, handler: Handler, concurrency: int) -> None:
        super().__init__(handler, concurrency)
        self._queued_of: Counter[str | None] = Counter()  # key -> how many of its messages are queued

    @property
    def calls(self) -> int:
        """How many calls run, and will be made with what is queued: one for each key at least."""
        return self.running + sum(-(-count // self.batch) for count in self._queued_of.values())

    @property
    def rest(self) -> int:
        """Nothing: a claim cannot ask for the key whose batch is being gathered."""
        return 0

    def add(self, deliveries: Sequence[HeldDelivery]) -> None:
        """Count what was claimed."""
        super().add(deliveries)
        self._queued_of.update(map(_key, deliveries))

    def drop(self, held: HeldDelivery) -> None:
        """Count what is withdrawn no more."""
        super().drop(held)
        self._forget([held])

    def ripe_at(self) -> float:
        """Return when the next call may start."""
        first = self.waiting[0]
        return 0.0 if first.must_start or self._full() is not None else first.held_since + self.linger

    def take(self) -> list[HeldDelivery]:
        """Give a slot to the next call and return its messages: all of one key."""
        first = self.waiting[0]
        lingers = not first.must_start and first.held_since + self.linger > time.monotonic()
        if lingers and (full := self._full()) is not None:
            first = full
        same = [held for held in self.waiting if held is first or (_key(held) == _key(first) and not held.must_start)]
        deliveries = [first] if first.must_start else same[: self.batch]
        taken = set(map(id, deliveries))
        self.waiting = deque(held for held in self.waiting if id(held) not in taken)
        self._forget(deliveries)
        self._start(deliveries)
        return deliveries

    def put_back(self, deliveries: Sequence[HeldDelivery]) -> None:
        """Take back the slot of a call that was never made."""
        super().put_back(deliveries)
        self._queued_of.update(map(_key, deliveries))

    def _full(self) -> HeldDelivery | None:
        """Return the first message of a key that has a whole batch here."""
        sizes = Counter(_key(held) for held in self.waiting if not held.must_start)
        return next((held for held in self.waiting if sizes[_key(held)] >= self.batch), None)

    def _forget(self, deliveries: Sequence[HeldDelivery]) -> None:
        self._queued_of.subtract(map(_key, deliveries))
        self._queued_of += Counter()  # without the keys of which nothing is queued


def slots_of(handler: Handler, concurrency: int) -> QueueSlots:
    """Return the slots of a handler's queue."""
    return (SlotsByKey if handler.settings.batch_by_key else QueueSlots)(handler, concurrency)


def _key(held: HeldDelivery) -> str | None:
    return held.delivery.claimed.key
