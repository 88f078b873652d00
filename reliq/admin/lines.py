"""The lines of a queue, one after another: the places of messages that wait for the turn of their key."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from reliq.admin import key_queries
from reliq.admin.places import STEP_IDS, LinePlace
from reliq.message import PRIORITY_LINES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reliq.admin.filters import Filter
    from reliq.admin.key_queries import KeySet
    from reliq.admin.places import Place, Spot
    from reliq.admin.session import QueueSession


#: Members of `ring` and `held` that are no keys: the turn of ready and retry, and the places of messages that only wait.
NO_LINES = ("", "\2")


class StatePart(NamedTuple):
    """
    A part of a state that is gone through in bounded steps: of one shard, and of waiting messages of one key.

    Attributes:
        where: which of its messages are meant.
    """

    queue: QueueSession
    spot: Spot
    where: Filter


def parts_of(queue: QueueSession, place: Place, where: Filter) -> Iterator[StatePart]:
    """Yield the parts of a state that may have a message which is meant."""
    if place != "waiting":
        yield from (StatePart(shard, place, where) for shard in queue.parts)
        return
    rest = replace(where, key="")
    for shard in queue.parts:
        yield from (StatePart(shard, LinePlace(key), rest) for key in ([where.key] if where.key else every_key(shard)))


def every_key(shard: QueueSession) -> Iterator[str]:
    """Yield each key of which a message may wait, once, in no order; the ring comes twice, for a key may wake meanwhile."""
    seen = set[str]()
    for key in chain(
        PRIORITY_LINES.values(), _among(shard, "ring"), _among(shard, "asleep"), _holding(shard), _among(shard, "ring")
    ):
        if key not in seen and key not in NO_LINES:
            seen.add(key)
            yield key


def first_lines(shard: QueueSession, most: int) -> list[LinePlace]:
    """Return up to `most` lines in the order in which they come first: by turns, then those that wake first, then others."""
    first, sleeping = shard.run_all([key_queries.first_keys(shard.keys, among, most) for among in ("ring", "asleep")])
    found = dict.fromkeys(key for key in (*first, *sleeping, *PRIORITY_LINES.values()) if key not in NO_LINES)
    for key in _holding(shard) if len(found) < most else ():
        found[key] = None
        if len(found) >= most:
            break
    return [LinePlace(key) for key in list(found)[:most]]


def _among(shard: QueueSession, among: KeySet) -> Iterator[str]:
    for found in shard.scan(partial(key_queries.keys_among, shard.keys, among, count=STEP_IDS)):
        yield from found


def _holding(shard: QueueSession) -> Iterator[str]:
    last: str | None = None
    while found := shard.run(key_queries.keys_holding(shard.keys, last, STEP_IDS)):
        yield from (key for key in found if key not in NO_LINES)
        last = found[-1]
