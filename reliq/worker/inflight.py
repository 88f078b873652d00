"""What this process holds, which of it may run, and how much more it can take."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from reliq.worker.line import Line
from reliq.worker.shares import Room

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from reliq.handler import Handler
    from reliq.worker.flight import Flight
    from reliq.worker.source import Source

#: A coroutine that was cancelled has so long to end before its slot counts as hung.
CANCEL_SECONDS = 5.0


class Inflight:
    """
    The flights of a process, from claim to settled. Every method is atomic.

    At most `concurrency` handlers run, of each queue at most its own limit; flights start in the order of their claims.

    Attributes:
        started: how many handlers were started.
        closed: whether nothing more starts.
        watched: whether `freed` is to be called for every flight that makes room.
        async_room, busy: called when a coroutine may start, and when there is something to renew again.
    """

    def __init__(self, handlers: Sequence[Handler], concurrency: int) -> None:
        self.concurrency = concurrency
        self.started = 0
        self.async_room = self.busy = self.freed = _nothing
        self.watched = self.closed = False
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)  # a plain handler may start
        self._roomier = threading.Condition(self._lock)  # more can be claimed
        self._fewer = threading.Condition(self._lock)  # something ended
        self._lines = {handler.queue.name: Line(handler, concurrency) for handler in handlers}
        self._flights: dict[tuple[str, str], Flight] = {}
        self._running: dict[tuple[str, str], Flight] = {}
        self._taken = 0
        self._suspects = 0
        self._low_water = 0  # held messages at which it is time to claim again, so that claims stay large
        self._has_async = any(line.is_async for line in self._lines.values())
        self._has_plain = not all(line.is_async for line in self._lines.values())
        self._async_told = False
        self._wanted = False  # somebody waits for room

    def add(self, flights: Sequence[Flight]) -> None:
        """Know of claimed `flights`."""
        with self._lock:
            first = not self._flights
            for flight in flights:
                self._flights[flight.receipt] = flight
                self._lines[flight.queue].taken += 1
                self._suspects += flight.delivery.claimed.suspect
            self._taken += len(flights)
        if first:
            self.busy()

    def wait_for_rooms(self, sources: Sequence[Source], timeout_seconds: float) -> list[Room]:
        """Return the room for each of `sources`, waiting a little until one can claim."""
        rooms: list[Room] = []

        def any_room() -> bool:
            rooms[:] = self._rooms(sources)
            return self.closed or any(map(_can_claim, sources, rooms))

        with self._lock:
            self._wanted = True
            self._roomier.wait_for(any_room, timeout_seconds)
            self._wanted = False
            return rooms

    def has_room(self, sources: Sequence[Source]) -> bool:
        """Say whether one of `sources` can claim."""
        with self._lock:
            return any(map(_can_claim, sources, self._rooms(sources)))

    def hold(self, flights: Iterable[Flight]) -> int:
        """Let `flights` start when there is a slot; return how many plain ones wait or run."""
        with self._lock:
            plain = 0
            for flight in flights:
                line = self._lines[flight.queue]
                line.waiting.append(flight)
                plain += not line.is_async
            self._work.notify(min(plain, self.concurrency))
            if self._has_async:
                self._tell_async()
            return sum(line.taken for line in self._lines.values() if not line.is_async)

    def next_plain(self, done: Flight | None) -> Flight | None:
        """Free the slot of `done`, wait for a plain flight that may start, and start it; None when it is over."""
        with self._lock:
            if done is not None:
                self._finish(done)
            while not self.closed:
                if flight := self._next(is_async=False):
                    flight.thread = threading.get_ident()
                    return flight
                self._work.wait()
            return None

    def next_async(self, done: Flight | None) -> Flight | None:
        """Free the slot of `done`, and start the next flight of a coroutine handler, if one may start."""
        with self._lock:
            self._async_told = False
            if done is not None:
                self._finish(done)
            return None if self.closed else self._next(is_async=True)

    def withdraw(self, flights: Iterable[Flight]) -> list[Flight]:
        """Return those of `flights` that have not started and now never will."""
        with self._lock:
            return [flight for flight in flights if self._withdraw(flight)]

    def settled(self, flights: Iterable[Flight]) -> None:
        """Forget flights whose outcome Redis has."""
        with self._lock:
            for flight in flights:
                self._flights.pop(flight.receipt, None)
            self._fewer.notify_all()

    def abandon(self, flight: Flight) -> None:
        """Expect nothing more of a handler that overran its time."""
        with self._lock:
            if flight.receipt in self._running and not flight.abandoned:
                flight.abandoned = True
                self._suspects -= flight.delivery.claimed.suspect
                self._fewer.notify_all()

    def close(self) -> None:
        """Let nothing more start."""
        with self._lock:
            self.closed = True
            self._work.notify_all()
            self._roomier.notify_all()

    def wait_until_none_runs(self, timeout_seconds: float) -> bool:
        """Wait until no handler runs but those that overran their time; say whether that is so."""
        with self._lock:
            return self._fewer.wait_for(lambda: all(f.abandoned for f in self._running.values()), timeout_seconds)

    def wait_until_settled(self, timeout_seconds: float) -> bool:
        """Wait until Redis has every outcome there is; say whether it has."""
        with self._lock:
            return self._fewer.wait_for(lambda: not any(f.settling for f in self._flights.values()), timeout_seconds)

    def flights(self) -> list[Flight]:
        """Return everything held, running or being settled."""
        with self._lock:
            return list(self._flights.values())

    def running(self) -> list[Flight]:
        """Return the flights whose handlers run."""
        with self._lock:
            return list(self._running.values())

    @property
    def suspects(self) -> int:
        """How many suspects are held or run here."""
        return self._suspects

    @property
    def hung(self) -> int:
        """How many slots are lost to handlers that only the end of the process ends."""
        now = time.monotonic()
        return sum(
            flight.abandoned and (not flight.handler.is_async or now > (flight.timeout_at or now) + CANCEL_SECONDS)
            for flight in self.running()
        )

    def _rooms(self, sources: Sequence[Source]) -> list[Room]:
        """Return the rooms now, and remember at which number of held messages there will be more."""
        free, held = self.concurrency - self._taken, self._taken - len(self._running)
        now = time.monotonic()
        # When every handler runs longer than usual, so will the next.
        youngest = min((now - (f.started_at or now) for f in self._running.values()), default=0.0)
        rooms: list[Room] = []
        self._low_water = 0
        for source in sources:
            line = self._lines[source.name]
            most = line.most_ahead(youngest)
            self._low_water = max(self._low_water, most // 2)
            ahead = max(0, most - held) if held <= most // 2 else 0
            slots = max(0, min(free, line.slots - line.taken))
            rooms.append(Room(slots, ahead, crowded=not slots and line.taken < line.slots))
        if any(map(_starves, sources, rooms)):
            # What is held ahead would take every slot that comes free from a queue that cannot be held.
            self._low_water = 0
            return [room._replace(ahead=0) for room in rooms]
        return rooms

    def _next(self, *, is_async: bool) -> Flight | None:
        """Start the oldest flight of a kind, unless it is the turn of the other kind."""
        if len(self._running) >= self.concurrency:
            return None
        mine = self._oldest(is_async)
        other = self._oldest(not is_async) if self._has_async and self._has_plain else None
        if other is not None:
            if is_async:
                self._work.notify()
            else:
                self._tell_async()
            if mine and self._contested() and other.waiting[0].fetched_at < mine.waiting[0].fetched_at:
                return None
        return self._start(mine) if mine else None

    def _oldest(self, is_async: bool) -> Line | None:
        """Return the line whose first flight was claimed first, of those that may start one."""
        oldest: Line | None = None
        for line in self._lines.values():
            waiting = line.waiting
            while waiting and waiting[0].settling:
                waiting.popleft()  # withdrawn
            if not waiting or line.is_async is not is_async or line.running >= line.slots:
                continue
            if oldest is None or waiting[0].fetched_at < oldest.waiting[0].fetched_at:
                oldest = line
        return oldest

    def _contested(self) -> bool:
        """Say whether more wait than there are slots, so that a start takes the slot of another."""
        return len(self._running) + sum(len(line.waiting) for line in self._lines.values()) > self.concurrency

    def _tell_async(self) -> None:
        if not self._async_told:
            self._async_told = True
            self.async_room()

    def _start(self, line: Line) -> Flight:
        flight = line.waiting.popleft()
        now = time.monotonic()
        timeout = flight.handler.timeout_seconds
        flight.started_at, flight.timeout_at = now, None if timeout is None else now + timeout
        self._running[flight.receipt] = flight
        line.running += 1
        self.started += 1
        return flight

    def _finish(self, flight: Flight) -> None:
        self._running.pop(flight.receipt, None)
        line = self._lines[flight.queue]
        line.running -= 1
        if flight.started_at is not None:
            line.learn(time.monotonic() - flight.started_at)
        if not flight.abandoned:
            self._suspects -= flight.delivery.claimed.suspect
        self._free(line)
        if self.closed or not self._running:
            self._fewer.notify_all()

    def _withdraw(self, flight: Flight) -> bool:
        if flight.started_at is not None or flight.settling:
            return False
        flight.settling = True
        self._suspects -= flight.delivery.claimed.suspect
        self._free(self._lines[flight.queue])
        if self._has_async:
            self._work.notify()  # what it went before may start
        return True

    def _free(self, line: Line) -> None:
        line.taken -= 1
        self._taken -= 1
        if self._wanted and (self._taken < self.concurrency or self._taken - len(self._running) <= self._low_water):
            self._roomier.notify()
        if self.watched:
            self.freed()


def _nothing() -> None:
    """Do what is done when nobody wants to know."""


def _starves(source: Source, room: Room) -> bool:
    return source.starves(room)


def _can_claim(source: Source, room: Room) -> bool:
    return source.limit(room) > 0
