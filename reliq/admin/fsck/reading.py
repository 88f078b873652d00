"""Reads every id that a queue has, from wherever it stands, a bounded piece at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, TypeVar

from reliq.admin import key_queries, queries
from reliq.admin.places import LinePlace
from reliq.chunks import chunked
from reliq.commands import LISTS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from reliq.admin.fsck.state import IdState
    from reliq.admin.queries import Index
    from reliq.admin.session import QueueSession
    from reliq.call import Command
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
            for some in chunked(rows, BATCH):
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
        if self.queue.run(key_queries.has_keys(self.queue.keys)):
            for keys in self._scanned("lines", queries.names_of, "line", count=SCANNED_KEYS):
                yield from chunked(keys, BATCH)

    def keys_and_places(self) -> Iterator[list[tuple[str, str]]]:
        """Yield every message key that is known, without an id, and every place of one that is held, or should be."""
        yield from chunked(sorted(self.leases), BATCH)
        for places in self._scanned("places", key_queries.places_scanned):
            yield from chunked(places, BATCH)
        in_turn = (self._scanned(name, key_queries.keys_among, name) for name in ("ring", "asleep"))
        for keys in chain([sorted(self.keys)], *in_turn):
            yield from ([(key, "") for key in some] for some in chunked(keys, BATCH))

    def scanned(self, what: str, index: Index) -> Iterator[list[str]]:
        """Yield the ids of a set, sorted set or hash that were not looked at yet, a piece at a time."""
        for found in self._scanned(what, queries.ids_scanned, index):
            yield from map(self.unknown, chunked(found, BATCH))

    def bodies(self) -> Iterator[list[str]]:
        """Yield the ids that have a body and were not looked at yet."""
        for found in self._scanned("bodies", queries.names_of, "msg", count=SCANNED_KEYS):
            yield from chunked(self.unknown(found), BATCH)

    def _scanned(
        self, what: str, step: Callable[..., Command[tuple[int, list[T]]]], *of: str, count: int = BATCH
    ) -> Iterator[list[T]]:
        """Yield what each step of a walk finds that `step` makes; say before each what is read."""

        def told(at: int) -> Command[tuple[int, list[T]]]:
            self.tell(what)
            return step(self.queue.keys, *of, at, count)

        return self.queue.scan(told)

    def unknown(self, ids: Sequence[str]) -> list[str]:
        """Return the ids that were not looked at yet, each once."""
        return [id for id in dict.fromkeys(ids) if id not in self.known]

    def length_of_lists(self) -> int:
        """Return how many ids one that is looked for everywhere is compared with."""
        sizes: list[int] = self.queue.run_all([queries.size(self.queue.keys, place) for place in LISTS])
        return sum(sizes) + self.longest_line
