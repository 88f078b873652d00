"""
Wait for wake tokens by blocking commands, each on its own connection; one thread polls all connections.

A wake token is a value in the Redis list `wake` of a shard; it announces that the shard has messages.
"""

from __future__ import annotations

import logging
import selectors
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from reliq.errors import ReliqError
from reliq.keys import Keys, token
from reliq.redis import commands
from reliq.redis.connection import NotSentError, ServerConnections, packed
from reliq.redis.redis_py import redis

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence

    from reliq.redis.client import Client
    from reliq.redis.cluster import Transport
    from reliq.redis.commands import Command

logger = logging.getLogger(__name__)

#: A wait without a token ends after this many seconds and is started again.
STAND_SECONDS = 180.0
#: A failed wait is started again this many seconds after its start. Until then, regular polls of Redis find messages.
STAND_AGAIN_SECONDS = 1.0
#: If the reply to a wait comes this many seconds after the wait's timeout, or later, the connection counts as broken.
LATE_ANSWER_SECONDS = 5.0
#: Seconds between two checks of the waits. A check ends waits on servers that failed or no longer have the keys.
LOST_SECONDS = 1.0
#: Redis deletes an unused poke (a value that interrupts a wait) after this many ms.
POKE_MS = 5000


@dataclass(slots=True, eq=False)
class _Wait:
    """A wait in Redis for one group of shards (place), with the connection and socket of this wait."""

    place: Hashable
    node: ServerConnections
    connection: Any
    socket: socket.socket
    shards: Sequence[Keys] = ()
    late_at: float = 0.0


