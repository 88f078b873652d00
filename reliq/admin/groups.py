"""Dead letters by why they died, with how many died so."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from reliq.admin import queries
from reliq.admin.dead import letters_in, span_of
from reliq.admin.page import LONGEST_SEARCH
from reliq.errors import ConfigurationError
from reliq.message import Letter
from reliq.settings import seconds

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from reliq.admin.filters import LetterFilter
    from reliq.admin.session import QueueSession

GroupBy = Literal["reason", "raised"]


@dataclass(frozen=True, slots=True)
class DeadGroup:
    """
    Dead letters that died alike.

    Attributes:
        reason: one of `DEATH_REASONS`; empty where letters are not grouped by it.
        raised: class and place of the exception, empty for those that have none; None where letters are not grouped
            by it. `LetterFilter(reason=, raised=)` means the same letters.
        newest: when the newest of them died, in unix seconds by Redis' clock.
        example: the newest one's id.
    """

    reason: str
    raised: str | None
    count: int
    newest: float
    example: str


@dataclass(frozen=True, slots=True)
class DeadGroups:
    """
    The dead letters of a queue by how they died, the largest group first.

    Attributes:
        looked: how many letters were looked at, the newest.
        of: how many there are.
    """

    groups: Sequence[DeadGroup]
    looked: int
    of: int


def dead_groups(
    queue: QueueSession, where: LetterFilter, by: Sequence[GroupBy], for_seconds: float, without: Collection[int]
) -> DeadGroups:
    """Group the newest letters that are meant; raise ConfigurationError for what they cannot be grouped by."""
    if not by or not set(by) <= {"reason", "raised"} or isinstance(by, str):
        raise ConfigurationError(f"by must be some of 'reason' and 'raised', such as ('reason', 'raised'), not {by!r}")
    whole_time = seconds("for_seconds", for_seconds, most=LONGEST_SEARCH)
    parts = [part for part in queue.parts if part.keys.shard not in without]
    test, of, looked = where.letter_tester(), 0, 0
    newest, counts = dict[tuple[str, str | None], Letter](), dict[tuple[str, str | None], int]()
    for part in parts:
        until = time.monotonic() + whole_time / len(parts)
        first, last = span_of(part, where)
        of += part.run(queries.size(part.keys, "dead"))
        for letters in letters_in(part, first, last, newest_first=True):
            looked += len(letters)
            for letter in filter(test, letters):
                group = letter.reason if "reason" in by else "", letter.raised if "raised" in by else None
                newest[group] = max(newest.get(group, letter), letter, key=lambda one: one.died)
                counts[group] = counts.get(group, 0) + 1
            if time.monotonic() >= until:
                break
    groups = [DeadGroup(*group, counts[group], letter.died, letter.id) for group, letter in newest.items()]
    return DeadGroups(sorted(groups, key=lambda group: (-group.count, -group.newest)), looked, of)
