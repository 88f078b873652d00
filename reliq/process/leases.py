"""The leases of a worker process in the hands of its supervisor: found, extended, given back."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from reliq import commands, transitions
from reliq.client.client import Client
from reliq.errors import ReliqError
from reliq.message import Claimed
from reliq.settings import BATCH_LIMIT
from reliq.transport.connection import PUBLISH_TIMEOUT_SECONDS
from reliq.transport.many import ManyWire
from reliq.wireformat import Held, read_count
from reliq.worker.served import Served

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from reliq.consumer.consumer import Consumer
    from reliq.handlers.handler import Handler
    from reliq.keys import Keys
    from reliq.transport.connection import Connection

#: A call is tried for 1 s while Redis is away: other processes may wait for the same help.
CALL_SECONDS = 1.0


class Leases:
    """
    The leases of a consumer's queues, each shard by its keys; every method may raise ReliqError.

    Attributes:
        call_seconds: for how long a call is tried while Redis is away.
    """

    def __init__(self, consumer: Consumer) -> None:
        self._consumer, self._served = consumer, Served(consumer.handlers)
        self.call_seconds = CALL_SECONDS

    @property
    def has_many_servers(self) -> bool:
        """Whether one server may be away while others answer."""
        return isinstance(self._connection().wire(PUBLISH_TIMEOUT_SECONDS), ManyWire)

    def shards(self, names: Sequence[str]) -> list[Keys]:
        """Return the shards of queues; while Redis is away, the first of each."""
        self._served = Served([self._handler(name) for name in names])
        with suppress(ReliqError):
            self._client().run_all(self._served.questions())
        return list(self._served.shards())

    def shard(self, name: str, number: int) -> Keys:
        """Return one shard of queue `name`."""
        return self._handler(name).queue.known_shards.keys(number)

    def held(self, keys: Keys, lane: str) -> list[Claimed]:
        """Return the messages of a shard that are held by the consumer that claims as `lane`."""
        return list(self._held(keys, lane))

    def extend(self, keys: Keys, claimed: Sequence[Claimed]) -> None:
        """Extend the leases of these messages of a shard to a whole one from now."""
        lease_ms = self._handler(keys.name).settings.lease_ms
        for piece in _pieces(claimed):
            self._client().run(transitions.extend(keys, piece, lease_ms=lease_ms), for_seconds=self.call_seconds)

    def end(self, keys: Keys, claimed: Sequence[Claimed]) -> None:
        """Have the leases of these messages of a shard be over now: who held them is dead, and they pay for it."""
        for piece in _pieces(claimed):
            self._client().run(transitions.extend(keys, piece, lease_ms=1), for_seconds=self.call_seconds)

    def release(self, keys: Keys, claimed: Sequence[Claimed]) -> None:
        """Give these messages of a shard back, unspent and in their order."""
        for piece in reversed(_pieces(claimed)):  # each piece goes before the last one: the first must come last
            self._client().run(transitions.release(keys, piece), for_seconds=self.call_seconds)

    def hand_on(self, names: Sequence[str]) -> None:
        """Have others look at every shard of queues: a token that a dead process took, or its watch, is nobody's."""
        shards = self.shards(names)
        requests = [commands.drop_watch(keys) for keys in shards]
        self._client().run_all(requests + [token for keys in shards for token in commands.push_wake_token(keys)])

    def _held(self, keys: Keys, lane: str) -> Iterator[Claimed]:
        """Yield the messages in unack whose receipts are of `lane`; each call reads a bounded part of it."""
        at, client, is_keyed = 0, self._client(), self._served.is_keyed(keys.name)
        while rows := client.run(commands.held(keys, at), for_seconds=self.call_seconds):
            ids = [id for id, _ in rows]
            words, lefts = client.run(commands.state_words(keys, ids)), client.run(commands.retries_left(keys, ids))
            for id, word, left in zip(ids, words, lefts, strict=True):
                number, key = read_count(left)
                if isinstance(word, Held) and word.lane == lane and number is not None:
                    yield Claimed(id, word.nonce, number, word.deaths, key=key if is_keyed or key else None)
            at += BATCH_LIMIT

    def _handler(self, name: str) -> Handler:
        (handler,) = self._consumer.chosen([name])
        return handler

    def _connection(self) -> Connection:
        return self._consumer.connection(self._consumer.handlers)

    def _client(self) -> Client:
        return Client.to(self._connection(), PUBLISH_TIMEOUT_SECONDS)


def _pieces(claimed: Sequence[Claimed]) -> list[Sequence[Claimed]]:
    return [claimed[at : at + BATCH_LIMIT] for at in range(0, len(claimed), BATCH_LIMIT)]
