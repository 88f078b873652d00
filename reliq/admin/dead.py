"""Dead letters by why they died, with how many died so."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from msgspec import structs

from reliq.admin import calls
from reliq.admin.filters import ignore
from reliq.admin.messages import LONGEST_SEARCH, Sum, letters_in, sequentially, span_of, walk_letters
from reliq.admin.publish import publish_check
from reliq.errors import ConfigurationError
from reliq.keys import check_id, first_published
from reliq.lua import transitions
from reliq.message import Copied, Letter
from reliq.queue import by_bytes
from reliq.redis import commands
from reliq.settings import BATCH_LIMIT, DAY_SECONDS, QueueSettings, check_int, milliseconds, seconds
from reliq.text import pluralize

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from reliq.admin.filters import LetterFilter
    from reliq.admin.session import QueueSession
    from reliq.message import Header
    from reliq.queue import Queue


GroupBy = Literal["reason", "raised"]


@dataclass(frozen=True, slots=True)
class DeadGroup:
    """
    Dead letters that died alike.

    Attributes:
        reason: one of `DEATH_REASONS`; empty where letters are not grouped by it.
        raised: class and place of the exception, empty for those that have none; None where letters are not grouped
            by it. `LetterFilter(reason=, raised=)` means the same letters.
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


def dead_groups(
    queue: QueueSession, where: LetterFilter, by: Sequence[GroupBy], for_seconds: float, without: Collection[int]
) -> DeadGroups:
    """Group the newest letters that are meant; raise ConfigurationError for what they cannot be grouped by."""
    if not by or not set(by) <= {"reason", "raised"} or isinstance(by, str):
        raise ConfigurationError(f"by must be some of 'reason' and 'raised', such as ('reason', 'raised'), not {by!r}")
    whole_time = seconds("for_seconds", for_seconds, most=LONGEST_SEARCH)
    parts = [part for part in queue.parts if part.keys.shard not in without]
    test = where.letter_tester()
    of = 0
    looked = 0
    newest = dict[tuple[str, str | None], Letter]()
    counts = dict[tuple[str, str | None], int]()
    for part in parts:
        until = time.monotonic() + whole_time / len(parts)
        first, last = span_of(part, where)
        of += part.run(calls.size(part.keys, "dead"))
        for letters in letters_in(part, first, last, newest_first=True):
            looked += len(letters)
            for letter in filter(test, letters):
                group = letter.reason if "reason" in by else "", letter.raised if "raised" in by else None
                newest[group] = max(newest.get(group, letter), letter, key=lambda one: one.died)
                counts[group] = counts.get(group, 0) + 1
            if time.monotonic() >= until:
                break
    groups = [DeadGroup(*group, counts[group], letter.died, letter.id) for group, letter in newest.items()]
    return DeadGroups(sorted(groups, key=lambda group: (-group.count, -group.newest)), looked, of)


#: A message that came from another queue stays known for this many seconds after its end: within them a redrive or move
#: that was cut off can be made again without publishing twice.
COPY_WINDOW_SECONDS = 7 * DAY_SECONDS
#: With a rate, one step publishes what the rate allows in this many seconds.
STEP_SECONDS = 0.2
FASTEST_RATE = 1_000_000

_DEATH = re.compile(r"\.\d{13,}-\d+$")


@dataclass(frozen=True, slots=True)
class RedriveResult(Sum):
    """
    How many dead letters a redrive found, and how each ended.

    Attributes:
        found: letters that the ids or the filter chose.
        redriven: published again.
        alive: left as they are, because a message of their id is alive in the queue.
        kept: left as they are, because the target queue refuses their headers or their size, as it would in a publish.
        gone: redriven or deleted by somebody else meanwhile.
    """

    found: int = 0
    redriven: int = 0
    alive: int = 0
    gone: int = 0
    kept: int = 0

    def __str__(self) -> str:
        """Return in one line what became of them."""
        parts = [f"{self.redriven} redriven"]
        if self.alive:
            parts.append(f"{self.alive} left: a message of their id is alive")
        if self.gone:
            parts.append(f"{pluralize(self.gone, 'was', 'were')} gone meanwhile")
        if self.kept:
            parts.append(f"{self.kept} kept: the other queue cannot have such headers or bodies")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class RedriveOptions:
    """
    How letters are published again.

    Attributes:
        limit: the most letters, None for all.
        rate: the most letters in a second, None for no limit.
        retries: deliveries after the first; None for what the message had.
        delay: seconds until they are due.

    Raises:
        ConfigurationError: one of them is not allowed.
    """

    limit: int | None = None
    rate: float | None = None
    retries: int | None = None
    delay: float = 0.0

    def __post_init__(self) -> None:
        if self.limit is not None:
            check_int("limit", self.limit, least=1, most=10**9)
        if self.rate is not None and not 0 < self.rate <= FASTEST_RATE:
            raise ConfigurationError(
                f"rate must be above 0 and at most {FASTEST_RATE:,} in a second, not {self.rate!r}"
            )
        if self.retries is not None:
            check_int("retries", self.retries, most=1000)
        seconds("delay", self.delay)


#: It is called after each step, with how many letters it looked at and the sum.
OnRedriven = Callable[[int, RedriveResult], None]


def redrive(
    queue: QueueSession,
    where: LetterFilter,
    options: RedriveOptions,
    to: Queue[bytes],
    on_step: OnRedriven,
) -> RedriveResult:
    """
    Publish letters again, oldest first, in `to`: their own queue, or another; each step is whole, so it may be cut off.

    Those of a sharded queue go shard by shard.
    """

    def redrive_part(part: QueueSession, step: OnRedriven, before: RedriveResult) -> RedriveResult:
        left = None if options.limit is None else options.limit - before.found
        return RedriveResult() if left == 0 else _redrive(part, where, replace(options, limit=left), to, pace, step)

    pace = Pace(options.rate)
    return sequentially(queue.parts, redrive_part, on_step, RedriveResult())


