"""
Many messages deleted, cancelled or moved, in bounded steps.

From pending and garbage a message is taken by its id. From a list only the oldest can be taken: to find one in the
middle, Redis would have to look through the whole list at once. Such a message is cancelled: its body goes at once,
and the worker that meets its id drops it. Each is counted once: as purged when it was taken out, as cancelled
when it is dropped.
"""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import islice
from typing import TYPE_CHECKING, Any, cast

from reliq.admin import calls
from reliq.admin.calls import CANCELLABLE, MOVABLE, PURGEABLE, KeyQueueState, is_list, place_of
from reliq.admin.dead import COPY_WINDOW_SECONDS, DeadLetterActions, copied, publish_check
from reliq.admin.filters import EVERYTHING, ignore
from reliq.admin.messages import StatePart, Tally, each, message_entries, parts_of
from reliq.keys import check_id
from reliq.lua import transitions
from reliq.message import RETRIES_LIMIT, CancelStatus
from reliq.queue import rescheduling, tombstone_ms
from reliq.redis import commands
from reliq.settings import BATCH_LIMIT, LARGEST_BODY, LONGEST_SECONDS, MIB, check_int
from reliq.text import chunked, chunked_by_size
from reliq.wire_format import open_envelope, read_count

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from reliq.admin.filters import Filter
    from reliq.admin.messages import Entry, OnStep
    from reliq.admin.session import QueueSession
    from reliq.message import Copied, Duration, Letter, RescheduleStatus
    from reliq.queue import Queue
    from reliq.redis.commands import Command


#: No step of a move reads more bytes of bodies, unless one body alone has more.
STEP_BYTES = 8 * MIB
#: A message that is being moved is due in this many ms or later, so that no worker gets it here and there.
HOLD_MS = 60_000


class MessageActions(DeadLetterActions):
    """The methods that change messages, one by one or many."""

    def cancel(self, queue: str, ids: Sequence[str], *, tombstone: Duration | None = None) -> dict[str, CancelStatus]:
        """
        Cancel messages; return for each `cancelled`, `running` (its handler is notified) or `not_found`.

        The id of a `cancelled` message is free at once; with `tombstone` a publish of it is refused for that many
        seconds. The id of a `running` one stays taken until its end, and for its `dedup` then.
        """
        session = self._redis.queue(queue)
        for_ms = tombstone_ms(tombstone)
        found: dict[str, CancelStatus] = {check_id(id): "not_found" for id in ids}
        for part, some in session.by_home(found).items():
            for piece in chunked(some, BATCH_LIMIT):
                found |= zip(piece, cancel_ids(part, piece, for_ms), strict=True)
        for id in [id for id, status in found.items() if status == "not_found"]:
            for part in session.homes(id)[1:]:  # where it was before the number of shards changed
                found[id] = cancel_ids(part, [id], for_ms)[0]
        return found

    def reschedule(self, queue: str, id: str, *, delay: Duration = 0.0, at: datetime | None = None) -> RescheduleStatus:
        """Give a waiting message another due time: `rescheduled`, or it is `running` or `not_found`."""
        status: RescheduleStatus = "not_found"
        for home in self._redis.queue(queue).homes(check_id(id)):
            status = home.run(rescheduling(home.keys, id, delay, at))[0]
            if status != "not_found":
                break
        return status

    def cancel_where(
        self,
        queue: str,
        state: str,
        where: Filter = EVERYTHING,
        *,
        tombstone: Duration | None = None,
        on_step: OnStep = ignore,
    ) -> Tally:
        """Cancel the messages of a state that `where` chooses."""
        for_ms = tombstone_ms(tombstone)
        session, place = self._state(queue, state, where, CANCELLABLE)

        def cancel(part: StatePart, ids: list[str]) -> Iterator[Tally]:
            exist = part.queue.run_all([calls.has_value(part.queue.keys, id) for id in ids])
            alive = [id for id, exists in zip(ids, exist, strict=True) if exists]
            yield _cancelled(alive, cancel_ids(part.queue, alive, for_ms), "cancelled")

        return each(parts_of(session, place, where), Tally("cancelled"), cancel, on_step)

    def purge(self, queue: str, state: str, where: Filter = EVERYTHING, *, on_step: OnStep = ignore) -> Tally:
        """Delete the messages of a state that `where` chooses. Dead letters have ended: the account stays as it is."""
        session, place = self._state(queue, state, where, PURGEABLE)

        def delete(part: StatePart, rows: list[Any]) -> Iterator[Tally]:
            yield _delete_letters(part, rows) if place == "dead" else remove(part, rows)

        return each(parts_of(session, place, where), Tally("deleted"), delete, on_step)

    def move(
        self,
        queue: str,
        to: str,
        state: str,
        where: Filter = EVERYTHING,
        *,
        limit: int | None = None,
        on_step: OnStep = ignore,
    ) -> Tally:
        """
        Move messages of a state to another queue, with ids, due times, retries left and headers.

        Each step puts up to 250 messages off, until a minute from now at the least, publishes them there and deletes them
        here. Cut off within a step, nothing is lost: the same move within that minute goes on where it ended; later,
        messages of that one step may run in both queues.
        """
        most = None if limit is None else check_int("limit", limit, least=1, most=10**9)
        session, place = self._state(queue, state, where, MOVABLE)
        mover = Mover(self._redis.other(queue, to), self._redis.publisher(to))
        return each(parts_of(session, place, where), Tally("moved"), mover.move, on_step, most)


