"""Reads every id that a queue has, from wherever it stands, a bounded piece at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import TYPE_CHECKING, TypeVar

from reliq.admin import key_queries, queries
from reliq.admin.places import LinePlace
from reliq.commands import LISTS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from reliq.admin.fsck.state import IdState
    from reliq.admin.key_queries import KeySet
    from reliq.admin.queries import Index
    from reliq.admin.session import QueueSession
    from reliq.commands import List

T = TypeVar("T")
#: It is called with the name of what is read, and how many ids were looked at so far.
OnProgress = Callable[[str, int], None]

#: Ids that are read in one piece and looked at in one call: some 2 ms.
BATCH = 250
#: Keys that Redis looks at in one step of a walk through the key space: some 0.3 ms.
SCANNED_KEYS = 1000


@dataclass(slots=True)
class Reading:
    """
    One reading of a queue.

    Attributes:
        known: the ids that were looked at.
        lines: the message key of the line in which an id was met that has no place there.
        leases: key and id of every message with a key that is leased.
        keys: the message keys that have a line.
        longest_line: how many ids the longest line has.
    """

    queue: QueueSession
    progress: OnProgress
    known: set[str] = field(default_factory=set)
    lines: dict[str, str] = field(default_factory=dict)
    leases: set[tuple[str, str]] = field(default_factory=set)
    keys: set[str] = field(default_factory=set)
    longest_line: int = 0

    def tell(self, what: str) -> None:
        """Say what is read now."""
        self.progress(what, len(self.known))

    def note(self, states: Iterable[IdState]) -> None:
        """Note what is known now of ids."""
        for one in states:
            if one.at and one.at == one.key:
                del self.lines[one.id]
            if one.key and one.lease_ms is not None:
                self.leases.add((one.key, one.id))

    def pieces(self, part: List) -> Iterator[tuple[int, list[str]]]:
        """Yield the ids of a list, a piece at a time, each with the place of its first."""
        start = 0
        while True:
            self.tell(part)
            ids = self.queue.run(queries.newest_ids(self.queue.keys, part, start, BATCH))
            if not ids:
                return
            yield start, ids
            start += len(ids)

    def line_pieces(self) -> Iterator[tuple[int, list[tuple[str, str]]]]:
        """Yield the ids of lines, each with its key: pieces of one long line, or the begin of several lines."""
        for keys in self._line_keys():
            self.keys.update(keys)
            begins = self.queue.run_all([queries.newest_ids(self.queue.keys, LinePlace(key), 0, BATCH) for key in keys])
            rows = [(id, key) for key, ids in zip(keys, begins, strict=True) for id in ids]
            for some in batches(rows):
                yield 0, some
            for key, ids in zip(keys, begins, strict=True):
                self.longest_line = max(self.longest_line, len(ids))
                if len(ids) == BATCH:
                    yield from self._rest_of_line(key, BATCH)

    def _rest_of_line(self, key: str, start: int) -> Iterator[tuple[int, list[tuple[str, str]]]]:
        while ids := self.queue.run(queries.newest_ids(self.queue.keys, LinePlace(key), start, BATCH)):
            yield start, [(id, key) for id in ids]
            start += len(ids)
            self.longest_line = max(self.longest_line, start)

    def _line_keys(self) -> Iterator[list[str]]:
        """Yield the message keys that have a line, some at a time; a queue without keys is not looked through for them."""
        cursor = -1 if self.queue.run(key_queries.has_keys(self.queue.keys)) else 0
        while cursor:
            self.tell("lines")
            cursor, keys = self.queue.run(key_queries.keys_of_lines(self.queue.keys, max(0, cursor), SCANNED_KEYS))
            yield from batches(keys, BATCH)

    def keys_and_places(self) -> Iterator[list[tuple[str, str]]]:
        """Yield every message key that is known, without an id, and every place of one that is held, or should be."""
        yield from batches(sorted(self.leases))
        cursor = -1
        while cursor:
            self.tell("places")
            cursor, places = self.queue.run(key_queries.places_scanned(self.queue.keys, max(0, cursor), BATCH))
            yield from batches(places)
        for keys in chain(batches(sorted(self.keys)), self._keys_among("ring"), self._keys_among("asleep")):
            yield [(key, "") for key in keys]

    def _keys_among(self, among: KeySet) -> Iterator[list[str]]:
        cursor = -1
        while cursor:
            self.tell(among)
            cursor, found = self.queue.run(key_queries.keys_among(self.queue.keys, among, max(0, cursor), BATCH))
            yield from batches(found)

    def scanned(self, what: str, index: Index) -> Iterator[list[str]]:
        """Yield the ids of a set, sorted set or hash that were not looked at yet, a piece at a time."""
        cursor = -1
        while cursor:
            self.tell(what)
            cursor, found = self.queue.run(queries.ids_scanned(self.queue.keys, index, max(0, cursor), BATCH))
            for ids in batches(found):
                yield self.unknown(ids)

    def bodies(self) -> Iterator[list[str]]:
        """Yield the ids that have a body and were not looked at yet."""
        cursor = -1
        while cursor:
            self.tell("bodies")
            cursor, found = self.queue.run(queries.ids_of_bodies(self.queue.keys, max(0, cursor), SCANNED_KEYS))
            yield from batches(self.unknown(found))

    def unknown(self, ids: Sequence[str]) -> list[str]:
        """Return the ids that were not looked at yet, each once."""
        return [id for id in dict.fromkeys(ids) if id not in self.known]

    def length_of_lists(self) -> int:
        """Return how many ids one that is looked for everywhere is compared with."""
        sizes: list[int] = self.queue.run_all([queries.size(self.queue.keys, place) for place in LISTS])
        return sum(sizes) + self.longest_line


def batches(all: Iterable[T], size: int = BATCH) -> Iterator[list[T]]:
    """Yield the items of a sequence, so many at a time."""
    rest = iter(all)
    while batch := list(islice(rest, size)):
        yield batch
