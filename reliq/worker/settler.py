"""
The settler sends the outcomes of messages to Redis, and the renewer renews leases.

A message is settled when Redis has stored its outcome, for example `ack` or `nack`.
"""

from __future__ import annotations

import logging
import queue
import time
from collections import Counter, defaultdict
from contextlib import suppress
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
    from reliq.lua.transitions import Booking, Settled
    from reliq.redis.client import Client
    from reliq.redis.commands import Call
    from reliq.worker.runner import AsyncExecutor


logger = logging.getLogger(__name__)

#: How long a step of the settler waits for an outcome if there is none to settle.
FIRST_OUTCOME_SECONDS = 0.5
#: If there are few outcomes, the settler waits this long for more outcomes, to settle all of them in one round trip.
#: If the worker dies during this wait, the messages with these outcomes run again.
#: The settler does not wait if this could delay a message of a queue with limits.
GATHER_SECONDS = 0.002
#: A step does not wait for more outcomes if the last round trip settled this many outcomes, or if this many are queued.
MANY = 20
#: The approximate limit of outcomes in one round trip. Redis serves no other client while it settles them.
GATHER_LIMIT = BATCH_LIMIT
#: The longest interval between two checks of the renewer while there are deliveries.
RENEWER_STEP_SECONDS = 0.05
#: How often the checkpoints of running jobs are stored. If its process is killed, a job repeats about this much work.
CHECKPOINT_SECONDS = 1.0
#: How long the renewer keeps checking after the last delivery was settled, before it sleeps until the next delivery.
IDLE_SECONDS = 1.0
#: A renewal is late if it starts after this share of the time between its planned start and the end of the lease.
LATE_PART = 0.5


class Settler:
    """
    Collect the outcomes of messages and send them to Redis together, again and again until Redis has replied.

    The settler drops an outcome only if Redis refuses it until the lease has expired, or if the outcome cannot be
    encoded at all. Then the message is redelivered when its lease expires.

    Args:
        client: the client for all script calls.
        inflight: the deliveries of this process.
        buried: called after a message has failed for good, to collect its dead letter.
    """

    def __init__(self, client: Client, inflight: Inflight, buried: Callable[[], None]) -> None:
        self._client = client
        self._inflight = inflight
        self._buried = buried
        self._waiting: queue.SimpleQueue[Sequence[HeldDelivery]] = queue.SimpleQueue()
        self._unsettled: dict[HeldDelivery, None] = {}
        self._latest = 0  # the number of outcomes in the latest round trip
        self._backoff = QueueBackoff("settler", client.observers)

    def settle(self, deliveries: Sequence[HeldDelivery], outcome: HandlerOutcome | None = None) -> None:
        """
        Queue `deliveries`, to be settled with `outcome`.

        If `outcome` is None, each delivery already has its own outcome.
        """
        for held in deliveries:
            held.settling = True
            if outcome is not None:
                held.outcome = outcome
        if deliveries:
            self._waiting.put(deliveries)

    def nudge(self) -> None:
        """End the wait for an outcome in the current call of `step`."""
        self._waiting.put([])

    def step(self) -> float:
        """Wait a short time for outcomes and settle them; return 0, because the next step needs no pause."""
        self._gather()
        if due := self._due():
            self._settle_all(due)
        return 0.0

    def _gather(self) -> None:
        """
        Take all queued outcomes, up to about GATHER_LIMIT.

        If there is no outcome to settle yet, first wait for one. If there are few outcomes then, wait GATHER_SECONDS
        for more.
        """
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
        """Return the deliveries to settle now. Leave out shards that wait for another attempt after an error."""
        if not self._backoff.until:
            return list(self._unsettled)
        return [held for held in self._unsettled if not self._backoff.waits(held.keys)]

    def _is_place_wanted(self) -> bool:
        """
        Return whether unsettled outcomes may delay the start of a message in a queue with limits.

        This is likely if the process has unsettled outcomes of the queue, but no other deliveries of the queue.
        """
        limited = set()
        for held in self._unsettled:
            limits = held.handler.queue.own_limits
            if limits is not None and (limits.ordered or limits.per_key or limits.concurrency):
                limited.add(held.queue)
        if not limited:
            return False
        return bool(limited.difference(held.queue for held in self._inflight.deliveries() if not held.settling))

    def _settle_all(self, deliveries: list[HeldDelivery]) -> None:
        """
        Settle `deliveries` in one round trip.

        If Redis does not reply to a script call, a later step sends the outcomes again. Redis settles each message only
        once.
        """
        self._latest = len(deliveries)
        unsaved = [
            held
            for held in deliveries
            if held.checkpoint and held.unsaved and held.outcome.kind not in ("ack", "expired")
        ]
        if unsaved:
            away = self._save(unsaved)
            deliveries = [held for held in deliveries if held.keys not in away]
        try:
            groups = _grouped(deliveries)
            answers = self._client.run_all([call for call, _ in groups])
        except BaseException as error:
            _note_try(deliveries, error)
            if isinstance(error, ReliqError) or not self._drop_unsendable(deliveries):
                raise
            return
        corrections: list[Call[Booking]] = []
        for (_, group), answer in zip(groups, answers, strict=True):
            if isinstance(answer, Exception):
                self._try_later(group, answer)
                continue
            again = settlement.unsettled(group, answer)  # settle these deliveries again in the next step
            ended = [held for held in group if held not in again] if again else group
            self._forget(ended)
            corrections += [call for held in ended if held.booked for call in _corrections(held)]
            if self._backoff.until:
                self._backoff.over(group[0].keys)
            is_ack = group[0].outcome is ACKED
            if not is_ack and any(is_final(held.delivery.claimed, held.outcome) for held in group):
                self._buried()
        if corrections:  # send these script calls only once, because a limit would count a repetition too
            with suppress(ReliqError):
                self._client.run_all(corrections)

    def _save(self, deliveries: list[HeldDelivery]) -> set[Keys]:
        """
        Store the checkpoints of `deliveries` in a separate round trip, before their outcomes.

        In a common round trip, Redis could store an outcome before the checkpoint, because a script that Redis has not
        cached yet runs last.

        Returns:
            The shards that are unavailable. The outcomes of their messages are settled later.
        """
        away = set()
        groups = _groups(deliveries)
        answers = self._client.run_all([settlement.saving(group[0].keys, group) for group in groups])
        for group, answer in zip(groups, answers, strict=True):
            if isinstance(answer, RedisUnavailableError):
                away.add(group[0].keys)
                self._backoff.note(group[0].keys, answer)
            elif isinstance(answer, Exception):
                logger.warning(
                    "queue %s: could not store checkpoints of %d failed or stopped jobs, so the jobs repeat work: %s",
                    *(group[0].queue, len(group), answer),
                )
        return away

    def _forget(self, deliveries: Sequence[HeldDelivery]) -> None:
        self._inflight.settled(deliveries)
        for held in deliveries:
            del self._unsettled[held]

    def _drop_unsendable(self, deliveries: list[HeldDelivery]) -> bool:
        """
        Replace each outcome that cannot be encoded for Redis; the new outcome makes the message a dead letter.

        If the new outcome cannot be encoded either, drop it.

        Returns:
            Whether an outcome could not be encoded.
        """
        unsendable: dict[HeldDelivery, str] = {}
        for held in deliveries:
            try:
                packed([call.command for call, _ in _grouped([held])])
            except Exception as error:
                unsendable[held] = type(error).__name__
        for held, error_type in unsendable.items():
            logger.error(
                "queue %s: message %s becomes a dead letter, because the result of its handler cannot be sent to Redis: %s",
                *(held.queue, printable(held.delivery.id), error_type),
            )
            if held.outcome is UNTELLABLE:
                self._forget([held])
            held.outcome = UNTELLABLE
        return bool(unsendable)

    def _try_later(self, deliveries: list[HeldDelivery], error: Exception) -> None:
        """
        Delay the next attempt to settle `deliveries`, all of the same shard, because of `error`.

        If Redis refused the outcomes, they are sent again until the leases expire. Then the messages are redelivered.
        If Redis is unavailable, the outcomes are sent again until it replies.
        """
        self._backoff.note(deliveries[0].keys, error)
        if isinstance(error, RedisUnavailableError):
            _note_try(deliveries, error)
        else:
            now = time.monotonic()
            self._forget([held for held in deliveries if held.lease_until < now])


