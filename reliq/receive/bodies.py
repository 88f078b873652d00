"""Read the bodies of claimed messages, a limited number of bytes in each round trip to Redis."""

from __future__ import annotations

import time
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Generic, NamedTuple

from reliq.handlers.settlement import E
from reliq.lua import transitions
from reliq.redis import commands
from reliq.settings import BATCH_LIMIT, INLINE_BYTES, READ_BYTES
from reliq.text import chunked_by_size

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from reliq.keys import Keys
    from reliq.lua.transitions import FoundBody
    from reliq.redis.commands import Request


class Read(NamedTuple, Generic[E]):
    """
    A request to Redis that reads message bodies.

    Attributes:
        keys: the shard of the messages.
        waiting: the deliveries of the shard whose bodies are not read yet.
        group: the first deliveries of `waiting`, whose bodies this request reads.
        size: about how many bytes the reply will have.
        request: the script call or command for Redis.
    """

    keys: Keys
    waiting: list[E]
    group: list[E]
    size: int
    request: Request[list[FoundBody]] | Request[list[bytes | None]]


class BodyReader(Generic[E]):
    """
    Read message bodies from Redis, a limited number of bytes in each round trip.

    The first round trip returns small bodies, but only the sizes of large bodies. The next round trips read the large
    bodies, as many as fit. A body larger than `max_body` is not read.

    Args:
        max_body: the largest allowed body in bytes, by queue name.
        backoff_until: for each shard with failed reads, the monotonic time until which it is not read again.
        expect: a function that gets the name of a queue and how many of its messages' bodies fit in a round trip.

    Attributes:
        ready: the deliveries whose bodies were read.
        gone: the deliveries whose bodies have expired in Redis.
    """

    def __init__(
        self,
        max_body: Mapping[str, int],
        backoff_until: Mapping[Keys, float] | None = None,
        expect: Callable[[str, int], None] = lambda _queue, _messages: None,
    ) -> None:
        self._max_body = max_body
        self._backoff_until = {} if backoff_until is None else backoff_until
        self._expect = expect
        self._largest = dict.fromkeys(max_body, 0)
        for name, size in max_body.items():
            expect(name, max(1, min(BATCH_LIMIT, READ_BYTES // size)))
        self._unread: dict[Keys, list[E]] = {}
        self._sized: dict[Keys, list[E]] = {}
        self.ready: list[E] = []
        self.gone: list[E] = []

    def add(self, keys: Keys, deliveries: list[E]) -> None:
        """Add claimed deliveries of a shard, so that the next reads include their bodies."""
        self._unread.setdefault(keys, []).extend(deliveries)

    def next_reads(self) -> list[Read[E]]:
        """Return the next reads of all shards, about READ_BYTES in all. Bodies of known size come first."""
        rest = READ_BYTES
        reads: list[Read[E]] = []
        for places in (self._sized, self._unread):
            for keys, held in list(places.items()):
                waiting = places[keys] = [delivery for delivery in held if not delivery.settling]
                if not waiting:
                    del places[keys]
                elif rest > 0 and not (self._backoff_until and self._backoff_until.get(keys, 0.0) > time.monotonic()):
                    read = self._sized_read if places is self._sized else self._unsized_read
                    reads.append(read(keys, waiting, rest))
                    rest -= reads[-1].size
        return reads

    def take(self, reads: Sequence[Read[E]], answers: Sequence[Any]) -> list[tuple[Read[E], Exception]]:
        """
        Store the bodies from the replies of Redis to `reads`; return the failed reads with their exceptions.

        `next_reads` will repeat the failed reads.
        """
        failures: list[tuple[Read[E], Exception]] = []
        for read, answer in zip(reads, answers, strict=True):
            if isinstance(answer, Exception):
                failures.append((read, answer))
            else:
                del read.waiting[: len(read.group)]
                self._fill(read.keys, read.group, answer)
        return failures

    def _unsized_read(self, keys: Keys, waiting: list[E], _room: int) -> Read[E]:
        group = waiting[:BATCH_LIMIT]
        size = min(INLINE_BYTES, len(group) * (self._largest[keys.name] or INLINE_BYTES))
        ids = [held.delivery.claimed.id for held in group]
        return Read(keys, waiting, group, size, transitions.bodies(keys, ids, max_body=self._max_body[keys.name]))

    def _sized_read(self, keys: Keys, waiting: list[E], room: int) -> Read[E]:
        group = next(chunked_by_size(waiting, attrgetter("size"), room, BATCH_LIMIT))
        ids = [held.delivery.claimed.id for held in group]
        return Read(keys, waiting, group, sum(held.size for held in group), commands.bodies(keys, ids))

    def _fill(self, keys: Keys, group: list[E], answer: list[FoundBody]) -> None:
        """Store the bodies in the deliveries of `group`. If Redis returned only the size of a body, read it later."""
        name = keys.name
        now = time.monotonic()
        max_body = self._max_body[name]
        largest = self._largest[name]
        sized = []
        for held, body in zip(group, answer, strict=True):
            if body is None:
                self.gone.append(held)
            elif isinstance(body, int):
                held.size = body
                sized.append(held)
            else:
                held.delivery = transitions.delivery(held.delivery.claimed, body, max_body=max_body, bare=keys.bare)
                held.held_since = now
                largest = max(largest, len(held.delivery.value))
                self.ready.append(held)
        if largest > self._largest[name]:
            self._largest[name] = largest
            self._expect(name, max(1, min(BATCH_LIMIT, READ_BYTES // largest)))
        if sized:
            self._sized.setdefault(keys, []).extend(sized)
