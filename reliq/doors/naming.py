"""Names queues in the registry for their producers: once in a while, after a publish, and never in its way."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from reliq import reads
from reliq.keys import Layout

if TYPE_CHECKING:
    from collections.abc import Callable

    from reliq.call import Command
    from reliq.connection import Connection

#: Between two times that a process names the same queue in the same Redis.
NAMING_SECONDS = 3600.0


class Naming:
    """
    Says when the queue `name` is to be named in the registry.

    The registry has names alone, so a queue in a foreign layout is not named: it would be looked for in ours.
    """

    def __init__(self, name: str, layout: Layout, connection: Callable[[], Connection]) -> None:
        self._name, self._connection = name, connection
        self._quiet_until = 0.0 if layout == Layout.RELIQ else float("inf")

    def due(self) -> Command[None] | None:
        """Return the command that names the queue, to be made once by whoever asks; None for the next hour."""
        now = time.monotonic()
        if now < self._quiet_until:
            return None
        named, self._quiet_until = self._connection().named, now + NAMING_SECONDS
        if named.get(self._name, 0.0) > now:  # another object of the same queue has named it
            return None
        named[self._name] = self._quiet_until
        return reads.register([self._name], int(time.time()))
