"""Dead letters by how they died, and their redrive."""

from __future__ import annotations

import hashlib
import re
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from reliq.admin import calls
from reliq.admin.filters import EVERYTHING, Filter, ignore
from reliq.admin.messages import LONGEST_SEARCH, MessageReads, Tally, each, parts_of, walk
from reliq.codec import Codec
from reliq.errors import BodyError, ConfigurationError
from reliq.keys import check_id, first_published
from reliq.message import RETRIES_LIMIT, Copied, Letter
from reliq.publish import Writer
from reliq.redis import commands
from reliq.redis.connection import BLOCKING, run_blocking
from reliq.redis.server import PUBLISH_SECONDS
from reliq.settings import BATCH_LIMIT, DAY_SECONDS, LARGEST_BODY, QueueSettings, check_int, seconds
from reliq.text import chunked

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from reliq.admin.messages import OnStep, StatePart
    from reliq.message import Duration, Header, Outgoing
    from reliq.queue import Queue


GroupBy = Literal["reason", "raised"]

#: A message that came from another queue stays known for this many seconds after its end: within them a redrive or move
#: that was cut off can be made again without publishing twice.
COPY_WINDOW_SECONDS = 7 * DAY_SECONDS
#: With a rate, one step publishes what the rate allows in this many seconds.
STEP_SECONDS = 0.2
FASTEST_RATE = 1_000_000

_DEATH = re.compile(r"\.\d{13,}-\d+$")


@dataclass(frozen=True, slots=True)
class DeadGroup:
    """
    Dead letters that died alike.

    Attributes:
        reason: one of `DEATH_REASONS`; empty where letters are not grouped by it.
        raised: class and place of the exception, empty for those that have none; None where letters are not grouped
            by it. `Filter(reason=, raised=)` means the same letters.
        newest: when the newest of them died, in unix seconds by Redis' clock.
        example: the newest one's id.
    """

    reason: str
    raised: str | None
    count: int
    newest: float
    example: str


@dataclass(frozen=True, slots=True)
class DeadGroups:
    """
    The dead letters of a queue by how they died, the largest group first.

    Attributes:
        looked: how many letters were looked at, the newest.
        of: how many there are.
    """

    groups: Sequence[DeadGroup]
    looked: int
    of: int


class DeadLetterReads(MessageReads):
    """The methods that read dead letters, besides those of every state."""

    def dead_groups(
        self,
        queue: str,
        where: Filter = EVERYTHING,
        *,
        by: Sequence[GroupBy] = ("reason", "raised"),
        for_seconds: float = 1.0,
        without: Collection[int] = (),
    ) -> DeadGroups:
        """Group the newest dead letters by cause, reading for `for_seconds` up to 60; `without` leaves shards out."""
        if not by or not set(by) <= {"reason", "raised"} or isinstance(by, str):
            raise ConfigurationError(
                f"by must be some of 'reason' and 'raised', such as ('reason', 'raised'), not {by!r}"
            )
        whole_time = seconds("for_seconds", for_seconds, most=LONGEST_SEARCH)
        session, place = self._state(queue, "dead", where)
        parts = list(parts_of(session, place, where, without))
        looked = 0
        newest = dict[tuple[str, str | None], Letter]()
        counts = dict[tuple[str, str | None], int]()
        for part in parts:
            until = time.monotonic() + whole_time / len(parts)
            for step in walk(part, count=BATCH_LIMIT):
                looked += len(step.rows)
                for _, letter in step.chosen:
                    group = letter.reason if "reason" in by else "", letter.raised if "raised" in by else None
                    newest[group] = max(newest.get(group, letter), letter, key=lambda one: one.died)
                    counts[group] = counts.get(group, 0) + 1
                if time.monotonic() >= until:
                    break
        groups = [DeadGroup(*group, counts[group], letter.died, letter.id) for group, letter in newest.items()]
        of = sum(session.run_all([calls.size(part.queue.keys, "dead") for part in parts]))
        return DeadGroups(sorted(groups, key=lambda group: (-group.count, -group.newest)), looked, of)


