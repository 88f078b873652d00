"""Sends every outcome to Redis, in batches, until Redis has it."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from reliq import settlement
from reliq.errors import RedisUnavailableError, ReliqError
from reliq.events import Lost
from reliq.settings import BATCH_LIMIT
from reliq.settlement import ACKED, UNTELLABLE, is_final
from reliq.transport.wire import packed
from reliq.worker.loop import QueueBackoff

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from reliq.call import Call
    from reliq.client.client import Client
    from reliq.keys import Keys
    from reliq.settlement import Outcome
    from reliq.transitions import Settled
    from reliq.worker.delivery import HeldDelivery
    from reliq.worker.inflight import Inflight

logger = logging.getLogger(__name__)

#: A step waits at most this long for the first outcome.
FIRST_OUTCOME_SECONDS = 0.5
#: While few outcomes come, a step waits this long for more, to settle several in one round trip. A worker that dies
#: meanwhile has them done twice; nothing else is late. Where a place is limited, its next message would be: none waits
#: when nothing else of its queue is at work here.
GATHER_SECONDS = 0.002
#: Outcomes come in numbers, and a step waits for no more, when the last round trip or the queue had this many.
MANY = 20
#: One round trip settles about this many at most: Redis serves nobody else meanwhile.
GATHER_LIMIT = BATCH_LIMIT


class Settler:
    """
    Collects outcomes and settles all that are there in one round trip, again and again until it is made.

    Whatever raises, no outcome is forgotten: a delivery leaves when Redis has said what became of its call, or when not
    even its failure can be told; its lease then ends.
    """

    def __init__(
        self, client: Client, inflight: Inflight, buried: Callable[[], None], settled: Callable[[], None]
    ) -> None:
        self._client, self._inflight = client, inflight
        self._buried, self._settled = buried, settled
        self._waiting: queue.SimpleQueue[Sequence[HeldDelivery]] = queue.SimpleQueue()
        self._hurried = threading.Event()
        self._unsettled: dict[HeldDelivery, None] = {}
        self._latest = 0  # how many outcomes the last round trip had
        self._put_off: dict[Keys, list[HeldDelivery]] = defaultdict(list)
        self._backoff = QueueBackoff("settler", client.observers)

    def settle(self, deliveries: Sequence[HeldDelivery], outcome: Outcome | None = None) -> None:
        """Queue `deliveries` for settling, with one outcome for all or the one that each has."""
        for held in deliveries:
            held.settling = True
            if outcome is not None:
                held.outcome = outcome
        if deliveries:
            self._waiting.put(deliveries)

    def nudge(self) -> None:
        """End the wait of a step."""
        self._hurried.set()
        self._waiting.put([])

    def step(self) -> float:
        """Settle what is there, waiting a little for the first; return 0."""
        self._gather()
        if self._put_off:
            self._take_up()
        try:
            if self._unsettled:
                self._settle_all()
        finally:
            self._settled()
        return 0.0

    def _gather(self) -> None:
        """Wait for one outcome, unless some wait already, and a moment for more if few come; then take all."""
        wait = FIRST_OUTCOME_SECONDS
        if self._put_off:
            wait = min([wait, *map(self._backoff.seconds_of, self._put_off)])
        try:
            if not self._unsettled:
                self._unsettled |= dict.fromkeys(self._waiting.get(timeout=wait))
                is_many = max(self._latest, self._waiting.qsize()) >= MANY
                if self._unsettled and not is_many and not self._is_waited_for():
                    self._hurried.wait(GATHER_SECONDS)
                self._hurried.clear()
            while len(self._unsettled) < GATHER_LIMIT:
                for held in self._waiting.get_nowait():
                    self._unsettled[held] = None
        except queue.Empty:
            return

    def _is_waited_for(self) -> bool:
        """Return whether a queue's next messages may need the places of these, and no more of it is at work here."""
        limited = {held.queue for held in self._unsettled if _holds_a_place(held)}
        if not limited:
            return False
        return bool(limited.difference(held.queue for held in self._inflight.deliveries() if not held.settling))

    def _take_up(self) -> None:
        """Take up what was put off and may be tried again; put off what has come for the others meanwhile."""
        for held in [held for held in self._unsettled if self._backoff.waits(held.keys)]:
            self._put_off[held.keys].append(held)
            del self._unsettled[held]
        for keys in [keys for keys in self._put_off if not self._backoff.waits(keys)]:
            self._unsettled |= dict.fromkeys(self._put_off.pop(keys))

    def _settle_all(self) -> None:
        """Make every call in one round trip; what Redis did not take is made again, which is safe."""
        self._latest = len(self._unsettled)
        try:
            groups = _grouped(self._unsettled)
            answers = self._client.run_all([call for call, _ in groups])
        except BaseException as error:
            _note_try(self._unsettled, error)
            if isinstance(error, ReliqError) or not self._weed_out():
                raise
            return
        for (_, group), answer in zip(groups, answers, strict=True):
            self._take(group, answer)

    def _take(self, group: list[HeldDelivery], answer: Any) -> None:
        """Process the answer to the call for `group`."""
        if isinstance(answer, Exception):
            self._try_later(group, answer)
        else:
            self._inflight.settled(group)
            if self._backoff.until:
                self._backoff.over(group[0].keys)
            if group[0].outcome is not ACKED and any(is_final(held.delivery.claimed, held.outcome) for held in group):
                self._buried()
        for held in group:
            self._unsettled.pop(held, None)

    def _weed_out(self) -> bool:
        """
        Try each answer alone, and have the messages of those that cannot be put into a call end as dead letters.

        Returns:
            whether there was one.
        """
        found = [(held, why) for held in self._unsettled if (why := _why_untellable(held))]
        for held, why in found:
            logger.error("queue %s: an answer cannot be told to Redis (%s): a dead letter", held.queue, why)
            if held.outcome is UNTELLABLE:
                self._inflight.settled([held])
                del self._unsettled[held]
            held.outcome = UNTELLABLE
        return bool(found)

    def _try_later(self, deliveries: list[HeldDelivery], error: Exception) -> None:
        """
        Put off what failed by `error`.

        What Redis refuses is tried until its lease is over and the message is delivered again; what could not be told
        because a server is away is tried until it is back.
        """
        keys, now = deliveries[0].keys, time.monotonic()
        self._backoff.note(keys, error)
        if isinstance(error, RedisUnavailableError):
            _note_try(deliveries, error)
            self._put_off[keys] += deliveries
            return
        self._inflight.settled([held for held in deliveries if held.lease_until < now])
        self._put_off[keys] += [held for held in deliveries if held.lease_until >= now]