def cancel_ids(queue: QueueSession, ids: Sequence[str], for_ms: int | None = None) -> list[CancelStatus]:
    """Cancel up to 500 messages; return what became of each."""
    return queue.run(transitions.cancel(queue.keys, ids, tombstone_ms=for_ms)) if ids else []


def remove(part: StatePart, ids: list[str], *, free_ids: bool = False) -> Tally:
    """Delete up to 500 messages of a part, given in their order, wherever they have gone meanwhile."""
    queue, spot = part.queue, part.spot
    purged = 0
    if spot != "unack":
        line = {"state": "line", "line": spot.key} if isinstance(spot, KeyQueueState) else {"state": spot}
        purged = queue.run(transitions.purge(queue.keys, ids, free_ids=free_ids, **cast("Any", line)))
    # A list gave its first ones; of pending nobody says which have moved on, and those purged are not found again.
    rest = ids[purged:] if is_list(spot) else ids if purged < len(ids) else []
    after = _cancelled(rest, cancel_ids(queue, rest), "deleted")
    done = purged + after.done
    return Tally("deleted", len(ids), done, after.running, gone=len(ids) - done - after.running)


def _delete_letters(part: StatePart, letters: list[Letter]) -> Tally:
    deleted = part.queue.run(commands.delete_letters(part.queue.keys, [letter.letter for letter in letters]))
    return Tally("deleted", len(letters), deleted, gone=len(letters) - deleted)


def _cancelled(ids: Sequence[str], answers: list[CancelStatus], verb: str) -> Tally:
    cancelled = answers.count("cancelled")
    running = answers.count("running")
    return Tally(verb, len(ids), cancelled, running, gone=len(ids) - cancelled - running)