class DeadLetterActions(MessageReads):
    """The methods that publish dead letters again."""

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
            retries: deliveries after the first; None for those of the first publication.
            delay: time until they are due.
        """
        check_redrive(limit=limit, rate=rate, retries=retries, delay=delay)
        if to is not None:
            self._redis.other(queue, to)
        session, place = self._state(queue, "dead", where)
        target = self._redis.publisher(to or queue)
        copy = LetterCopies(queue, target, retries, delay) if to else None
        pace = Pace(rate)

        def again(part: StatePart, letters: list[Letter]) -> Iterator[Tally]:
            for some in chunked(letters, BATCH_LIMIT if rate is None else max(1, round(rate * STEP_SECONDS))):
                done = copy(part, some) if copy else target.redrive(some, delay=delay, retries=retries)
                yield Tally("redriven", len(some), done, kept=len(some) - done)
                for _ in pace.waits(done):
                    yield Tally("redriven")

        return each(parts_of(session, place, where), Tally("redriven"), again, on_step, limit)


def check_redrive(*, limit: int | None, rate: float | None, retries: int | None, delay: Duration) -> None:
    """Raise ConfigurationError for an option of a redrive that is not allowed."""
    if limit is not None:
        check_int("limit", limit, least=1, most=10**9)
    if rate is not None and not 0 < rate <= FASTEST_RATE:
        raise ConfigurationError(f"rate must be above 0 and at most {FASTEST_RATE:,} in a second, not {rate!r}")
    if retries is not None:
        check_int("retries", retries, most=RETRIES_LIMIT)
    seconds("delay", delay)


class Pace:
    """Keeps to a rate: it waits until the rate allows as many as were published."""

    def __init__(self, per_second: float | None) -> None:
        self._per_second = per_second
        self._free_at = time.monotonic()

    def waits(self, done: int) -> Iterator[None]:
        """Sleep until `done` more fit the rate; yield now and then in a long sleep, for the caller may end it."""
        if self._per_second is None:
            return
        self._free_at = max(self._free_at, time.monotonic() - STEP_SECONDS) + done / self._per_second
        while (left := self._free_at - time.monotonic()) > STEP_SECONDS:
            time.sleep(STEP_SECONDS)
            yield
        time.sleep(max(0.0, left))


class LetterCopies:
    """
    Publishes dead letters in another queue and deletes them here.

    The two queues lie in different slots of a Cluster, so it is two steps. Cut off between them, the letter is still here
    and its message there; made again, the publish answers `duplicate`, for the id is of this death alone.
    """

    def __init__(self, queue: str, to: Queue[bytes], retries: int | None, delay: Duration) -> None:
        self._queue = queue
        self._to = to
        self._retries = retries
        self._delay = delay
        self._takes = publish_check(to)

    def __call__(self, part: StatePart, letters: list[Letter]) -> int:
        """Publish letters that the queue accepts; return how many."""
        orders = {one.letter: order for one in letters if self._takes(order := self._order(one))}
        if orders:
            self._to.publish_many(orders.values())
            part.queue.run(commands.delete_letters(part.queue.keys, orders))
        return len(orders)

    def _order(self, letter: Letter) -> Copied[bytes]:
        default = QueueSettings().retries if letter.header.retries is None else letter.header.retries
        retries = default if self._retries is None else self._retries
        own: dict[str, Any] = {"body": letter.payload, "id": copy_id(letter), "delay": self._delay, "retries": retries}
        return copied(self._queue, letter.id, letter.header, self._to, **own)


def copy_id(letter: Letter) -> str:
    """Return the id of a letter's message in another queue: always the same, and of this death alone."""
    id = f"{_DEATH.sub('', letter.id)}.{letter.letter}"
    try:
        return check_id(id)
    except ConfigurationError:  # too long, or of a foreign publisher
        digest = hashlib.sha256(letter.id.encode("utf-8", "surrogateescape")).hexdigest()[:32]
        return f"{digest}.{letter.letter}"


def copied(queue: str, old_id: str, header: Header, to: Queue[bytes], **own: Any) -> Copied[bytes]:
    """Return a message of `queue` as it is published in `to`: its effects and follow-ups stay known by the first id."""
    own |= {"headers": header.headers, "key": header.key, "priority": header.priority, "dedup": COPY_WINDOW_SECONDS}
    *origin, incarnation = first_published(queue, old_id, header)
    with suppress(ConfigurationError):  # an envelope has no place for the id of a foreign publisher
        check_id(origin[1])
        own |= {} if to.keys.bare else {"origin": origin, "incarnation": incarnation}
    return Copied(**own)


def publish_check(queue: Queue[bytes]) -> Callable[[Outgoing[bytes]], bool]:
    """Return a function that reports whether a message, which a foreign program may have written, may be published in `queue`."""
    shards = queue.known_shards
    is_read: list[bool] = []
    writer = Writer(shards, Codec(bytes), QueueSettings(max_body=LARGEST_BODY))

    def accepts(order: Outgoing[bytes]) -> bool:
        try:
            message = writer.special(order)
        except (ConfigurationError, BodyError):
            return False
        if message.line and not is_read:  # from its first key on the queue keeps its one shard
            run_blocking(shards.read(BLOCKING, for_seconds=PUBLISH_SECONDS))
            is_read.append(True)
        return not (message.line and shards.map.served > 1)

    return accepts
