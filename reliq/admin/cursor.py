"""Places in a state from which a reader goes on, while its messages come and go."""

from __future__ import annotations

import math
import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from reliq import commands
from reliq.admin import queries
from reliq.admin.places import is_list, place_of
from reliq.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reliq.admin.places import Place, Spot
    from reliq.admin.session import QueueSession
    from reliq.commands import SortedSet

#: A message of a list that was met is looked for this far before the place where it was, and then this far from both
#: ends; that keeps Redis busy for some 3 ms.
NEAR, FAR = 500, 100_000


#: Scans and lists have no place beyond this one.
LAST_PLACE = 2**64
_LETTER_NAME = re.compile(r"[0-9]{1,20}-[0-9]{1,20}")


@dataclass(frozen=True, slots=True)
class Cursor:
    """
    The place of one message in a state.

    Attributes:
        at: the score in a sorted set; in a list how many are claimed before it; in garbage where a scan went on.
        other: how many claims the queue had counted; in garbage how many of that scan's ids come before; of a dead
            letter its shard.
        id: of the message; of a dead letter its letter.
    """

    state: Place
    at: float
    other: int
    id: str

    def __str__(self) -> str:
        return opaque(f"{self.state} {self.at!r} {self.other} {self.id}")

    @classmethod
    def parse(cls, text: str | None, state: Place) -> Cursor | None:
        """Return the place that `text` says, None for None; raise ConfigurationError for one that is not of `state`."""
        if text is None:
            return None
        try:
            told, at, other, id = read_opaque(text).split(" ", 3)
            cursor = cls(state, float(at), int(other), id)
        except (ValueError, AttributeError):
            told, cursor = "", cls(state, math.nan, 0, "")
        if told != state or not cursor._is_whole():
            raise ConfigurationError(
                f"after must be the `after` of an earlier page of the state {state}, not {str(text)[:40]!r}"
            )
        return cursor

    @property
    def order(self) -> tuple[float, bytes]:
        """The place in a sorted set, and among those of several shards."""
        return self.at, _bytes(self.id)

    def _is_whole(self) -> bool:
        """Say whether it can be the place of a message."""
        if self.state in ("pending", "unack"):
            return not math.isnan(self.at)
        if self.state == "dead" and _LETTER_NAME.fullmatch(self.id) is None:
            return False
        return 0 <= self.at < LAST_PLACE and 0 <= self.other < LAST_PLACE


def rows_after(queue: QueueSession, spot: Spot, after: Cursor | None, count: int) -> tuple[list[Cursor], bool]:
    """Return up to `count` messages of a place, except dead, that come next, and whether there may be more."""
    if spot == "garbage":
        return _of_garbage(queue, after, count)
    read = _of_list if is_list(spot) else _of_sorted_set
    rows = read(queue, spot, after, count + 1)
    return rows[:count], len(rows) > count


def _of_sorted_set(queue: QueueSession, spot: Spot, after: Cursor | None, count: int) -> list[Cursor]:
    """Read in the order of scores and ids: the place is exact, whether its message is still there or not."""
    place = cast("SortedSet", spot)
    start = 0 if after is None else _rank_after(queue, place, after)
    rows = queue.run(queries.scored_at(queue.keys, place, start, count))
    return [Cursor(place, score, 0, id) for id, score in rows]


def _rank_after(queue: QueueSession, place: SortedSet, after: Cursor) -> int:
    """Return how many messages come before the one next to a place, or at it."""
    keys = queue.keys
    rank, score, low, high = queue.run_all(
        [
            queries.rank(keys, place, after.id),
            queries.score(keys, place, after.id),
            queries.count_to(keys, place, after.at, without=True),
            queries.count_to(keys, place, after.at),
        ]
    )
    if rank is not None and score == after.at:
        return int(rank) + 1
    wanted = _bytes(after.id)
    while low < high:  # among those of one score it is found by halves
        middle = (low + high) // 2
        rows = queue.run(queries.scored_at(keys, place, middle, 1))
        if rows and (rows[0][1], _bytes(rows[0][0])) <= (after.at, wanted):
            low = middle + 1
        else:
            high = middle
    return int(low)


def _of_list(queue: QueueSession, spot: Spot, after: Cursor | None, count: int) -> list[Cursor]:
    """
    Read in the order of claims.

    The message of the place is looked for, and those behind it are read in the same look. When it is gone, as many as
    were claimed since are taken to have stood before it: nothing is passed over, and some may be seen twice.
    """
    keys, state = queue.keys, place_of(spot)
    claims = queue.run(commands.claims(keys))
    if after is None:
        first_ids = queue.run(queries.ids_at(keys, spot, 0, count))
        return [Cursor(state, at, claims, id) for at, id in enumerate(first_ids)]
    likely = max(0, int(after.at) - max(0, claims - after.other))
    for guess in _guesses(queue, spot, after, likely):
        start = max(0, guess - NEAR)
        window = queue.run(queries.ids_at(keys, spot, start, NEAR + 1 + count))
        if after.id in window:
            first = window.index(after.id) + 1
            return [Cursor(state, start + at, claims, window[at]) for at in range(first, len(window))][:count]
    ids = queue.run(queries.ids_at(keys, spot, likely, count))
    return [Cursor(state, at, claims, id) for at, id in enumerate(ids, likely)]


def _guesses(queue: QueueSession, spot: Spot, after: Cursor, likely: int) -> Iterator[int]:
    """Yield where the message of a place in a list may be: where it was, where the claims moved it, where it is found."""
    yield int(after.at)
    yield likely
    for newest_first in (False, True):
        size = queue.run(queries.size(queue.keys, spot))
        index = queue.run(queries.index_of(queue.keys, spot, after.id, newest_first=newest_first, most=FAR))
        if index is not None:
            yield size - 1 - index


def _of_garbage(queue: QueueSession, after: Cursor | None, count: int) -> tuple[list[Cursor], bool]:
    """Read as a scan does: what stays is seen at least once."""
    at, skip = (0, 0) if after is None else (int(after.at), after.other)
    rows = list[Cursor]()
    while True:
        following, ids = queue.run(queries.ids_scanned(queue.keys, "garbage", at, count))
        for number, id in enumerate(ids[skip:], skip + 1):
            is_last = number == len(ids)
            if len(rows) == count:
                return rows, True
            if is_last and not following:
                return [*rows, Cursor("garbage", at, number, id)], False
            rows.append(Cursor("garbage", following, 0, id) if is_last else Cursor("garbage", at, number, id))
        if not following:
            return rows, False
        at, skip = following, 0


def opaque(place: str) -> str:
    """Return a place as the text that a person or a program is given for it."""
    return urlsafe_b64encode(_bytes(place)).decode().rstrip("=")


def read_opaque(text: str) -> str:
    """Return the place that `opaque` made a text of; raise ValueError or AttributeError for what is none."""
    padded = text.encode("ascii") + b"=" * (-len(text) % 4)
    return urlsafe_b64decode(padded).decode("utf-8", "surrogateescape")


def _bytes(id: str) -> bytes:
    return id.encode("utf-8", "surrogateescape")
