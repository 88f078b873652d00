"""Deliveries that this process holds, from claim to settled, and the waits of threads, event loop and fetcher for them."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from reliq.worker.claims import QueueClaims
from reliq.worker.delivery import HandlerCall
from reliq.worker.quick_calls import QuickCalls
from reliq.worker.slots import SlotTable
from reliq.worker.slots_by_key import slots_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from reliq.handlers.handler import Handler
    from reliq.worker.claims import Capacity
    from reliq.worker.delivery import HeldDelivery


class Inflight:
    """
    The deliveries of a process, from claim to settled. Every method is atomic; `reliq.worker.slots` says what may start.

    Free slots are given to calls at once. One thread is woken; it wakes the next when it takes a call that is not quick
    (`QuickCalls`). The fetcher waits for capacity here or in Redis (`watch`).

    Attributes:
        started, closed: how many messages were given to handlers, and whether nothing more starts.
        most: no more messages start than these; a batch that begins before starts as a whole.
        call_loop, nudge: called when a coroutine may start, and when the wait in Redis may be over.
    """

    def __init__(self, handlers: Sequence[Handler], concurrency: int) -> None:
        self.concurrency, self.started, self.closed = concurrency, 0, False
        self.most, self._given = math.inf, 0  # and how many messages have slots, or had
        self.call_loop: Callable[[], None] = lambda: None
        self.nudge = self.call_loop
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)  # a plain handler may start
        self._roomier = threading.Condition(self._lock)  # more can be claimed
        self._fewer = threading.Condition(self._lock)  # something ended
        self._some = threading.Condition(self._lock)  # something is held
        self._table = SlotTable({one.queue.name: slots_of(one, concurrency) for one in handlers}, concurrency)
        self._deliveries: dict[HeldDelivery, None] = {}  # in the order of their claims
        self._plain_calls: deque[list[HeldDelivery]] = deque()  # that have a slot, and no thread yet
        self._async_calls: deque[list[HeldDelivery]] = deque()  # that have a slot, and no task yet
        self._runs: dict[HandlerCall, None] = {}
        self._resting, self._waking, self._quick = 0, False, QuickCalls(self._work)  # threads without a call; one comes
        self._loop_called = self._fetcher_waits = False  # the loop is on its way; the fetcher waits here for capacity
        self._watched: Sequence[QueueClaims] | None = None  # what the fetcher, waiting in Redis, cannot claim

    def add(self, deliveries: Sequence[HeldDelivery]) -> None:
        """Hold claimed `deliveries` of one queue."""
        with self._lock:
            if not self._deliveries:
                self._some.notify_all()
            self._deliveries.update(dict.fromkeys(deliveries))
            self._table.add(deliveries)

    def wait_for_deliveries(self, timeout_seconds: float) -> None:
        """Wait until something is held, or nothing more will be."""
        with self._lock:
            self._some.wait_for(lambda: self._deliveries or self.closed, timeout_seconds)

    def limit_reads(self, queue: str, messages: int) -> None:
        """Set how many messages of `queue` one round trip reads at most, because its bodies are large."""
        with self._lock:
            self._table.queues[queue].read_limit = messages

    def wait_for_capacity(self, claims: Sequence[QueueClaims], timeout_seconds: float) -> list[Capacity]:
        """Return the capacity for each of `claims`, waiting a little until one has room."""
        found: list[Capacity] = []

        def any_room() -> bool:
            self._fetcher_waits = True  # unless there is room
            found[:] = self._table.capacities(claims, time.monotonic())
            return self.closed or any(map(QueueClaims.has_room, claims, found))

        with self._lock:
            self._roomier.wait_for(any_room, timeout_seconds)
            self._fetcher_waits = False
            return found

    def watch(self, claims: Sequence[QueueClaims]) -> bool:
        """Begin a wait in Redis that ends when one of `claims` can be made; return False when one can be made now."""
        with self._lock:
            self._watched = None if self._can_claim(claims) else claims
            return self._watched is not None

    def unwatch(self) -> None:
        """End the watch: the wait in Redis is over."""
        self._watched = None

    def wait_is_over(self) -> bool:
        """Return True once when the wait in Redis must end."""
        with self._lock:
            if self._watched is None or not self._can_claim(self._watched):
                return False
            self._watched = None
            return True

    def hold(self, deliveries: Iterable[HeldDelivery]) -> int:
        """Queue `deliveries` for slots; return how many threads plain handlers can use."""
        with self._lock:
            for held in deliveries:
                if not held.settling:
                    self._table.queues[held.queue].put(held)
            self._give_slots()
            self._wake_thread()
            return min(self.concurrency, self._table.plain_calls)

    def next_plain(self, done: HandlerCall | None) -> HandlerCall | None:
        """Free the slot of `done`, wait for a call of a plain handler and start it; None when it is over."""
        with self._lock:
            if done is not None:
                self._finish((done,))
            while not self.closed:
                if self._plain_calls and self._quick.may_take():
                    run = self._start(self._plain_calls.popleft(), threading.get_ident())
                    if self._quick.took(run):
                        self._wake_thread()
                    return run
                self._rest()
            return None

    def next_async(self, done: Sequence[HandlerCall]) -> tuple[list[HandlerCall], float | None]:
        """Free the slots of `done`, start what may start of coroutine handlers; return when a batch will have waited."""
        with self._lock:
            self._loop_called = True  # it is here
            self._finish(done)
            self._wake_thread()
            runs = [self._start(deliveries) for deliveries in self._async_calls]
            self._async_calls.clear()
            self._loop_called = False
            return runs, self._table.linger(time.monotonic(), is_async=True)

    def withdraw(self, deliveries: Iterable[HeldDelivery]) -> list[HeldDelivery]:
        """Return those of `deliveries` that have not started and now never will."""
        with self._lock:
            waits = [held for held in deliveries if not (held.started or held.settling)]
            if waits:
                self._withdraw(waits)
            return waits

    def loop_is_late(self) -> None:
        """Claim no more for the event loop: it may be blocked."""
        self._table.loop_late = True

    def loop_is_blocked(self) -> list[HeldDelivery]:
        """Take the slots of the event loop's calls, because it is blocked; return what was held for it, withdrawn."""
        with self._lock:
            self._table.give_coroutines_slots(on=False)
            waits = [one for one in self._deliveries if one.handler.is_async and not (one.started or one.settling)]
            self._withdraw(waits)
            return waits

    def loop_runs(self) -> None:
        """Give the event loop's calls slots again."""
        with self._lock:
            self._table.loop_late = False
            self._table.give_coroutines_slots(on=True)
            self._give_slots()
            self._wake_thread()
            self._tell_fetcher()

    def settled(self, deliveries: Iterable[HeldDelivery]) -> None:
        """Drop deliveries whose outcome Redis has."""
        with self._lock:
            for held in deliveries:
                if held in self._deliveries:
                    del self._deliveries[held]
                    self._table.queues[held.queue].ended -= 1
            self._fewer.notify_all()
            if self._fetcher_waits:
                self._tell_fetcher()

    def abandon(self, run: HandlerCall) -> None:
        """Expect nothing more of a handler that overran its time."""
        with self._lock:
            if run in self._runs and not run.abandoned:
                run.abandon()
                self._table.abandon(run.deliveries)
                self._fewer.notify_all()
                self._tell_fetcher()

    def close(self) -> None:
        """Start nothing more."""
        with self._lock:
            self.closed = True
            self._take_back()
            self._work.notify_all()
            self._some.notify_all()
            self._tell_fetcher()

    def wait_until_none_runs(self, timeout_seconds: float) -> bool:
        """Wait until no handler runs but those that overran their time; say whether that is so."""
        with self._lock:
            return self._fewer.wait_for(lambda: all(run.abandoned for run in self._runs), timeout_seconds)

    def wait_until_settled(self, timeout_seconds: float) -> bool:
        """Wait until Redis has every outcome there is; say whether it has."""
        with self._lock:
            return self._fewer.wait_for(lambda: not any(held.settling for held in self._deliveries), timeout_seconds)

    def deliveries(self) -> list[HeldDelivery]:
        """Return everything held, running or being settled."""
        with self._lock:
            return list(self._deliveries)

    def runs(self) -> list[HandlerCall]:
        """Return the calls of handlers that are under way."""
        with self._lock:
            return list(self._runs)

    @property
    def loop_is_used(self) -> bool:
        """Whether calls of coroutine handlers have slots, or wait for some."""
        return any(slots.is_async and slots.calls for slots in self._table.queues.values())

    def _can_claim(self, claims: Sequence[QueueClaims]) -> bool:
        return self.closed or any(map(QueueClaims.can_claim, claims, self._table.capacities(claims, time.monotonic())))

    def _give_slots(self) -> None:
        """Give free slots to what may start, and call the event loop for its own."""
        now = time.monotonic()
        while not self.closed and self._given < self.most and (deliveries := self._table.next_call(now)):
            self._given += len(deliveries)
            (self._async_calls if deliveries[0].handler.is_async else self._plain_calls).append(deliveries)
        loop_wanted = self._async_calls or self._table.linger(now, is_async=True) is not None
        if loop_wanted and not self._loop_called:
            self._loop_called = True
            self.call_loop()

    def _rest(self) -> None:
        """Wait for a call, or for a batch that lingers, and give it a slot."""
        linger = self._table.linger(time.monotonic(), is_async=False)
        self._resting += 1
        try:
            self._quick.wait(linger, looks_on=bool(self._plain_calls))
        finally:  # a time limit of a handler's own may raise here, too late for its handler
            self._resting -= 1
            self._waking = False
        if linger is not None:
            self._give_slots()

    def _wake_thread(self) -> None:
        """Wake a thread for the next call, or for a batch that lingers, unless one is on its way: it wakes the next."""
        if self._resting and not self._waking:
            lingers = self._table.linger(time.monotonic(), is_async=False) is not None
            self._waking = bool(self._plain_calls) or lingers
            if self._waking:
                self._work.notify()

    def _take_back(self) -> None:
        """Take the slots of calls that have no thread or task yet."""
        for calls in (self._plain_calls, self._async_calls):
            while calls:
                self._given -= len(calls[-1])
                self._table.put_back(calls.pop())

    def _start(self, deliveries: list[HeldDelivery], thread: int = 0) -> HandlerCall:
        handler, now = deliveries[0].handler, time.monotonic()
        timeout = handler.timeout_seconds
        run = HandlerCall(deliveries, handler, now, None if timeout is None else now + timeout, thread=thread)
        for held in deliveries:
            held.started = True
        self._runs[run] = None
        self.started += len(deliveries)
        return run

    def _finish(self, runs: Iterable[HandlerCall]) -> None:
        """Free the slots of `runs` and give them on."""
        idle, now = False, time.monotonic()
        for run in runs:
            del self._runs[run]
            slots = self._table.end_call(run.deliveries, self._quick.ended(run, now), abandoned=run.abandoned)
            idle = idle or not slots.queued  # nothing of the queue takes the slot
        if self.closed:
            self._fewer.notify_all()
        self._give_slots()
        if idle or self._table.queued <= self._table.refill_at:
            self._tell_fetcher()

    def _withdraw(self, deliveries: list[HeldDelivery]) -> None:
        """Remove `deliveries` from the queue for slots; those behind them may start."""
        self._take_back()
        for held in deliveries:
            held.settling = True
        self._table.withdraw(deliveries)
        self._give_slots()
        self._wake_thread()
        self._tell_fetcher()

    def _tell_fetcher(self) -> None:
        """Wake the fetcher wherever it waits, because there may be more to claim."""
        if self._fetcher_waits:
            self._fetcher_waits = False  # once; it notes when it waits again
            self._roomier.notify()
        elif self._watched is not None:
            self.nudge()
