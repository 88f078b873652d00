"""Requests that wait in Redis, each over a connection of its own, and one poll over all of them."""

from __future__ import annotations

import logging
import selectors
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import redis

from reliq.errors import ReliqError
from reliq.redis import commands
from reliq.redis.connection import BROKEN, packed, translated

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable

    from reliq.keys import Keys
    from reliq.redis.client import Client
    from reliq.redis.cluster import Wire
    from reliq.redis.commands import Command
    from reliq.redis.connection import PooledConnection

logger = logging.getLogger(__name__)

N = TypeVar("N", bound="Hashable")
T = TypeVar("T")

#: A wait whose answer is so much later than it asked for has lost its connection, or its server.
LATE_ANSWER_SECONDS = 5.0
#: Waits at a server that has failed, or that has their keys no more, are ended this often.
LOST_SECONDS = 1.0


@dataclass(slots=True, eq=False)
class _Wait(Generic[N]):
    """A connection for one key with its socket, which redis-py forgets at an error, and what waits on it, if anything."""

    name: N
    key: str
    node: PooledConnection
    connection: Any
    socket: socket.socket
    request: Command[Any]
    late_at: float = 0.0
    stands: bool = False


class BlockingWaits(Generic[N]):
    """
    Waits in Redis that need not be in one slot or on one server. They go on while the caller does something else.

    One thread uses them; `poke` is for others. Their connections are not of the wire's pool, which could be too small.
    """

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._waits: dict[N, _Wait[N]] = {}
        self._selector = selectors.DefaultSelector()
        self._poked, self._poker = socket.socketpair()
        for end in (self._poked, self._poker):
            end.setblocking(False)
        self._selector.register(self._poked, selectors.EVENT_READ)
        self._checked_at = 0.0

    def stands(self, name: N) -> bool:
        """Return whether `name` waits."""
        wait = self._waits.get(name)
        return wait is not None and wait.stands

    def begin(self, name: N, key: str, request: Command[Any], seconds: float) -> None:
        """
        Have `request`, which waits for something at `key` for so many seconds, wait as `name`.

        Raises:
            RedisUnavailableError, RedisRefusedError: it cannot.
        """
        try:
            node = self._wire.node_for(key)
        except redis.ConnectionError as error:
            self.end(name)
            raise translated(request, error) from None
        wait = self._waits.get(name)
        if wait is None or wait.node is not node:
            self.end(name)
            wait = self._waits[name] = self._opened(name, key, node, request)
        wait.request = request
        wait.stands = True
        wait.late_at = time.monotonic() + seconds + LATE_ANSWER_SECONDS
        try:
            wait.connection.send_packed_command(packed([request.command]))
        except BROKEN as error:
            raise self._failed(wait, error) from None

    def answers(self, seconds: float) -> list[tuple[N, Any]]:
        """Wait so long for an answer or a poke; return the names whose waits are over, with answer or ReliqError."""
        found: list[tuple[N, Any]] = []
        for ready, _ in self._selector.select(seconds):
            if ready.data is None:
                self._poked.recv(4096)
            else:
                found += self._read(ready.data)
        if time.monotonic() - self._checked_at >= LOST_SECONDS:
            self._checked_at = time.monotonic()
            found += self._lost()
        return found

    def poke(self) -> None:
        """End a wait for answers; other threads call this."""
        try:
            self._poker.send(b"1")
        except OSError:
            return  # there are pokes enough, or nobody waits any more

    def end(self, name: N) -> None:
        """Give up the wait of `name`, if it waits: what has come for it is lost."""
        if wait := self._waits.pop(name, None):
            self._selector.unregister(wait.socket)
            wait.connection.disconnect()

    def close(self) -> list[N]:
        """Give up every wait; return the names whose answers had come."""
        came = [name for name, answer in self.answers(0.0) if not isinstance(answer, Exception) and answer]
        for name in list(self._waits):
            self.end(name)
        self._selector.close()
        self._poked.close()
        self._poker.close()
        return came

    def _opened(self, name: N, key: str, node: PooledConnection, request: Command[Any]) -> _Wait[N]:
        connection = node.lone_connection()
        try:
            connection.connect()
            connection.send_packed_command(packed([("PING",)]))
            connection.read_response()
        except (*BROKEN, redis.ResponseError) as error:
            connection.disconnect()
            self._wire.note(node, error)
            raise translated(request, error) from None
        wait = _Wait(name, key, node, connection, connection._sock, request)  # noqa: SLF001  it has no other name
        self._selector.register(wait.socket, selectors.EVENT_READ, wait)
        return wait

    def _read(self, wait: _Wait[N]) -> list[tuple[N, Any]]:
        """Return the answer of a wait, none when it did not stand and its connection was closed."""
        stood = wait.stands
        wait.stands = False
        try:
            return [(wait.name, wait.request.read(wait.connection.read_response()))]
        except (*BROKEN, redis.ResponseError) as error:
            failure = self._failed(wait, error)
        except ReliqError as error:
            failure = error
        return [(wait.name, failure)] if stood else []

    def _lost(self) -> list[tuple[N, Any]]:
        """End the waits at servers that have failed, and those that another server has now; return them."""
        found: list[tuple[N, Any]] = []
        now = time.monotonic()
        for wait in [wait for wait in self._waits.values() if wait.stands]:
            try:
                if self._wire.node_for(wait.key) is not wait.node:
                    self.end(wait.name)
                elif now > wait.late_at:
                    found.append((wait.name, self._failed(wait, redis.TimeoutError("no answer to a wait in Redis"))))
            except redis.ConnectionError as error:
                self.end(wait.name)
                found.append((wait.name, translated(wait.request, error)))
        return found

    def _failed(self, wait: _Wait[N], error: Exception) -> ReliqError:
        """End a wait that failed, and return why."""
        self._wire.note(wait.node, error)
        self.end(wait.name)
        return translated(wait.request, error)


