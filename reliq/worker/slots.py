"""
The claimed messages (deliveries) of a worker process, and its slots. A slot runs one handler call at a time.

`Inflight` stores each delivery from its claim until it is settled, that is, until Redis has stored the outcome of the
handler, for example `ack`. It also divides the free slots among the queues.

`QueueSlots` counts the messages and handler calls of one queue. A `HeldDelivery` is a claimed message. A `HandlerCall`
is one call of a handler, with one message or a batch of messages.
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
    from reliq.limits import Limit


#: How long a cancelled coroutine handler may continue to run before its slot counts as hung.
CANCEL_SECONDS = 5.0
#: How long a prefetched message may wait for a slot before it is returned to Redis.
HOLD_SECONDS = 0.1
#: Prefetch at most this many groups of messages. A group has as many messages as one round trip reads bodies. While the
#: first group starts, the bodies of the second group are read, and the third group is claimed.
HOLD_READS = 3
#: Stop claiming from a queue while this process has about this many finished messages of the queue that Redis has not
#: settled yet.
UNSETTLED_LIMIT = 4 * BATCH_LIMIT
#: The weight of the latest handler call in the moving average of call durations.
_PACE_WEIGHT = 0.2
#: The smallest average duration of a handler call, to avoid a division by zero.
_SHORTEST_SECONDS = 1e-5


class HeldDelivery(msgspec.Struct, eq=False, gc=False):
    """
    A claimed message in this process, from its claim until it is settled.

    All times are monotonic seconds.

    Deliveries are compared by identity and not by id, because a process can have two deliveries of the same message.

    Attributes:
        delivery: the delivery; without its body until the body is read.
        handler: the handler of the message's queue; in a queue of tasks, the handler of its task once its body is read.
        queue: the name of the message's queue.
        keys: the shard from which the message was claimed.
        fetched_at: when the message was claimed.
        held_since: when the message became ready to start (body read, booked time reached); before that, a future time.
        is_read: with a shared limit by cost, whether the body is read, so that a start can be booked; otherwise False.
        parked: whether it waits for its booked start without a slot.
        lease_until: when the lease expires, counted from the moment before the claim or the renewal was sent.
        renew_at: when to renew the lease.
        must_start: whether it must start at once, because it may have killed its process or has no retry left.
        started: whether the handler was called.
        took_ms: the run time of the handler in ms.
        lost: whether Redis has refused the receipt, because the message has another lease or no longer exists.
        cancelled: whether the message was cancelled after its claim.
        abandoned: whether the handler exceeded its timeout and still runs; the lease is not renewed any more.
        settling: whether the outcome is queued for Redis, or is being sent.
        outcome: the outcome; valid only while `settling`.
        tried: whether Redis may already have stored the outcome, because an earlier script call got no reply.
        trace_id: the OpenTelemetry trace id; empty without a trace.
        size: bytes of the stored body, if it is too large to be read together with other bodies; else 0.
        checkpoint: the last checkpoint of this delivery, as number, text, number of unnamed follow-up messages, and
            cursor; None without a checkpoint.
        saved: number and text of the last checkpoint that Redis has stored for this delivery.
        booked: the shared limits by cost that permitted the start, each with the booked time in Unix microseconds by
            the clock of the limit's Redis server.
        has_successor: whether its id was published again with `on_conflict` during the delivery. If so, the script
            `succeed` must settle it.
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
    checkpoint: tuple[int, str, int, Any] | None = None
    saved: tuple[int, str] = (0, "")
    has_successor: bool = False
    is_read: bool = False
    parked: bool = False
    booked: Sequence[tuple[Limit, int]] = ()

    @property
    def unsaved(self) -> bool:
        """Whether Redis has not stored the last checkpoint yet."""
        return self.checkpoint is not None and self.checkpoint[:2] != self.saved


def deliveries_of(
    claimed: Sequence[Claimed], handler: Handler, leased_at: float, keys: Keys | None = None
) -> list[HeldDelivery]:
    """
    Return a delivery for each claimed message.

    Args:
        claimed: the messages, in the order of the claim.
        handler: the handler of their queue.
        leased_at: the monotonic time just before the claim was sent.
        keys: the shard of the messages; None in a queue with one shard.
    """
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
        # Positional arguments are faster than keyword arguments, and this code runs for every message.
        deliveries.append(
            HeldDelivery(Delivery(message), handler, queue, keys, now, held_since, lease_until, renew_at, must_start)
        )
    return deliveries