def _redrive(
    queue: QueueSession,
    where: LetterFilter,
    options: RedriveOptions,
    to: Queue[bytes],
    pace: Pace,
    on_step: OnRedriven,
) -> RedriveResult:
    sum_of = RedriveResult()
    is_own = to.name == queue.name
    for letters in _steps(queue, where, options):
        words = _again(queue, letters, options, to) if is_own else _copy(queue, letters, options, to)
        sum_of += RedriveResult(
            len(letters),
            words.count("redriven"),
            words.count("alive"),
            words.count("not_found"),
            words.count("kept"),
        )
        on_step(len(letters), sum_of)
        pace.wait(words.count("redriven"), partial(on_step, 0, sum_of))
    return sum_of


def copy_id(letter: Letter) -> str:
    """Return the id of a letter's message in another queue: always the same, and of this death alone."""
    id = f"{_DEATH.sub('', letter.id)}.{letter.letter}"
    try:
        return check_id(id)
    except ConfigurationError:  # too long, or of a foreign publisher
        digest = hashlib.sha256(letter.id.encode("utf-8", "surrogateescape")).hexdigest()[:32]
        return f"{digest}.{letter.letter}"


class Pace:
    """Keeps to a rate: it waits until the rate allows as many as were published."""

    def __init__(self, per_second: float | None) -> None:
        self._per_second = per_second
        self._free_at = time.monotonic()

    def wait(self, done: int, meanwhile: Callable[[], None] = ignore) -> None:
        """Sleep until `done` more fit the rate; call `meanwhile` now and then in a long sleep: it may raise to end it."""
        if self._per_second is None:
            return
        self._free_at = max(self._free_at, time.monotonic() - STEP_SECONDS) + done / self._per_second
        while (left := self._free_at - time.monotonic()) > STEP_SECONDS:
            time.sleep(STEP_SECONDS)
            meanwhile()
        time.sleep(max(0.0, left))


def _steps(queue: QueueSession, where: LetterFilter, options: RedriveOptions) -> Iterator[list[Letter]]:
    """Yield the chosen letters, as many at a time as limit and rate allow."""
    size = BATCH_LIMIT if options.rate is None else max(1, min(BATCH_LIMIT, round(options.rate * STEP_SECONDS)))
    left = options.limit
    for _, letters in walk_letters(queue, where):
        for at in range(0, len(letters), size):
            step = letters[at : at + size] if left is None else letters[at : min(at + size, at + left)]
            if not step:
                return
            yield step
            left = None if left is None else left - len(step)


def _again(queue: QueueSession, letters: list[Letter], options: RedriveOptions, own: Queue[bytes]) -> list[Any]:
    """Publish letters in their shard again; those whose home is another by now are copied there."""
    ttl_ms = milliseconds(QueueSettings().ttl)
    answers = dict[str, Any]()
    here = [one for one in letters if queue.is_home_of(one.id)]
    for some in by_bytes(here):
        rows = [(one.letter, one.id, _retries(one, options)) for one in some]
        call = transitions.redrive(
            queue.keys, rows, ttl_ms=ttl_ms, delay_ms=milliseconds(options.delay), fence=queue.map.fence
        )
        words = queue.run(call)
        answers |= zip((one.letter for one in some), words, strict=True)
    for one in letters:
        if answers.get(one.letter, "stale") == "stale":  # its home is another shard by now, and the queue finds it
            answers[one.letter] = (
                "redriven" if own.redrive([_with_retries(one, options)], delay=options.delay) else "alive"
            )
    return [answers[one.letter] for one in letters]


def _with_retries(letter: Letter, options: RedriveOptions) -> Letter:
    return replace(letter, header=structs.replace(letter.header, retries=_retries(letter, options)))


def _copy(queue: QueueSession, letters: list[Letter], options: RedriveOptions, to: Queue[bytes]) -> list[Any]:
    """
    Publish letters in another queue and delete them here.

    The two lie in different slots of a Cluster, so it is two steps. Cut off between them, the letter is still here
    and its message there; made again, the publish answers `duplicate`, for the id is of this death alone.
    """
    takes = publish_check(to)
    orders = {one.letter: order for one in letters if takes(order := _order(queue.name, one, options, to))}
    if orders:
        to.publish_many(orders.values())
        queue.run(commands.delete_letters(queue.keys, orders))
    return ["redriven" if one.letter in orders else "kept" for one in letters]


def _order(queue: str, letter: Letter, options: RedriveOptions, to: Queue[bytes]) -> Copied[bytes]:
    own: dict[str, Any] = {"body": letter.payload, "id": copy_id(letter), "delay": options.delay}
    return copied(queue, letter.id, letter.header, to, retries=_retries(letter, options), **own)


def copied(queue: str, old_id: str, header: Header, to: Queue[bytes], **own: Any) -> Copied[bytes]:
    """Return a message of `queue` as it is published in `to`: its effects and follow-ups stay known by the first id."""
    own |= {"headers": header.headers, "key": header.key, "priority": header.priority, "dedup": COPY_WINDOW_SECONDS}
    *origin, incarnation = first_published(queue, old_id, header)
    with suppress(ConfigurationError):  # an envelope has no place for the id of a foreign publisher
        check_id(origin[1])
        own |= {} if to.keys.bare else {"origin": origin, "incarnation": incarnation}
    return Copied(**own)


def _retries(letter: Letter, options: RedriveOptions) -> int:
    if options.retries is not None:
        return options.retries
    return QueueSettings().retries if letter.header.retries is None else letter.header.retries
