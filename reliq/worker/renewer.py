"""Keeps what is held: extends leases, ends handlers that overran their time, gives back what waits too long."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Literal

from reliq import transitions
from reliq.events import Handled, Lost, RenewalLate, notify
from reliq.settings import BATCH_LIMIT
from reliq.settlement import RELEASED
from reliq.worker.loop import QueueBackoff
from reliq.worker.slots import HOLD_SECONDS
from reliq.worker.watchdog import LoopWatchdog

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reliq.call import Call
    from reliq.client.client import Client
    from reliq.handlers.handler import Handler
    from reliq.keys import Keys
    from reliq.settlement import Outcome
    from reliq.worker.delivery import HandlerCall, HeldDelivery
    from reliq.worker.event_loop import AsyncExecutor
    from reliq.worker.inflight import Inflight

#: While anything is held the renewer looks at least this often.
RENEWER_STEP_SECONDS = 0.05
#: It goes on for this long after the last delivery, then waits for the next one.
IDLE_SECONDS = 1.0
#: A renewal is reported as late when this share of the rest of its lease has passed.
LATE_PART = 0.5


class Renewer:
    """Looks at everything that is held, in a thread of its own, which no handler can keep waiting."""

    def __init__(
        self,
        client: Client,
        handlers: Sequence[Handler],
        inflight: Inflight,
        async_executor: AsyncExecutor,
        settle: Callable[[list[HeldDelivery], Outcome], None],
        overran: Callable[[HandlerCall, float], None] = lambda _run, _seconds: None,
    ) -> None:
        self._client, self._inflight, self._async_executor, self._settle = client, inflight, async_executor, settle
        self._tell_overrun = overran
        self._watchdog = LoopWatchdog(async_executor, inflight, settle)
        self._look_seconds = min([RENEWER_STEP_SECONDS, *(handler.lease_seconds / 6 for handler in handlers)])
        self._backoff = QueueBackoff("renewer", client.observers)
        self._is_away = False  # Redis did not answer the last renewals
        self._asked_at = self._answered_at = 0.0  # when the last renewals were sent, and their answer came
        self._held_at = 0.0  # when there was something to look at

    def is_behind(self, keys: Keys) -> bool:
        """
        Return whether Redis has yet to hear of a delivery of a shard whose renewal is due: its renewal or its outcome.

        The renewal may wait for an answer, or for this process, which was held up. One that Redis refuses is not
        waited for, and an outcome for a third of a lease after the lease has ended: Redis may refuse it for longer.
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
            self._async_executor.see_to(run)
            if run.timeout_at is not None and now > run.timeout_at and run.unanswered:
                self._overran(run, now)
        self._watchdog.look(now)
        longest = HOLD_SECONDS  # and as long as its batch lingers
        held_too_long = [
            f for f in deliveries if not f.started and now - f.held_since > longest + f.handler.linger_seconds
        ]
        self._settle(self._inflight.withdraw(held_too_long), RELEASED)
        due = [f for f in deliveries if now >= f.renew_at and not (f.settling or f.lost or f.abandoned)]
        if due:
            self._extend(due)
        return self._look_seconds if time.monotonic() - now < self._look_seconds else 0.0

    def _extend(self, due: list[HeldDelivery]) -> None:
        """Extend the leases of `due` in one round trip."""
        groups = _groups([held for held in due if not self._backoff.waits(held.keys)])
        if not groups:
            return
        sent_at = time.monotonic()
        if not self._is_away:
            self._tell_lateness([held for held in due if not self._backoff.has(held.keys)], sent_at)
        self._asked_at, self._is_away = sent_at, True  # until it has answered
        answers = self._client.run_all([_extension(group) for group in groups])
        self._answered_at, self._is_away = time.monotonic(), False
        for group, answer in zip(groups, answers, strict=True):
            if isinstance(answer, Exception):
                self._backoff.note(group[0].keys, answer)
            else:
                self._backoff.over(group[0].keys)
                self._note(group, answer, sent_at)

    def _note(self, group: list[HeldDelivery], answer: transitions.Settled, sent_at: float) -> None:
        """Update each delivery of `group` from the answer; one being settled lost its receipt to its own settling."""
        lost = []
        for held in group:
            if held.delivery.id not in answer.lost:
                held.leased(sent_at)
                held.cancelled = held.cancelled or held.delivery.id in answer.cancelled
            elif not held.settling:
                held.lost = True
                lost.append(held.delivery.id)
        if lost:
            notify(self._client.observers, [Lost(group[0].queue, tuple(lost), "extend")])

    def _tell_lateness(self, due: list[HeldDelivery], now: float) -> None:
        """Notify observers of a late renewal, and whether it waited for the answer to the one before."""
        first = min(due, key=lambda held: held.renew_at, default=None)
        if first is None:
            return
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
        if run.abandoned and run.hangs:
            run.leave_leases()
        if run.abandoned or (run.handler.is_async and run.task is None):
            return
        self._inflight.abandon(run)
        if run.handler.is_async:
            self._async_executor.cancel(run)
        elif run.abandoned:
            each = (now - run.started_at) / len(run.deliveries)
            facts = [(f.queue, f.delivery.id, f.delivery.attempt) for f in run.unanswered]
            notify(self._client.observers, [Handled(*fact, "timeout", each, failed=True) for fact in facts])
            self._tell_overrun(run, each)


def _groups(deliveries: Sequence[HeldDelivery]) -> list[list[HeldDelivery]]:
    """
    Return `deliveries` as the calls that renew them: of one shard, at most BATCH_LIMIT in each.

    An answer names messages by their ids. A process can hold two deliveries of one message, the first with a receipt
    that no longer holds; they go into different calls.
    """
    grouped: dict[tuple[Keys, int], list[HeldDelivery]] = defaultdict(list)
    seen: Counter[tuple[Keys, str]] = Counter()
    for held in deliveries:
        message = held.keys, held.delivery.id
        grouped[held.keys, seen[message]].append(held)
        seen[message] += 1
    return [group[at : at + BATCH_LIMIT] for group in grouped.values() for at in range(0, len(group), BATCH_LIMIT)]


def _extension(group: list[HeldDelivery]) -> Call[transitions.Settled]:
    receipts = [held.delivery.claimed for held in group]
    return transitions.extend(group[0].keys, receipts, lease_ms=group[0].handler.lease_ms)