#: A wait in Redis that no token ends is begun anew after this time.
STAND_SECONDS = 180.0
#: A wait that failed is begun anew after this time; meanwhile looks find what comes.
STAND_AGAIN_SECONDS = 1.0


class WakeTokens:
    """The waits of one process for the tokens of its shards; `poke` may be called by other threads."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._waits: BlockingWaits[Keys] = client.blocking_waits()
        self._again_at: dict[Keys, float] = {}
        self.poke = self._waits.poke

    def expect(self, shards: Iterable[Keys]) -> None:
        """Wait for the tokens of shards."""
        for keys in shards:
            if not (self._waits.stands(keys) or time.monotonic() < self._again_at.get(keys, 0.0)):
                try:
                    self._waits.begin(keys, keys.wake, commands.wake_token(keys, STAND_SECONDS), STAND_SECONDS)
                except ReliqError as error:
                    self._failed(keys, error)

    def came(self, seconds: float) -> set[Keys]:
        """Wait so long for tokens or a poke; return the shards whose tokens have come."""
        found = set()
        for keys, answer in self._waits.answers(seconds):
            if isinstance(answer, Exception):
                self._failed(keys, answer)
            elif answer:
                found.add(keys)
        return found

    def pass_on(self, shards: Iterable[Keys]) -> None:
        """Give tokens that cannot be used here to other processes."""
        if requests := [request for keys in shards for request in commands.push_wake_token(keys)]:
            with suppress(ReliqError):
                self._client.run_all(requests)

    def forget(self, keys: Keys) -> None:
        """Wait for a shard no more: it is none of ours."""
        self._waits.end(keys)
        self._again_at.pop(keys, None)

    def close(self) -> None:
        """Wait for nothing more, and pass on what has come meanwhile."""
        self.pass_on(self._waits.close())

    def _failed(self, keys: Keys, error: Exception) -> None:
        logger.debug("queue %s: the wait for a token failed: %s", keys.name, error)
        self._again_at[keys] = time.monotonic() + STAND_AGAIN_SECONDS
