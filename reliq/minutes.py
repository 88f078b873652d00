"""
The last minutes of a queue, which a worker notes in Redis: a ring of totals, so that whoever looks has a past at once.

The hash `minutes` has a field for each of the last 180 minutes, by the minute's number modulo 180. A value is the time in
unix ms, and as it was then the totals of what arrived, was acked, failed, became a dead letter and ended in any other way
than by an ack, how many messages waited, and since when, in unix ms or `-`, the first of them had been due.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from reliq.call import Command
from reliq.foreign import LAST_SECOND, whole_number
from reliq.rights import runs

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reliq.keys import Keys

#: Minutes that are kept, and the ms of one.
MINUTES_LIMIT, MINUTE_MS = 180, 60_000

#: Numbers in a value, the last one aside.
_NUMBERS = 7


class Totals(NamedTuple):
    """
    A queue as a minute's note has it.

    Attributes:
        at_ms: when, in unix ms by Redis' clock.
        arrived: published or redriven.
        failed: deliveries that ended in an error, or by their lease.
        dead, ended: messages that became dead letters; that ended in any way but by an ack, these included.
        waiting: due, for a worker or for the turn of their key.
        due_ms: since when the first of them has been due; None when nothing waits, or nobody knows.
    """

    at_ms: int
    arrived: int
    acked: int
    failed: int
    dead: int
    ended: int
    waiting: int
    due_ms: int | None

    @property
    def sums_then(self) -> tuple[int, int, int, int, int]:
        """The answer of `sums` then."""
        return self.arrived, self.acked, self.failed, self.dead, self.ended

    @staticmethod
    def sums(totals: Mapping[str, int]) -> tuple[int, int, int, int, int]:
        """Return how many arrived, were acked, failed, died and ended in any way but by an ack, of a queue's totals."""
        kinds = (
            ("published", "redriven"),
            ("acked",),
            ("nacked", "retried_lease"),
            ("dead",),
            ("dead", "expired", "cancelled", "purged"),
        )
        arrived, acked, failed, dead, ended = (sum(totals.get(kind, 0) for kind in some) for some in kinds)
        return arrived, acked, failed, dead, ended


@runs("minutes:HMGET")
def noted(keys: Keys, minutes: Sequence[int]) -> Command[list[Totals]]:
    """Read what the ring has in the places of these minutes, each by its number; it may be of the minutes before them."""
    return Command(
        ("HMGET", keys.minutes, *(minute % MINUTES_LIMIT for minute in minutes)),
        lambda reply: sorted(found for one in reply if (found := _read(one)) is not None),
    )


@runs("minutes:HSET,PEXPIRE")
def note(keys: Keys, totals: Totals) -> list[Command[Any]]:
    """Note a queue's totals of one minute; the notes are gone when none was written for as long as they last."""
    minute = totals.at_ms // MINUTE_MS
    text = " ".join("-" if number is None else str(number) for number in totals)
    return [
        Command(("HSET", keys.minutes, minute % MINUTES_LIMIT, text), int),
        Command(("PEXPIRE", keys.minutes, MINUTES_LIMIT * MINUTE_MS), int),
    ]


def _read(value: bytes | None) -> Totals | None:
    """Return what a value says; None for one that something else wrote."""
    *texts, due = (value or b"").split(b" ")
    numbers = [number for text in texts if (number := whole_number(text)) is not None and number >= 0]
    if len(numbers) != len(texts) or len(numbers) != _NUMBERS or numbers[0] > LAST_SECOND * 1000:
        return None
    at_ms, arrived, acked, failed, dead, ended, waiting = numbers
    return Totals(at_ms, arrived, acked, failed, dead, ended, waiting, whole_number(due))