def _note_try(deliveries: Iterable[HeldDelivery], error: BaseException) -> None:
    """
    Mark deliveries whose script call failed with `error`, if Redis may have stored their outcomes nevertheless.

    If Redis later refuses the receipt of a marked delivery, this does not prove that its lease was lost.
    """
    for held in deliveries:
        held.tried = held.tried or getattr(error, "maybe_ran", True)


def _corrections(held: HeldDelivery) -> list[Call[Booking]]:
    """
    Return the script calls that replace the booked cost of a message at its shared limits by the real cost.

    If the handler was not called, the script calls give back the booked start and its cost.
    """
    spent, cost = held.delivery.claimed.spent if held.started else 0, held.delivery.header.cost
    more = (cost if spent is None else spent) - cost
    return [transitions.book(one, held.started - 1, more, after_us=at_us) for one, at_us in held.booked if more]


def _grouped(deliveries: Iterable[HeldDelivery]) -> list[tuple[Call[Settled], list[HeldDelivery]]]:
    """
    Return the script calls that settle `deliveries`, each with the deliveries that it settles.

    Do not report a lost lease if it is already reported, or if an earlier script call may have settled the delivery.
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
    Renew leases and enforce the timeouts of handlers.

    The renewer runs in a separate thread, which handlers do not delay. It also returns messages to Redis that have
    waited too long for a slot, and checks whether the event loop is blocked.

    Args:
        client: the client for all script calls.
        handlers: the handlers of this process.
        inflight: the deliveries of this process.
        async_executor: the executor with the event loop.
        settle: called with deliveries and their outcome, to return messages to Redis.
        report_overrun: called with the call of a plain handler that exceeded its timeout, and with its run time in
            seconds divided by its number of messages.
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
        self._asked_at = 0.0  # the time when the last renewals were sent
        self._answered_at = 0.0  # the time when the last reply to renewals arrived
        self._held_at = 0.0  # the time of the last step with deliveries
        self._saved_at = 0.0  # the time when checkpoints were last stored
        self._unsaved_backoff = QueueBackoff("writer of checkpoints", client.observers)

    def is_behind(self, keys: Keys) -> bool:
        """
        Return whether this process is late with renewing a lease or settling an outcome in the shard `keys`.

        If so, the scheduler must not reclaim expired leases of the shard, because they may be leases of this process.
        Renewals that Redis refuses do not count. An outcome counts until its lease has been expired for a third of the
        lease time.
        """
        now = time.monotonic()
        is_refused = self._backoff.refuses(keys)
        return any(
            now < held.lease_until + held.handler.lease_seconds / 3 if held.settling else not is_refused
            for held in self._inflight.deliveries()
            if held.keys is keys and held.renew_at <= now and not (held.lost or held.abandoned)
        )

    def step(self) -> float:
        """Check all deliveries for due renewals and timeouts; return the seconds until the next check."""
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
        queues, latest = self._inflight.queues, now - HOLD_SECONDS
        waiting = [
            held for held in deliveries if not held.started and held.held_since + queues[held.queue].linger < latest
        ]
        self._settle(self._inflight.withdraw(waiting), RELEASED)
        due = [
            held for held in deliveries if held.renew_at <= now and not (held.settling or held.lost or held.abandoned)
        ]
        self._extend(due)
        is_time = now - self._saved_at >= CHECKPOINT_SECONDS
        if is_time:
            self._saved_at = now
        # Store the first checkpoint of a suspect (a message that may have killed its process) at once. The message has
        # then made progress, so it does not become a dead letter if its process is killed again.
        unsaved = [
            held
            for held in deliveries
            if held.checkpoint
            and (is_time or (held.delivery.claimed.deaths > 0 and held.checkpoint[0] > held.saved[0] == 0))
            and held.unsaved
            and not (held.settling or held.lost)
        ]
        if unsaved:
            self._save(unsaved)
        return self._look_seconds if time.monotonic() - now < self._look_seconds else 0.0

    def _extend(self, due: list[HeldDelivery]) -> None:
        """Renew the leases of the deliveries `due` in one round trip."""
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
                elif not held.settling:  # while settling, the lease may be gone because Redis has stored the outcome
                    held.lost = True
                    lost.append(held.delivery.id)
            if lost:
                notify(self._client.observers, [LeaseLost(group[0].queue, tuple(lost), "extend")])

    def _save(self, deliveries: list[HeldDelivery]) -> None:
        """Store the checkpoints of running jobs in one round trip; after an error, a later step stores them again."""
        groups = _groups([held for held in deliveries if not self._unsaved_backoff.waits(held.keys)])
        if not groups:
            return
        saved = [[(held, held.checkpoint[:2]) for held in group if held.checkpoint] for group in groups]
        answers = self._client.run_all([settlement.saving(group[0].keys, group) for group in groups])
        for group, answer in zip(saved, answers, strict=True):
            if isinstance(answer, Exception):
                self._unsaved_backoff.note(group[0][0].keys, answer)
                continue
            self._unsaved_backoff.over(group[0][0].keys)
            for held, checkpoint in group:
                held.cancelled = held.cancelled or held.delivery.id in answer.cancelled
                held.saved = checkpoint  # not `held.checkpoint`: the handler may have replaced it meanwhile

    def _notify_lateness(self, due: list[HeldDelivery], now: float) -> None:
        """Notify observers if a renewal is late, and whether Redis or this process has delayed it."""
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
        Handle the timeout of a handler call: cancel a coroutine handler, or abandon a plain handler.

        A plain handler runs in a thread and cannot be cancelled. After it is abandoned, it keeps its slot, but its
        leases are not renewed any more. The same applies to a coroutine handler that still runs CANCEL_SECONDS after it
        was cancelled.
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
                Handled(
                    *(held.queue, held.delivery.id, held.delivery.attempt, "timeout", seconds),
                    raised="TimeoutError",
                    failed=True,
                    task=held.handler.task,
                )
                for held in run.unanswered
            ]
            notify(self._client.observers, events)
            self._report_overrun(run, seconds)


def _groups(deliveries: Sequence[HeldDelivery]) -> list[list[HeldDelivery]]:
    """
    Group `deliveries` by shard, at most BATCH_LIMIT in each group. Each group gets its own script call.

    The reply to a script call contains only message ids. A process can have two deliveries of the same message, the
    first with an expired lease. Such deliveries go into different groups, so that each reply is about one of them.
    """
    grouped: dict[tuple[Keys, int], list[HeldDelivery]] = defaultdict(list)
    seen: Counter[tuple[Keys, str]] = Counter()
    for held in deliveries:
        message = held.keys, held.delivery.id
        grouped[held.keys, seen[message]].append(held)
        seen[message] += 1
    return [group[at : at + BATCH_LIMIT] for group in grouped.values() for at in range(0, len(group), BATCH_LIMIT)]
