"""The flights of one queue in this process, and how fast they go."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from reliq.settings import BATCH_LIMIT
from reliq.worker.shares import Room

if TYPE_CHECKING:
    from reliq.handler import Handler
    from reliq.worker.flight import Flight

#: What is held beyond what runs must start within this, or goes back.
HOLD_SECONDS = 0.1
#: And be no more than so many reads bring: of one that starts, one on its way, and one that is claimed.
HOLD_READS = 3
#: The most that may have ended without Redis knowing it, about, for more to be claimed.
UNSETTLED_LIMIT = 4 * BATCH_LIMIT
#: How much one more duration counts in the running mean.
_PACE_WEIGHT = 0.2
_SHORTEST_SECONDS = 1e-5
#: What is over so soon in the mean waits for nothing but the interpreter: one thread does as much of it as many.
QUICK_SECONDS = 5e-5
#: A handler of the quick kind that has not ended by then is taken to be stuck, and another thread goes on.
STUCK_SECONDS = 0.001
#: So little that a few runs in a row which lost the interpreter do not make a quick handler a slow one.
_QUICKNESS_WEIGHT = 0.005


class Line:
    """
    The flights of one queue.

    Attributes:
        slots: how many runs there may be at once.
        batch: how many messages a run has at most.
        waiting: those that wait for a slot, and some that were withdrawn meanwhile.
        withdrawn: how many of those.
        known: how many messages are claimed and not settled.
        taken: how many of them are not finished; `started` of those run.
        running: how many runs there are.
        used: how many slots the runs have, and what is taken will need.
        pace: running mean of a run's seconds, None before the first.
        read_limit: how many messages one round trip reads at most.
    """

    def __init__(self, handler: Handler, concurrency: int) -> None:
        cap = handler.settings.concurrency
        self.is_async = handler.is_async
        self.slots = concurrency if cap is None else min(cap, concurrency)
        self.batch, self._linger = handler.batch, handler.linger_seconds
        self.waiting: deque[Flight] = deque()
        self.known = self.taken = self.started = self.running = self.used = self.withdrawn = 0
        self.pace: float | None = None
        self.read_limit = BATCH_LIMIT
        # Running mean of how long a run holds up what waits for its thread.
        self._delay = 2 * QUICK_SECONDS
        self._state: tuple[int, ...] = ()  # for which the room was found
        self._room = Room(0, 0)

    def learn(self, took: float) -> None:
        """Take one more duration into the mean."""
        self.pace = took if self.pace is None else self.pace * (1 - _PACE_WEIGHT) + took * _PACE_WEIGHT
        self._delay += (min(took, STUCK_SECONDS) - self._delay) * _QUICKNESS_WEIGHT

    @property
    def is_quick(self) -> bool:
        """Whether runs are so short that one thread does as much as many, though it waits out those that wait."""
        return self._delay < QUICK_SECONDS

    def most_ahead(self, youngest: float) -> int:
        """Return how many messages would start within HOLD_SECONDS, when the `youngest` run of all is so old."""
        if self.pace is None:
            return 0
        pace = max(self.pace, youngest, _SHORTEST_SECONDS)
        if pace >= HOLD_SECONDS:
            return 0
        return min(HOLD_READS * self.read_limit, int(self.slots * self.batch * HOLD_SECONDS / pace))

    def room(self, free: int, ahead: int) -> Room:
        """
        Return the room when `free` slots of the process are, and so many messages may be held `ahead`.

        There is none while Redis has yet to be told how many others ended: what is not told in time is done twice.
        """
        if self.known - self.taken >= UNSETTLED_LIMIT:
            return Room(0, 0)
        state = (free, ahead, self.used, self.taken - self.started)
        if state != self._state:
            self._state, self._room = state, self._new_room(free, ahead)
        return self._room

    def _new_room(self, free: int, ahead: int) -> Room:
        slots = max(0, min(free, self.slots - self.used))
        # Of a batch that is being gathered for a free slot.
        rest = (self.started - self.taken) % self.batch if free >= 0 and self.used <= self.slots else 0
        return Room(slots, ahead, not slots and self.used < self.slots, self.batch, rest)

    def count(self) -> int:
        """Bring `used` up to date; return by how much it grew."""
        before, self.used = self.used, self.running - (self.started - self.taken) // self.batch
        return self.used - before

    def hold(self, flight: Flight) -> None:
        """Have `flight` wait for a slot: at the end, but before a batch that is being gathered if it must not wait."""
        if flight.settling:
            return
        flight.waiting = True
        if flight.must_start and self.batch > 1:
            self.waiting.appendleft(flight)
        else:
            self.waiting.append(flight)

    def head(self) -> Flight | None:
        """Return the flight that starts next, None when none waits."""
        waiting = self.waiting
        while waiting:
            if not waiting[0].settling:
                return waiting[0]
            waiting.popleft()
            self.withdrawn -= 1
        return None

    def next_run(self) -> list[Flight]:
        """Take the flights of the next run: what must not wait runs alone."""
        waiting = self.waiting
        first = waiting.popleft()
        flights = [first]
        while len(flights) < self.batch and not first.must_start and waiting and not waiting[0].must_start:
            flight = waiting.popleft()
            if flight.settling:
                self.withdrawn -= 1
            else:
                flights.append(flight)
        return flights

    def ripe_at(self, head: Flight) -> float:
        """Return when the run that begins with `head` may start: a batch lingers for more, unless it is full."""
        if self.batch == 1 or head.must_start or len(self.waiting) - self.withdrawn >= self.batch:
            return 0.0
        return head.held_since + self._linger
