"""Walks through the messages of one state in bounded steps, in the order in which they come first."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from reliq import commands
from reliq.admin import queries
from reliq.admin.places import STEP_IDS
from reliq.message import BARE
from reliq.wireformat import HEADER_LIMIT, MAGIC, open_envelope

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from reliq.admin.filters import Filter
    from reliq.admin.places import Spot
    from reliq.admin.session import QueueSession
    from reliq.message import Header

#: Bytes of a value that are read at first: the whole header and the start of the body.
START_BYTES = 2 * HEADER_LIMIT


@dataclass(frozen=True, slots=True)
class Found:
    """
    A message that was met on a walk.

    Attributes:
        body: its start, or the whole of it when a text was looked for.
        overhead: bytes of the header line before it.
        is_gone: whether Redis has no value of it any more.
    """

    id: str
    header: Header
    body: bytes
    overhead: int
    is_gone: bool


class Walk:
    """
    A walk through one place, except dead, a piece at a time.

    What is claimed meanwhile shifts the rest towards the walker, so each look goes half over the last one: nothing
    is passed over unless messages leave faster than they are looked at. With `ids_only` no value is read.
    """

    def __init__(
        self, queue: QueueSession, spot: Spot, where: Filter, *, offset: int = 0, ids_only: bool = False
    ) -> None:
        self._queue, self._keys, self._spot = queue, queue.keys, spot
        self._where, self._offset, self._at, self._ids_only = where, offset, offset, ids_only

    def pieces(self) -> Iterator[tuple[int, list[Found]]]:
        """Yield for each step how many ids it looked at, and the chosen messages."""
        test = self._where.tester()
        for ids in self._ids():
            found = (
                [Found(id, BARE, b"", 0, False) for id in ids]
                if self._ids_only
                else read_messages(self._queue, ids, whole=bool(self._where.match))
            )
            if self._where.is_set:
                found = [one for one in found if not one.is_gone and test(one.header, one.body)]
            yield len(ids), found

    def removed(self, count: int) -> None:
        """Note that `count` of the messages passed by were removed."""
        self._at = max(self._offset, self._at - count)

    def _ids(self) -> Iterator[list[str]]:
        if self._spot == "garbage":
            yield from self._garbage()
            return
        seen: set[str] = set()
        while True:
            back = min(STEP_IDS, self._at - self._offset)
            window = self._queue.run(queries.ids_at(self._keys, self._spot, self._at - back, back + STEP_IDS))
            fresh = [id for id in window if id not in seen]
            if not fresh:
                return
            seen = set(window)
            self._at += STEP_IDS
            for at in range(0, len(fresh), STEP_IDS):
                yield fresh[at : at + STEP_IDS]

    def _garbage(self) -> Iterator[list[str]]:
        skip = self._offset
        for ids in self._queue.scan(partial(queries.ids_scanned, self._keys, "garbage", count=STEP_IDS)):
            if fresh := ids[skip:]:
                yield fresh
            skip = max(0, skip - len(ids))


def read_messages(
    queue: QueueSession, ids: Sequence[str], *, length: int = START_BYTES, whole: bool = False
) -> list[Found]:
    """Read the first `length` bytes of messages, of long headers more, or with `whole` all of each."""
    keys = queue.keys
    values = queue.read_each([commands.body_start(keys, id, length) for id in ids], b"")
    cut = [
        at for at, start in enumerate(values) if len(start) == length and (whole or not _has_header(start, keys.bare))
    ]
    for at in cut:
        if whole:
            values[at] = queue.run(queries.value(keys, ids[at])) or b""
        else:
            values[at] = queue.run(commands.body_start(keys, ids[at], START_BYTES))
    gone = {id for id, value in zip(ids, values, strict=True) if not value}
    if gone and keys.bare:  # only a bare body can be empty
        there = queue.run_all([queries.has_value(keys, id) for id in gone])
        gone -= {id for id, is_there in zip(gone, there, strict=True) if is_there}
    return [_found(id, value, id in gone, bare=keys.bare) for id, value in zip(ids, values, strict=True)]


def _has_header(start: bytes, bare: bool) -> bool:
    """Say whether the start of a value holds its whole header, or it has none."""
    return bare or not start.startswith(MAGIC) or b"\n" in start


def _found(id: str, value: bytes, is_gone: bool, *, bare: bool) -> Found:
    header, body = open_envelope(value, bare=bare)
    return Found(id, header, body, len(value) - len(body), is_gone)
