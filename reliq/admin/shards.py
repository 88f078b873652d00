"""
How many shards a queue has, and the change of that number on a live queue.

A change is three steps, and each of them may be the last before the process dies; made again, all goes on:

1. the next map is written over the one that was read: from then on publishers ask the old home of a chosen id before
   they publish it at its new one;
2. every shard is told the epoch of the map. Those that are to go are closed;
3. when nothing is left where only the earlier number looks for it, the change is finished.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from reliq import commands, transitions
from reliq.admin import queries, queue_queries, server
from reliq.admin.discover import STEP_KEYS
from reliq.admin.places import STEP_IDS
from reliq.errors import ConfigurationError
from reliq.ids import home
from reliq.keys import pattern
from reliq.shardmap import ShardMap, map_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from reliq.admin.session import QueueSession, Session
    from reliq.keys import Keys
    from reliq.message import Counts


@dataclass(frozen=True, slots=True)
class ShardsView:
    """
    The shards of a queue.

    Attributes:
        map: how many there are, and were.
        counts: of each of them, shard 0 first.
    """

    map: ShardMap
    counts: tuple[Counts, ...]


@dataclass(frozen=True, slots=True)
class Leftover:
    """
    The ids that keep a change of the number of shards from being finished: only the earlier number finds them.

    Attributes:
        alive: messages.
        letters: dead letters.
        taken: ids that stay taken after their end.
        taken_ms: for how long the last of them does.
    """

    alive: int = 0
    letters: int = 0
    taken: int = 0
    taken_ms: int = 0

    def __bool__(self) -> bool:
        """Return whether there is anything."""
        return bool(self.alive or self.letters or self.taken)

    def __str__(self) -> str:
        """Return in one line what there is."""
        parts = [f"{self.alive} messages alive"] * bool(self.alive)
        parts += [f"{self.letters} dead letters (redrive or purge them)"] * bool(self.letters)
        parts += [f"{self.taken} ids that stay taken for up to {self.taken_ms / 1000:.0f} s"] * bool(self.taken)
        return ", ".join(parts)


class Resharder:
    """Changes the number of shards of a queue."""

    def __init__(self, queue: QueueSession) -> None:
        self._queue, self._first = queue, queue.keys.of_shard(0)
        self._text = queue.run(map_text(self._first))
        self.map = ShardMap.parse(self._text)

    def view(self) -> ShardsView:
        """Return the map and the counts of each shard."""
        return ShardsView(self.map, tuple(self._queue.run_all(list(map(transitions.counts, self._all())))))

    def resize(self, number: int) -> None:
        """
        Begin to have `number` shards, or go on with what was cut off.

        Raises:
            ConfigurationError: it is no power of two, the queue is one of the Go original, an earlier change is not
                finished, or somebody else has changed the number meanwhile.
        """
        number, now = ShardMap.wanted(number, self._first.layout), self.map
        if number != now.n:
            if now.was != now.n:
                raise ConfigurationError(
                    f"the change of {self._queue.name!r} from {now.was} to {now.n} shards is not finished: "
                    f"reliq shards {self._queue.name} --finish"
                )
            self._pause_new(number)
            self._write(ShardMap(now.epoch + 1, number, now.n, "growing" if number > now.n else "shrinking"))
        self._fence()

    def finish(self) -> Leftover:
        """Finish a change when nothing is left where only the earlier number looks for it; return what is left."""
        now = self.map
        self._fence()
        left = self._leftover() if now.was != now.n else Leftover()
        if not left and now.was != now.n:
            self._write(ShardMap(now.epoch, now.n, now.n, "steady"))
        return left

    def _all(self) -> list[Keys]:
        return [self._first.of_shard(shard) for shard in range(self.map.served)]

    def _write(self, after: ShardMap) -> None:
        found = self._queue.run(transitions.remap(self._first, self._text, after.text))
        if found != after.text:
            raise ConfigurationError(
                f"somebody else has changed the shards of {self._queue.name!r} meanwhile; look again: "
                f"reliq shards {self._queue.name}"
            )
        self._text, self.map = found, after

    def _fence(self) -> None:
        """Tell every shard the epoch of the map, and close those that are to go."""
        if self.map.epoch:
            calls = [
                transitions.ask(keys, [], epoch=self.map.epoch, closing=keys.shard >= self.map.n)
                for keys in self._all()
            ]
            self._queue.run_all(calls)

    def _pause_new(self, number: int) -> None:
        """Pause the shards that are new, when the queue is paused, before anything comes into them."""
        pause, left_ms = (
            self._queue.run(commands.paused(self._first)),
            self._queue.run(queue_queries.pause_ms(self._first)),
        )
        if pause is not None:
            new = [self._first.of_shard(shard) for shard in range(self.map.n, number)]
            self._queue.run_all([commands.pause(keys, pause, left_ms if left_ms > 0 else None) for keys in new])

    def _leftover(self) -> Leftover:
        """
        Count the ids that are not in the shard where only the map of now looks for them.

        First those alive, then the letters, then the marks: what ends meanwhile leaves one that is met later.
        """
        old = [keys for keys in self._all() if keys.shard < self.map.was]
        alive = sum(self._strays(keys, self._alive(keys)) for keys in old)
        letters = sum(self._strays(keys, self._letters(keys)) for keys in old)
        marks = [left_ms for node in self._queue.each().values() for left_ms in self._marks(node, old)]
        return Leftover(alive, letters, len(marks), max(marks, default=0))

    def _strays(self, keys: Keys, ids: Iterable[str]) -> int:
        return sum(home(id, self.map.n) != keys.shard for id in ids)

    def _alive(self, keys: Keys) -> Iterator[str]:
        indexes: tuple[queries.Index, ...] = ("retries_left", "garbage")
        for index in indexes:
            cursor = -1
            while cursor:
                cursor, found = self._queue.run(queries.ids_scanned(keys, index, max(0, cursor), STEP_IDS))
                yield from found

    def _letters(self, keys: Keys) -> Iterator[str]:
        after = "-"
        while some := self._queue.run(commands.letters_between(keys, after, "+", count=STEP_IDS)):
            yield from (one.id for one in some)
            after = f"({some[-1].letter}"

    def _marks(self, node: Session, old: list[Keys]) -> Iterator[int]:
        """Yield for how many ms each id is taken, on one server, that is not at home in the shard of its mark."""
        starts = {keys.dedup("")[:-4]: keys for keys in old}
        wanted, cursor = pattern(self._first.dedup("").partition("}")[0]) + "*:dd:*", "0"
        while True:
            cursor, found = node.run(server.keys_scanned(wanted, cursor, STEP_KEYS))
            yield from self._taken_ms(node, starts, found)
            if cursor == "0":
                return

    def _taken_ms(self, node: Session, starts: dict[str, Keys], found: list[str]) -> Iterator[int]:
        cut = [key.partition(":dd:") for key in found]
        strays = [
            (starts[start], id)
            for start, _, id in cut
            if start in starts and home(id, self.map.n) != starts[start].shard
        ]
        lefts = node.run_all([queries.taken_ms(keys, id) for keys, id in strays])
        yield from (left for left in lefts if left > 0)
