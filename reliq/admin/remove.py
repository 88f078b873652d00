"""
Many messages deleted or cancelled, in bounded steps.

From pending and garbage a message is taken by its id. From a list only the oldest can be taken: to find one in the
middle, Redis would have to look through the whole list at once. Such a message is cancelled: its body goes at once,
and the worker that meets its id drops it. Each is counted once: as purged when it was taken out, as cancelled
when it is dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from reliq import transitions
from reliq.admin.in_turn import Sum, in_turn
from reliq.admin.lines import StatePart, parts_of
from reliq.admin.list import size_of
from reliq.admin.places import CANCELLABLE, LinePlace, Place, Spot, check_place, is_list
from reliq.admin.queries import size
from reliq.admin.walk import Found, Walk
from reliq.chunks import chunked
from reliq.control import tombstone_ms
from reliq.ids import check_id
from reliq.settings import BATCH_LIMIT
from reliq.text import count_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reliq.admin.filters import Filter
    from reliq.admin.session import QueueSession
    from reliq.message import CancelStatus, Duration

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
            parts.append(f"{count_of(self.running, 'is running: it is', 'are running: they are')} not retried")
        if self.gone:
            parts.append(f"{self.gone} had ended meanwhile")
        return ", ".join(parts)


#: It is called after each step, with how many ids the step looked at and the sum.
OnStep = Callable[[int, RemoveResult], None]


def purge(queue: QueueSession, state: str, where: Filter, on_step: OnStep) -> RemoveResult:
    """Delete the messages of a state that are there now; tell `on_step` how many each step looked at, and the sum."""
    place = check_place(state, PURGEABLE)
    return in_turn(parts_of(queue, place, where), lambda part, step, _: _purge(part, step), on_step, RemoveResult())


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
    sum_of, most = RemoveResult(), part.queue.run(size(part.queue.keys, part.spot))
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
    place, for_ms = check_place(state, CANCELLABLE), tombstone_ms(tombstone)
    return in_turn(
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

    return in_turn(parts_of(queue, place, where), count_part, on_step, RemoveResult()).found


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
        line = {"state": "line", "line": spot.key} if isinstance(spot, LinePlace) else {"state": spot}
        purged = queue.run(transitions.purge(queue.keys, ids, free_ids=free_ids, **cast("Any", line)))
    # A list gave its first ones; of pending nobody says which have moved on, and those purged are not found again.
    rest = ids[purged:] if is_list(spot) else ids if purged < len(ids) else []
    after = _counted(rest, cancel_ids(queue, rest))
    return RemoveResult(
        len(ids), purged, after.cancelled, after.running, len(ids) - purged - after.cancelled - after.running
    )


def _counted(ids: Sequence[str], answers: list[CancelStatus]) -> RemoveResult:
    cancelled, running = answers.count("cancelled"), answers.count("running")
    return RemoveResult(len(ids), 0, cancelled, running, len(ids) - cancelled - running)
