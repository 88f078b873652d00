"""
Many messages deleted, cancelled, moved or redriven, in bounded steps.

From pending and garbage a message is taken by its id. From a list only the oldest can be taken: to find a message in the
middle, Redis would have to search the whole list in a single command. Such a message is cancelled: its body is deleted
immediately, and the worker that meets its id drops it. Each message is counted once: as purged when it was taken out,
as cancelled when it is dropped.
"""

from __future__ import annotations

import hashlib
import re
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, cast

from reliq.admin import calls
from reliq.admin.calls import KeyQueueState, is_list, place_of
from reliq.admin.filters import EVERYTHING, ignore
from reliq.admin.messages import MessageReads, StatePart, Tally, each, message_entries, parts_of
from reliq.admin.words import CANCELLABLE, MOVABLE, PURGEABLE
from reliq.codec import Codec
from reliq.errors import BodyError, ConfigurationError
from reliq.keys import check_id, first_published
from reliq.lua import transitions
from reliq.message import RETRIES_LIMIT, CancelStatus, Copied
from reliq.publish import Writer
from reliq.queue import rescheduling, tombstone_ms
from reliq.redis import commands
from reliq.redis.connection import BLOCKING, run_blocking
from reliq.redis.server import PUBLISH_SECONDS
from reliq.settings import (
    BATCH_LIMIT,
    DAY_SECONDS,
    LARGEST_BODY,
    LONGEST_SECONDS,
    MIB,
    QueueSettings,
    check_int,
    seconds,
)
from reliq.text import chunked, chunked_by_size
from reliq.wire_format import open_envelope, read_count

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reliq.admin.filters import Filter
    from reliq.admin.messages import Entry, OnStep
    from reliq.admin.session import QueueSession
    from reliq.message import DeadLetter, Duration, Header, RescheduleStatus
    from reliq.queue import Queue

#: A copy of a message in another queue stays known for this many seconds after its end: within them a redrive or move
#: that was cut off can be repeated without publishing twice.
COPY_WINDOW_SECONDS = 7 * DAY_SECONDS
FASTEST_RATE = 1_000_000
#: No step of a move reads more bytes of bodies, unless one body alone has more.
STEP_BYTES = 8 * MIB
#: A message that is being moved is due in this many ms or later, so that no worker gets it here and there.
HOLD_MS = 60_000

_DEATH = re.compile(r"\.\d{13,}-\d+$")


class MessageActions(MessageReads):
    """The methods that change messages, by id or many together."""

    def cancel(self, queue: str, ids: Sequence[str], *, tombstone: Duration | None = None) -> dict[str, CancelStatus]:
        """
        Cancel messages; return for each `cancelled`, `running` (its handler is notified) or `not_found`.

        The id of a `cancelled` message is free at once; with `tombstone` a publish of it is refused for that many
        seconds. The id of a `running` one stays taken until its end, and for its `dedup` then.
        """
        session = self._redis.queue(queue)
        for_ms = tombstone_ms(tombstone)
        found: dict[str, CancelStatus] = {check_id(id): "not_found" for id in ids}
        for at in (0, 1):  # the second home is the shard of the earlier number, while that changes
            for some in chunked([id for id, status in found.items() if status == "not_found"], BATCH_LIMIT):
                homes = [(id, home) for id in some for home in session.homes(id)[at : at + 1]]
                requests = [transitions.cancel(home.keys, [id], tombstone_ms=for_ms) for id, home in homes]
                answers = session.run_all(requests)
                found |= {id: status for (id, _), (status,) in zip(homes, answers, strict=True)}
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

        def cancel(part: StatePart, ids: list[str]) -> Tally:
            exist = part.queue.run_all([calls.has_value(part.queue.keys, id) for id in ids])
            alive = [id for id, exists in zip(ids, exist, strict=True) if exists]
            return _cancelled(alive, cancel_ids(part.queue, alive, for_ms), "cancelled")

        return each(parts_of(session, place, where), Tally("cancelled"), cancel, on_step)

    def purge(self, queue: str, state: str, where: Filter = EVERYTHING, *, on_step: OnStep = ignore) -> Tally:
        """Delete the messages of a state that `where` chooses. Dead letters have ended: the account stays as it is."""
        session, place = self._state(queue, state, where, PURGEABLE)
        delete = _delete_letters if place == "dead" else remove
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
        copier = Copier(self._redis.other(queue, to), self._redis.publisher(to))
        return each(parts_of(session, place, where), Tally("moved"), copier.move, on_step, most)

    def redrive(
        self,
        queue: str,
        where: Filter = EVERYTHING,
        *,
        to: str | None = None,
        limit: int | None = None,
        rate: float | None = None,
        retries: int | None = None,
        delay: Duration = 0.0,
        on_step: OnStep = ignore,
    ) -> Tally:
        """
        Publish dead letters again, oldest first, in their queue or in the queue `to`.

        Cut off at any point, nothing is lost; called again, it goes on with the rest and publishes no letter twice.

        Args:
            limit: the most letters; None for all.
            rate: the most letters in a second; None for no limit.
            retries: deliveries after the first; None for the number of the first publication.
            delay: time until they are due.
        """
        check_redrive(limit=limit, rate=rate, retries=retries, delay=delay)
        copier = None if to is None else Copier(self._redis.other(queue, to), self._redis.publisher(to))
        session, place = self._state(queue, "dead", where)
        target = self._redis.publisher(queue)

        def publish(part: StatePart, letters: list[DeadLetter]) -> Tally:
            if copier is None:
                done = target.redrive(letters, delay=delay, retries=retries)
            else:
                done = copier.copy_letters(part, letters, retries, delay)
            return Tally("redriven", len(letters), done, kept=len(letters) - done)

        return each(parts_of(session, place, where), Tally("redriven"), publish, on_step, limit, rate)


