"""Settle and renew deliveries in Redis: the settler sends outcomes, the renewer renews leases."""

from __future__ import annotations

import logging
import queue
import time
from collections import Counter, defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from reliq.errors import RedisUnavailableError, ReliqError
from reliq.events import Handled, LeaseLost, RenewalLate, notify
from reliq.handlers import settlement
from reliq.handlers.settlement import ACKED, RELEASED, UNTELLABLE, HandlerOutcome, is_final
from reliq.lua import transitions
from reliq.redis.connection import packed
from reliq.settings import BATCH_LIMIT
from reliq.text import printable
from reliq.worker.loop import QueueBackoff
from reliq.worker.slots import HOLD_SECONDS, HandlerCall, HeldDelivery, Inflight

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from reliq.handlers.handler import Handler
    from reliq.keys import Keys
    from reliq.lua.transitions import Settled
    from reliq.redis.client import Client
    from reliq.redis.commands import Call
    from reliq.worker.runner import AsyncExecutor


logger = logging.getLogger(__name__)

#: How long a step of the settler waits for the first outcome.
FIRST_OUTCOME_SECONDS = 0.5
#: With few outcomes, a step waits this long for more, to settle several in one round trip. If the worker dies
#: meanwhile, these messages run twice. It does not wait if the next message of a limited queue could be delayed.
GATHER_SECONDS = 0.002
#: A step does not wait for more outcomes if the last round trip, or the queue, had this many.
MANY = 20
#: The most outcomes of a round trip, roughly, because Redis serves no other client meanwhile.
GATHER_LIMIT = BATCH_LIMIT
#: The longest interval between two checks of the renewer while there are deliveries.
RENEWER_STEP_SECONDS = 0.05
#: How long the renewer keeps checking after the last delivery, before it waits for the next.
IDLE_SECONDS = 1.0
#: A renewal counts as late if this share of the remaining lease has passed.
LATE_PART = 0.5


class Settler:
    """
    Collect outcomes and settle them together in one round trip; retry until Redis has answered.

    No outcome is dropped before Redis has answered its call, except an outcome that cannot be encoded at all: that
    message is redelivered when its lease expires.
    """

    def __init__(self, client: Client, inflight: Inflight, buried: Callable[[], None]) -> None:
        self._client = client
        self._inflight = inflight
        self._buried = buried
        self._waiting: queue.SimpleQueue[Sequence[HeldDelivery]] = queue.SimpleQueue()
        self._unsettled: dict[HeldDelivery, None] = {}
        self._latest = 0  # the number of outcomes in the last round trip
        self._backoff = QueueBackoff("settler", client.observers)

    def settle(self, deliveries: Sequence[HeldDelivery], outcome: HandlerOutcome | None = None) -> None:
        """Queue `deliveries` to be settled with `outcome`, or with their own outcomes if it is None."""
        for held in deliveries:
            held.settling = True
            if outcome is not None:
                held.outcome = outcome
        if deliveries:
            self._waiting.put(deliveries)

    def nudge(self) -> None:
        """End the current wait for an outcome."""
        self._waiting.put([])

    def step(self) -> float:
        """Settle the queued outcomes, after a short wait for the first; return 0."""
        self._gather()
        if due := self._due():
            self._settle_all(due)
        return 0.0

    def _gather(self) -> None:
        """Take the queued outcomes; wait for the first, and a moment for more if there are few."""
        room = GATHER_LIMIT - len(self._due())
        try:
            if room == GATHER_LIMIT:
                wait = min([FIRST_OUTCOME_SECONDS, *(self._backoff.seconds_of(held.keys) for held in self._unsettled)])
                first = self._waiting.get(timeout=wait)
                self._unsettled |= dict.fromkeys(first)
                is_many = max(self._latest, self._waiting.qsize()) >= MANY
                if first and not is_many and not self._is_place_wanted():
                    time.sleep(GATHER_SECONDS)
            while room > 0:
                ended = self._waiting.get_nowait()
                self._unsettled |= dict.fromkeys(ended)
                room -= len(ended)
        except queue.Empty:
            return

    def _due(self) -> list[HeldDelivery]:
        """Return the deliveries of shards that are not in backoff."""
        if not self._backoff.until:
            return list(self._unsettled)
        return [held for held in self._unsettled if not self._backoff.waits(held.keys)]

    def _is_place_wanted(self) -> bool:
        """Return whether a limited queue may wait for these outcomes, because nothing else of it runs here."""
        limited = set()
        for held in self._unsettled:
            limits = held.handler.queue.limits
            if limits is not None and (limits.ordered or limits.per_key or limits.concurrency):
                limited.add(held.queue)
        if not limited:
            return False
        return bool(limited.difference(held.queue for held in self._inflight.deliveries() if not held.settling))

    def _settle_all(self, deliveries: list[HeldDelivery]) -> None:
        """Send all calls in one round trip. Calls without an answer are repeated later, which is safe."""
        self._latest = len(deliveries)
        try:
            groups = _grouped(deliveries)
            answers = self._client.run_all([call for call, _ in groups])
        except BaseException as error:
            _note_try(deliveries, error)
            if isinstance(error, ReliqError) or not self._drop_unsendable(deliveries):
                raise
            return
        for (_, group), answer in zip(groups, answers, strict=True):
            if isinstance(answer, Exception):
                self._try_later(group, answer)
                continue
            self._forget(group)
            if self._backoff.until:
                self._backoff.over(group[0].keys)
            is_ack = group[0].outcome is ACKED
            if not is_ack and any(is_final(held.delivery.claimed, held.outcome) for held in group):
                self._buried()

    def _forget(self, deliveries: Sequence[HeldDelivery]) -> None:
        self._inflight.settled(deliveries)
        for held in deliveries:
            del self._unsettled[held]

    def _drop_unsendable(self, deliveries: list[HeldDelivery]) -> bool:
        """
        Find outcomes that cannot be encoded in a call, and make their messages dead letters.

        Returns:
            Whether there was such an outcome.
        """
        unsendable: dict[HeldDelivery, str] = {}
        for held in deliveries:
            try:
                packed([call.command for call, _ in _grouped([held])])
            except Exception as error:
                unsendable[held] = type(error).__name__
        for held, error_type in unsendable.items():
            logger.error(
                "queue %s: message %s: the answer of the handler cannot be sent to Redis (%s); it "
                "becomes a dead letter",
                *(held.queue, printable(held.delivery.id), error_type),
            )
            if held.outcome is UNTELLABLE:
                self._forget([held])
            held.outcome = UNTELLABLE
        return bool(unsendable)

    def _try_later(self, deliveries: list[HeldDelivery], error: Exception) -> None:
        """
        Back off from the shard of deliveries that could not be settled because of `error`.

        Refused outcomes are retried until the lease expires and the message is redelivered. If the server is
        unavailable, they are retried until it is back.
        """
        self._backoff.note(deliveries[0].keys, error)
        if isinstance(error, RedisUnavailableError):
            _note_try(deliveries, error)
        else:
            now = time.monotonic()
            self._forget([held for held in deliveries if held.lease_until < now])


