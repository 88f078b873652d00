"""The waits of a process for wake tokens, each over a connection of its own, and one poll over all of them."""

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

#: A wait that no token ends is begun anew after this time.
STAND_SECONDS = 180.0
#: A wait that fails is begun anew after this time from its beginning on; meanwhile looks find what comes.
STAND_AGAIN_SECONDS = 1.0
#: A wait whose answer is so much later than it asked for has lost its connection, or its server.
LATE_ANSWER_SECONDS = 5.0
#: Waits at a server that has failed, or that has their keys no more, are ended this often.
LOST_SECONDS = 1.0
#: Redis deletes a poke that nobody waits for after this time.
POKE_MS = 5000


@dataclass(slots=True, eq=False)
class _Wait:
    """A connection for one place, with its socket, which redis-py forgets at an error, and the shards that wait on it."""

    place: Hashable
    node: ServerConnections
    connection: Any
    socket: socket.socket
    shards: Sequence[Keys] = ()
    late_at: float = 0.0


class WakeTokens:
    """
    Waits in Redis for the tokens of shards, which go on while the caller does something else.

    Shards lie at one place when one command may name keys of all of them: in a Cluster each lies alone. The shards of a
    place share a wait. One thread uses this object; `poke` is for others. Its connections are not of the wire's pool,
    which could be too small.

    Attributes:
        standing: the places whose waits stand.
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
        """Return shards by their places; end the waits of places that have others by now."""
        places: dict[Hashable, list[Keys]] = {}
        for keys in shards:
            places.setdefault(self._wire.place(keys.wake), []).append(keys)
        for place, known in self._places.items():
            if places.get(place) != known:
                self._end(place)
        self._places = places
        return places

    def expect(self, place: Hashable, shards: Sequence[Keys]) -> None:
        """Have a wait stand for the tokens of `shards`, which lie at one place; after a failure not at once."""
        wait = self._waits.get(place)
        if wait is not None and place in self.standing:
            if not set(shards) <= set(wait.shards):  # it ends, and the next is for them too
                with suppress(ReliqError):
                    self._client.run_all(commands.poke(self._poke_key(wait.shards), POKE_MS))
            return
        now = time.monotonic()
        if now < self._again_at.get(place, 0.0):
            return
        # The first wait after a good one may begin anew at once; each later one waits, until one ends well.
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
        """Wait so long for tokens or a poke; return the shards whose tokens have come, and those whose waits have failed."""
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
        """End a wait of `came`; other threads call this."""
        try:
            self._poker.send(b"1")
        except OSError:
            return  # there are pokes enough, or nobody waits any more

    def pass_on(self, shards: Iterable[Keys]) -> None:
        """Give tokens that cannot be used here to other processes."""
        if requests := [request for keys in shards for request in commands.push_wake_token(keys)]:
            with suppress(ReliqError):
                self._client.run_all(requests)

    def restart(self) -> None:
        """End the waits, because their server was away: of a connection that hangs nothing else is heard for long."""
        for place in list(self._waits):
            self._end(place)

    def close(self) -> None:
        """Wait for nothing more, and pass on what has come meanwhile."""
        if self._selector.get_map() is None:
            return  # it was closed before
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
        wait = _Wait(place, node, connection, connection._sock)  # noqa: SLF001  it has no other name
        self._selector.register(wait.socket, selectors.EVENT_READ, wait)
        self._waits[place] = wait
        return wait

    def _lost(self) -> list[Keys]:
        """End the waits at servers that have failed, and those that another server has now; return the shards of the former."""
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
        """End a wait that has failed."""
        self._end(place)
        logger.debug("queue %s: the wait for a token failed: %s", shards[0].name, error)

    def _end(self, place: Hashable) -> None:
        """End the wait at a place, if it waits; what has come for it is lost."""
        self.standing.discard(place)
        if wait := self._waits.pop(place, None):
            self._selector.unregister(wait.socket)
            wait.connection.disconnect()
