"""
Messages from one queue to another, which may lie in another slot of a Cluster: so not in one script.

Each message goes in four steps, and every one of them may be the last before the process dies:

1. note in the queue where its messages go (`B:moving`), and see that the other queue does not know the id;
2. put the message off by 126 years. From then on no worker gets it, so it cannot run here as well as there. Its due
   time is kept in that far one, and what is left of its time to live can be told from it;
3. publish it there under its own id, with a window: made again, that answers `duplicate`. When somebody else has
   published that id there meanwhile, the message gets its due time back and stays;
4. delete it here.

A move that was cut off is finished by making it again: messages that are put off go first, all of them to the queue
noted. Until then they are in nobody's way and in no danger: pending, and marked as moving.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING

from reliq import commands, transitions
from reliq.admin import queries, queue_queries
from reliq.admin.in_turn import Sum, in_turn
from reliq.admin.lines import StatePart, parts_of
from reliq.admin.list import entries
from reliq.admin.places import MOVABLE, MOVING_MS, STEP_IDS, Spot, check_place, is_list, place_of
from reliq.admin.publish import taker
from reliq.admin.redrive import COPY_WINDOW_SECONDS, copied
from reliq.admin.remove import remove
from reliq.admin.walk import Walk
from reliq.chunks import chunked_by_size
from reliq.errors import ConfigurationError
from reliq.keys import is_name
from reliq.message import RETRIES_LIMIT
from reliq.outgoing import Outgoing
from reliq.settings import BATCH_LIMIT, LARGEST_BODY, LONGEST_SECONDS, MIB, whole
from reliq.text import typed
from reliq.wireformat import Delayed, StateWord, open_envelope, read_count

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reliq.admin.filters import Filter
    from reliq.admin.list import Entry
    from reliq.admin.session import QueueSession
    from reliq.commands import SortedSet
    from reliq.message import BulkResult
    from reliq.queue import Queue
    from reliq.wireformat import StateWord

#: No step reads more bytes of bodies, unless one body alone has more.
STEP_BYTES = 8 * MIB


@dataclass(frozen=True, slots=True)
class MoveResult(Sum):
    """
    How many messages a move found, and how each ended.

    Attributes:
        found: messages that the ids or the filter chose, and those that an earlier move left half way.
        moved: they are there now.
        kept: not moved, because the other queue has a message of their id, or had one a short while ago (an earlier
            move may have brought it), or refuses their id, headers, due time, retries or size, as in a publish.
        running: not moved, because a worker has them.
        gone: ended meanwhile.
    """

    found: int = 0
    moved: int = 0
    kept: int = 0
    running: int = 0
    gone: int = 0

    def __str__(self) -> str:
        """Return in one line what became of them."""
        parts = [f"{self.moved} moved"]
        if self.kept:
            parts.append(f"{self.kept} kept: their ids are in use there, or it cannot have them")
        if self.running:
            parts.append(f"{self.running} kept: a worker has them")
        if self.gone:
            parts.append(f"{self.gone} had ended meanwhile")
        return ", ".join(parts)


#: It is called after each step, with how many ids the step looked at and the sum.
OnMoved = Callable[[int, MoveResult], None]


def move(
    queue: QueueSession,
    target: QueueSession,
    to: Queue[bytes],
    state: str,
    where: Filter,
    limit: int | None,
    on_step: OnMoved,
) -> MoveResult:
    """Move messages of a state that are there now to the queue `target`, `to`; raise when one to a third was cut off."""
    place, left = check_place(state, MOVABLE), None if limit is None else whole("limit", limit, least=1, most=10**9)

    def move_part(part: StatePart, step: OnMoved, _before: MoveResult) -> MoveResult:
        nonlocal left
        mover = Mover(part.queue, target, to)
        done = MoveResult() if left == 0 else mover.move(part.spot, part.where, left, step)
        left = None if left is None else left - mover.met
        return done

    return in_turn(parts_of(queue, place, where), move_part, on_step, MoveResult())


class Mover:
    """
    Moves messages of a shard to the queue `to`.

    Attributes:
        met: how many messages counted against the limit.
    """

    def __init__(self, queue: QueueSession, target: QueueSession, to: Queue[bytes]) -> None:
        self._queue, self._keys, self._target, self._to = queue, queue.keys, target, to
        self._takes = taker(to)
        self.met = 0
        self._told: set[str] = set()  # ids that stay after all, and are counted as such

    def move(self, spot: Spot, where: Filter, limit: int | None, on_step: OnMoved) -> MoveResult:
        """Move the messages of a place, after those of a move that was cut off; raise when that was to another queue."""
        sum_of = MoveResult()
        if self._note_destination():
            for held in self._left_behind():
                sum_of += MoveResult(len(held)) + self._finish("unack", held)[0]
                on_step(0, sum_of)
        left = self._queue.run(queries.size(self._keys, spot)) if limit is None else limit
        walk = Walk(self._queue, spot, where)
        for looked, found in walk.pieces():
            met = entries(self._queue, place_of(spot), found[:left])
            done, taken = self._piece(spot, met)
            walk.removed(taken)
            left, self.met = left - len(met), self.met + len(met)
            sum_of += done
            on_step(looked, sum_of)
            if left <= 0:
                break
        self._queue.run(queue_queries.drop_move(self._keys))
        return sum_of

    def _note_destination(self) -> bool:
        """Note where messages go; return whether that was noted already, by a move that was cut off."""
        to = self._to.name
        if self._queue.run(queue_queries.note_move(self._keys, to, only_first=True)):
            return False
        noted = self._queue.run(queue_queries.noted_move(self._keys))
        if not is_name(noted, self._keys.layout):  # no move wrote that
            self._queue.run(queue_queries.note_move(self._keys, to, only_first=False))
            return False
        if noted != to:
            raise ConfigurationError(
                f"a move of {self._keys.name!r} to {noted!r} was cut off; finish it first: "
                + typed("move", self._keys.name, noted, options=["--state", "ready"], layout=self._keys.layout)
            )
        return True

    def _left_behind(self) -> Iterator[list[tuple[str, int]]]:
        """Yield the messages that are put off, wherever they are, each with the time until when."""
        first, last = MOVING_MS // 1000, 2 * MOVING_MS // 1000
        places: tuple[SortedSet, ...] = ("pending", "unack")
        for place in places:
            while rows := self._queue.run(queries.due_between(self._keys, place, first, last, STEP_IDS)):
                yield [(id, round(due * 1000)) for id, due in rows]
        for words in self._queue.scan(partial(queries.words_scanned, self._keys, count=STEP_IDS)):
            if held := _put_off(words):
                yield held

    def _piece(self, spot: Spot, met: list[Entry]) -> tuple[MoveResult, int]:
        """Put messages off, publish them in the other queue, delete them here; return how many left their place."""
        met = [one for one in met if one.id not in self._told]
        held = [one for one in met if one.mark == "held"]
        gone = [one for one in met if one.mark == "cancelled" or one.size is None]
        out = {one.id for one in (*held, *gone)}
        meant = [one for one in met if one.id not in out]
        free = self._free(meant)
        rows = [(one.id, round((one.when or 0) * 1000) + MOVING_MS) for one in free]
        calls = [transitions.reschedule(self._keys, [id], at_ms=until) for id, until in rows]
        answers = [answer[0] for answer in self._queue.run_all(calls)]
        ready = [row for row, answer in zip(rows, answers, strict=True) if answer == "rescheduled"]
        running = answers.count("running") + len(held)
        lost = answers.count("not_found") + len(gone)
        done, taken = self._finish(spot, ready)
        return MoveResult(len(met), 0, len(meant) - len(free), running, lost) + done, taken

    def _free(self, meant: list[Entry]) -> list[Entry]:
        """Return the messages that the other queue can have and does not know."""
        fit = [one for one in meant if (one.size or 0) <= LARGEST_BODY and self._takes(self._trial(one))]
        tests = (queries.marker, queries.is_alive, queries.is_in_garbage)
        homes = [(one, home.keys) for one in fit for home in self._target.homes(one.id)]
        answers = self._queue.run_all([test(keys, one.id) for one, keys in homes for test in tests])
        known = {one.id for at, (one, _) in enumerate(homes) if any(answers[3 * at : 3 * at + 3])}
        return [one for one in fit if one.id not in known]

    @staticmethod
    def _trial(one: Entry) -> Outgoing[bytes]:
        """Return a message as it would be published, with the start of its body."""
        key, at = one.key or None, datetime.fromtimestamp(one.when or 0, UTC)
        return Outgoing(body=one.body, id=one.id, at=at, headers=one.headers, key=key, priority=one.priority)

    def _finish(self, spot: Spot, held: list[tuple[str, int]]) -> tuple[MoveResult, int]:
        """Publish messages that are put off in the other queue, and delete them here."""
        done, taken = MoveResult(), 0
        sizes = self._queue.run_all([queries.length(self._keys, id) for id, _ in held])
        for rows in chunked_by_size(zip(held, sizes, strict=True), itemgetter(1), STEP_BYTES, BATCH_LIMIT):
            part = [row for row, _ in rows]
            orders = self._orders(part)
            told = self._to.publish_many(orders)
            kept = self._taken_by_others(orders, told)
            self._told |= kept
            back = [
                transitions.reschedule(self._keys, [id], at_ms=until - MOVING_MS) for id, until in part if id in kept
            ]
            self._queue.run_all(back)
            ids = [id for id, _ in part if id not in kept]
            removed = remove(self._queue, spot, ids, free_ids=True)  # so that they can come back
            done += MoveResult(0, len(orders) - len(kept), len(kept), gone=len(part) - len(orders))
            taken += removed.purged if is_list(spot) else len(ids)
        return done, taken

    def _taken_by_others(self, orders: list[Outgoing[bytes]], told: BulkResult) -> set[str]:
        """Return the ids that somebody else has published there, or cancelled: a duplicate is else our own copy."""
        met = [one for one in orders if one.id in told.duplicates]
        homes = [self._target.homes(str(one.id))[0].keys for one in met]
        values = self._queue.run_all([queries.value(keys, str(one.id)) for one, keys in zip(met, homes, strict=True)])
        others = set(told.tombstoned)
        for one, value in zip(met, values, strict=True):
            if value is not None:  # else it has ended there
                header, body = open_envelope(value, bare=self._to.keys.bare)
                is_ours = self._to.keys.bare or header.window_ms == COPY_WINDOW_SECONDS * 1000
                others |= set() if is_ours and body == one.body else {str(one.id)}
        return others

    def _orders(self, held: list[tuple[str, int]]) -> list[Outgoing[bytes]]:
        """Return the orders to publish; a message without a body has ended and has none."""
        ids = [id for id, _ in held]
        asked = [queries.value(self._keys, id) for id in ids] + [queries.ttl_ms(self._keys, id) for id in ids]
        lefts, now_ms, *rest = self._queue.run_all(
            [commands.retries_left(self._keys, ids), commands.server_ms(), *asked]
        )
        rows = zip(held, rest[: len(ids)], rest[len(ids) :], lefts, strict=True)
        return [
            self._order(id, until, value, read_count(left)[0] or 0, None if ttl < 0 else ttl + now_ms - until)
            for (id, until), value, ttl, left in rows
            if value is not None
        ]

    def _order(self, id: str, until: int, value: bytes, retries: int, ttl_ms: int | None) -> Outgoing[bytes]:
        header, body = open_envelope(value, bare=self._keys.bare)
        ttl = None if ttl_ms is None else min(LONGEST_SECONDS, max(1, ttl_ms) / 1000)
        at = datetime.fromtimestamp((until - MOVING_MS) / 1000, UTC)
        left = min(RETRIES_LIMIT, max(0, retries))
        return copied(self._queue.name, id, header, self._to, body=body, at=at, id=id, retries=left, ttl=ttl)


def _put_off(words: list[tuple[str, StateWord]]) -> list[tuple[str, int]]:
    """Return the ids whose state word puts them off for a move, with the time until when."""
    due = ((id, word.due_ms) for id, word in words if isinstance(word, Delayed) and not word.cancelled)
    return [(id, due_ms) for id, due_ms in due if MOVING_MS <= due_ms < 2 * MOVING_MS]
