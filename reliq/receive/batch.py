"""The messages that one `receive` holds, and the calls for them; the clients make those."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from reliq import commands, settlement, transitions
from reliq.answers import Ack, Nack
from reliq.client.lanes import Lanes
from reliq.errors import RedisUnavailableError
from reliq.events import Handled
from reliq.ids import first_published
from reliq.outbox.effects import inbox_keep_ms
from reliq.receive.listener import Listener
from reliq.receive.received import Received
from reliq.receive.take import Take
from reliq.settings import BATCH_LIMIT, HandlerSettings, whole
from reliq.settlement import Ending
from reliq.shardmap import declaration

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from reliq.call import Call, Command, Request
    from reliq.client.shards import Shards
    from reliq.codec.codec import Codec
    from reliq.keys import Keys
    from reliq.limits import Limits
    from reliq.message import Claimed, Delivery, Duration
    from reliq.receive.listener import Found
    from reliq.settings import QueueSettings
    from reliq.transitions import FoundBody, Settled

B = TypeVar("B")

#: The longest wait in Redis between two looks, in seconds: shorter than the time-out for a reply.
LOOK_SECONDS = 0.6


class Receiver(Generic[B]):
    """Shared by the receives of one queue in a process: the lanes of their claims, and when they spare leases."""

    def __init__(self, shards: Shards, codec: Codec[B], settings: QueueSettings, limits: Limits | None = None) -> None:
        self.shards, self.codec, self.settings, self._limits = shards, codec, settings, limits
        self.lanes, self._has_written = Lanes(), False
        self._away: set[Keys] = set()
        self._spare_until: dict[Keys, float] = {}
        self._listener: Listener | None = None
        self._lock = threading.Lock()  # receives of several threads begin at once

    def batch(self, *, limit: int, lease: Duration) -> Batch[B]:
        """Return what one `receive` is to hold; raise ConfigurationError for a limit or lease that is not allowed."""
        return Batch(self, whole("limit", limit, least=1, most=BATCH_LIMIT), HandlerSettings(lease=lease))

    def listener(self) -> Listener | None:
        """Return what waits for the shards of the queue; None where one wait in Redis is for all of them."""
        if self.shards.lie_together:
            return None
        with self._lock:
            client = self.shards.clients.blocking()
            if self._listener is None or self._listener.client is not client:
                self._listener = self.shards.clients.waits = Listener(client, self.shards, self.spares_leases)
            return self._listener

    @property
    def is_keyed(self) -> bool:
        """Whether messages may have keys, or are limited."""
        return self._limits is not None or self.shards.is_keyed

    def lead(self) -> list[Request[Any]]:
        """Return what is to be made before a claim: the limits are written once; while there are none it is asked for keys."""
        keys, limits = self.shards.first, self._limits
        if limits is not None:
            self.shards.map.check_is_one(keys.name)
            return [] if self._has_written else [transitions.limit(keys, limits.fields(), declared=limits.declared)]
        return [] if keys.bare or self.shards.is_keyed or len(self.shards.all) > 1 else [declaration(keys)]

    @property
    def writes_limits(self) -> bool:
        """Whether limits are declared, which must be in Redis before anything is claimed."""
        return self._limits is not None

    def led(self, answer: Any) -> bool:
        """Take the answer to `lead`; return whether messages turn out to have keys."""
        if isinstance(answer, Exception) and self._limits is not None:
            raise answer
        self._has_written = True
        if is_news := self._limits is None and isinstance(answer, str):
            self.shards.note(self.shards.map, is_keyed=True)
        return is_news

    def spares_leases(self, keys: Keys) -> bool:
        """Return whether a shard's expired leases stay: after an outage their holders may be about to renew them."""
        return keys in self._away or time.monotonic() < self._spare_until.get(keys, 0.0)

    def away(self, shards: Iterable[Keys]) -> None:
        """Note that shards did not answer."""
        self._away.update(shards)

    def answered(self, keys: Keys, lease_seconds: float) -> None:
        """Note that a shard has answered; its leases are spared for another third of one if it was away before."""
        if keys in self._away:
            self._spare_until[keys] = time.monotonic() + lease_seconds / 3
            self._away.discard(keys)