def check_redrive(*, limit: int | None, rate: float | None, retries: int | None, delay: Duration) -> None:
    """Raise ConfigurationError for an option of a redrive that is not allowed."""
    if limit is not None:
        check_int("limit", limit, least=1, most=10**9)
    if rate is not None and not 0 < rate <= FASTEST_RATE:
        raise ConfigurationError(f"rate must be above 0 and at most {FASTEST_RATE:,} in a second, not {rate!r}")
    if retries is not None:
        check_int("retries", retries, most=RETRIES_LIMIT)
    seconds("delay", delay)


def cancel_ids(queue: QueueSession, ids: Sequence[str], for_ms: int | None = None) -> list[CancelStatus]:
    """Cancel up to 500 messages; return the status of each."""
    return queue.run(transitions.cancel(queue.keys, ids, tombstone_ms=for_ms)) if ids else []


def remove(part: StatePart, ids: list[str], *, free_ids: bool = False) -> Tally:
    """Delete up to 500 messages of a part, given in their order, wherever they have gone meanwhile."""
    queue, spot = part.queue, part.spot
    purged = 0
    if spot != "unack":
        line = {"state": "line", "line": spot.key} if isinstance(spot, KeyQueueState) else {"state": spot}
        purged = queue.run(transitions.purge(queue.keys, ids, free_ids=free_ids, **cast("Any", line)))
    # From a list the first were purged. For a sorted set the answer is a number: a cancel does not find purged ids again.
    rest = ids[purged:] if is_list(spot) else ids if purged < len(ids) else []
    after = _cancelled(rest, cancel_ids(queue, rest), "deleted")
    done = purged + after.done
    return Tally("deleted", len(ids), done, after.running, gone=len(ids) - done - after.running)


def _delete_letters(part: StatePart, letters: list[DeadLetter]) -> Tally:
    deleted = part.queue.run(commands.delete_letters(part.queue.keys, [letter.letter for letter in letters]))
    return Tally("deleted", len(letters), deleted, gone=len(letters) - deleted)


def _cancelled(ids: Sequence[str], answers: list[CancelStatus], verb: str) -> Tally:
    cancelled = answers.count("cancelled")
    running = answers.count("running")
    return Tally(verb, len(ids), cancelled, running, gone=len(ids) - cancelled - running)


