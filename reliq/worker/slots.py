"""
The slots of a process: for each queue what waits for one, what runs, and how much more may be claimed.

A process has `concurrency` slots; each runs one call of a handler, with one message or with a batch. A claimed message
goes one way, and each queue counts how many are where:

    claim ──▶ queued ─────▶ running ──────▶ ended ───────▶ forgotten
              no slot yet   a slot for      Redis has yet
              (body read    each call       to be told
              or not)

What starts. A free slot is given to the message that was claimed first, of the queues that run fewer calls than their
own `concurrency`; a batch that is not full waits for its `linger` first. The call is then taken by a thread, or by the
event loop. While the loop is blocked its calls are given no slots and have none: they stand still anyway.

How much is claimed (`Capacity`).
- For free slots. What is queued has a slot coming, so a slot counts as free when neither a call nor what is queued
  needs it.
- Ahead of them, so that no slot waits for a round trip: what will start within HOLD_SECONDS at the pace of the queue's
  calls, at most what HOLD_READS reads bring; less what is queued already. What is held longer goes back to Redis
  (renewer). It is claimed when half of it is gone, so that claims stay large.
- Nothing ahead while a queue that has work gets no slot and can hold none ahead, because its handlers are slow or
  its messages may not be held: what is queued of others drains first.
- Of suspects, which may have killed a worker, never more than may run beside each other (`Suspects`): the others stay
  in Redis, and what of them must wait keeps nothing else waiting.
- Nothing while too much has ended that Redis does not know, or of coroutines while their loop does not answer.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from reliq.settings import BATCH_LIMIT
from reliq.transitions import Suspects
from reliq.worker.claims import Capacity, QueueClaims

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from reliq.handlers.handler import Handler
    from reliq.worker.delivery import HeldDelivery

#: A message that is held ahead and has not started after this time goes back to Redis.
HOLD_SECONDS = 0.1
#: At most three reads are held ahead: one whose messages start, one on its way, and one just claimed.
HOLD_READS = 3
#: No more is claimed while about this many messages have ended and are not settled.
UNSETTLED_LIMIT = 4 * BATCH_LIMIT
#: A call's duration has this weight in the running mean.
_PACE_WEIGHT = 0.2
#: The mean counts as at least this long, so that it divides.
_SHORTEST_SECONDS = 1e-5


class QueueSlots:
    """
    The messages and calls of one queue in this process.

    Attributes:
        limit: how many calls there may be at once.
        batch: how many messages a call has at most.
        waiting: what has its body and waits for a slot, in the order in which it starts.
        queued: how many messages are claimed and have no slot, those in `waiting` included.
        running: how many slots its calls have.
        ended: how many messages have ended, or gone back, without Redis knowing it.
        pace: running mean of a call's seconds, None before the first.
        read_limit: how many messages one round trip reads at most.
        rooms: of each suspect that is held or runs, among how many it may run.
        stalled: its event loop is blocked: its calls get no slots, and those that they have count as free.
    """

    def __init__(self, handler: Handler, concurrency: int) -> None:
        cap = handler.settings.concurrency
        self.is_async = handler.is_async
        self.limit = concurrency if cap is None else min(cap, concurrency)
        self.batch, self.linger = handler.batch, handler.linger_seconds
        self.waiting: deque[HeldDelivery] = deque()
        self.queued = self.running = self.ended = 0
        self.pace: float | None = None
        self.read_limit = BATCH_LIMIT
        self.rooms: list[int] = []
        self.stalled = False

    @property
    def calls(self) -> int:
        """How many calls run, and will be made with what is queued."""
        return self.running + (self.queued + self.batch - 1) // self.batch

    @property
    def suspects(self) -> Suspects:
        """The queue's suspects here, as the next claim needs them."""
        return Suspects(self.limit, len(self.rooms), min(self.rooms, default=self.limit))

    @property
    def rest(self) -> int:
        """How many more messages the batch takes that is being gathered."""
        return -self.queued % self.batch

    def add(self, deliveries: Sequence[HeldDelivery]) -> None:
        """Count what was claimed, and the suspects among it."""
        self.queued += len(deliveries)
        for held in deliveries:
            if held.delivery.claimed.deaths:
                self.rooms.append(Suspects.room(held.delivery.claimed, self.limit))

    def drop(self, held: HeldDelivery) -> None:
        """Count what is withdrawn no more."""
        self.queued -= 1
        self.ended += 1
        self.part_from_suspects([held])

    def part_from_suspects(self, deliveries: Iterable[HeldDelivery]) -> None:
        """Give room to others: the suspects among these have ended, gone back, or overrun their time."""
        for held in deliveries:
            if held.delivery.claimed.deaths:
                self.rooms.remove(Suspects.room(held.delivery.claimed, self.limit))

    def learn(self, took: float) -> None:
        """Take one more duration into the mean."""
        self.pace = took if self.pace is None else self.pace * (1 - _PACE_WEIGHT) + took * _PACE_WEIGHT

    def hold_limit(self, standstill: float) -> int:
        """Return how many messages would start within HOLD_SECONDS, when none has for `standstill` seconds."""
        if self.pace is None:
            return 0
        pace = max(self.pace, standstill, _SHORTEST_SECONDS)
        if pace >= HOLD_SECONDS:
            return 0
        return min(HOLD_READS * self.read_limit, int(self.limit * self.batch * HOLD_SECONDS / pace))

    def put(self, held: HeldDelivery) -> None:
        """Queue `held` for a slot: at the end, or before a batch that is being gathered if it must not wait."""
        if held.must_start and self.batch > 1:
            self.waiting.appendleft(held)
        else:
            self.waiting.append(held)

    def may_start(self, now: float) -> bool:
        """Return whether a call may be given a free slot."""
        if not self.waiting or self.running >= self.limit or self.stalled:
            return False
        return self.batch == 1 or self.ripe_at() <= now

    def ripe_at(self) -> float:
        """Return when the next call may start: a batch lingers for more, unless it is full."""
        if self.waiting[0].must_start or len(self.waiting) >= self.batch:
            return 0.0
        return self.waiting[0].held_since + self.linger

    def take(self) -> list[HeldDelivery]:
        """Give a slot to the next call and return its messages: what must not wait is called alone."""
        waiting = self.waiting
        first = waiting.popleft()
        deliveries = [first]
        while len(deliveries) < self.batch and not first.must_start and waiting and not waiting[0].must_start:
            deliveries.append(waiting.popleft())
        self._start(deliveries)
        return deliveries

    def put_back(self, deliveries: Sequence[HeldDelivery]) -> None:
        """Take back the slot of a call that was never made."""
        self.waiting.extendleft(reversed(deliveries))
        self.queued += len(deliveries)
        self.running -= 1

    def _start(self, deliveries: Sequence[HeldDelivery]) -> None:
        self.queued -= len(deliveries)
        self.running += 1


