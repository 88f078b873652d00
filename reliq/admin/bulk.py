"""Many messages deleted or cancelled, in bounded steps.

From pending and garbage a message is taken by its id. From a list only the oldest can be taken: to find one in the
middle, Redis would have to look through the whole list at once. Such a message is cancelled: its body goes at once,
and the worker that meets its id drops it. Each is counted once: as purged when it was taken out, as cancelled
when it is dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, cast

from reliq.admin import calls
from reliq.admin.calls import (
    CANCELLABLE,
    MOVABLE,
    MOVING_MS,
    STEP_IDS,
    KeyQueueState,
    Place,
    Spot,
    check_place,
    is_list,
    place_of,
    size,
)
from reliq.admin.dead import COPY_WINDOW_SECONDS, copied
from reliq.admin.messages import Found, StatePart, Sum, Walk, entries, parts_of, sequentially, size_of
from reliq.admin.publish import publish_check
from reliq.errors import ConfigurationError
from reliq.keys import check_id, is_name
from reliq.lua import transitions
from reliq.message import RETRIES_LIMIT, Outgoing
from reliq.queue import tombstone_ms
from reliq.redis import commands
from reliq.settings import BATCH_LIMIT, LARGEST_BODY, LONGEST_SECONDS, MIB, check_int
from reliq.text import chunked, chunked_by_size, pluralize, shell_command
from reliq.wire_format import Delayed, StateWord, open_envelope, read_count

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from reliq.admin.filters import Filter
    from reliq.admin.messages import Entry
    from reliq.admin.session import QueueSession
    from reliq.message import BulkResult, CancelStatus, Duration
    from reliq.queue import Queue
    from reliq.redis.commands import SortedSet
    from reliq.wire_format import StateWord


#: States that hold messages: dead letters are deleted by `admin.dead`.
PURGEABLE: tuple[Place, ...] = ("pending", "ready", "waiting", "unack", "retry", "garbage")


@dataclass(frozen=True, slots=True)
class RemoveResult(Sum):
    """
    How many messages a purge or a cancel found, and how each ended.

    Attributes:
        found: messages that the ids or the filter chose.
        purged: deleted at once.
        cancelled: deleted too; one in the middle of a list leaves it when a worker meets it.
        running: a worker has them: they are not retried, and their handlers are told.
        gone: ended otherwise meanwhile.
    """

    found: int = 0
    purged: int = 0
    cancelled: int = 0
    running: int = 0
    gone: int = 0

    def __str__(self) -> str:
        """Return in one line what became of messages that were to be deleted."""
        return self.summary("deleted")

    def summary(self, verb: str) -> str:
        """Return in one line how many were deleted or cancelled, as `verb` says, and what became of the others."""
        parts = [f"{self.purged + self.cancelled} {verb}"]
        if self.running:
            parts.append(f"{pluralize(self.running, 'is running: it is', 'are running: they are')} not retried")
        if self.gone:
            parts.append(f"{self.gone} had ended meanwhile")
        return ", ".join(parts)


#: It is called after each step, with how many ids the step looked at and the sum.
OnStep = Callable[[int, RemoveResult], None]


def purge(queue: QueueSession, state: str, where: Filter, on_step: OnStep) -> RemoveResult:
    """Delete the messages of a state that are there now; tell `on_step` how many each step looked at, and the sum."""
    place = check_place(state, PURGEABLE)
    return sequentially(
        parts_of(queue, place, where), lambda part, step, _: _purge(part, step), on_step, RemoveResult()
    )


def _purge(part: StatePart, on_step: OnStep) -> RemoveResult:
    walk = Walk(*part, ids_only=not part.where.is_set)

    def step(found: list[Found]) -> RemoveResult:
        done = remove(part.queue, part.spot, [one.id for one in found])
        walk.removed(done.purged)
        return done

    return _in_steps(part, walk, step, on_step)


def _in_steps(
    part: StatePart, walk: Walk, step: Callable[[list[Found]], RemoveResult], on_step: OnStep
) -> RemoveResult:
    """Take each step of a walk, until as many messages were found as there were at its beginning."""
    sum_of = RemoveResult()
    most = part.queue.run(size(part.queue.keys, part.spot))
    for looked, found in walk.pieces():
        sum_of += step(found)
        on_step(looked, sum_of)
        if sum_of.found >= most:
            break
    return sum_of


def cancel(
    queue: QueueSession,
    state: str,
    where: Filter,
    on_step: OnStep,
    *,
    tombstone: Duration | None = None,
) -> RemoveResult:
    """Cancel the messages of a state that are there now; as `purge`."""
    place = check_place(state, CANCELLABLE)
    for_ms = tombstone_ms(tombstone)
    return sequentially(
        parts_of(queue, place, where), lambda part, step, _: _cancel(part, for_ms, step), on_step, RemoveResult()
    )


def _cancel(part: StatePart, for_ms: int | None, on_step: OnStep) -> RemoveResult:
    walk = Walk(*part)

    def step(found: list[Found]) -> RemoveResult:
        ids = [one.id for one in found if not one.is_gone]
        answers = cancel_ids(part.queue, ids, for_ms)
        # A cancelled message leaves pending and unack at once, and a list when a worker meets it.
        walk.removed(answers.count("cancelled") if part.spot in ("pending", "unack") else 0)
        return _counted(ids, answers)

    return _in_steps(part, walk, step, on_step)


def count(queue: QueueSession, state: str, where: Filter, on_step: OnStep) -> int:
    """Count the chosen messages of a state."""
    place = check_place(state, PURGEABLE)
    if not where.is_set:
        return size_of(queue, place)

    def count_part(part: StatePart, step: OnStep, _before: RemoveResult) -> RemoveResult:
        found = 0
        for looked, some in Walk(*part, ids_only=not part.where.is_set).pieces():
            found += len(some)
            step(looked, RemoveResult(found))
        return RemoveResult(found)

    return sequentially(parts_of(queue, place, where), count_part, on_step, RemoveResult()).found


def cancel_each(queue: QueueSession, ids: Sequence[str], tombstone: Duration | None) -> dict[str, CancelStatus]:
    """Cancel messages; return what became of each."""
    for_ms = tombstone_ms(tombstone)
    found: dict[str, CancelStatus] = {}
    for part, some in queue.by_home([check_id(id) for id in dict.fromkeys(ids)]).items():
        for piece in chunked(some, BATCH_LIMIT):
            found |= zip(piece, cancel_ids(part, piece, for_ms), strict=True)
    for id in [id for id, status in found.items() if status == "not_found"]:
        for part in queue.homes(id)[1:]:  # where it was before the number of shards changed
            found[id] = cancel_ids(part, [id], for_ms)[0]
    return {id: found[id] for id in map(check_id, dict.fromkeys(ids))}


def cancel_ids(queue: QueueSession, ids: Sequence[str], for_ms: int | None = None) -> list[CancelStatus]:
    """Cancel up to 500 messages; return what became of each."""
    if not ids:
        return []
    return queue.run(transitions.cancel(queue.keys, ids, tombstone_ms=for_ms))


def remove(queue: QueueSession, spot: Spot, ids: list[str], *, free_ids: bool = False) -> RemoveResult:
    """Delete up to 500 messages of a place, given in their order, wherever they have gone meanwhile; as `purge`."""
    purged = 0
    if ids and spot != "unack":
        line = {"state": "line", "line": spot.key} if isinstance(spot, KeyQueueState) else {"state": spot}
        purged = queue.run(transitions.purge(queue.keys, ids, free_ids=free_ids, **cast("Any", line)))
    # A list gave its first ones; of pending nobody says which have moved on, and those purged are not found again.
    rest = ids[purged:] if is_list(spot) else ids if purged < len(ids) else []
    after = _counted(rest, cancel_ids(queue, rest))
    return RemoveResult(
        len(ids), purged, after.cancelled, after.running, len(ids) - purged - after.cancelled - after.running
    )


def _counted(ids: Sequence[str], answers: list[CancelStatus]) -> RemoveResult:
    cancelled = answers.count("cancelled")
    running = answers.count("running")
    return RemoveResult(len(ids), 0, cancelled, running, len(ids) - cancelled - running)


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
    place = check_place(state, MOVABLE)
    left = None if limit is None else check_int("limit", limit, least=1, most=10**9)

    def move_part(part: StatePart, step: OnMoved, _before: MoveResult) -> MoveResult:
        nonlocal left
        mover = Mover(part.queue, target, to)
        done = MoveResult() if left == 0 else mover.move(part.spot, part.where, left, step)
        left = None if left is None else left - mover.met
        return done

    return sequentially(parts_of(queue, place, where), move_part, on_step, MoveResult())


class Mover:
    """
    Moves messages of a shard to the queue `to`.

    Attributes:
        met: how many messages counted against the limit.
    """

    def __init__(self, queue: QueueSession, target: QueueSession, to: Queue[bytes]) -> None:
        self._queue = queue
        self._keys = queue.keys
        self._target = target
        self._to = to
        self._takes = publish_check(to)
        self.met = 0
        self._told: set[str] = set()  # ids that stay after all, and are counted as such

    def move(self, spot: Spot, where: Filter, limit: int | None, on_step: OnMoved) -> MoveResult:
        """Move the messages of a place, after those of a move that was cut off; raise when that was to another queue."""
        sum_of = MoveResult()
        if self._note_destination():
            for held in self._left_behind():
                sum_of += MoveResult(len(held)) + self._finish("unack", held)[0]
                on_step(0, sum_of)
        left = self._queue.run(calls.size(self._keys, spot)) if limit is None else limit
        walk = Walk(self._queue, spot, where)
        for looked, found in walk.pieces():
            met = entries(self._queue, place_of(spot), found[:left])
            done, taken = self._piece(spot, met)
            walk.removed(taken)
            left = left - len(met)
            self.met = self.met + len(met)
            sum_of += done
            on_step(looked, sum_of)
            if left <= 0:
                break
        self._queue.run(calls.drop_move(self._keys))
        return sum_of

    def _note_destination(self) -> bool:
        """Note where messages go; return whether that was noted already, by a move that was cut off."""
        to = self._to.name
        if self._queue.run(calls.note_move(self._keys, to, only_first=True)):
            return False
        noted = self._queue.run(calls.noted_move(self._keys))
        if not is_name(noted, self._keys.layout):  # no move wrote that
            self._queue.run(calls.note_move(self._keys, to, only_first=False))
            return False
        if noted != to:
            raise ConfigurationError(
                f"a move of {self._keys.name!r} to {noted!r} was cut off; finish it first: "
                + shell_command("move", self._keys.name, noted, options=["--state", "ready"], layout=self._keys.layout)
            )
        return True

    def _left_behind(self) -> Iterator[list[tuple[str, int]]]:
        """Yield the messages that are put off, wherever they are, each with the time until when."""
        first = MOVING_MS // 1000
        last = 2 * MOVING_MS // 1000
        places: tuple[SortedSet, ...] = ("pending", "unack")
        for place in places:
            while rows := self._queue.run(calls.due_between(self._keys, place, first, last, STEP_IDS)):
                yield [(id, round(due * 1000)) for id, due in rows]
        for words in self._queue.scan(partial(calls.words_scanned, self._keys, count=STEP_IDS)):
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
        tests = (calls.marker, calls.is_alive, calls.is_in_garbage)
        homes = [(one, home.keys) for one in fit for home in self._target.homes(one.id)]
        answers = self._queue.run_all([test(keys, one.id) for one, keys in homes for test in tests])
        known = {one.id for at, (one, _) in enumerate(homes) if any(answers[3 * at : 3 * at + 3])}
        return [one for one in fit if one.id not in known]

    @staticmethod
    def _trial(one: Entry) -> Outgoing[bytes]:
        """Return a message as it would be published, with the start of its body."""
        key = one.key or None
        at = datetime.fromtimestamp(one.when or 0, UTC)
        return Outgoing(body=one.body, id=one.id, at=at, headers=one.headers, key=key, priority=one.priority)

    def _finish(self, spot: Spot, held: list[tuple[str, int]]) -> tuple[MoveResult, int]:
        """Publish messages that are put off in the other queue, and delete them here."""
        done = MoveResult()
        taken = 0
        sizes = self._queue.run_all([calls.length(self._keys, id) for id, _ in held])
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
        values = self._queue.run_all([calls.value(keys, str(one.id)) for one, keys in zip(met, homes, strict=True)])
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
        asked = [calls.value(self._keys, id) for id in ids] + [calls.ttl_ms(self._keys, id) for id in ids]
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