class Copier:
    """
    Publishes copies of messages in another queue, then deletes the messages here.

    The two queues lie in different slots of a Cluster, so it is two steps. Cut off between them, the message is in both;
    repeated, the publish answers `duplicate`, and only the delete is left to do.

    Args:
        target: the session of the other queue, `to`.
    """

    def __init__(self, target: QueueSession, to: Queue[bytes]) -> None:
        self._target = target
        self._to = to
        self._writer = Writer(to.known_shards, Codec(bytes), QueueSettings(max_body=LARGEST_BODY))
        run_blocking(to.known_shards.read(BLOCKING, for_seconds=PUBLISH_SECONDS))

    def copy_letters(self, part: StatePart, letters: list[DeadLetter], retries: int | None, delay: Duration) -> int:
        """Publish the dead letters that the other queue accepts, and delete them here; return how many."""
        orders = dict[str, Copied[bytes]]()
        for letter in letters:
            before = QueueSettings().retries if letter.header.retries is None else letter.header.retries
            order = self._order(
                part.queue.name,
                letter.id,
                letter.header,
                body=letter.payload,
                id=copy_id(letter),
                delay=delay,
                retries=before if retries is None else retries,
            )
            if self._accepts(order):
                orders[letter.letter] = order
        if orders:
            self._to.publish_many(orders.values())
            part.queue.run(commands.delete_letters(part.queue.keys, orders))
        return len(orders)

    def move(self, part: StatePart, ids: list[str]) -> Tally:
        """Move messages of a step."""
        met = message_entries(part.queue, place_of(part.spot), ids)
        held = [entry for entry in met if entry.mark == "held"]
        alive = [entry for entry in met if entry.mark not in ("held", "cancelled") and entry.size is not None]
        total = Tally("moved", len(ids), running=len(held), gone=len(ids) - len(held) - len(alive))
        for some in chunked_by_size(alive, lambda entry: entry.size or 0, STEP_BYTES, BATCH_LIMIT):
            total += self._move(part, some)
        return total

    def _move(self, part: StatePart, some: list[Entry]) -> Tally:
        """Put messages off, publish them in the other queue, then delete them here."""
        queue = part.queue
        now_ms = queue.run(commands.server_ms())
        due = {entry.id: round((entry.when or 0) * 1000) for entry in some}
        orders = self._orders(queue, due, now_ms)
        answers = postpone(
            queue, {id: max(due[id], now_ms + HOLD_MS) for id, order in orders.items() if self._accepts(order)}
        )
        held = [id for id, answer in answers.items() if answer == "rescheduled"]
        result = self._to.publish_many([orders[id] for id in held])
        refused = {*result.tombstoned, *result.duplicates} - self._copies([orders[id] for id in result.duplicates])
        postpone(queue, {id: due[id] for id in refused})
        there = [id for id in held if id not in refused]
        if there:
            remove(part, there, free_ids=True)  # so that they can come back
        running = list(answers.values()).count("running")
        gone = len(due) - len(orders) + list(answers.values()).count("not_found")
        return Tally("moved", 0, len(there), running, len(due) - len(there) - running - gone, gone)

    def _orders(self, queue: QueueSession, due: Mapping[str, int], now_ms: int) -> dict[str, Copied[bytes]]:
        """Return each message as it is published there; a message without a body has ended and is left out."""
        keys, ids = queue.keys, list(due)
        lefts = queue.run(commands.retries_left(keys, ids))
        values = queue.run_all([calls.value(keys, id) for id in ids])
        ttls_ms = queue.run_all([calls.ttl_ms(keys, id) for id in ids])
        orders = {}
        for id, value, ttl_ms, left in zip(ids, values, ttls_ms, lefts, strict=True):
            if value is None:
                continue
            header, body = open_envelope(value, bare=keys.bare)
            orders[id] = self._order(
                queue.name,
                id,
                header,
                body=body,
                at=datetime.fromtimestamp(due[id] / 1000, UTC),
                id=id,
                retries=min(RETRIES_LIMIT, max(0, read_count(left)[0] or 0)),
                ttl=None if ttl_ms < 0 else min(LONGEST_SECONDS, max(1, ttl_ms + now_ms - due[id]) / 1000),
            )
        return orders

    def _order(self, queue: str, old_id: str, header: Header, **own: Any) -> Copied[bytes]:
        """Return a message as it is published in the other queue: its effects and follow-ups stay known by the first id."""
        own |= {"headers": header.headers, "key": header.key, "priority": header.priority, "dedup": COPY_WINDOW_SECONDS}
        *origin, publication_id = first_published(queue, old_id, header)
        with suppress(ConfigurationError):  # an envelope has no place for the id of a foreign publisher
            check_id(origin[1])
            own |= {} if self._to.keys.bare else {"origin": origin, "publication_id": publication_id}
        return Copied(**own)

    def _accepts(self, order: Copied[bytes]) -> bool:
        """Report whether the other queue accepts a message, which a foreign program may have written."""
        try:
            message = self._writer.special(order)
        except (ConfigurationError, BodyError):
            return False
        return not (message.line and self._to.known_shards.map.served > 1)

    def _copies(self, orders: Sequence[Copied[bytes]]) -> set[str]:
        """Return the ids that have a copy from an earlier move in the other queue."""
        homes = [(order, home.keys) for order in orders for home in self._target.homes(str(order.id))]
        values = self._target.read_each([calls.value(keys, str(order.id)) for order, keys in homes], None)
        copies = set[str]()
        for (order, keys), value in zip(homes, values, strict=True):
            header, body = open_envelope(value or b"", bare=keys.bare)
            if value is not None and body == order.body:
                copies |= {str(order.id)} if keys.bare or header.window_ms == COPY_WINDOW_SECONDS * 1000 else set()
        return copies


def postpone(queue: QueueSession, due: Mapping[str, int]) -> dict[str, RescheduleStatus]:
    """Give messages other due times; return the status of each."""
    answers = queue.run_all([transitions.reschedule(queue.keys, [id], at_ms=at_ms) for id, at_ms in due.items()])
    return {id: answer for id, (answer,) in zip(due, answers, strict=True)}


def copy_id(letter: DeadLetter) -> str:
    """Return the id of a letter's message in another queue: always the same, and of this death alone."""
    id = f"{_DEATH.sub('', letter.id)}.{letter.letter}"
    try:
        return check_id(id)
    except ConfigurationError:  # too long, or of a foreign publisher
        digest = hashlib.sha256(letter.id.encode("utf-8", "surrogateescape")).hexdigest()[:32]
        return f"{digest}.{letter.letter}"