class WakeTokens:
    """
    Waits for the wake tokens of shards. The waits run in Redis while the caller does other work.

    A place is a group of shards that share one wait, because one command may use all their keys. In a Cluster, each
    shard is a place of its own. One thread uses this object; other threads may call only `poke`. The connections do
    not come from the transport's pool, which could be too small.

    Attributes:
        standing: the places (groups of shards) with a running wait.
    """

    def __init__(self, client: Client, wire: Transport) -> None:
        self._client = client
        self._wire = wire
        self._name = token()
        self.standing: set[Hashable] = set()
        self._places: dict[Hashable, list[Keys]] = {}
        self._waits: dict[Hashable, _Wait] = {}
        self._again_at: dict[Hashable, float] = {}
        self._selector = selectors.DefaultSelector()
        self._poked, self._poker = socket.socketpair()
        for end in (self._poked, self._poker):
            end.setblocking(False)
        self._selector.register(self._poked, selectors.EVENT_READ)
        self._checked_at = 0.0

    def serve(self, shards: Iterable[Keys]) -> dict[Hashable, list[Keys]]:
        """Group shards by place, so that each group shares one wait; end the waits of groups that have changed."""
        places: dict[Hashable, list[Keys]] = {}
        for keys in shards:
            places.setdefault(self._wire.place(keys.wake), []).append(keys)
        for place, known in self._places.items():
            if places.get(place) != known:
                self._end(place)
        self._places = places
        return places

    def expect(self, place: Hashable, shards: Sequence[Keys]) -> None:
        """Start a wait for the wake tokens of the `shards` at a place, unless a wait runs or has just failed."""
        wait = self._waits.get(place)
        if wait is not None and place in self.standing:
            if not set(shards) <= set(wait.shards):  # end the running wait, so that the next wait includes all shards
                with suppress(ReliqError):
                    self._client.run_all(commands.poke(self._poke_key(wait.shards), POKE_MS))
            return
        now = time.monotonic()
        if now < self._again_at.get(place, 0.0):
            return
        # If a wait fails after a successful wait, the first restart is immediate; further restarts are delayed.
        self._again_at[place] = now + STAND_AGAIN_SECONDS if place in self._again_at else now
        try:
            node = self._wire.node_for(shards[0].wake)
        except NotSentError as error:
            self._note_failure(place, shards, error)
            return
        try:
            if wait is None or wait.node is not node:
                self._end(place)
                wait = self._open(place, node)
            wait.shards = shards
            wait.late_at = now + STAND_SECONDS + LATE_ANSWER_SECONDS
            wait.connection.send_packed_command(packed([self._request(shards).command]))
            self.standing.add(place)
        except (redis.RedisError, OSError) as error:
            self._wire.note(node, error)
            self._note_failure(place, shards, error)

    def came(self, seconds: float) -> tuple[list[Keys], list[Keys]]:
        """Wait for tokens or a poke; return the shards with a token, and the shards with a failed wait."""
        came: list[Keys] = []
        failed: list[Keys] = []
        for ready, _ in self._selector.select(seconds):
            wait: _Wait | None = ready.data
            if wait is None:
                self._poked.recv(4096)
                continue
            stood = wait.place in self.standing
            self.standing.discard(wait.place)
            try:
                key = self._request(wait.shards).read(wait.connection.read_response())
                came += [keys for keys in wait.shards if keys.wake == key]
                self._again_at.pop(wait.place, None)
            except (redis.RedisError, OSError) as error:
                self._wire.note(wait.node, error)
                self._note_failure(wait.place, wait.shards, error)
                failed += wait.shards if stood else ()
        if time.monotonic() - self._checked_at >= LOST_SECONDS:
            self._checked_at = time.monotonic()
            failed += self._lost()
        return came, failed

    def poke(self) -> None:
        """Interrupt `came`; other threads may call this."""
        try:
            self._poker.send(b"1")
        except OSError:
            return  # pokes are pending already, or this object is closed

    def pass_on(self, shards: Iterable[Keys]) -> None:
        """Return unused tokens to Redis, so that other processes get them."""
        if requests := [request for keys in shards for request in commands.push_wake_token(keys)]:
            with suppress(ReliqError):
                self._client.run_all(requests)

    def restart(self) -> None:
        """End all waits, for example after an outage of Redis, because their connections may be dead."""
        for place in list(self._waits):
            self._end(place)

    def close(self) -> None:
        """End all waits, and return unused tokens to Redis for other processes."""
        if self._selector.get_map() is None:
            return  # closed already
        came, _ = self.came(0.0)
        self.restart()
        self._selector.close()
        self._poked.close()
        self._poker.close()
        self.pass_on(came)

    def _request(self, shards: Sequence[Keys]) -> Command[str | None]:
        return commands.wake_token(self._poke_key(shards), shards, STAND_SECONDS)

    def _poke_key(self, shards: Sequence[Keys]) -> str:
        return shards[0].lane(f"{self._name}.poke")

    def _open(self, place: Hashable, node: ServerConnections) -> _Wait:
        connection = node.lone_connection()
        try:
            connection.connect()
            connection.send_packed_command(packed([("PING",)]))
            connection.read_response()
        except (redis.RedisError, OSError):
            connection.disconnect()
            raise
        wait = _Wait(place, node, connection, connection._sock)  # noqa: SLF001  no public name
        self._selector.register(wait.socket, selectors.EVENT_READ, wait)
        self._waits[place] = wait
        return wait

    def _lost(self) -> list[Keys]:
        """End waits on servers that failed or no longer have the keys; return the shards of the failed servers."""
        failed: list[Keys] = []
        for place in [*self.standing]:
            wait = self._waits[place]
            try:
                if self._wire.node_for(wait.shards[0].wake) is not wait.node:
                    self._end(place)
                    continue
                if time.monotonic() <= wait.late_at:
                    continue
                error: Exception = redis.TimeoutError("no answer to a wait in Redis")
                self._wire.note(wait.node, error)
            except NotSentError as away:
                error = away
            self._note_failure(place, wait.shards, error)
            failed += wait.shards
        return failed

    def _note_failure(self, place: Hashable, shards: Sequence[Keys], error: Exception) -> None:
        """End a failed wait and log the error."""
        self._end(place)
        logger.debug("queue %s: waiting for a wake-up token failed: %s", shards[0].name, error)

    def _end(self, place: Hashable) -> None:
        """End the wait of a group of shards, if there is a wait; a token in an unread reply is lost."""
        self.standing.discard(place)
        if wait := self._waits.pop(place, None):
            self._selector.unregister(wait.socket)
            wait.connection.disconnect()