def _note_try(deliveries: Iterable[HeldDelivery], error: BaseException) -> None:
    """Mark deliveries that may already be settled: an invalid receipt then does not mean a lost lease."""
    for held in deliveries:
        held.tried = held.tried or getattr(error, "maybe_ran", True)


def _grouped(deliveries: Iterable[HeldDelivery]) -> list[tuple[Call[Settled], list[HeldDelivery]]]:
    """
    Return the calls for `deliveries`, each with its deliveries.

    Calls for lost or possibly settled deliveries do not report a lost lease.
    """
    by_shard: dict[tuple[Keys, bool], list[HeldDelivery]] = defaultdict(list)
    for held in deliveries:
        by_shard[held.keys, held.lost or held.tried].append(held)
    calls = []
    for (keys, is_quiet), group in by_shard.items():
        of_group = settlement.calls(keys, group[0].handler.queue.settings, group)
        calls += [(_without_loss(call), piece) for call, piece in of_group] if is_quiet else of_group
    return calls


def _without_loss(call: Call[Settled]) -> Call[Settled]:
    return replace(
        call, events=lambda answer: [event for event in call.events(answer) if not isinstance(event, LeaseLost)]
    )


class Renewer:
    """
    Renew leases and enforce timeouts in a separate thread, which handlers do not delay.

    It also returns messages that have waited too long for a slot, and pings the event loop.
    """

    def __init__(
        self,
        client: Client,
        handlers: Sequence[Handler],
        inflight: Inflight,
        async_executor: AsyncExecutor,
        settle: Callable[[list[HeldDelivery], HandlerOutcome], None],
        report_overrun: Callable[[HandlerCall, float], None] = lambda _run, _seconds: None,
    ) -> None:
        self._client = client
        self._inflight = inflight
        self._async_executor = async_executor
        self._settle = settle
        self._report_overrun = report_overrun
        self._look_seconds = min([RENEWER_STEP_SECONDS, *(handler.lease_seconds / 6 for handler in handlers)])
        self._backoff = QueueBackoff("renewer", client.observers)
        self._asked_at = 0.0  # when the last renewals were sent
        self._answered_at = 0.0  # when the last answer to renewals came
        self._held_at = 0.0  # when there were deliveries

    def is_behind(self, keys: Keys) -> bool:
        """
        Return whether a renewal or outcome for this shard is overdue in Redis.

        Then expired leases must not be reclaimed, because they may be leases of this process. Refused renewals do not
        count. Outcomes count until a third of a lease after their lease has expired.
        """
        now = time.monotonic()
        is_refused = self._backoff.refuses(keys)
        return any(
            now < held.lease_until + held.handler.lease_seconds / 3 if held.settling else not is_refused
            for held in self._inflight.deliveries()
            if held.keys is keys and held.renew_at <= now and not (held.lost or held.abandoned)
        )

    def step(self) -> float:
        """Check all deliveries once; return the seconds until the next check."""
        now = time.monotonic()
        deliveries = self._inflight.deliveries()
        if not deliveries:
            if now - self._held_at <= IDLE_SECONDS or self._inflight.closed:
                return self._look_seconds
            self._inflight.wait_for_deliveries(IDLE_SECONDS)
            return 0.0
        self._held_at = now
        for run in self._inflight.runs():
            if run.timeout_at is not None and now > run.timeout_at and run.unanswered:
                self._overran(run, now)
        self._settle(self._async_executor.watch(now), RELEASED)
        latest = now - HOLD_SECONDS
        waiting = [
            held for held in deliveries if not held.started and held.held_since + held.handler.linger_seconds < latest
        ]
        self._settle(self._inflight.withdraw(waiting), RELEASED)
        due = [
            held for held in deliveries if held.renew_at <= now and not (held.settling or held.lost or held.abandoned)
        ]
        self._extend(due)
        return self._look_seconds if time.monotonic() - now < self._look_seconds else 0.0

    def _extend(self, due: list[HeldDelivery]) -> None:
        """Renew the leases of `due` in one round trip."""
        groups = _groups([held for held in due if not self._backoff.waits(held.keys)])
        if not groups:
            return
        sent_at = time.monotonic()
        if self._answered_at >= self._asked_at:
            self._notify_lateness([held for held in due if not self._backoff.has(held.keys)], sent_at)
        self._asked_at = sent_at
        calls = []
        for group in groups:
            receipts = [held.delivery.claimed for held in group]
            calls.append(transitions.extend(group[0].keys, receipts, lease_ms=group[0].handler.lease_ms))
        answers = self._client.run_all(calls)
        self._answered_at = time.monotonic()
        for group, answer in zip(groups, answers, strict=True):
            if isinstance(answer, Exception):
                self._backoff.note(group[0].keys, answer)
                continue
            self._backoff.over(group[0].keys)
            lease_seconds = group[0].handler.lease_seconds
            lost = []
            for held in group:
                if held.delivery.id not in answer.lost:
                    held.lease_until = sent_at + lease_seconds
                    held.renew_at = sent_at + lease_seconds / 3
                    held.cancelled = held.cancelled or held.delivery.id in answer.cancelled
                elif not held.settling:  # else it may be settled already, which ends its receipt
                    held.lost = True
                    lost.append(held.delivery.id)
            if lost:
                notify(self._client.observers, [LeaseLost(group[0].queue, tuple(lost), "extend")])

    def _notify_lateness(self, due: list[HeldDelivery], now: float) -> None:
        """Notify observers of a late renewal, and whether Redis or this process caused the delay."""
        if not due:
            return
        first = min(due, key=lambda held: held.renew_at)
        late = now - first.renew_at
        if late > LATE_PART * (first.lease_until - first.renew_at):
            waited = self._answered_at - max(self._asked_at, first.renew_at)
            cause: Literal["process", "redis"] = "redis" if waited > late / 2 else "process"
            notify(self._client.observers, [RenewalLate(first.queue, late, cause)])

    def _overran(self, run: HandlerCall, now: float) -> None:
        """
        Handle a timeout: cancel a coroutine; give up a thread, which cannot be cancelled.

        A handler that is given up keeps its slot, and its leases are not renewed any more. A coroutine is given up if
        it still runs CANCEL_SECONDS after it was cancelled.
        """
        if run.handler.is_async and run.task is None:
            return
        is_first = not run.abandoned
        self._inflight.abandon(run)
        if run.hangs:
            for held in run.deliveries:
                held.abandoned = True
        if is_first and run.handler.is_async:
            self._async_executor.call(run.task.cancel)
        elif is_first and run.abandoned:
            seconds = (now - run.started_at) / len(run.deliveries)
            events = [
                Handled(held.queue, held.delivery.id, held.delivery.attempt, "timeout", seconds, failed=True)
                for held in run.unanswered
            ]
            notify(self._client.observers, events)
            self._report_overrun(run, seconds)


def _groups(deliveries: Sequence[HeldDelivery]) -> list[list[HeldDelivery]]:
    """
    Group `deliveries` by shard for renewal, at most BATCH_LIMIT in each group.

    Answers list message ids. A process can have two deliveries of a message, the first with an expired lease, so these
    go into different groups.
    """
    grouped: dict[tuple[Keys, int], list[HeldDelivery]] = defaultdict(list)
    seen: Counter[tuple[Keys, str]] = Counter()
    for held in deliveries:
        message = held.keys, held.delivery.id
        grouped[held.keys, seen[message]].append(held)
        seen[message] += 1
    return [group[at : at + BATCH_LIMIT] for group in grouped.values() for at in range(0, len(group), BATCH_LIMIT)]
