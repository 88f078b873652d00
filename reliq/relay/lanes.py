"""The lanes of a relay: each call has one of its own until its rows are noted as sent, and Redis remembers it for weeks."""

from __future__ import annotations

from reliq.client.lanes import Lane
from reliq.ids import token

#: Within 30 days a call may be made again, by any relay, and publishes nothing twice. A relay that died leaves one key
#: for each lane of a queue, of about 100 bytes.
REMEMBERED_MS = 30 * 86_400_000


class RelayLanes:
    """
    The lanes of one relay.

    A lane is free again when the rows of its call are noted as sent in the transaction that takes the next rows, or in
    an earlier one: who finds rows of an earlier call in the database, and is told `stale`, knows that they were sent.
    """

    def __init__(self) -> None:
        self._name, self._made = token(), 0
        self._free: list[Lane] = []

    def take(self) -> Lane:
        """Return a lane that no call has; it is gone until it is given back."""
        if self._free:
            return self._free.pop()
        self._made += 1
        return Lane(f"{self._name}{self._made}")

    def give_back(self, lane: Lane) -> None:
        """Note that the call of the lane has its answer."""
        self._free.append(lane)