class HandlerCall(msgspec.Struct, eq=False):
    """
    One call of a handler.

    Attributes:
        deliveries: the message of the call, or the messages of its batch.
        handler: the handler.
        started_at: the monotonic time of the start.
        timeout_at: the monotonic time of the timeout; None for no timeout.
        began: whether the handler was called.
        abandoned: whether the call exceeded its timeout.
        thread: the id of the thread of a plain handler; 0 for a coroutine handler.
        task: the asyncio task of a coroutine handler; None for a plain handler.
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
        """Return the arguments for the handler function: the body or bodies, and the job or jobs if it takes jobs."""
        if self.handler.is_batch:
            bodies = [job.body for job in jobs]
            return (bodies, jobs) if self.handler.takes_job else (bodies,)
        return (jobs[0].body, jobs[0]) if self.handler.takes_job else (jobs[0].body,)

    @property
    def unanswered(self) -> list[HeldDelivery]:
        """The deliveries that have no outcome yet."""
        for held in self.deliveries:
            if held.settling:
                return [held for held in self.deliveries if not held.settling]
        return self.deliveries

    @property
    def hangs(self) -> bool:
        """Whether the call exceeded its timeout and cannot be cancelled."""
        if not self.handler.is_async:
            return self.abandoned
        now = time.monotonic()
        return self.abandoned and now > (self.timeout_at or now) + CANCEL_SECONDS


def started_call(deliveries: list[HeldDelivery], thread: int = 0) -> HandlerCall:
    """Return a handler call for `deliveries` that starts now."""
    handler = deliveries[0].handler
    now = time.monotonic()
    timeout = handler.timeout_seconds
    for held in deliveries:
        held.started = True
    return HandlerCall(deliveries, handler, now, None if timeout is None else now + timeout, thread=thread)


class QueueSlots:
    """
    The messages and handler calls of one queue in this process.

    Attributes:
        is_async: whether the handler is a coroutine function.
        is_mixed: whether the queue has tasks of both kinds, plain and coroutine functions.
        limit: the maximum number of concurrent handler calls.
        batch: the maximum number of messages in a handler call.
        linger: the seconds that an incomplete batch waits for more messages; 0 with shared limits, because a call then
            starts at its booked time.
        waiting: the deliveries with bodies that wait for a slot, in order.
        queued: all deliveries without a slot: the deliveries in `waiting`, those that wait for a booked start, and
            those whose bodies are not read yet.
        parked: the number of deliveries that wait for a booked start of a shared limit; they need no slot yet.
        running: the number of slots in use.
        coroutines: the number of slots in use by calls of coroutine functions.
        ended: the number of unsettled deliveries whose handler has ended, or that are to be returned to Redis.
        pace: the moving average of call durations in seconds; None before the first call has ended.
        read_limit: the maximum number of bodies that one round trip reads.
        suspects: the suspects in this process (messages that may have killed a process), except suspects of calls that
            exceeded their timeout.
        no_suspects: the argument `suspects` of a claim while this process has no suspects.
        stalled: whether the event loop is blocked. If so, calls of coroutine functions get no slots, and the slots that
            they use count as free.
    """

    def __init__(self, handler: Handler, concurrency: int) -> None:
        cap = handler.settings.concurrency
        self.is_async = handler.is_async
        self.is_mixed = len({each.is_async for each in handler.each}) > 1
        self.limit = concurrency if cap is None else min(cap, concurrency)
        self.batch = handler.batch
        self.linger = 0.0 if handler.queue.limits else handler.linger_seconds
        self.waiting: deque[HeldDelivery] = deque()
        self.queued: dict[HeldDelivery, None] = {}
        self.parked = 0
        self.running = self.coroutines = 0
        self.ended = 0
        self.pace: float | None = None
        self.read_limit = BATCH_LIMIT
        self.suspects: set[HeldDelivery] = set()
        self.no_suspects = Suspects(self.limit, 0, self.limit)
        self.stalled = False

    @property
    def calls(self) -> int:
        """The number of running handler calls plus the number of handler calls that the queued deliveries need."""
        return self.running + (len(self.queued) - self.parked + self.batch - 1) // self.batch

    @property
    def is_partly_stalled(self) -> bool:
        """Whether the event loop is blocked, while plain tasks of the queue can run."""
        return self.stalled and self.is_mixed

    @property
    def rest(self) -> int:
        """The number of messages that are missing to complete the last batch of queued messages."""
        return (self.parked - len(self.queued)) % self.batch

    def hold_limit(self, standstill: float) -> int:
        """
        Return how many messages to prefetch: the number that will start within HOLD_SECONDS at the current pace.

        Args:
            standstill: the seconds since a handler call last got a slot. If they are longer than the average duration
                of a call, they are used instead.
        """
        if self.pace is None:
            return 0
        pace = max(self.pace, standstill, _SHORTEST_SECONDS)
        if pace >= HOLD_SECONDS:
            return 0
        return min(HOLD_READS * self.read_limit, int(self.limit * self.batch * HOLD_SECONDS / pace))

    def ripe_at(self) -> float:
        """
        Return the monotonic time at which the next handler call may start; 0 if it may start now.

        An incomplete batch may start later, when its linger time is over.
        """
        if self.waiting[0].must_start or self._first_of_full_batch() is not None:
            return 0.0
        return self.waiting[0].held_since + self.linger

    def take(self) -> list[HeldDelivery]:
        """
        Remove the messages of the next handler call from `waiting`, and return them.

        A message that must start at once gets its own call.
        """
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
    The messages and handler calls of a queue with `batch_by_key`.

    All messages of a handler call have the same message key, or none of them has a message key.

    A full batch starts before a batch that still lingers for more messages.
    """

    @property
    def calls(self) -> int:
        """
        The number of running handler calls plus the number of handler calls that the queued deliveries need.

        Each message key needs at least one call.
        """
        return self.running + sum(
            -(-count // self.batch) for count in Counter(_key(held) for held in self.queued if not held.parked).values()
        )

    @property
    def rest(self) -> int:
        """Always 0: a claim cannot ask for messages of a certain message key to fill a batch."""
        return 0

    def take(self) -> list[HeldDelivery]:
        """Remove the messages of the next handler call from `waiting`, all with the same message key; return them."""
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
        """Return the first message of a key with a full batch."""
        sizes = Counter(_key(held) for held in self.waiting if not held.must_start)
        return next((held for held in self.waiting if sizes[_key(held)] >= self.batch), None)


def _key(held: HeldDelivery) -> str | None:
    return held.delivery.claimed.key


class Inflight:
    """
    Store the deliveries of a process until they are settled, and share its slots among its queues.

    Every public method is atomic. A free slot is given at once to a handler call that waits for it. If several calls
    get slots, only one idle thread is woken. This thread takes a call and then wakes the next thread.

    The fetcher waits in `wait_for_capacity` for room for more messages. If the fetcher waits for wake-ups from Redis
    instead, `watch` ends this wait when there is room.

    Args:
        handlers: the handlers of this process.
        concurrency: the number of slots.

    Attributes:
        concurrency: the number of slots.
        started: the number of messages passed to handlers so far.
        closed: whether the shutdown has begun, so that no more handler calls start.
        max_jobs: the number of messages after which no more handler calls start.
        call_loop: called to notify the event loop that a coroutine handler may start.
        poke: called to end the fetcher's wait for wake-ups from Redis.
        queues: the slots of each queue, by queue name.
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
        self._slots_given = 0  # the number of messages that have got a slot so far
        self._slot_given_at = 0.0  # the monotonic time at which a handler call last got a slot
        self._offered_at = 0.0  # the monotonic time at which free slots were last offered to waiting messages
        self._queued = 0  # the number of claimed messages without a slot
        self._refill_at = 0  # when at most this many messages wait for slots, the fetcher is notified to claim more
        self._loop_late = False  # whether the event loop has not answered a ping
        self._lock = threading.Lock()
        self._plain_call_ready = threading.Condition(self._lock)  # notified when a plain handler may start
        self._capacity_grew = threading.Condition(self._lock)  # notified when the fetcher can claim more messages
        self._changed = threading.Condition(self._lock)  # notified when a call ends, or the first delivery is added
        self._deliveries: dict[HeldDelivery, None] = {}  # all deliveries, in the order of their claims
        self._plain_calls: deque[list[HeldDelivery]] = deque()  # have a slot, wait for a thread
        self._async_calls: deque[list[HeldDelivery]] = deque()  # have a slot, wait for a task
        self._runs: dict[HandlerCall, None] = {}
        self._idle_threads = 0  # the number of threads that wait for a handler call
        self._waking = False  # whether an idle thread was notified and has not yet woken up
        self._loop_called = False  # whether the event loop was notified and has not yet fetched its calls
        self._fetcher_waits = False  # whether the fetcher waits in `wait_for_capacity`
        self._watched: Sequence[QueueClaims] | None = None  # the argument of `watch`; None after `poke` or `unwatch`

    def add(self, deliveries: Sequence[HeldDelivery]) -> None:
        """Add claimed deliveries, all of the same queue."""
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
        """Wait until there are deliveries, or the process stops claiming."""
        with self._lock:
            self._changed.wait_for(lambda: self._deliveries or self.closed, timeout_seconds)

    def wait_for_capacity(self, claims: Sequence[QueueClaims], timeout_seconds: float) -> list[Capacity]:
        """
        Return how many messages this process can claim from each shard in `claims`.

        If it has no room for any message, first wait at most `timeout_seconds` for room.
        """
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
        """
        Arrange that `poke` is called once, when this process can claim messages from a shard in `claims`.

        Returns:
            False if this process can already claim from one of these shards. Then `poke` will not be called.
        """
        with self._lock:
            self._watched = None if self._can_claim(claims) else claims
            return self._watched is not None

    def unwatch(self) -> None:
        """Undo `watch`, after the fetcher has waited for wake-ups from Redis."""
        self._watched = None

    def enqueue(self, deliveries: Iterable[HeldDelivery]) -> int:
        """
        Let `deliveries` wait for slots, and give them the free slots.

        In a queue with batches, a message that must start at once is put before the other waiting messages.

        Returns:
            The number of threads that plain handlers can use now.
        """
        with self._lock:
            for held in deliveries:
                slots = self.queues[held.queue]
                slots.parked -= held.parked
                held.parked = False
                if not (held.settling or (slots.stalled and slots.is_mixed and held.handler.is_async)):
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

    def park(self, deliveries: Iterable[HeldDelivery]) -> None:
        """Let `deliveries` wait without a slot until `enqueue` is called with them."""
        with self._lock:
            for held in deliveries:
                if not (held.settling or held.parked):
                    held.parked = True
                    self.queues[held.queue].parked += 1

    def next_plain(self, done: HandlerCall | None) -> HandlerCall | None:
        """
        Free the slot of the ended call `done`. Then wait for the next call of a plain handler and mark it as started.

        Returns:
            The handler call that this thread must run; None after `close`.
        """
        with self._lock:
            if done is not None:
                self._finish((done,))
            while not (self._plain_calls or self.closed):
                # Before this thread began to wait, the linger time of a batch may have ended. Then start it now.
                if self._batching:
                    self._give_slots()
                    if self._plain_calls:
                        break
                linger = self._linger(is_async=False)
                self._idle_threads += 1
                try:
                    self._plain_call_ready.wait(linger)
                finally:  # the application may raise an exception in this thread, for example for its own time limit
                    self._idle_threads -= 1
                    self._waking = False
            if self.closed:
                return None
            run = started_call(self._plain_calls.popleft(), threading.get_ident())
            self._runs[run] = None
            self.started += len(run.deliveries)
            self._wake_thread()
            return run

    def next_async(self, done: Sequence[HandlerCall]) -> tuple[list[HandlerCall], float | None]:
        """
        Free the slots of the ended calls `done`, and mark all calls of coroutine handlers with a slot as started.

        Returns:
            The handler calls that the event loop must run, and the seconds until a lingering batch may start; None
            instead of the seconds if no batch lingers.
        """
        with self._lock:
            self._loop_called = True  # the caller is the event loop, so it needs no notification
            self._finish(done)
            self._wake_thread()
            runs = [started_call(deliveries) for deliveries in self._async_calls]
            self._async_calls.clear()
            for run in runs:
                self._runs[run] = None
                self.started += len(run.deliveries)
            self._loop_called = False
            return runs, self._linger(is_async=True)

    def withdraw(self, deliveries: Iterable[HeldDelivery]) -> list[HeldDelivery]:
        """
        Take back those of `deliveries` that have not started, so that they get no slot, and return them.

        They are marked as `settling`, so the caller must settle them.
        """
        with self._lock:
            waiting = [held for held in deliveries if not (held.started or held.settling)]
            if not waiting:
                return waiting
            self._take_back()
            for held in waiting:
                held.settling = True
                slots = self.queues[held.queue]
                del slots.queued[held]
                slots.parked -= held.parked
                held.parked = False
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
        Store whether the event loop is late or blocked.

        While the loop is late, no messages are claimed for coroutine handlers. While it is blocked, coroutine handlers
        get no slots, and the slots of running coroutine handlers count as free.
        """
        with self._lock:
            self._loop_late = is_late
            for slots in self.queues.values():
                slots.stalled = is_blocked and (slots.is_async or slots.is_mixed)
                if slots.is_partly_stalled:
                    slots.waiting = deque(held for held in slots.waiting if not held.handler.is_async)
            self._free = self.concurrency
            for slots in self.queues.values():
                self._free -= slots.running - (slots.coroutines if slots.stalled else 0)
            self._give_slots()
            self._wake_thread()
            self._notify_fetcher()

    def settled(self, deliveries: Iterable[HeldDelivery]) -> None:
        """Remove `deliveries` from this process, because they are settled."""
        with self._lock:
            for held in deliveries:
                if held in self._deliveries:
                    del self._deliveries[held]
                    self.queues[held.queue].ended -= 1
            self._changed.notify_all()
            self._notify_fetcher()

    def abandon(self, run: HandlerCall) -> None:
        """Mark a handler call that exceeded its timeout as abandoned, so that a shutdown does not wait for it."""
        with self._lock:
            if run in self._runs and not run.abandoned:
                run.abandoned = True
                # Suspects of this call (messages that may have killed a process) do not count any more, so that other
                # suspects can run.
                self.queues[run.handler.queue_name].suspects.difference_update(run.deliveries)
                self._changed.notify_all()
                self._notify_fetcher()

    def close(self) -> None:
        """Start no more handler calls, and wake the threads that wait for a call, for deliveries or for room."""
        with self._lock:
            self.closed = True
            self._take_back()
            self._plain_call_ready.notify_all()
            self._changed.notify_all()
            self._notify_fetcher()

    def wait_until_none_runs(self, timeout_seconds: float) -> bool:
        """
        Wait until no handler runs; return False if handlers still run after `timeout_seconds`.

        Handlers that exceeded their timeout do not count.
        """
        with self._lock:
            return self._changed.wait_for(lambda: all(run.abandoned for run in self._runs), timeout_seconds)

    def wait_until_ended(self, runs: Collection[HandlerCall], timeout_seconds: float) -> bool:
        """Wait until the handler calls `runs` have ended; return whether all have ended."""
        with self._lock:
            return self._changed.wait_for(lambda: self._runs.keys().isdisjoint(runs), timeout_seconds)

    def wait_until_settled(self, timeout_seconds: float) -> bool:
        """Wait until all outcomes are settled in Redis; return whether all are settled."""
        with self._lock:
            return self._changed.wait_for(lambda: not any(held.settling for held in self._deliveries), timeout_seconds)

    def deliveries(self) -> list[HeldDelivery]:
        """Return all deliveries: prefetched, running, or being settled."""
        with self._lock:
            return list(self._deliveries)

    def runs(self) -> list[HandlerCall]:
        """Return the running handler calls."""
        with self._lock:
            return list(self._runs)

    @property
    def loop_is_used(self) -> bool:
        """Whether messages run on the event loop, or may need it when they get a slot."""
        return any((slots.is_async or slots.is_mixed) and slots.calls for slots in self.queues.values())

    def _can_claim(self, claims: Sequence[QueueClaims]) -> bool:
        """Return whether a claim from a shard in `claims` could return messages, or the shutdown has begun."""
        return self.closed or (bool(claims) and any(map(QueueClaims.can_claim, claims, self._capacities(claims))))

    def _capacities(self, claims: Sequence[QueueClaims]) -> list[Capacity]:
        """
        Return how many messages this process can claim from each shard in `claims`.

        Also store in `_refill_at` at which number of queued messages the fetcher is notified to claim more.
        """
        free = self.concurrency
        is_busy = False
        calls = {}
        for name, slots in self.queues.items():
            calls[name] = slots.calls - (slots.coroutines if slots.stalled else 0)
            if not slots.stalled or slots.is_mixed:
                free -= min(slots.limit, calls[name])
                is_busy = is_busy or slots.running > 0
        # The seconds since the last handler call got a slot. If they exceed the average duration of a call,
        # `hold_limit` uses them instead.
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
        """
        Give free slots to the handler calls that may start, the call with the oldest claim first.

        If a coroutine handler got a slot, or its batch lingers for more messages, notify the event loop.
        """
        now = self._offered_at = time.monotonic()
        while not self.closed and self._free > 0 and self._slots_given < self.max_jobs:
            first: QueueSlots | None = None
            for slots in self.queues.values():
                if not slots.waiting or (slots.stalled and slots.is_async):
                    continue
                if slots.running - (slots.coroutines if slots.stalled else 0) >= slots.limit:
                    continue
                may_start = slots.batch == 1 or slots.ripe_at() <= now
                if may_start and (first is None or slots.waiting[0].fetched_at < first.waiting[0].fetched_at):
                    first = slots
            if first is None:
                break
            deliveries = first.take()
            for held in deliveries:
                del first.queued[held]
            is_async = deliveries[0].handler.is_async
            first.running += 1
            first.coroutines += is_async
            self._queued -= len(deliveries)
            self._free -= 1
            self._slots_given += len(deliveries)
            self._slot_given_at = now
            (self._async_calls if is_async else self._plain_calls).append(deliveries)
        loop_wanted = self._async_calls or (self._batching and self._linger(is_async=True) is not None)
        if loop_wanted and not self._loop_called:
            self._loop_called = True
            self.call_loop()

    def _linger(self, *, is_async: bool) -> float | None:
        """
        Return the seconds from the last offer of slots until the next incomplete batch may start.

        Return None if no batch lingers for more messages. The time of the offer counts, not the present: a batch that
        has become ready to start since then has not been offered a slot yet.
        """
        if not self._batching:
            return None
        ripe = [slots.ripe_at() for slots in self._batching if slots.is_async is is_async and slots.waiting]
        return min((at - self._offered_at for at in ripe if at > self._offered_at), default=None)

    def _wake_thread(self) -> None:
        """
        Wake an idle thread if a handler call has got a slot, or if a batch lingers for more messages.

        If a thread is already being woken, do nothing.
        """
        if self._idle_threads and not self._waking:
            self._waking = bool(self._plain_calls) or self._linger(is_async=False) is not None
            if self._waking:
                self._plain_call_ready.notify()

    def _take_back(self) -> None:
        """Take the slots from calls that no thread or task has started; their messages wait for a slot again."""
        for calls in (self._plain_calls, self._async_calls):
            while calls:
                deliveries = calls.pop()
                slots = self.queues[deliveries[0].queue]
                slots.waiting.extendleft(reversed(deliveries))
                slots.queued.update(dict.fromkeys(deliveries))
                is_async = deliveries[0].handler.is_async
                slots.running -= 1
                slots.coroutines -= is_async
                self._queued += len(deliveries)
                self._free += not (slots.stalled and is_async)
                self._slots_given -= len(deliveries)

    def _finish(self, runs: Iterable[HandlerCall]) -> None:
        """Free the slots of the ended calls `runs` and give these slots to the next calls."""
        is_slot_unused = False
        now = time.monotonic()
        for run in runs:
            del self._runs[run]
            slots = self.queues[run.handler.queue_name]
            is_async = run.handler.is_async
            slots.running -= 1
            slots.coroutines -= is_async
            slots.ended += len(run.deliveries)
            if slots.suspects:
                slots.suspects.difference_update(run.deliveries)
            self._free += not (slots.stalled and is_async)
            if run.began:
                took = now - run.started_at
                slots.pace = took if slots.pace is None else slots.pace * (1 - _PACE_WEIGHT) + took * _PACE_WEIGHT
            is_slot_unused = is_slot_unused or len(slots.queued) == slots.parked
        if self.closed:
            self._changed.notify_all()
        self._give_slots()
        if is_slot_unused or self._queued <= self._refill_at:
            self._notify_fetcher()

    def _notify_fetcher(self) -> None:
        """End the fetcher's wait if this process may have room for more messages."""
        if self._fetcher_waits:
            self._fetcher_waits = False  # notify only once
            self._capacity_grew.notify()
            return
        watched = self._watched
        if watched is not None and self._can_claim(watched):
            self._watched = None
            self.poke()
