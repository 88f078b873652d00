"""A producer names its queue in the registry once a minute, after a publish; a failure there fails no publish."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from reliq import commands

if TYPE_CHECKING:
    from collections.abc import Callable

    from reliq.call import Command
    from reliq.keys import Keys
    from reliq.transport.connection import Connection

#: A process names a queue in a Redis once in this many seconds; a queue is forgotten only after such a time.
NAMING_SECONDS = 60.0


class Registrar:
    """
    Says when the queue of `keys` is to be named in the registry.

    Attributes:
        quiet_until: nothing is due before, by the monotonic clock.
    """

    def __init__(self, keys: Keys, connection: Callable[[], Connection]) -> None:
        self._entry, self._connection = keys.entry, connection
        self.quiet_until = 0.0

    def due(self) -> Command[None] | None:
        """Return the command that names the queue, to be made once by whoever asks; None for the next minute."""
        now = time.monotonic()
        if now < self.quiet_until:
            return None
        named, self.quiet_until = self._connection().named, now + NAMING_SECONDS
        if named.get(self._entry, 0.0) > now:  # another object of the same queue has named it
            return None
        named[self._entry] = self.quiet_until
        return commands.register([self._entry], int(time.time()))