class Batch(Generic[B]):
    """
    The messages of one `receive`, from the claim to the settling.

    Attributes:
        lease_seconds: how long a lease lasts that is not renewed.
        undecodable: events of those that were nacked because their body does not decode.
        jobs: those that the block works on.
        given_up: whether the caller has gone.
        listener: what waits where the shards lie apart.
        cut: ends the wait of a caller that goes.
    """

    def __init__(self, receiver: Receiver[B], limit: int, handling: HandlerSettings) -> None:
        self._receiver, self._handling, self._limit = receiver, handling, limit
        self._take = self._at(receiver.shards.first, limit)
        self._glances: list[Take] = []
        self._switches, self._leads, self._is_wide = 0, 0, False
        self._kept_ms = partial(inbox_keep_ms, receiver.settings, handling)
        self.lease_seconds = handling.lease_ms / 1000
        self._lane, _ = receiver.lanes.take()
        self.undecodable: list[Handled] = []
        self.jobs: list[Received[B]] = []
        self._deliveries: list[Delivery] = []  # of the jobs, in their order
        self.given_up = False
        self.listener: Listener | None = None
        self.cut: Callable[[], object] = lambda: None

    @property
    def claimed(self) -> list[Claimed]:
        """Every message that the claim took."""
        return self._take.claimed

    def give_up(self) -> None:
        """Note that nobody waits for the messages any more."""
        self.given_up = True
        self.cut()

    @property
    def may_detour(self) -> bool:
        """Whether another shard can serve when the chosen one is away."""
        return bool(self._glances)

    def begin(self) -> None:
        """Choose a shard, by the map as it is known now."""
        shards, self.listener, self._is_wide = self._receiver.shards, self._receiver.listener(), False
        self._take = self._at(shards.keys(shards.turn()), self._limit)
        self._glances = [self._at(keys, 0) for keys in shards.all if keys.shard != self._take.keys.shard]

    def look(self) -> list[Request[Any]]:
        """
        Return the calls of one look: messages that are due or overdue are moved before the claim.

        It claims in one shard; when there was nothing, the next one counts also what there is in the others.
        """
        spares, takes = self._receiver.spares_leases, self._takes()
        lead = self._receiver.lead()
        self._leads = len(lead)
        # A claim beside them would go first where Redis does not know the script of limits yet.
        if lead and self._receiver.writes_limits:
            return [*lead]
        return [
            *lead,
            *(call for take in takes for call in take.look(self._lane.next(), spare_leases=spares(take.keys))),
        ]

    @contextmanager
    def noting_outages(self) -> Iterator[None]:
        """Note that Redis was away when that ends the code inside."""
        try:
            yield
        except RedisUnavailableError:
            self._receiver.away(self._receiver.shards.all)
            raise

    def looked(self, answers: Sequence[Any]) -> float:
        """
        Keep what was claimed; return the seconds in which nothing else will come due. Raise what was refused.

        They are 0 when another shard may have messages, or the queue has keys: the next look claims there, or with regard
        to them; and when messages were moved after the claim. Shards that are away are left out while others answer.
        """
        takes = self._takes()
        if len(answers) == self._leads:
            self._receiver.led(answers[0])
            return 0.0
        away: dict[Keys, RedisUnavailableError] = {}
        for at, take in enumerate(takes):
            try:
                take.looked(answers[self._leads + 3 * at :][:3])
                self._receiver.answered(take.keys, self.lease_seconds)
            except RedisUnavailableError as error:
                away[take.keys] = error
        self._receiver.away(away)
        self._glances = [take for take in self._glances if take.keys not in away]
        if self._take.keys in away:
            if self.claimed or not self._glances:
                raise away[self._take.keys]
            self._take = self._at(
                self._glances.pop(self._receiver.shards.turn() % len(self._glances)).keys, self._limit
            )
            return 0.0
        if self.listener:
            self.listener.note({take.keys: min(take.next_in_ms) / 1000 for take in takes if take.next_in_ms})
        has_keys = self._leads and self._receiver.led(answers[0])
        if not self.claimed and has_keys:
            self._take = self._at(self._take.keys, self._limit)
        if not self.claimed and (has_keys or any(take.missed for take in takes) or self._widens() or self._switch()):
            return 0.0
        return min([LOOK_SECONDS, *(due_ms / 1000 for take in takes for due_ms in take.next_in_ms)])

    def heard(self, found: Found) -> None:
        """Look next where a wait has found something, if it says where."""
        for keys in found:
            self._take, self._glances = self._at(keys, self._limit), []
        if not found:
            self.begin()

    def over(self) -> None:
        """Note that the last look has its answer: its lane is free."""
        self._receiver.lanes.give_back(self._lane)

    def token(self, for_seconds: float) -> Command[Any]:
        """Return the wait for something to claim, in any shard; they lie together."""
        if self._glances:
            return commands.first_wake_token(self._take.keys.wake, [take.keys for take in self._glances], for_seconds)
        return commands.wake_token(self._take.keys, for_seconds)

    def reads(self) -> list[Call[list[FoundBody]]]:
        """Return the call for the values of what was claimed."""
        return self._take.reads()

    def large_reads(self, answers: Sequence[Any]) -> list[Command[list[bytes | None]]]:
        """Return the calls for the values of which `reads` brought the sizes alone."""
        return self._take.large_reads(answers)

    def fill(self, answers: Sequence[Any]) -> list[Call[Settled]]:
        """Turn what was claimed into jobs; return the calls that settle what has no body or does not decode."""
        deliveries, endings = self._take.opened(answers)
        for delivery in deliveries:
            try:
                self._add(delivery, settlement.decoded(delivery, self._receiver.codec.decode))
            except Exception as error:
                endings.append(self._undecodable(delivery, error))
        return self._take.settle(endings)

    def release(self) -> list[Call[Settled]]:
        """Return the calls that give everything back unspent."""
        return self._take.release()

    def renew(self) -> Call[Settled]:
        """Return the call that extends every lease that still holds."""
        held = [one.claimed for job, one in zip(self.jobs, self._deliveries, strict=True) if not job.lost]
        return transitions.extend(self._take.keys, held, lease_ms=self._handling.lease_ms)

    def told(self, answer: Settled) -> None:
        """Tell the jobs what a renewal or their settling showed."""
        for job in self.jobs:
            job.lost = job.lost or job.id in answer.lost
            job.cancelled = job.cancelled or job.id in answer.cancelled

    def settle(self, error: BaseException | None) -> list[Call[Settled]]:
        """Return the calls that settle everything: unanswered jobs are acked, after an error nacked."""
        unanswered = Ack() if error is None else Nack(reason=type(error).__name__)
        return self._take.settle(
            Ending(delivery, settlement.answered(job.answer or unanswered, delivery.attempt, self._handling))
            for job, delivery in zip(self.jobs, self._deliveries, strict=True)
        )

    def _at(self, keys: Keys, limit: int) -> Take:
        is_keyed = self._receiver.is_keyed
        return Take(keys, self._receiver.settings, limit=limit, lease_ms=self._handling.lease_ms, keyed=is_keyed)

    def _takes(self) -> Sequence[Take]:
        """Return where the next look is made."""
        return (self._take, *self._glances) if self._is_wide else (self._take,)

    def _widens(self) -> bool:
        """Look next at the other shards too; say whether there are any, and they were not looked at."""
        is_narrow, self._is_wide = not self._is_wide, True
        return is_narrow and bool(self._glances)

    def _switch(self) -> bool:
        """Claim next where most messages are; say whether there are any. Who claims nothing again and again waits."""
        fullest = max(self._glances, key=lambda take: take.behind, default=self._take)
        self._switches += 1
        if not fullest.behind or self._switches > len(self._glances):
            self._switches = 0
            return False
        rest = [take for take in self._glances if take is not fullest]
        self._glances = [*rest, self._at(self._take.keys, 0)]
        self._take = self._at(fullest.keys, self._limit)
        return True

    def _add(self, delivery: Delivery, body: B) -> None:
        one, header = delivery.claimed, delivery.header
        due = None if header.due is None else header.due / 1000
        self._deliveries.append(delivery)
        queue = self._take.keys.name
        known = (queue, header.key, one.token, first_published(queue, one.id, header), self._kept_ms)
        self.jobs.append(Received(one.id, body, delivery.attempt, one.left, due, header.headers, *known))

    def _undecodable(self, delivery: Delivery, error: Exception) -> Ending:
        """Return the end of a delivery whose body does not decode, and note its event."""
        queue = self._take.keys.name
        why = settlement.undecodable(error, queue, delivery.id)
        outcome = settlement.raised(why, delivery.attempt, self._handling)
        self.undecodable.append(
            Handled(queue, delivery.id, delivery.attempt, "nack", 0.0, error=outcome.error, failed=True)
        )
        return Ending(delivery, outcome)
