"""Finds the server that has a benchmark's queue: that one is measured, among many too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reliq.client.client import Client
from reliq.commands import server_ms
from reliq.keys import Keys
from reliq.transport.connection import PUBLISH_TIMEOUT_SECONDS, Connection
from reliq.transport.pool import plain_client

if TYPE_CHECKING:
    from reliq.transport.wire import PooledWire

#: A request is tried again for this long while Redis is away.
AWAY_SECONDS = 5.0


def node_of(url: str, queue: str, timeout_seconds: float = PUBLISH_TIMEOUT_SECONDS) -> PooledWire:
    """Return the wire to the server that has a queue; raise ReliqError when it is away."""
    wire = Connection.to(url).wire(timeout_seconds)
    Client(wire).run(server_ms(), for_seconds=AWAY_SECONDS)  # the servers are known then
    return wire.node_for(Keys(queue).ready)


def plain_client_of(url: str, queue: str, timeout_seconds: float) -> Any:
    """Return redis-py's own client of the server that has a queue."""
    return plain_client(url, timeout_seconds, node=node_of(url, queue).server)