class SlotTable:
    """
    The slots of a process, and the queues that share them; whoever uses it holds a lock.

    Attributes:
        queues: the slots of each queue, by its name.
        queued: how many messages are claimed and have no slot, of all queues.
        refill_at: at how many of them there is capacity ahead again.
        started_at: when the latest call was given a slot.
        loop_late: the event loop does not answer.
    """

    def __init__(self, queues: Mapping[str, QueueSlots], concurrency: int) -> None:
        self._concurrency = self._free = concurrency
        self.queues = queues
        self._batching = [slots for slots in self.queues.values() if slots.batch > 1]
        self.queued = self.refill_at = 0
        self.started_at = 0.0
        self.loop_late = False

    @property
    def plain_calls(self) -> int:
        """How many calls of plain handlers may run at once with what is held."""
        calls = 0
        for slots in self.queues.values():
            if not slots.is_async:
                calls += min(slots.limit, slots.calls)
        return calls

    def add(self, deliveries: Sequence[HeldDelivery]) -> None:
        """Count what was claimed of one queue."""
        slots = self.queues[deliveries[0].queue]
        slots.add(deliveries)
        self.queued += len(deliveries)

    def next_call(self, now: float) -> list[HeldDelivery]:
        """Give a free slot to what was claimed first of all that may start, and return it; nothing when none is free."""
        if self._free <= 0:
            return []
        first: QueueSlots | None = None
        for slots in self.queues.values():
            if slots.may_start(now) and (first is None or slots.waiting[0].fetched_at < first.waiting[0].fetched_at):
                first = slots
        if first is None:
            return []
        deliveries = first.take()
        self.queued -= len(deliveries)
        self._free -= 1
        self.started_at = now
        return deliveries

    def put_back(self, deliveries: Sequence[HeldDelivery]) -> None:
        """Take back the slot of a call that was never made."""
        slots = self.queues[deliveries[0].queue]
        slots.put_back(deliveries)
        self._free += not slots.stalled
        self.queued += len(deliveries)

    def end_call(self, deliveries: Sequence[HeldDelivery], took: float | None, *, abandoned: bool) -> QueueSlots:
        """Free the slot of a call that has ended; `took` is None when its handler was not called."""
        slots = self.queues[deliveries[0].queue]
        slots.running -= 1
        slots.ended += len(deliveries)
        self._free += not slots.stalled
        if took is not None:
            slots.learn(took)
        if slots.rooms and not abandoned:
            slots.part_from_suspects(deliveries)
        return slots

    def give_coroutines_slots(self, *, on: bool) -> None:
        """Give calls of coroutine handlers slots, or none: those that they have count as free."""
        for slots in self.queues.values():
            slots.stalled = slots.is_async and not on
        self._free = self._concurrency - sum(slots.running for slots in self.queues.values() if not slots.stalled)

    def withdraw(self, deliveries: Iterable[HeldDelivery]) -> None:
        """Remove `deliveries`, which are settling, from their queues."""
        for held in deliveries:
            self.queues[held.queue].drop(held)
            self.queued -= 1
        for slots in self.queues.values():
            slots.waiting = deque(held for held in slots.waiting if not held.settling)

    def abandon(self, deliveries: Sequence[HeldDelivery]) -> None:
        """Count suspects that overran their time no more, so that others get their turn."""
        self.queues[deliveries[0].queue].part_from_suspects(deliveries)

    def linger(self, now: float, *, is_async: bool) -> float | None:
        """Return the seconds until a batch that lingers now may start, None when there is none."""
        if not self._batching:
            return None
        ripe = [slots.ripe_at() for slots in self._batching if slots.is_async is is_async and slots.waiting]
        return min((at - now for at in ripe if at > now), default=None)

    def capacities(self, claims: Sequence[QueueClaims], now: float) -> list[Capacity]:
        """Return how much of each queue can be claimed, and note when there will be more."""
        free, runs = self._concurrency, False
        for slots in self.queues.values():
            if not slots.stalled:
                free -= min(slots.limit, slots.calls)
                runs = runs or slots.running > 0
        # When nothing has started for longer than calls usually take, the next will take as long.
        standstill = now - self.started_at if runs else 0.0
        self.refill_at = 0
        found = [self._capacity(self.queues[one.name], free, standstill) for one in claims]
        if any(map(QueueClaims.starves, claims, found)):
            self.refill_at = 0
            return [one._replace(ahead=0) for one in found]
        return found

    def _capacity(self, slots: QueueSlots, free: int, standstill: float) -> Capacity:
        if slots.ended >= UNSETTLED_LIMIT or (slots.is_async and self.loop_late):
            return Capacity(0, 0)
        most = slots.hold_limit(standstill)
        refill_at = max(most - most // 2, most - BATCH_LIMIT)
        self.refill_at = max(self.refill_at, refill_at)
        ahead = most - self.queued if self.queued <= refill_at else 0
        calls = slots.calls
        own = max(0, slots.limit - calls)
        direct = max(0, min(free, own))
        gathers = free >= 0 and calls <= slots.limit
        rest = slots.rest if gathers else 0
        return Capacity(direct, ahead, not direct and own > 0, slots.batch, rest, slots.suspects)