def _holds_a_place(held: HeldDelivery) -> bool:
    """Return whether so many at once are declared for the queue of `held`, in all or of a key."""
    limits = held.handler.queue.limits
    return limits is not None and bool(limits.ordered or limits.per_key or limits.concurrency)


def _note_try(deliveries: Iterable[HeldDelivery], error: BaseException) -> None:
    """Mark deliveries whose calls may have run: a receipt that no longer holds is then no loss."""
    for held in deliveries:
        held.tried = held.tried or getattr(error, "maybe_ran", True)


def _why_untellable(held: HeldDelivery) -> str:
    """Return why the outcome of `held` cannot be sent, empty when it can."""
    try:
        packed([call.command for call, _ in _grouped([held])])
    except Exception as error:
        return type(error).__name__
    return ""


def _grouped(deliveries: Iterable[HeldDelivery]) -> list[tuple[Call[Settled], list[HeldDelivery]]]:
    """Return the calls for `deliveries`, each with its own; those whose receipt may be used up tell of no loss."""
    by_shard: dict[tuple[Keys, bool], list[HeldDelivery]] = defaultdict(list)
    for held in deliveries:
        by_shard[held.keys, held.lost or held.tried].append(held)
    found = []
    for (keys, is_quiet), group in by_shard.items():
        found += [
            (_silent(call) if is_quiet else call, piece)
            for call, piece in settlement.calls(keys, group[0].handler.queue.settings, group)
        ]
    return found


def _silent(call: Call[Settled]) -> Call[Settled]:
    """Return `call` without news of loss: it is known, or may be our own first try's doing."""
    return replace(call, events=lambda answer: [e for e in call.events(answer) if not isinstance(e, Lost)])
