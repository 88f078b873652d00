"""Reports to Redis about deliveries: the settler sends their outcomes, the renewer extends their leases."""

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

#: A step of the settler waits at most this long for the first outcome.
FIRST_OUTCOME_SECONDS = 0.5
#: While few outcomes come, a step waits this long for more, to settle several in one round trip. A worker that dies
#: meanwhile has them done twice; nothing else is late. Where a place is limited, its next message would be: none waits
#: when nothing else of its queue is at work here.
GATHER_SECONDS = 0.002
#: Outcomes come in numbers, and a step waits for no more, when the last round trip or the queue had this many.
MANY = 20
#: One round trip settles about this many at most: Redis serves no other client meanwhile.
GATHER_LIMIT = BATCH_LIMIT
#: While anything is held the renewer looks at least this often.
RENEWER_STEP_SECONDS = 0.05
#: It goes on for this long after the last delivery, then waits for the next delivery.
IDLE_SECONDS = 1.0
#: A renewal is reported as late when this share of the rest of its lease has passed.
LATE_PART = 0.5


class Settler:
    """
    Collects outcomes and settles all that are there in one round trip, again and again until it is made.

    Whatever raises, no outcome is forgotten: a delivery leaves when Redis has answered its call, or when not even its
    failure can be sent; its lease then ends.
    """

    def __init__(self, client: Client, inflight: Inflight, buried: Callable[[], None]) -> None:
        self._client = client
        self._inflight = inflight
        self._buried = buried
        self._waiting: queue.SimpleQueue[Sequence[HeldDelivery]] = queue.SimpleQueue()
        self._unsettled: dict[HeldDelivery, None] = {}
        self._latest = 0  # how many outcomes the last round trip had
        self._backoff = QueueBackoff("settler", client.observers)

    def settle(self, deliveries: Sequence[HeldDelivery], outcome: HandlerOutcome | None = None) -> None:
        """Queue `deliveries` for settling, with one outcome for all or the one that each has."""
        for held in deliveries:
            held.settling = True
            if outcome is not None:
                held.outcome = outcome
        if deliveries:
            self._waiting.put(deliveries)

    def nudge(self) -> None:
        """End the wait of a step for the first outcome."""
        self._waiting.put([])

    def step(self) -> float:
        """Settle what is there, waiting a little for the first; return 0."""
        self._gather()
        if due := self._due():
            self._settle_all(due)
        return 0.0

    def _gather(self) -> None:
        """Wait for one outcome, unless some are due already, and a moment for more if few come; then take all."""
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
        """Return the deliveries whose shards do not back off."""
        if not self._backoff.until:
            return list(self._unsettled)
        return [held for held in self._unsettled if not self._backoff.waits(held.keys)]

    def _is_place_wanted(self) -> bool:
        """Return whether a queue's next messages may need the places of these, and no more of it is at work here."""
        limited = set()
        for held in self._unsettled:
            limits = held.handler.queue.limits
            if limits is not None and (limits.ordered or limits.per_key or limits.concurrency):
                limited.add(held.queue)
        if not limited:
            return False
        return bool(limited.difference(held.queue for held in self._inflight.deliveries() if not held.settling))

    def _settle_all(self, deliveries: list[HeldDelivery]) -> None:
        """Make every call in one round trip; what Redis did not take is made again, which is safe."""
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
        Try each outcome alone, and have messages whose outcome cannot be put into a call end as dead letters.

        Returns:
            whether there was such an outcome.
        """
        unsendable: dict[HeldDelivery, str] = {}
        for held in deliveries:
            try:
                packed([call.command for call, _ in _grouped([held])])
            except Exception as error:
                unsendable[held] = type(error).__name__
        for held, error_type in unsendable.items():
            logger.error("queue %s: an answer cannot be told to Redis (%s): a dead letter", held.queue, error_type)
            if held.outcome is UNTELLABLE:
                self._forget([held])
            held.outcome = UNTELLABLE
        return bool(unsendable)

    def _try_later(self, deliveries: list[HeldDelivery], error: Exception) -> None:
        """
        Back off from the shard of deliveries that failed by `error`.

        What Redis refuses is tried until its lease is over and the message is delivered again; what could not be sent
        because a server is away is tried until it is back.
        """
        self._backoff.note(deliveries[0].keys, error)
        if isinstance(error, RedisUnavailableError):
            _note_try(deliveries, error)
        else:
            now = time.monotonic()
            self._forget([held for held in deliveries if held.lease_until < now])


def _note_try(deliveries: Iterable[HeldDelivery], error: BaseException) -> None:
    """Mark deliveries whose calls may have run: a receipt that no longer holds is then no loss."""
    for held in deliveries:
        held.tried = held.tried or getattr(error, "maybe_ran", True)


def _grouped(deliveries: Iterable[HeldDelivery]) -> list[tuple[Call[Settled], list[HeldDelivery]]]:
    """
    Return the calls for `deliveries`, each with its own.

    The calls for deliveries whose receipt may be used up report no loss: it is known, or caused by our own first try.
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
    Extends leases and enforces timeouts, in a thread of its own, which no handler can keep waiting.

    It also gives back what has waited for a slot for too long, and pings the event loop.
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
        self._answered_at = 0.0  # when their answer came, or that of earlier ones while Redis is away
        self._held_at = 0.0  # when there was something to look at

    def is_behind(self, keys: Keys) -> bool:
        """
        Return whether Redis lacks the renewal, or the outcome, of a delivery of a shard whose renewal is due.

        The renewal may wait for an answer, or for this process, which was held up. A renewal that Redis refuses does not
        count, and an outcome counts until a third of a lease after the lease has ended: Redis may refuse it for longer.
        """
        now = time.monotonic()
        is_refused = self._backoff.refuses(keys)
        return any(
            now < held.lease_until + held.handler.lease_seconds / 3 if held.settling else not is_refused
            for held in self._inflight.deliveries()
            if held.keys is keys and held.renew_at <= now and not (held.lost or held.abandoned)
        )

    def step(self) -> float:
        """Look once; return how long nothing can need it."""
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
        """Extend the leases of `due` in one round trip."""
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
                elif not held.settling:  # else its own settling has used up its receipt
                    held.lost = True
                    lost.append(held.delivery.id)
            if lost:
                notify(self._client.observers, [LeaseLost(group[0].queue, tuple(lost), "extend")])

    def _notify_lateness(self, due: list[HeldDelivery], now: float) -> None:
        """Notify observers of a late renewal, and whether it waited for the answer to the renewal before."""
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
        Cancel a coroutine; a thread cannot be stopped: its lease is left to end and its slot is lost.

        A coroutine that has not ended CANCEL_SECONDS after it was cancelled is like a thread.
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
    Return `deliveries` as the calls that renew them: of one shard, at most BATCH_LIMIT in each.

    An answer lists messages by their ids. A process can hold two deliveries of one message, the first with a receipt
    that no longer holds; they go into different calls.
    """
    grouped: dict[tuple[Keys, int], list[HeldDelivery]] = defaultdict(list)
    seen: Counter[tuple[Keys, str]] = Counter()
    for held in deliveries:
        message = held.keys, held.delivery.id
        grouped[held.keys, seen[message]].append(held)
        seen[message] += 1
    return [group[at : at + BATCH_LIMIT] for group in grouped.values() for at in range(0, len(group), BATCH_LIMIT)]
