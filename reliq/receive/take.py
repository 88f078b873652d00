"""One take from a queue: the calls that claim messages and read their values, and the deliveries that come of them."""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING, Any

from reliq import commands, settlement, transitions
from reliq.chunks import chunked_by_size
from reliq.message import BARE, Delivery
from reliq.settings import BATCH_LIMIT, READ_BYTES
from reliq.settlement import EXPIRED, RELEASED, Ending

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from reliq.call import Call, Command
    from reliq.keys import Keys
    from reliq.message import Claimed
    from reliq.settings import QueueSettings
    from reliq.settlement import Ended
    from reliq.transitions import CallNumber, FoundBody, Settled


class Take:
    """
    Messages of one queue, from the look that claims them to the calls that settle them; whoever holds it makes the calls.

    Args:
        keyed: whether the messages may have keys, or are limited.
        spread: of how many keys they may be; None: of any number.

    Attributes:
        claimed: every message that the last look took.
        buried: what the last look took back for good: garbage, of which dead letters are to be made.
        behind: how many the last look has left in ready and retry.
        missed: whether the last look has moved messages and met none: they came after its claim, and another look is due.
        next_in_ms: after a look, until something else comes due; none: nothing will.
    """

    def __init__(
        self,
        keys: Keys,
        settings: QueueSettings,
        *,
        limit: int,
        lease_ms: int,
        keyed: bool = False,
        spread: int | None = None,
    ) -> None:
        self.keys, self._settings, self._keyed, self._spread = keys, settings, keyed, spread
        self._limit, self._lease_ms = limit, lease_ms
        self.claimed: list[Claimed] = []
        self._found: list[FoundBody] = []
        self.buried: tuple[str, ...] = ()
        self.next_in_ms: list[int] = []
        self.behind, self.missed = 0, False

    def look(self, call_number: CallNumber, *, spare_leases: bool = False) -> list[Call[Any]]:
        """Return the calls of one look: messages that are due or overdue are moved before the claim."""
        keys, keyed, limit, lease_ms = self.keys, self._keyed, self._limit, self._lease_ms
        return [
            transitions.promote(keys, keyed=keyed),
            transitions.reclaim(keys, spare_leases=spare_leases, keyed=keyed),
            transitions.claim(keys, call_number, limit=limit, lease_ms=lease_ms, keyed=keyed, spread=self._spread),
        ]

    def looked(self, answers: Sequence[Any]) -> None:
        """Keep what was claimed; raise what Redis refused."""
        promoted, reclaimed, claim = answers
        self.claimed = [] if isinstance(claim, Exception) else claim.claimed
        _raise_first(answers)
        self.buried, self.behind = reclaimed.buried, claim.behind
        moved = promoted[0] + len(reclaimed.overdue) + len(reclaimed.again)
        self.missed = moved > 0 and not (self.claimed or self.behind)
        self.next_in_ms = [due for due in (promoted[1], reclaimed.next_in_ms) if due > 0]

    def reads(self) -> list[Call[list[FoundBody]]]:
        """Return the call for the values of what was claimed, if anything was."""
        ids = [one.id for one in self.claimed]
        return [transitions.bodies(self.keys, ids, max_body=self._settings.max_body)] if ids else []

    def large_reads(self, answers: Sequence[Any]) -> list[Command[list[bytes | None]]]:
        """Return the calls, each of a bounded size, for values of which `reads` brought the sizes; raise what Redis refused."""
        _raise_first(answers)
        self._found = [found for answer in answers for found in answer]
        sized = [(one.id, size) for one, size in zip(self.claimed, self._found, strict=True) if isinstance(size, int)]
        pieces = chunked_by_size(sized, itemgetter(1), READ_BYTES, BATCH_LIMIT)
        return [commands.bodies(self.keys, [id for id, _ in piece]) for piece in pieces]

    def opened(self, answers: Sequence[Any]) -> tuple[list[Delivery], list[Ending]]:
        """Return the deliveries of what was read, and the ends of those whose body is gone; raise what Redis refused."""
        _raise_first(answers)
        deliveries: list[Delivery] = []
        gone: list[Ending] = []
        large = (value for answer in answers for value in answer)
        max_body, bare = self._settings.max_body, self.keys.bare
        for one, found in zip(self.claimed, self._found, strict=True):
            value = next(large) if isinstance(found, int) else found
            if value is None:
                gone.append(Ending(Delivery(one, b"", BARE, b""), EXPIRED))
            else:
                deliveries.append(transitions.delivery(one, value, max_body=max_body, bare=bare))
        return deliveries, gone

    def release(self) -> list[Call[Settled]]:
        """Return the calls that give everything back unspent."""
        return self.settle(Ending(Delivery(one, b"", BARE, b""), RELEASED) for one in self.claimed)

    def settle(self, endings: Iterable[Ended]) -> list[Call[Settled]]:
        """Return the calls that tell Redis how deliveries ended."""
        return [call for call, _ in settlement.calls(self.keys, self._settings, endings)]


def _raise_first(answers: Sequence[Any]) -> None:
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
