"""
Wait for wake tokens of several shards at the same time.

A wake token is a value in the Redis list `wake` of a shard. It announces that the shard has messages. Each wait is a
blocking command (BLPOP) on its own connection. One thread polls all these connections.
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

#: A wait that gets no token ends after this many seconds and is started again.
STAND_SECONDS = 180.0
#: A wait that failed twice in a row starts again at least this many seconds after its previous start. Until then, only
#: regular polls of Redis find messages.
STAND_AGAIN_SECONDS = 1.0
#: If Redis has not replied to a wait this many seconds after the timeout of the wait, the connection counts as broken.
LATE_ANSWER_SECONDS = 5.0
#: Seconds between two checks of the running waits. A check ends the waits on servers that failed, and on servers that
#: no longer have the Redis keys of the shards.
LOST_SECONDS = 1.0
#: A poke is a value that ends a wait early. Redis deletes a poke that no wait has taken after this many ms.
POKE_MS = 5000


@dataclass(slots=True, eq=False)
class _Wait:
    """A wait in Redis for the tokens of one group of shards (place), and the connection that it uses."""

    place: Hashable
    node: ServerConnections
    connection: Any
    socket: socket.socket
    shards: Sequence[Keys] = ()
    late_at: float = 0.0


class WakeTokens:
    """
    Waits for the wake tokens of shards. The caller may do other work while Redis runs the waits.

    A place is a group of shards that share one wait. On a single server, all shards of this object are one place. In a
    Cluster, each slot is its own place, because one command may use only keys of the same slot.

    One thread uses this object. Other threads may call only `poke`. The waits do not use connections of the transport's
    pool, because they would occupy them for long.

    Attributes:
        standing: the places whose wait is running.
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
        """Set the shards to wait for, and return them by place. End the waits of places whose shards have changed."""
        places: dict[Hashable, list[Keys]] = {}
        for keys in shards:
            places.setdefault(self._wire.place(keys.wake), []).append(keys)
        for place, known in self._places.items():
            if places.get(place) != known:
                self._end(place)
        self._places = places
        return places

    def expect(self, place: Hashable, shards: Sequence[Keys]) -> None:
        """Start a wait for the tokens of `shards` at their `place`, unless a wait is running or has just failed."""
        wait = self._waits.get(place)
        if wait is not None and place in self.standing:
            if not set(shards) <= set(wait.shards):  # end the running wait, which lacks some shards
                with suppress(ReliqError):
                    self._client.run_all(commands.poke(self._poke_key(wait.shards), POKE_MS))
            return
        now = time.monotonic()
        if now < self._again_at.get(place, 0.0):
            return
        # If a wait fails after a wait without an error, its first restart is immediate. Further restarts are delayed.
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
        """Wait at most `seconds` for a token or a poke. Return the shards with a token, and those whose wait failed."""
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
        """End the current or next `came` early. This method may be called from other threads."""
        try:
            self._poker.send(b"1")
        except OSError:
            return  # `came` has not read earlier pokes yet, or this object is closed

    def pass_on(self, shards: Iterable[Keys]) -> None:
        """Give the tokens of `shards` back to Redis, so that other processes get them."""
        if requests := [request for keys in shards for request in commands.push_wake_token(keys)]:
            with suppress(ReliqError):
                self._client.run_all(requests)

    def restart(self) -> None:
        """Close the connections of all waits, for example after an outage of Redis. `expect` opens new connections."""
        for place in list(self._waits):
            self._end(place)

    def close(self) -> None:
        """End all waits. Give tokens that have arrived back to Redis, so that other processes get them."""
        if self._selector.get_map() is None:
            return  # this object is closed already
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
        """End the waits on servers that failed or no longer have the shards. Return the shards of failed servers."""
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
        """End the failed wait for `shards`, and log the error."""
        self._end(place)
        logger.debug("queue %s: waiting for a wake-up token failed: %s", shards[0].name, error)

    def _end(self, place: Hashable) -> None:
        """Close the connection of the wait at a place, if there is one. A token in an unread reply is lost."""
        self.standing.discard(place)
        if wait := self._waits.pop(place, None):
            self._selector.unregister(wait.socket)
            wait.connection.disconnect()
