"""What this process holds, which of it may run, and how much more it can take."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from reliq.settings import BATCH_LIMIT
from reliq.worker.lines import Lines
from reliq.worker.lookout import Lookout
from reliq.worker.run import Run
from reliq.worker.source import Source

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from reliq.handler import Handler
    from reliq.worker.flight import Flight
    from reliq.worker.line import Line
    from reliq.worker.shares import Room

#: A coroutine that was cancelled has so long to end before its slot counts as hung.
CANCEL_SECONDS = 5.0


class Inflight:
    """
    The flights of a process, from claim to settled. Every method is atomic.

    At most `concurrency` handlers run, of each queue at most its own limit; flights start in the order of their claims.

    Attributes:
        started: how many messages were given to handlers.
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
        self._lines = Lines(handlers, concurrency)
        self._flights: dict[Flight, None] = {}  # in the order of their claims
        self._runs: dict[Run, None] = {}
        self._used = 0  # slots that the runs have, and what is taken will need
        self._held = 0  # messages that are claimed and do not run
        self._suspects = 0
        self._low_water = 0  # held messages at which it is time to claim again, so that claims stay large
        self._async_told = False
        self._wanted = False  # somebody waits for room
        self._lookout = Lookout(self._lines, self._work)

    def add(self, flights: Sequence[Flight]) -> None:
        """Know of claimed `flights` of one queue."""
        with self._lock:
            first = not self._flights
            line = self._lines[flights[0].queue]
            line.known += len(flights)
            line.taken += len(flights)
            self._used += line.count()
            self._flights.update(dict.fromkeys(flights))
            self._suspects += sum(flight.delivery.claimed.suspect for flight in flights)
            self._held += len(flights)
        if first:
            self.busy()

    def limit_reads(self, queue: str, messages: int) -> None:
        """Know that one round trip reads no more than so many messages of `queue`: its bodies are large."""
        with self._lock:
            self._lines[queue].read_limit = messages

    def wait_for_rooms(self, sources: Sequence[Source], timeout_seconds: float) -> list[Room]:
        """Return the room for each of `sources`, waiting a little until one can claim."""
        rooms: list[Room] = []

        def any_room() -> bool:
            rooms[:] = self._rooms(sources)
            return self.closed or any(map(Source.can_claim, sources, rooms))

        with self._lock:
            self._wanted = True
            self._roomier.wait_for(any_room, timeout_seconds)
            self._wanted = False
            return rooms

    def has_room(self, sources: Sequence[Source]) -> bool:
        """Say whether one of `sources` can claim."""
        with self._lock:
            return any(map(Source.can_claim, sources, self._rooms(sources)))

    def hold(self, flights: Iterable[Flight]) -> int:
        """Let `flights` start when there is a slot; return how many threads plain handlers can use."""
        with self._lock:
            for flight in flights:
                self._lines[flight.queue].hold(flight)
            plain = sum(line.used for line in self._lines if not line.is_async)
            self._work.notify(self._lookout.threads(min(plain, self.concurrency)))
            if self._lines.has_async:
                self._tell_async()
            return plain

    def next_plain(self, done: Run | None) -> Run | None:
        """Free the slot of `done`, wait for plain work that may start, and start it; None when it is over."""
        with self._lock:
            if done is not None:
                self._finish(done)
            leads = self._lookout.leads(done)
            while not self.closed:
                now = time.monotonic()
                if not leads and self._is_led(now):
                    self._lookout.look_on()
                elif run := self._next(now, is_async=False):
                    run.thread = threading.get_ident()
                    self._lookout.began(run, leads=leads)
                    return run
                else:
                    if leads:
                        self._lookout.rested()
                        leads = False
                    self._work.wait(self._lines.linger(now, is_async=False))
            return None

    def next_async(self, done: Iterable[Run]) -> tuple[list[Run], float | None]:
        """Free the slots of `done`, start what may start of coroutine handlers; return when a batch will have waited."""
        with self._lock:
            self._async_told = False
            for run in done:
                self._finish(run)
            now = time.monotonic()
            runs: list[Run] = []
            while not self.closed and (new := self._next(now, is_async=True)):
                runs.append(new)
            return runs, self._lines.linger(now, is_async=True)

    def withdraw(self, flights: Iterable[Flight]) -> list[Flight]:
        """Return those of `flights` that have not started and now never will."""
        with self._lock:
            return [flight for flight in flights if self._withdraw(flight)]

    def settled(self, flights: Iterable[Flight]) -> None:
        """Forget flights whose outcome Redis has."""
        with self._lock:
            for flight in flights:
                if flight in self._flights:
                    del self._flights[flight]
                    self._lines[flight.queue].known -= 1
            self._fewer.notify_all()
            if self._wanted:
                self._roomier.notify()

    def abandon(self, run: Run) -> None:
        """Expect nothing more of a handler that overran its time."""
        with self._lock:
            if run in self._runs and not run.abandoned:
                run.abandoned = True
                for flight in run.flights:
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
            return self._fewer.wait_for(lambda: all(run.abandoned for run in self._runs), timeout_seconds)

    def wait_until_settled(self, timeout_seconds: float) -> bool:
        """Wait until Redis has every outcome there is; say whether it has."""
        with self._lock:
            return self._fewer.wait_for(lambda: not any(flight.settling for flight in self._flights), timeout_seconds)

    def flights(self) -> list[Flight]:
        """Return everything held, running or being settled."""
        with self._lock:
            return list(self._flights)

    def runs(self) -> list[Run]:
        """Return the calls of handlers that are under way."""
        with self._lock:
            return list(self._runs)

    @property
    def suspects(self) -> int:
        """How many suspects are held or run here."""
        return self._suspects

    @property
    def hung(self) -> int:
        """How many slots are lost to handlers that only the end of the process ends."""
        now = time.monotonic()
        return sum(
            run.abandoned and (not run.handler.is_async or now > (run.timeout_at or now) + CANCEL_SECONDS)
            for run in self.runs()
        )

    def _rooms(self, sources: Sequence[Source]) -> list[Room]:
        """Return the rooms now, and remember at which number of held messages there will be more."""
        free, held, now = self.concurrency - self._used, self._held, time.monotonic()
        # When every handler runs longer than usual, so will the next.
        youngest = min((now - run.started_at for run in self._runs), default=0.0)
        rooms: list[Room] = []
        self._low_water = 0
        for source in sources:
            line = self._lines[source.name]
            most = line.most_ahead(youngest)
            low_water = most - min(most // 2, BATCH_LIMIT)
            self._low_water = max(self._low_water, low_water)
            rooms.append(line.room(free, max(0, most - held) if held <= low_water else 0))
        if any(map(Source.starves, sources, rooms)):
            # What is held ahead would take every slot that comes free from a queue that cannot be held.
            self._low_water = 0
            return [room._replace(ahead=0) for room in rooms]
        return rooms

    def _next(self, now: float, *, is_async: bool) -> Run | None:
        """Start the oldest work of a kind, unless it is the turn of the other kind."""
        if len(self._runs) >= self.concurrency:
            return None
        mine = self._lines.oldest(now, is_async=is_async)
        other = (
            self._lines.oldest(now, is_async=not is_async) if self._lines.has_async and self._lines.has_plain else None
        )
        if other is not None:
            if is_async:
                self._work.notify()
            else:
                self._tell_async()
            contested = self._used > self.concurrency  # so that a start takes the slot of another
            if mine and contested and other.waiting[0].fetched_at < mine.waiting[0].fetched_at:
                return None
        return self._start(mine, now) if mine else None

    def _is_led(self, now: float) -> bool:
        """Say whether what may start is quick, and a thread is at such work."""
        if not self._lookout.is_led(now):
            return False
        line = self._lines.oldest(now, is_async=False)
        return line is not None and line.is_quick

    def _tell_async(self) -> None:
        if not self._async_told:
            self._async_told = True
            self.async_room()

    def _start(self, line: Line, now: float) -> Run:
        flights = line.next_run()
        handler = flights[0].handler
        run = Run(flights, handler, now, None if handler.timeout_seconds is None else now + handler.timeout_seconds)
        for flight in flights:
            flight.started = True
        self._runs[run] = None
        line.running += 1
        line.started += len(flights)
        self._held -= len(flights)
        self._used += line.count()
        self.started += len(flights)
        return run

    def _finish(self, run: Run) -> None:
        del self._runs[run]
        line = self._lines[run.flights[0].queue]
        line.running -= 1
        line.started -= len(run.flights)
        if run.began:
            line.learn(time.monotonic() - run.started_at)
        if self._suspects and not run.abandoned:
            self._suspects -= sum(flight.delivery.claimed.suspect for flight in run.flights)
        self._free(line, len(run.flights))
        if self.closed or not self._runs:
            self._fewer.notify_all()

    def _withdraw(self, flight: Flight) -> bool:
        if flight.started or flight.settling:
            return False
        flight.settling = True
        line = self._lines[flight.queue]
        line.withdrawn += flight.waiting
        self._suspects -= flight.delivery.claimed.suspect
        self._held -= 1
        self._free(line, 1)
        if self._lines.has_async:
            self._work.notify()  # what it went before may start
        return True

    def _free(self, line: Line, messages: int) -> None:
        line.taken -= messages
        self._used += line.count()
        if self._wanted and (self._used < self.concurrency or self._held <= self._low_water):
            self._roomier.notify()
        if self.watched:
            self.freed()


def _nothing() -> None:
    """Do what is done when nobody wants to know."""
