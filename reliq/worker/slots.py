"""
The deliveries of a process from their claim until Redis has their outcome, and the slots that calls of handlers need.

A `HeldDelivery` is one claimed message, a `HandlerCall` one call of a handler. `QueueSlots` has the messages and calls of one
queue, `Inflight` divides the free slots among queues and guards all with a lock for all threads.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, deque
from typing import TYPE_CHECKING, Any

import msgspec

from reliq.handlers.settlement import RELEASED, HandlerOutcome
from reliq.lua.transitions import Suspects
from reliq.message import Claimed, Delivery
from reliq.settings import BATCH_LIMIT
from reliq.worker.claims import Capacity, QueueClaims

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from reliq.handlers.handler import Handler, Job
    from reliq.keys import Keys


#: A cancelled coroutine has this long to end before its slot counts as hung.
CANCEL_SECONDS = 5.0
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


class HeldDelivery(msgspec.Struct, eq=False, gc=False):
    """
    One delivery in this process.

    Two deliveries of one message have the same id and can be here at once, so objects are compared, never ids.

    Attributes:
        queue: the name of its queue.
        keys: the Redis keys of the shard that it was claimed from.
        delivery: without its body until that is read.
        size: of its value, when that is too large to be read unasked.
        fetched_at: when it was claimed.
        held_since: since when it could have started: not before its body is read, for which it has its lease.
        lease_until: until when no other consumer can have it, by the monotonic clock, counted from before the
            claim or renewal was sent.
        renew_at: when its lease is to be extended next.
        must_start: it may not wait in a buffer: a suspect, or a message with no retry left.
        started: its handler has begun.
        took_ms: how long its handler took for it.
        lost: its receipt no longer holds.
        cancelled: its message was cancelled meanwhile.
        abandoned: its handler overran its time, goes on all the same, and its lease is left to end.
        settling: its outcome is on the way to Redis.
        outcome: what that is; meaningless before.
        tried: its outcome may have reached Redis without our knowing.
        trace_id: of the trace that its handling is a part of; empty without one.
    """

    delivery: Delivery
    handler: Handler
    queue: str
    keys: Keys
    fetched_at: float
    held_since: float
    lease_until: float
    renew_at: float
    must_start: bool
    started: bool = False
    took_ms: int = 0
    lost: bool = False
    cancelled: bool = False
    abandoned: bool = False
    settling: bool = False
    outcome: HandlerOutcome = RELEASED
    tried: bool = False
    trace_id: str = ""
    size: int = 0


def deliveries_of(
    claimed: Sequence[Claimed], handler: Handler, leased_at: float, keys: Keys | None = None
) -> list[HeldDelivery]:
    """Return a delivery for each of `claimed`, whose claim from the shard `keys`, or the first, was sent at `leased_at`."""
    keys = keys or handler.queue.keys
    queue = handler.queue_name
    lease = handler.lease_seconds
    lease_until = leased_at + lease
    renew_at = leased_at + lease / 3
    now = time.monotonic()
    held_since = now + lease
    deliveries = []
    for message in claimed:
        must_start = message.deaths > 0 or message.left <= 0
        # Positional arguments: this runs for every message.
        deliveries.append(
            HeldDelivery(Delivery(message), handler, queue, keys, now, held_since, lease_until, renew_at, must_start)
        )
    return deliveries


class HandlerCall(msgspec.Struct, eq=False):
    """
    One call of a handler.

    Attributes:
        deliveries: one, or what a batch handler takes at once.
        started_at: by the monotonic clock.
        timeout_at: when the handler has had its time, None for no limit.
        began: the handler was called.
        abandoned: it overran its time.
        thread, task: the thread it runs in; its asyncio task, if it is a coroutine.
    """

    deliveries: list[HeldDelivery]
    handler: Handler
    started_at: float
    timeout_at: float | None
    began: bool = True
    abandoned: bool = False
    thread: int = 0
    task: Any = None

    def arguments(self, jobs: list[Job[Any]]) -> tuple[Any, ...]:
        """Return what the handler is called with for `jobs`."""
        if self.handler.is_batch:
            bodies = [job.body for job in jobs]
            return (bodies, jobs) if self.handler.takes_job else (bodies,)
        return (jobs[0].body, jobs[0]) if self.handler.takes_job else (jobs[0].body,)

    @property
    def unanswered(self) -> list[HeldDelivery]:
        """The deliveries whose outcome is not on its way."""
        for held in self.deliveries:
            if held.settling:
                return [held for held in self.deliveries if not held.settling]
        return self.deliveries

    @property
    def hangs(self) -> bool:
        """Whether it overran its time and only the end of the process ends it."""
        if not self.handler.is_async:
            return self.abandoned
        now = time.monotonic()
        return self.abandoned and now > (self.timeout_at or now) + CANCEL_SECONDS


def started_call(deliveries: list[HeldDelivery], thread: int = 0) -> HandlerCall:
    """Return a call of the handler of `deliveries`, which starts now."""
    handler = deliveries[0].handler
    now = time.monotonic()
    timeout = handler.timeout_seconds
    for held in deliveries:
        held.started = True
    return HandlerCall(deliveries, handler, now, None if timeout is None else now + timeout, thread=thread)


class QueueSlots:
    """
    The messages and calls of one queue in this process.

    Attributes:
        limit: how many calls there may be at once.
        batch: how many messages a call has at most.
        waiting: what has its body and waits for a slot, in the order in which it starts.
        queued: the messages that are claimed and have no slot, those in `waiting` included.
        running: how many slots its calls have.
        ended: how many messages have ended, or gone back, and are not settled in Redis.
        pace: running mean of a call's seconds, None before the first.
        read_limit: how many messages one round trip reads at most.
        suspects: those that are held or run, but for one whose handler has overran its time.
        stalled: its event loop is blocked: its calls get no slots, and those that they have count as free.
    """

    def __init__(self, handler: Handler, concurrency: int) -> None:
        cap = handler.settings.concurrency
        self.is_async = handler.is_async
        self.limit = concurrency if cap is None else min(cap, concurrency)
        self.batch = handler.batch
        self.linger = handler.linger_seconds
        self.waiting: deque[HeldDelivery] = deque()
        self.queued: dict[HeldDelivery, None] = {}
        self.running = 0
        self.ended = 0
        self.pace: float | None = None
        self.read_limit = BATCH_LIMIT
        self.suspects: set[HeldDelivery] = set()
        self.no_suspects = Suspects(self.limit, 0, self.limit)
        self.stalled = False

    @property
    def calls(self) -> int:
        """How many calls run, and will be made with what is queued."""
        return self.running + (len(self.queued) + self.batch - 1) // self.batch

    @property
    def rest(self) -> int:
        """How many more messages the batch takes that is being gathered."""
        return -len(self.queued) % self.batch

    def hold_limit(self, standstill: float) -> int:
        """Return how many messages would start within HOLD_SECONDS, when none has for `standstill` seconds."""
        if self.pace is None:
            return 0
        pace = max(self.pace, standstill, _SHORTEST_SECONDS)
        if pace >= HOLD_SECONDS:
            return 0
        return min(HOLD_READS * self.read_limit, int(self.limit * self.batch * HOLD_SECONDS / pace))

    def ripe_at(self) -> float:
        """Return when the next call may start: a batch lingers for more, unless one is full."""
        if self.waiting[0].must_start or self._first_of_full_batch() is not None:
            return 0.0
        return self.waiting[0].held_since + self.linger

    def take(self) -> list[HeldDelivery]:
        """Remove the messages of the next call from the queue: what must not wait is called alone."""
        waiting = self.waiting
        first = waiting.popleft()
        deliveries = [first]
        while len(deliveries) < self.batch and not first.must_start and waiting and not waiting[0].must_start:
            deliveries.append(waiting.popleft())
        return deliveries

    def _first_of_full_batch(self) -> HeldDelivery | None:
        return self.waiting[0] if len(self.waiting) >= self.batch else None


class SlotsByKey(QueueSlots):
    """
    As `QueueSlots`: a call takes messages of one key, and those without a key are called together.

    A batch that is full starts before one that lingers, unless the lingering batch is ripe.
    """

    @property
    def calls(self) -> int:
        """How many calls run, and will be made with what is queued: one for each key at least."""
        return self.running + sum(-(-count // self.batch) for count in Counter(map(_key, self.queued)).values())

    @property
    def rest(self) -> int:
        """Nothing: a claim cannot ask for the key whose batch is being gathered."""
        return 0

    def take(self) -> list[HeldDelivery]:
        """Remove the messages of the next call from the queue: all of one key."""
        first = self.waiting[0]
        lingers = not first.must_start and first.held_since + self.linger > time.monotonic()
        if lingers and (full := self._first_of_full_batch()) is not None:
            first = full
        same = [held for held in self.waiting if held is first or (_key(held) == _key(first) and not held.must_start)]
        deliveries = [first] if first.must_start else same[: self.batch]
        started = set(deliveries)
        self.waiting = deque(held for held in self.waiting if held not in started)
        return deliveries

    def _first_of_full_batch(self) -> HeldDelivery | None:
        """Return the first message of a key that has a whole batch here."""
        sizes = Counter(_key(held) for held in self.waiting if not held.must_start)
        return next((held for held in self.waiting if sizes[_key(held)] >= self.batch), None)


def _key(held: HeldDelivery) -> str | None:
    return held.delivery.claimed.key


class Inflight:
    """
    The deliveries of a process, from claim to settled, and the slots that its queues share. Every method is atomic.

    Free slots are given to calls at once. One thread is woken; it wakes the next when it takes a call. The fetcher waits
    for capacity here or in Redis (`watch`).

    Attributes:
        started, closed: how many messages were given to handlers, and whether nothing more starts.
        max_jobs: no more messages start than these; a batch that begins before starts as a whole.
        call_loop, poke: called when a coroutine may start, and when the fetcher's wait for tokens is over.
        queues: the slots of each queue, by its name.
    """

    def __init__(self, handlers: Sequence[Handler], concurrency: int) -> None:
        self.concurrency = concurrency
        self.started = 0
        self.closed = False
        self.max_jobs = math.inf
        self.call_loop: Callable[[], None] = lambda: None
        self.poke = self.call_loop
        self.queues = {
            handler.queue.name: (SlotsByKey if handler.settings.batch_by_key else QueueSlots)(handler, concurrency)
            for handler in handlers
        }
        self._batching = [slots for slots in self.queues.values() if slots.batch > 1]
        self._free = concurrency
        self._slots_given = 0  # how many messages have slots, or had
        self._slot_given_at = 0.0  # when the latest call was given one
        self._queued = 0  # messages of all queues that are claimed and have no slot
        self._refill_at = 0  # at how many of them there is capacity ahead again
        self._loop_late = False  # the event loop does not answer
        self._lock = threading.Lock()
        self._plain_call_ready = threading.Condition(self._lock)  # a plain handler may start
        self._capacity_grew = threading.Condition(self._lock)  # more can be claimed
        self._changed = threading.Condition(self._lock)  # something ended, or is held where nothing was
        self._deliveries: dict[HeldDelivery, None] = {}  # in the order of their claims
        self._plain_calls: deque[list[HeldDelivery]] = deque()  # that have a slot, and no thread yet
        self._async_calls: deque[list[HeldDelivery]] = deque()  # that have a slot, and no task yet
        self._runs: dict[HandlerCall, None] = {}
        self._idle_threads = 0  # threads without a call
        self._waking = False  # one of these threads is on its way
        self._loop_called = False  # the event loop is on its way
        self._fetcher_waits = False  # it waits here for capacity
        self._watched: Sequence[QueueClaims] | None = None  # what the fetcher, waiting in Redis, cannot claim

    def add(self, deliveries: Sequence[HeldDelivery]) -> None:
        """Hold claimed `deliveries` of one queue."""
        with self._lock:
            if not self._deliveries:
                self._changed.notify_all()
            claimed = dict.fromkeys(deliveries)
            slots = self.queues[deliveries[0].queue]
            self._deliveries.update(claimed)
            slots.queued.update(claimed)
            self._queued += len(claimed)
            for held in deliveries:
                if held.delivery.claimed.deaths:
                    slots.suspects.add(held)

    def wait_for_deliveries(self, timeout_seconds: float) -> None:
        """Wait until something is held, or nothing more will be."""
        with self._lock:
            self._changed.wait_for(lambda: self._deliveries or self.closed, timeout_seconds)

    def wait_for_capacity(self, claims: Sequence[QueueClaims], timeout_seconds: float) -> list[Capacity]:
        """Return the capacity for each of `claims`, waiting a little until one has room."""
        until = time.monotonic() + timeout_seconds
        with self._lock:
            capacities = self._capacities(claims)
            while (left := until - time.monotonic()) > 0:
                if self.closed or any(map(QueueClaims.has_room, claims, capacities)):
                    break
                self._fetcher_waits = True
                self._capacity_grew.wait(left)
                self._fetcher_waits = False
                capacities = self._capacities(claims)
            return capacities

    def watch(self, claims: Sequence[QueueClaims]) -> bool:
        """Begin a wait for tokens that a poke ends when one of `claims` can be made; return False when one can be now."""
        with self._lock:
            self._watched = None if self._can_claim(claims) else claims
            return self._watched is not None

    def unwatch(self) -> None:
        """End the watch: the wait in Redis is over."""
        self._watched = None

    def enqueue(self, deliveries: Iterable[HeldDelivery]) -> int:
        """
        Queue `deliveries` for slots; return how many threads plain handlers can use.

        A message that must not wait goes before a batch that is being gathered.
        """
        with self._lock:
            for held in deliveries:
                if not held.settling:
                    slots = self.queues[held.queue]
                    if held.must_start and slots.batch > 1:
                        slots.waiting.appendleft(held)
                    else:
                        slots.waiting.append(held)
            self._give_slots()
            self._wake_thread()
            threads = 0
            for slots in self.queues.values():
                if not slots.is_async:
                    threads += min(slots.limit, slots.calls)
            return min(self.concurrency, threads)

    def next_plain(self, done: HandlerCall | None) -> HandlerCall | None:
        """Free the slot of `done`, wait for a call of a plain handler and start it; None when it is over."""
        with self._lock:
            if done is not None:
                self._finish((done,))
            while not (self._plain_calls or self.closed):
                linger = self._linger(time.monotonic(), is_async=False)
                self._idle_threads += 1
                try:
                    self._plain_call_ready.wait(linger)
                finally:  # a time limit of a handler's own may raise here, too late for its handler
                    self._idle_threads -= 1
                    self._waking = False
                if linger is not None:
                    self._give_slots()
            if self.closed:
                return None
            run = started_call(self._plain_calls.popleft(), threading.get_ident())
            self._runs[run] = None
            self.started += len(run.deliveries)
            self._wake_thread()
            return run

    def next_async(self, done: Sequence[HandlerCall]) -> tuple[list[HandlerCall], float | None]:
        """Free the slots of `done`, start what may start of coroutine handlers; return when a batch will have waited."""
        with self._lock:
            self._loop_called = True  # it is here
            self._finish(done)
            self._wake_thread()
            runs = [started_call(deliveries) for deliveries in self._async_calls]
            self._async_calls.clear()
            for run in runs:
                self._runs[run] = None
                self.started += len(run.deliveries)
            self._loop_called = False
            return runs, self._linger(time.monotonic(), is_async=True)

    def withdraw(self, deliveries: Iterable[HeldDelivery]) -> list[HeldDelivery]:
        """Return those of `deliveries` that have not started and now never will."""
        with self._lock:
            waiting = [held for held in deliveries if not (held.started or held.settling)]
            if not waiting:
                return waiting
            self._take_back()
            for held in waiting:
                held.settling = True
                slots = self.queues[held.queue]
                del slots.queued[held]
                slots.suspects.discard(held)
                slots.ended += 1
                self._queued -= 1
            for slots in self.queues.values():
                slots.waiting = deque(held for held in slots.waiting if not held.settling)
            self._give_slots()
            self._wake_thread()
            self._notify_fetcher()
            return waiting

    def note_loop(self, *, is_late: bool = False, is_blocked: bool = False) -> None:
        """
        Note how the event loop does: no more is claimed for one that is late.

        Calls of coroutine handlers get no slots while the loop is blocked, and those that they have count as free.
        """
        with self._lock:
            self._loop_late = is_late
            for slots in self.queues.values():
                slots.stalled = is_blocked and slots.is_async
            self._free = self.concurrency - sum(slots.running for slots in self.queues.values() if not slots.stalled)
            self._give_slots()
            self._wake_thread()
            self._notify_fetcher()

    def settled(self, deliveries: Iterable[HeldDelivery]) -> None:
        """Drop deliveries whose outcome Redis has."""
        with self._lock:
            for held in deliveries:
                if held in self._deliveries:
                    del self._deliveries[held]
                    self.queues[held.queue].ended -= 1
            self._changed.notify_all()
            self._notify_fetcher()

    def abandon(self, run: HandlerCall) -> None:
        """Expect nothing more of a handler that overran its time."""
        with self._lock:
            if run in self._runs and not run.abandoned:
                run.abandoned = True
                # Suspects among them count no more, so that others get their turn.
                self.queues[run.handler.queue_name].suspects.difference_update(run.deliveries)
                self._changed.notify_all()
                self._notify_fetcher()

    def close(self) -> None:
        """Start nothing more."""
        with self._lock:
            self.closed = True
            self._take_back()
            self._plain_call_ready.notify_all()
            self._changed.notify_all()
            self._notify_fetcher()

    def wait_until_none_runs(self, timeout_seconds: float) -> bool:
        """Wait until no handler runs but those that overran their time; return whether that is so."""
        with self._lock:
            return self._changed.wait_for(lambda: all(run.abandoned for run in self._runs), timeout_seconds)

    def wait_until_ended(self, runs: Collection[HandlerCall], timeout_seconds: float) -> bool:
        """Wait until calls of handlers have ended; return whether they have."""
        with self._lock:
            return self._changed.wait_for(lambda: self._runs.keys().isdisjoint(runs), timeout_seconds)

    def wait_until_settled(self, timeout_seconds: float) -> bool:
        """Wait until Redis has every outcome there is; return whether it has."""
        with self._lock:
            return self._changed.wait_for(lambda: not any(held.settling for held in self._deliveries), timeout_seconds)

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
        return any(slots.is_async and slots.calls for slots in self.queues.values())

    def _can_claim(self, claims: Sequence[QueueClaims]) -> bool:
        """Return whether one of `claims` can be made, or nothing more will be."""
        return self.closed or (bool(claims) and any(map(QueueClaims.can_claim, claims, self._capacities(claims))))

    def _capacities(self, claims: Sequence[QueueClaims]) -> list[Capacity]:
        """Return how much of each queue can be claimed, and note when there will be more."""
        free = self.concurrency
        is_busy = False
        calls = {}
        for name, slots in self.queues.items():
            calls[name] = slots.calls
            if not slots.stalled:
                free -= min(slots.limit, calls[name])
                is_busy = is_busy or slots.running > 0
        # When nothing has started for longer than calls usually take, the next will take as long.
        standstill = time.monotonic() - self._slot_given_at if is_busy else 0.0
        self._refill_at = 0
        starves = False
        capacities = []
        for claim in claims:
            slots = self.queues[claim.name]
            if slots.ended >= UNSETTLED_LIMIT or (slots.is_async and self._loop_late):
                capacities.append(Capacity(0, 0))
                continue
            hold_limit = slots.hold_limit(standstill)
            refill_at = max(hold_limit - hold_limit // 2, hold_limit - BATCH_LIMIT)
            self._refill_at = max(self._refill_at, refill_at)
            ahead = hold_limit - self._queued if self._queued <= refill_at else 0
            below_limit = slots.limit - calls[claim.name]
            direct = max(0, min(free, below_limit))
            rest = slots.rest if slots.batch > 1 and free >= 0 and below_limit >= 0 else 0
            suspects = slots.no_suspects
            if slots.suspects:
                rooms = [Suspects.room(held.delivery.claimed, slots.limit) for held in slots.suspects]
                suspects = Suspects(slots.limit, len(rooms), min(rooms))
            is_crowded = not direct and below_limit > 0
            capacity = Capacity(direct, ahead, is_crowded, slots.batch, rest, suspects)
            capacities.append(capacity)
            starves = starves or (is_crowded and claim.starves(capacity))
        if starves:
            self._refill_at = 0
            return [capacity._replace(ahead=0) for capacity in capacities]
        return capacities

    def _give_slots(self) -> None:
        """Give free slots to what was claimed first of all that may start, and call the event loop for its own."""
        now = time.monotonic()
        while not self.closed and self._free > 0 and self._slots_given < self.max_jobs:
            first: QueueSlots | None = None
            for slots in self.queues.values():
                if not slots.waiting or slots.running >= slots.limit or slots.stalled:
                    continue
                may_start = slots.batch == 1 or slots.ripe_at() <= now
                if may_start and (first is None or slots.waiting[0].fetched_at < first.waiting[0].fetched_at):
                    first = slots
            if first is None:
                break
            deliveries = first.take()
            for held in deliveries:
                del first.queued[held]
            first.running += 1
            self._queued -= len(deliveries)
            self._free -= 1
            self._slots_given += len(deliveries)
            self._slot_given_at = now
            (self._async_calls if first.is_async else self._plain_calls).append(deliveries)
        loop_wanted = self._async_calls or (self._batching and self._linger(now, is_async=True) is not None)
        if loop_wanted and not self._loop_called:
            self._loop_called = True
            self.call_loop()

    def _linger(self, now: float, *, is_async: bool) -> float | None:
        """Return the seconds until a batch that lingers now may start, None when there is none."""
        if not self._batching:
            return None
        ripe = [slots.ripe_at() for slots in self._batching if slots.is_async is is_async and slots.waiting]
        return min((at - now for at in ripe if at > now), default=None)

    def _wake_thread(self) -> None:
        """Wake a thread for the next call, or for a batch that lingers, unless one is on its way: it wakes the next."""
        if self._idle_threads and not self._waking:
            self._waking = bool(self._plain_calls) or self._linger(time.monotonic(), is_async=False) is not None
            if self._waking:
                self._plain_call_ready.notify()

    def _take_back(self) -> None:
        """Take the slots of calls that have no thread or task yet."""
        for calls in (self._plain_calls, self._async_calls):
            while calls:
                deliveries = calls.pop()
                slots = self.queues[deliveries[0].queue]
                slots.waiting.extendleft(reversed(deliveries))
                slots.queued.update(dict.fromkeys(deliveries))
                slots.running -= 1
                self._queued += len(deliveries)
                self._free += not slots.stalled
                self._slots_given -= len(deliveries)

    def _finish(self, runs: Iterable[HandlerCall]) -> None:
        """Free the slots of `runs` and give them on."""
        is_slot_unused = False
        now = time.monotonic()
        for run in runs:
            del self._runs[run]
            slots = self.queues[run.handler.queue_name]
            slots.running -= 1
            slots.ended += len(run.deliveries)
            if slots.suspects:
                slots.suspects.difference_update(run.deliveries)
            self._free += not slots.stalled
            if run.began:
                took = now - run.started_at
                slots.pace = took if slots.pace is None else slots.pace * (1 - _PACE_WEIGHT) + took * _PACE_WEIGHT
            is_slot_unused = is_slot_unused or not slots.queued  # nothing of the queue takes the slot
        if self.closed:
            self._changed.notify_all()
        self._give_slots()
        if is_slot_unused or self._queued <= self._refill_at:
            self._notify_fetcher()

    def _notify_fetcher(self) -> None:
        """Wake the fetcher wherever it waits, because there may be more to claim."""
        if self._fetcher_waits:
            self._fetcher_waits = False  # once; it notes when it waits again
            self._capacity_grew.notify()
            return
        watched = self._watched
        if watched is not None and self._can_claim(watched):
            self._watched = None
            self.poke()
