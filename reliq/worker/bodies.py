"""The bodies of what was claimed: which are read next, and what can start when they have come."""

from __future__ import annotations

import time
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from reliq import commands, transitions
from reliq.chunks import chunked_by_size
from reliq.errors import RedisRefusedError
from reliq.settings import BATCH_LIMIT, INLINE_BYTES, READ_BYTES
from reliq.settlement import EXPIRED, RELEASED

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reliq.call import Request
    from reliq.handlers.handler import Handler
    from reliq.keys import Keys
    from reliq.settlement import Outcome
    from reliq.transitions import FoundBody
    from reliq.worker.delivery import HeldDelivery
    from reliq.worker.inflight import Inflight
    from reliq.worker.loop import QueueBackoff


class Read(NamedTuple):
    """The first deliveries of those that wait in a shard, the call that reads their bodies, and the bytes expected."""

    keys: Keys
    waiting: list[HeldDelivery]
    group: list[HeldDelivery]
    size: int
    request: Request[list[FoundBody]] | Request[list[bytes | None]]


class BodyReader:
    """
    Makes the calls that read bodies, a bounded number of bytes in one round trip, and submits what has its body.

    A call brings small bodies, or the sizes of large ones; the next round trip brings as many of those as fit. A body
    that is larger than `max_body` is not read. The largest so far says how many messages are claimed ahead.
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
        self._max_body = {handler.queue.name: handler.queue.settings.max_body for handler in handlers}
        self._largest = dict.fromkeys(self._max_body, 0)
        for name, max_body in self._max_body.items():
            self._expect(name, max_body)
        self._unread: dict[Keys, list[HeldDelivery]] = {}
        self._sized: dict[Keys, list[HeldDelivery]] = {}
        self._ready: list[HeldDelivery] = []

    def add(self, deliveries: list[HeldDelivery]) -> None:
        """Queue claimed `deliveries` of one shard for a read of their bodies."""
        if deliveries:
            self._inflight.add(deliveries)
            self._unread.setdefault(deliveries[0].keys, []).extend(deliveries)

    def next_reads(self) -> list[Read]:
        """Return the next reads: the first bodies of each shard, as many as fit; those first whose sizes are known."""
        rest, reads = READ_BYTES, []
        for places in (self._sized, self._unread):
            for keys, held in list(places.items()):
                waiting = places[keys] = [one for one in held if not one.settling]
                if not waiting:
                    del places[keys]
                elif rest > 0 and not (self._backoff.until and self._backoff.waits(keys)):
                    read = self._sized_read if places is self._sized else self._unsized_read
                    reads.append(read(keys, waiting, rest))
                    rest -= reads[-1].size
        return reads

    def take(self, reads: Sequence[Read], answers: Sequence[Any]) -> list[tuple[Keys, Exception]]:
        """
        Take the bodies of `reads`, and return the shards that failed.

        What Redis refuses is given back, what fails otherwise is read again.
        """
        failures: list[tuple[Keys, Exception]] = []
        for (keys, waiting, group, *_), answer in zip(reads, answers, strict=True):
            if isinstance(answer, RedisRefusedError):
                self._settle(self._inflight.withdraw(group), RELEASED)
            if isinstance(answer, Exception):
                failures.append((keys, answer))
            else:
                del waiting[: len(group)]
                self._ready += self._filled(keys, group, answer)
        return failures

    def start(self) -> None:
        """Submit the deliveries that have their bodies, those that must not wait first."""
        deliveries, self._ready = self._ready, []
        if deliveries:
            self._submit(sorted(deliveries, key=attrgetter("must_start"), reverse=True))

    def _unsized_read(self, keys: Keys, waiting: list[HeldDelivery], _room: int) -> Read:
        group, name = waiting[:BATCH_LIMIT], keys.name
        size = min(INLINE_BYTES, len(group) * (self._largest[name] or INLINE_BYTES))
        return Read(keys, waiting, group, size, transitions.bodies(keys, _ids(group), max_body=self._max_body[name]))

    def _sized_read(self, keys: Keys, waiting: list[HeldDelivery], room: int) -> Read:
        group = next(chunked_by_size(waiting, attrgetter("size"), room, BATCH_LIMIT))
        return Read(keys, waiting, group, sum(one.size for one in group), commands.bodies(keys, _ids(group)))

    def _filled(self, keys: Keys, group: list[HeldDelivery], answer: list[FoundBody]) -> list[HeldDelivery]:
        """Give deliveries their bodies; return those that have one, end those without, and have large ones read next."""
        name, bare, now = keys.name, keys.bare, time.monotonic()
        max_body, largest = self._max_body[name], self._largest[name]
        filled, gone, sized = [], [], []
        for held, found in zip(group, answer, strict=True):
            if found is None:
                gone.append(held)
            elif isinstance(found, int):
                held.size = found
                sized.append(held)
            else:
                held.delivery = transitions.delivery(held.delivery.claimed, found, max_body=max_body, bare=bare)
                held.held_since = now
                largest = max(largest, len(held.delivery.value))
                filled.append(held)
        if largest > self._largest[name]:
            self._largest[name] = largest
            self._expect(name, largest)
        if sized:
            self._sized.setdefault(keys, []).extend(sized)
        if gone:
            self._settle(self._inflight.withdraw(gone), EXPIRED)
        return filled

    def _expect(self, name: str, size: int) -> None:
        """Expect bodies of this size in a queue; no more of its messages are claimed ahead than three reads bring."""
        self._inflight.limit_reads(name, max(1, min(BATCH_LIMIT, READ_BYTES // size)))


def _ids(group: list[HeldDelivery]) -> list[str]:
    return [held.delivery.claimed.id for held in group]
