"""The bodies of what was claimed: which are read next, and what can start when they have come."""

from __future__ import annotations

import time
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from reliq import commands
from reliq.errors import RedisRefusedError
from reliq.message import Delivery
from reliq.settings import BATCH_LIMIT, READ_BYTES
from reliq.settlement import EXPIRED, RELEASED
from reliq.wireformat import open_envelope

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reliq.call import Request
    from reliq.handlers.handler import Handler
    from reliq.keys import Keys
    from reliq.settlement import Outcome
    from reliq.worker.delivery import HeldDelivery
    from reliq.worker.inflight import Inflight
    from reliq.worker.loop import QueueBackoff

#: A shard of a queue, and its deliveries whose bodies one call reads.
Read = tuple["Keys", list["HeldDelivery"]]


class BodyReader:
    """
    Makes the calls that read bodies, a bounded number of bytes in one round trip, and submits what has its body.

    The largest body so far says how large a queue's bodies are; before the first, the queue's `max_body` does. The
    first is read alone: a foreign publisher's bodies may be larger.
    """

    def __init__(
        self,
        handlers: Sequence[Handler],
        inflight: Inflight,
        backoff: QueueBackoff,
        submit: Callable[[list[HeldDelivery]], None],
        settle: Callable[[list[HeldDelivery], Outcome], None],
    ) -> None:
        self._inflight, self._backoff = inflight, backoff
        self._submit, self._settle = submit, settle
        self._largest: dict[str, int] = {}
        self._expected: dict[str, int] = {}
        for handler in handlers:
            self._expect(handler.queue.name, handler.queue.settings.max_body)
        self._unread: dict[Keys, list[HeldDelivery]] = {}
        self._ready: list[HeldDelivery] = []

    def add(self, deliveries: list[HeldDelivery]) -> None:
        """Queue claimed `deliveries` of one shard for a read of their bodies."""
        if deliveries:
            self._inflight.add(deliveries)
            self._unread.setdefault(deliveries[0].keys, []).extend(deliveries)

    def next_reads(self) -> list[Read]:
        """Return the next reads: the first bodies of each shard, as many as are expected to fit."""
        rest, reads = READ_BYTES, []
        for keys, waiting in list(self._unread.items()):
            group = self._unread[keys] = [held for held in waiting if not held.settling]
            if not group:
                del self._unread[keys]
            elif rest > 0 and not (self._backoff.until and self._backoff.waits(keys)):
                size = self._expected[keys.name]
                group = group[: _fitting(rest, size) if keys.name in self._largest else 1]
                rest -= size * len(group)
                reads.append((keys, group))
        return reads

    def requests(self, reads: Sequence[Read]) -> list[Request[list[bytes | None]]]:
        """Return the calls for `reads`."""
        return [commands.bodies(keys, [held.delivery.claimed.id for held in group]) for keys, group in reads]

    def take(self, reads: Sequence[Read], answers: Sequence[Any]) -> list[tuple[Keys, Exception]]:
        """
        Take the bodies of `reads`, and return the shards that failed.

        What Redis refuses is given back, what fails otherwise is read again.
        """
        failures: list[tuple[Keys, Exception]] = []
        for (keys, group), answer in zip(reads, answers, strict=True):
            if isinstance(answer, RedisRefusedError):
                self._give_back(group)
            if isinstance(answer, Exception):
                failures.append((keys, answer))
            else:
                del self._unread[keys][: len(group)]
                self._ready += self._filled(keys, group, answer)
        return failures

    def start(self) -> None:
        """Submit the deliveries that have their bodies, those that must not wait first."""
        deliveries, self._ready = self._ready, []
        if deliveries:
            self._submit(sorted(deliveries, key=attrgetter("must_start"), reverse=True))

    def _filled(self, keys: Keys, group: list[HeldDelivery], values: list[bytes | None]) -> list[HeldDelivery]:
        """Give deliveries their bodies; return those that have one, end the others."""
        name, bare, now = keys.name, keys.bare, time.monotonic()
        filled, gone, largest = [], [], self._largest.setdefault(name, 0)
        for held, value in zip(group, values, strict=True):
            if value is None:
                gone.append(held)
                continue
            header, payload = open_envelope(value, bare=bare)
            held.delivery = Delivery(held.delivery.claimed, value, header, payload)
            held.held_since = now
            largest = max(largest, len(value))
            filled.append(held)
        if largest > self._largest[name]:
            self._largest[name] = largest
            self._expect(name, largest)
        if gone:
            self._settle(self._inflight.withdraw(gone), EXPIRED)
        return filled

    def _expect(self, name: str, size: int) -> None:
        """Expect bodies of this size in a queue; no more of its messages are claimed ahead than three reads bring."""
        self._expected[name] = size
        self._inflight.limit_reads(name, _fitting(READ_BYTES, size))

    def _give_back(self, deliveries: list[HeldDelivery]) -> None:
        self._settle(self._inflight.withdraw(deliveries), RELEASED)


def _fitting(room: int, size: int) -> int:
    """Return how many bodies of a `size` are read at once when there is `room` for so many bytes."""
    return max(1, min(BATCH_LIMIT, room // size))
