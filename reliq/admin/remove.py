"""
Many messages deleted or cancelled, in bounded steps.

From pending and garbage a message is taken by its id. From a list only the oldest can be taken: to find one in the
middle, Redis would have to look through the whole list at once. Such a message is cancelled: its body goes at once,
and the worker that meets its id drops it. Each is counted once: as purged when it was taken out, as cancelled
when it is dropped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

from reliq import transitions
from reliq.admin.pieces import LISTS, TRY_SECONDS, State, size
from reliq.admin.walk import Walk

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reliq.admin.filters import Filter
    from reliq.client.client import Client
    from reliq.keys import Keys
    from reliq.message import CancelStatus

Taken = Literal["pending", "ready", "retry", "garbage"]

#: States that hold messages which may be cancelled.
CANCELLABLE: tuple[State, ...] = ("pending", "ready", "retry", "unack")


@dataclass(frozen=True, slots=True)
class Removed:
    """
    What became of messages that were to be deleted or cancelled.

    Attributes:
        found: messages that were meant.
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

    def __add__(self, other: Removed) -> Removed:
        return Removed(
            self.found + other.found,
            self.purged + other.purged,
            self.cancelled + other.cancelled,
            self.running + other.running,
            self.gone + other.gone,
        )


def purge(client: Client, keys: Keys, state: State, where: Filter, on_step: Callable[[int, Removed], None]) -> Removed:
    """Delete the messages of a state that are there now; tell `on_step` how many each step looked at, and the sum."""
    sum_of = Removed()
    most = client.run(size(keys, state), for_seconds=TRY_SECONDS)
    walk = Walk(client, keys, state, where, ids_only=not where.is_set)
    for looked, found in walk.pieces():
        done = remove(client, keys, state, [one.id for one in found])
        walk.removed(done.purged)
        sum_of += done
        on_step(looked, sum_of)
        if sum_of.found >= most:
            break
    return sum_of


def cancel(
    client: Client,
    keys: Keys,
    state: State,
    where: Filter,
    on_step: Callable[[int, Removed], None],
    *,
    tombstone_ms: int | None = None,
) -> Removed:
    """Cancel the messages of a state that are there now; as `purge`."""
    sum_of = Removed()
    most = client.run(size(keys, state), for_seconds=TRY_SECONDS)
    walk = Walk(client, keys, state, where)
    for looked, found in walk.pieces():
        ids = [one.id for one in found if not one.is_gone]
        answers = cancel_ids(client, keys, ids, tombstone_ms=tombstone_ms)
        # What is cancelled in pending, or waits in unack, is out of there.
        walk.removed(answers.count("cancelled") if state in ("pending", "unack") else 0)
        sum_of += _counted(ids, answers)
        on_step(looked, sum_of)
        if sum_of.found >= most:
            break
    return sum_of


def count(client: Client, keys: Keys, state: State, where: Filter, on_step: Callable[[int, Removed], None]) -> int:
    """Count the messages of a state that are meant."""
    if not where.is_set:
        return client.run(size(keys, state), for_seconds=TRY_SECONDS)
    found = 0
    for looked, some in Walk(client, keys, state, where).pieces():
        found += len(some)
        on_step(looked, Removed(found))
    return found


def cancel_ids(
    client: Client, keys: Keys, ids: Sequence[str], *, tombstone_ms: int | None = None
) -> list[CancelStatus]:
    """Cancel up to 500 messages; return what became of each."""
    if not ids:
        return []
    return client.run(transitions.cancel(keys, ids, tombstone_ms=tombstone_ms), for_seconds=TRY_SECONDS)


def remove(client: Client, keys: Keys, state: State, ids: list[str], *, free_ids: bool = False) -> Removed:
    """Delete up to 500 messages of a state, given in their order, wherever they have gone meanwhile; as `purge`."""
    purged = 0
    if ids and state != "unack":
        call = transitions.purge(keys, ids, state=cast("Taken", state), free_ids=free_ids)
        purged = client.run(call, for_seconds=TRY_SECONDS)
    # A list gave its first ones; of pending nobody says which have moved on, and those purged are not found again.
    rest = ids[purged:] if state in LISTS else ids if purged < len(ids) else []
    after = _counted(rest, cancel_ids(client, keys, rest))
    return Removed(
        len(ids), purged, after.cancelled, after.running, len(ids) - purged - after.cancelled - after.running
    )


def _counted(ids: Sequence[str], answers: list[CancelStatus]) -> Removed:
    cancelled, running = answers.count("cancelled"), answers.count("running")
    return Removed(len(ids), 0, cancelled, running, len(ids) - cancelled - running)
