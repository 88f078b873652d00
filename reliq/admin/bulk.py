"""
Publish the lines of a file; delete, cancel, move or redrive many messages, in bounded steps.

A delete removes messages from pending and garbage by their ids. From a list, it removes only the oldest messages: to
find an id in the middle of a list, Redis would have to search the whole list in a single command. A message in the
middle is cancelled instead: its body is deleted immediately, and the worker that claims its id drops the id. A message
counts as purged when its id is removed or dropped. A running message ends as cancelled.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, Unpack, cast

import msgspec

from reliq.admin import calls
from reliq.admin.calls import KeyQueueState, is_list, place_of
from reliq.admin.filters import CANCELLABLE, EVERYTHING, PURGEABLE, Filter, ignore
from reliq.admin.messages import Entry, MessageReads, OnStep, StatePart, Tally, each, message_entries, parts_of
from reliq.admin.session import QueueSession, UnknownQueueError
from reliq.codec import Codec
from reliq.errors import BodyError, ConfigurationError
from reliq.keys import check_id, first_published
from reliq.lua import transitions
from reliq.message import RETRIES_LIMIT, CancelStatus, Copied, DeadLetter, OutgoingMessage
from reliq.publish import Writer
from reliq.queue import Queue, rescheduling, tombstone_ms
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
from reliq.text import chunked, chunked_by_size, join_first, pluralize
from reliq.wire_format import open_envelope, read_count

if TYPE_CHECKING:
    from pathlib import Path

    from reliq.message import Duration, Header, PublishOptions, Receipt, RescheduleStatus


#: After a copied message has ended in its new queue, its id stays taken there for this many seconds. During this time,
#: you can repeat an interrupted redrive or move without publishing a message twice.
COPY_WINDOW_SECONDS = 7 * DAY_SECONDS
FASTEST_RATE = 1_000_000
#: A step of a move reads bodies of at most this many bytes in total. A body that is larger is moved in its own step.
STEP_BYTES = 8 * MIB
#: A move first postpones each message to at least this many ms from now, so that no worker claims the message while the
#: move copies it.
HOLD_MS = 60_000

_DEATH = re.compile(r"\.\d{13,}-\d+$")


OnError = Literal["stop", "skip"]

#: Each line is published as a message. The id of the message stays taken for this many seconds after the message ended.
#: If you publish the same file again during this time, no line is published twice.
DEDUP_SECONDS = DAY_SECONDS
#: The script call that publishes lines contains at most this many bytes of bodies.
CALL_BYTES = 4 * MIB


@dataclass(frozen=True, slots=True)
class FilePublished:
    """
    The result of publishing the lines of a file.

    Attributes:
        lines: number of lines that are neither blank nor malformed.
        published: number of lines that this run published.
        before: number of lines that an earlier run had published.
        cancelled: number of lines that Redis refused, because their messages were cancelled with a tombstone.
        malformed: line numbers, from 1, of the lines that are not JSON or are too large.
    """

    lines: int = 0
    published: int = 0
    before: int = 0
    cancelled: int = 0
    malformed: tuple[int, ...] = ()

    def __str__(self) -> str:
        """Return a text with the numbers of published, previously published and cancelled lines."""
        parts = [f"{self.published} published", f"{pluralize(self.before, 'was', 'were')} before"]
        if self.cancelled:
            parts.append(f"{pluralize(self.cancelled, 'was', 'were')} cancelled a short while ago")
        return ", ".join(parts)


#: A callback that `publish_lines` calls after each step, with the number of bytes of the file that the step processed,
#: and with the result of all steps so far.
OnLines = Callable[[int, FilePublished], None]


class MessageActions(MessageReads):
    """The methods that publish and change messages, by id or in bulk."""

    def publish(self, queue: str, body: bytes, *, raw: bool = False, **options: Unpack[PublishOptions]) -> Receipt:
        """
        Publish a message whose body is the bytes `body`, with the options of `Queue.publish`; return the receipt.

        Raises:
            BodyError: the body is not JSON, and `raw` is not set.
            PublishFailed: Redis did not answer, or refused the message.
        """
        target = self._publisher(queue)
        if not raw and not is_json(body):
            raise BodyError("the body is not JSON; quote it for the shell, or send bytes as they are with --raw")
        return target.publish(body, **options)

    def publish_lines(
        self,
        queue: str,
        path: Path,
        *,
        raw: bool = False,
        on_error: OnError = "stop",
        on_step: OnLines = ignore,
        **options: Unpack[PublishOptions],
    ) -> FilePublished:
        """
        Publish each line of a file; after an interruption, call this again to publish the rest.

        No line is published twice, because the id of each message is made from the content of the whole file and the
        number of the line. The id stays taken for `dedup` after the message ended, by default for a day.

        Args:
            raw: accept lines that are not JSON.
            on_error: what to do if a line is malformed: `stop` publishes nothing, `skip` publishes the other lines.
            on_step: called after each step, with the number of bytes of the file that the step processed, and with the
                result of all steps so far.
            options: options of `Queue.publish`, for all lines.

        Raises:
            BodyError: with `stop`, a line is malformed.
            ConfigurationError: the file cannot be read.
            PublishFailed: Redis did not answer, or refused messages. Call this again to publish the other lines.
        """
        target = self._publisher(queue)
        if options.get("dedup") is None:
            options["dedup"] = DEDUP_SECONDS
        at = 0
        result = FilePublished()
        try:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()[:20]
                malformed = tuple(number for number, body, _ in _lines(file, raw=raw) if body is None)
                if malformed and on_error == "stop":
                    numbers = join_first([*map(str, malformed)])
                    subject = f"line {numbers} is" if len(malformed) == 1 else f"lines {numbers} are"
                    raise BodyError(
                        f"{path}: {subject} not JSON, or larger than {LARGEST_BODY} bytes; nothing was published. Correct "
                        "the file, or publish the other lines with --on-error skip"
                    )
                good = ((number, body, at) for number, body, at in _lines(file, raw=raw) if body is not None)
                for chunk in chunked_by_size(good, lambda line: len(line[1]), CALL_BYTES, BATCH_LIMIT):
                    messages = []
                    for number, body, _ in chunk:
                        options["id"] = f"{digest}-{number}"
                        messages.append(OutgoingMessage(body=body, **options))
                    sent = target.publish_many(messages)
                    result = FilePublished(
                        result.lines + len(chunk),
                        result.published + sent.published,
                        result.before + len(sent.duplicates),
                        result.cancelled + len(sent.tombstoned),
                    )
                    on_step(chunk[-1][2] - at, result)
                    at = chunk[-1][2]
        except OSError as error:
            raise ConfigurationError(f"cannot read {path}: {error.strerror}") from None
        return replace(result, malformed=malformed)

    def cancel(self, queue: str, ids: Sequence[str], *, tombstone: Duration | None = None) -> dict[str, CancelStatus]:
        """
        Cancel messages; return the result for each id.

        The result is `cancelled`, `running` (a handler runs the message, and is notified) or `not_found`. You can
        publish the id of a `cancelled` message again immediately; with `tombstone`, only after that many seconds. The
        id of a `running` message stays taken until the message has ended and its `dedup` time is over.
        """
        session = self._queue(queue)
        for_ms = tombstone_ms(tombstone)
        found: dict[str, CancelStatus] = {check_id(id): "not_found" for id in ids}
        for at in (0, 1):  # while the number of shards changes, a message may be in its new or its old shard
            for some in chunked([id for id, status in found.items() if status == "not_found"], BATCH_LIMIT):
                homes = [(id, home) for id in some for home in session.homes(id)[at : at + 1]]
                requests = [transitions.cancel(home.keys, [id], tombstone_ms=for_ms) for id, home in homes]
                answers = session.run_all(requests)
                found |= {id: status for (id, _), (status,) in zip(homes, answers, strict=True)}
        return found

    def reschedule(self, queue: str, id: str, *, delay: Duration = 0.0, at: datetime | None = None) -> RescheduleStatus:
        """
        Give a waiting message another due time; return `rescheduled`, `running` or `not_found`.

        The due time of a running message stays unchanged.
        """
        status: RescheduleStatus = "not_found"
        for home in self._queue(queue).homes(check_id(id)):
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
        """Cancel the messages of a state that match the filter `where`."""
        for_ms = tombstone_ms(tombstone)
        session, place = self._state(queue, state, where, CANCELLABLE)

        def cancel(part: StatePart, ids: list[str]) -> Tally:
            exist = part.queue.run_all([calls.has_value(part.queue.keys, id) for id in ids])
            alive = [id for id, exists in zip(ids, exist, strict=True) if exists]
            request = transitions.cancel(part.queue.keys, alive, tombstone_ms=for_ms)
            return _cancelled(alive, part.queue.run(request) if alive else [], "cancelled")

        return each(parts_of(session, place, where), Tally("cancelled"), cancel, on_step)

    def purge(self, queue: str, state: str, where: Filter = EVERYTHING, *, on_step: OnStep = ignore) -> Tally:
        """
        Delete the messages of a state that match the filter `where`.

        Deleting dead letters does not change the queue's totals, because these messages have already ended.
        """
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
        Move messages of a state to another queue, with their ids, due times, retries left and headers.

        Each step postpones up to 250 messages to at least a minute from now, publishes them in the other queue, and
        deletes them in this queue. If the move is interrupted, no message is lost. Call it again within a minute;
        later, messages of the interrupted step may run in both queues.
        """
        most = None if limit is None else check_int("limit", limit, least=1, most=10**9)
        session, place = self._state(queue, state, where, CANCELLABLE)
        copier = self._copier(queue, to)
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

        If the redrive is interrupted, no dead letter is lost. Call it again to publish the remaining dead letters; no
        dead letter is published twice.

        Args:
            limit: maximum number of dead letters; None for all.
            rate: maximum number of dead letters per second; None for no limit.
            retries: maximum number of deliveries after the first; None for the number of the original publish.
            delay: seconds until the messages are due.
        """
        check_redrive(limit=limit, rate=rate, retries=retries, delay=delay)
        copier = None if to is None else self._copier(queue, to)
        session, place = self._state(queue, "dead", where)
        target = self._publisher(queue)

        def publish(part: StatePart, letters: list[DeadLetter]) -> Tally:
            if copier is None:
                done = target.redrive(letters, delay=delay, retries=retries)
            else:
                done = copier.copy_letters(part, letters, retries, delay)
            return Tally("redriven", len(letters), done, kept=len(letters) - done)

        return each(parts_of(session, place, where), Tally("redriven"), publish, on_step, limit, rate)

    def _copier(self, queue: str, to: str) -> Copier:
        """
        Return a `Copier` of messages from `queue` to the queue `to`.

        Raises:
            ConfigurationError: `to` is the same queue, or an unknown queue.
        """
        if to == queue:
            raise ConfigurationError(f"messages of {queue!r} cannot go to {queue!r} itself; name another queue")
        try:
            return Copier(self._queue(to, whole=True), self._publisher(to))
        except UnknownQueueError as error:
            raise ConfigurationError(f"{error}; messages go only to a queue that was used before") from None


def check_redrive(*, limit: int | None, rate: float | None, retries: int | None, delay: Duration) -> None:
    """Raise ConfigurationError if an option of a redrive is not allowed."""
    if limit is not None:
        check_int("limit", limit, least=1, most=10**9)
    if rate is not None and not 0 < rate <= FASTEST_RATE:
        raise ConfigurationError(f"rate must be above 0 and at most {FASTEST_RATE:,} in a second, not {rate!r}")
    if retries is not None:
        check_int("retries", retries, most=RETRIES_LIMIT)
    seconds("delay", delay)


def remove(part: StatePart, ids: list[str], *, free_ids: bool = False) -> Tally:
    """
    Delete up to 500 messages that were read from a state, even if they are in another state by now.

    Args:
        part: the state in one shard, or the key queue, from which the messages were read.
        ids: ids of the messages, in the order in which they were read.
        free_ids: whether the ids can be published again immediately.
    """
    queue, spot = part.queue, part.spot
    purged = 0
    if spot != "unack":
        line = {"state": "line", "line": spot.key} if isinstance(spot, KeyQueueState) else {"state": spot}
        purged = queue.run(transitions.purge(queue.keys, ids, free_ids=free_ids, **cast("Any", line)))
    # `purge` removes ids of a list in order, so it has removed the first `purged` ids: cancel the ids after them. From
    # other states, `purge` may have removed any of the ids: cancel all ids, because `cancel` ignores removed ids.
    rest = ids[purged:] if is_list(spot) else ids if purged < len(ids) else []
    answers = queue.run(transitions.cancel(queue.keys, rest, kind="purged")) if rest else []
    after = _cancelled(rest, answers, "deleted")
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
    Publishes copies of messages in another queue, then deletes the original messages.

    In a Cluster, the two queues are in different slots, so no script can change both. If the process stops between the
    publish and the delete, a message is in both queues. If the move or redrive is repeated, Redis reports the copy as a
    duplicate, and only the original message is deleted.

    Args:
        target: the session of the other queue.
        to: the other queue.
    """

    def __init__(self, target: QueueSession, to: Queue[bytes]) -> None:
        self._target = target
        self._to = to
        self._writer = Writer(to.known_shards, Codec(bytes), QueueSettings(max_body=LARGEST_BODY))
        run_blocking(to.known_shards.read(BLOCKING, for_seconds=PUBLISH_SECONDS))

    def copy_letters(self, part: StatePart, letters: list[DeadLetter], retries: int | None, delay: Duration) -> int:
        """
        Publish dead letters in the other queue, then delete them; return how many.

        Dead letters that the other queue does not accept are kept.
        """
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
        """Move the messages of one step, except running messages and messages that have ended."""
        met = message_entries(part.queue, place_of(part.spot), ids)
        held = [entry for entry in met if entry.mark == "held"]
        alive = [entry for entry in met if entry.mark not in ("held", "cancelled") and entry.size is not None]
        total = Tally("moved", len(ids), running=len(held), gone=len(ids) - len(held) - len(alive))
        for some in chunked_by_size(alive, lambda entry: entry.size or 0, STEP_BYTES, BATCH_LIMIT):
            total += self._move(part, some)
        return total

    def _move(self, part: StatePart, some: list[Entry]) -> Tally:
        """Postpone messages, publish them in the other queue, then delete them in this queue."""
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
            remove(part, there, free_ids=True)  # the ids must be free, so that the messages can be moved back
        running = list(answers.values()).count("running")
        gone = len(due) - len(orders) + list(answers.values()).count("not_found")
        return Tally("moved", 0, len(there), running, len(due) - len(there) - running - gone, gone)

    def _orders(self, queue: QueueSession, due: Mapping[str, int], now_ms: int) -> dict[str, Copied[bytes]]:
        """
        Read messages of `queue`, and return them as objects for `publish_many` of the other queue.

        Messages without a body have ended, and are omitted.

        Args:
            due: the due time of each message id, in unix ms.
            now_ms: the server's time.
        """
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
        """
        Return a message as an object for `publish_many` of the other queue.

        The copy stores the queue and id of the first publication, because `Job.once` and follow-up messages use them
        for deduplication.
        """
        own |= {"headers": header.headers, "key": header.key, "priority": header.priority, "cost": header.cost}
        own["dedup"] = COPY_WINDOW_SECONDS
        *origin, publication_id = first_published(queue, old_id, header)
        # If a program in Go chose an id that reliq does not allow, the copy does not store the first publication.
        with suppress(ConfigurationError):
            check_id(origin[1])
            own |= {} if self._to.keys.bare else {"origin": origin, "publication_id": publication_id}
        return Copied(**own)

    def _accepts(self, order: Copied[bytes]) -> bool:
        """Return whether the other queue accepts a message. A message that another program published may be invalid."""
        try:
            message = self._writer.special(order)
        except (ConfigurationError, BodyError):
            return False
        return not (message.line and self._to.known_shards.map.served > 1)

    def _copies(self, orders: Sequence[Copied[bytes]]) -> set[str]:
        """Return the ids of `orders` that an earlier, interrupted move has published in the other queue."""
        homes = [(order, home.keys) for order in orders for home in self._target.homes(str(order.id))]
        values = self._target.read_each([calls.value(keys, str(order.id)) for order, keys in homes], None)
        copies = set[str]()
        for (order, keys), value in zip(homes, values, strict=True):
            header, body = open_envelope(value or b"", bare=keys.bare)
            if value is not None and body == order.body:
                copies |= {str(order.id)} if keys.bare or header.window_ms == COPY_WINDOW_SECONDS * 1000 else set()
        return copies


