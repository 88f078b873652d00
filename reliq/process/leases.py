"""The leases of a worker process in the hands of its supervisor: found, extended, given back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reliq import commands, transitions
from reliq.client.client import Client
from reliq.foreign import whole_number
from reliq.message import Claimed
from reliq.settings import BATCH_LIMIT
from reliq.transport.connection import PUBLISH_TIMEOUT_SECONDS
from reliq.wireformat import Held

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from reliq.consumer.consumer import Consumer
    from reliq.keys import Keys

#: A call is tried for 1 s while Redis is away: meanwhile the supervisor hears no signal and sees no process.
CALL_SECONDS = 1.0


class Leases:
    """The leases of a consumer's queues; every method may raise ReliqError."""

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer

    def held(self, name: str, lane: str) -> list[Claimed]:
        """Return the messages of queue `name` that are held by the consumer that claims as `lane`."""
        return list(self._held(self._keys(name), lane))

    def extend(self, name: str, claimed: Sequence[Claimed]) -> None:
        """Extend the leases of these messages of queue `name` to a whole one from now."""
        (handler,) = self._consumer.chosen([name])
        for piece in _pieces(claimed):
            self._client().run(
                transitions.extend(handler.queue.keys, piece, lease_ms=handler.settings.lease_ms),
                for_seconds=CALL_SECONDS,
            )

    def release(self, name: str, claimed: Sequence[Claimed]) -> None:
        """Give these messages of queue `name` back, unspent and in their order."""
        for piece in reversed(_pieces(claimed)):  # each piece goes before the last one: the first must come last
            self._client().run(transitions.release(self._keys(name), piece), for_seconds=CALL_SECONDS)

    def _held(self, keys: Keys, lane: str) -> Iterator[Claimed]:
        """Yield the messages in unack whose receipts are of `lane`; each call reads a bounded part of it."""
        at, client = 0, self._client()
        while rows := client.run(commands.held(keys, at), for_seconds=CALL_SECONDS):
            ids = [id for id, _ in rows]
            words, lefts = client.run(commands.state_words(keys, ids)), client.run(commands.retries_left(keys, ids))
            for id, word, left in zip(ids, words, lefts, strict=True):
                number = whole_number(left or b"")
                if isinstance(word, Held) and word.lane == lane and number is not None:
                    yield Claimed(id, word.nonce, number, word.deaths)
            at += BATCH_LIMIT

    def _keys(self, name: str) -> Keys:
        (handler,) = self._consumer.chosen([name])
        return handler.queue.keys

    def _client(self) -> Client:
        return Client.to(self._consumer.connection(self._consumer.handlers), PUBLISH_TIMEOUT_SECONDS)


def _pieces(claimed: Sequence[Claimed]) -> list[Sequence[Claimed]]:
    return [claimed[at : at + BATCH_LIMIT] for at in range(0, len(claimed), BATCH_LIMIT)]
