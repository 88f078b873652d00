"""A producer names its queue in the registry once a minute, after a publish; a failure there fails no publish."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from reliq import commands

if TYPE_CHECKING:
    from reliq.call import Command
    from reliq.client.client import Clients
    from reliq.keys import Keys

#: A process names a queue in a Redis once in this many seconds; a queue is forgotten only after such a time.
NAMING_SECONDS = 60.0


class Registrar:
    """Says when the queue of `keys` is to be named in the registry of the Redis that its `clients` ask."""

    def __init__(self, keys: Keys, clients: Clients) -> None:
        self._entry, self._clients = keys.entry, clients

    def due(self) -> Command[None] | None:
        """Return the command that names the queue, to be made once by whoever asks; None for the next minute."""
        now = time.monotonic()
        if now < self._clients.named_until:
            return None
        named, self._clients.named_until = self._clients.connection().named, now + NAMING_SECONDS
        if named.get(self._entry, 0.0) > now:  # another object of the same queue has named it
            return None
        named[self._entry] = self._clients.named_until
        return commands.register([self._entry], int(time.time()))