def postpone(queue: QueueSession, due: Mapping[str, int]) -> dict[str, RescheduleStatus]:
    """Set the due times of messages to the unix ms in `due`; return the status of each id."""
    answers = queue.run_all([transitions.reschedule(queue.keys, [id], at_ms=at_ms) for id, at_ms in due.items()])
    return {id: answer for id, (answer,) in zip(due, answers, strict=True)}


def copy_id(letter: DeadLetter) -> str:
    """
    Return the id for the copy of a dead letter's message in another queue.

    The same dead letter always gives the same id. Two dead letters of the same message give different ids.
    """
    id = f"{_DEATH.sub('', letter.id)}.{letter.letter}"
    try:
        return check_id(id)
    except ConfigurationError:
        # The new id is too long, or a program in Go chose an id that reliq does not allow: use a digest of the old id.
        digest = hashlib.sha256(letter.id.encode("utf-8", "surrogateescape")).hexdigest()[:32]
        return f"{digest}.{letter.letter}"


def is_json(body: bytes) -> bool:
    """Return whether `body` is a single JSON value."""
    try:
        msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return True


def _lines(file: BinaryIO, *, raw: bool) -> Iterator[tuple[int, bytes | None, int]]:
    """
    Yield three values for each line that is not blank: its number, its body, and the file offset of its end.

    The body is None if the line is malformed. Only the start of a line that is too large is kept in memory.
    """
    file.seek(0)
    number = 0
    while line := file.readline(LARGEST_BODY + 2):
        number += 1
        body = line.strip(b"\r\n")
        is_good = len(body) <= LARGEST_BODY and (raw or is_json(body))
        while not line.endswith(b"\n") and (line := file.readline(LARGEST_BODY)):
            is_good = False
        if body.strip():
            yield number, body if is_good else None, file.tell()