class Mover:
    """Moves messages to the queue `to`, whose session is `target`."""

    def __init__(self, target: QueueSession, to: Queue[bytes]) -> None:
        self._target = target
        self._to = to
        self._takes = publish_check(to)

    def move(self, part: StatePart, ids: list[str]) -> Iterator[Tally]:
        """Move messages of one step; yield how each piece of them ended."""
        met = message_entries(part.queue, place_of(part.spot), ids)
        held = [one for one in met if one.mark == "held"]
        alive = [one for one in met if one.mark not in ("held", "cancelled") and one.size is not None]
        yield Tally("moved", len(ids), running=len(held), gone=len(ids) - len(held) - len(alive))
        for some in chunked_by_size(alive, lambda one: one.size or 0, STEP_BYTES, BATCH_LIMIT):
            yield self._move(part, some)

    def _move(self, part: StatePart, some: list[Entry]) -> Tally:
        """Put messages off, publish them in the other queue, then delete them here."""
        queue = part.queue
        now_ms = queue.run(commands.server_ms())
        due = {one.id: round((one.when or 0) * 1000) for one in some}
        orders = self._orders(queue, due, now_ms)
        fit = [id for id, order in orders.items() if len(order.body) <= LARGEST_BODY and self._takes(order)]
        known = self._known([orders[id] for id in fit])
        free = [id for id in fit if id not in known]
        put_off = self._postpone(queue, {id: max(due[id], now_ms + HOLD_MS) for id in free})
        held = [id for id, answer in put_off.items() if answer == "rescheduled"]
        told = self._to.publish_many([orders[id] for id in held])
        refused = {*told.duplicates, *told.tombstoned}  # published or cancelled there meanwhile by another program
        self._postpone(queue, {id: due[id] for id in refused})
        there = ({id for id, is_copy in known.items() if is_copy} | set(held)) - refused
        if there:
            remove(part, [id for id in fit if id in there], free_ids=True)  # so that they can come back
        running = list(put_off.values()).count("running")
        gone = len(due) - len(orders) + list(put_off.values()).count("not_found")
        return Tally("moved", 0, len(there), running, len(due) - len(there) - running - gone, gone)

    def _orders(self, queue: QueueSession, due: Mapping[str, int], now_ms: int) -> dict[str, Copied[bytes]]:
        """Return each message as it is published there; a message without a body has ended and is left out."""
        keys, ids = queue.keys, list(due)
        requests = [
            commands.retries_left(keys, ids),
            *(make(keys, id) for make in (calls.value, calls.ttl_ms) for id in ids),
        ]
        lefts, *answers = queue.run_all(requests)
        orders = {}
        for id, value, ttl_ms, left in zip(ids, answers[: len(ids)], answers[len(ids) :], lefts, strict=True):
            if value is None:
                continue
            header, body = open_envelope(value, bare=keys.bare)
            orders[id] = copied(
                queue.name,
                id,
                header,
                self._to,
                body=body,
                at=datetime.fromtimestamp(due[id] / 1000, UTC),
                id=id,
                retries=min(RETRIES_LIMIT, max(0, read_count(left)[0] or 0)),
                ttl=None if ttl_ms < 0 else min(LONGEST_SECONDS, max(1, ttl_ms + now_ms - due[id]) / 1000),
            )
        return orders

    def _known(self, orders: Sequence[Copied[bytes]]) -> dict[str, bool]:
        """Return the ids that are in use in the other queue, and whether by a copy that a move left there."""
        homes = [(order, home.keys) for order in orders for home in self._target.homes(str(order.id))]
        tests = (calls.marker, calls.is_alive, calls.is_in_garbage, calls.value)
        requests: list[Command[Any]] = [test(keys, str(order.id)) for order, keys in homes for test in tests]
        answers = iter(self._target.read_each(requests, None))
        known = dict[str, bool]()
        for order, keys in homes:
            marker, is_alive, is_in_garbage, value = islice(answers, len(tests))
            if marker or is_alive or is_in_garbage:
                header, body = open_envelope(value or b"", bare=keys.bare)
                is_copy = keys.bare or header.window_ms == COPY_WINDOW_SECONDS * 1000
                known[str(order.id)] = value is not None and is_copy and body == order.body
        return known

    @staticmethod
    def _postpone(queue: QueueSession, due: Mapping[str, int]) -> dict[str, RescheduleStatus]:
        """Give messages of the queue that they leave other due times; return how each answered."""
        answers = queue.run_all([transitions.reschedule(queue.keys, [id], at_ms=at_ms) for id, at_ms in due.items()])
        return {id: answer for id, (answer,) in zip(due, answers, strict=True)}
