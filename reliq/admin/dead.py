"""The dead letters: looked through in bounded steps, published again here or elsewhere, deleted."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from reliq import commands, transitions
from reliq.admin import queries
from reliq.admin.filters import LetterFilter, ignore
from reliq.admin.publish import taker
from reliq.control import by_bytes
from reliq.errors import ConfigurationError
from reliq.ids import check_id
from reliq.message import Outgoing
from reliq.settings import BATCH_LIMIT, DAY_SECONDS, MIB, QueueSettings, milliseconds, seconds, whole

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from reliq.admin.filters import Filter
    from reliq.admin.session import QueueSession
    from reliq.message import Letter
    from reliq.queue import Queue

#: The first step reads one letter, for it may be of any size; each later step reads at most twice as many as the one
#: before, and as many as LETTERS_STEP_BYTES are expected to hold.
FIRST_STEP, LETTERS_STEP_BYTES = 1, MIB
#: A message that came from another queue stays known for this many seconds after its end: within them a redrive or move
#: that was cut off can be made again without publishing twice.
COPY_WINDOW_SECONDS = 7 * DAY_SECONDS
#: With a rate, one step publishes what the rate allows in this many seconds.
STEP_SECONDS = 0.2
FASTEST_RATE = 1_000_000

_DEATH = re.compile(r"\.\d{13,}-\d+$")


@dataclass(frozen=True, slots=True)
class RedriveResult:
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
            parts.append(f"{self.gone} were gone meanwhile")
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
            whole("limit", self.limit, least=1, most=10**9)
        if self.rate is not None and not 0 < self.rate <= FASTEST_RATE:
            raise ConfigurationError(
                f"rate must be above 0 and at most {FASTEST_RATE:,} in a second, not {self.rate!r}"
            )
        if self.retries is not None:
            whole("retries", self.retries, most=1000)
        seconds("delay", self.delay)


#: Both are called after each step, with how many letters it looked at and the sum.
OnRedriven = Callable[[int, RedriveResult], None]
OnLetters = Callable[[int, int], None]


def letters_of(queue: QueueSession, where: LetterFilter) -> Iterator[Letter]:
    """Yield the chosen dead letters, oldest first; each is read when it is asked for."""
    return (letter for _, some in walk_letters(queue, where) for letter in some)


def walk_letters(queue: QueueSession, where: Filter) -> Iterator[tuple[int, list[Letter]]]:
    """Yield for each step how many letters it looked at, and the chosen ones, oldest first; later deaths are left out."""
    asked = where if isinstance(where, LetterFilter) else LetterFilter(headers=where.headers, match=where.match)
    test = asked.letter_tester()
    start, last = asked.span(queue.run(commands.server_ms()))
    newest = commands.letters_between(queue.keys, start, last, count=1, newest_first=True)
    for letter in queue.run(newest):
        last = letter.letter
    count = FIRST_STEP
    while True:
        request = commands.letters_between(queue.keys, start, last, count=count)
        letters = queue.run(request)
        if not letters:
            return
        yield len(letters), [letter for letter in letters if test(letter)]
        start, count = f"({letters[-1].letter}", next_step(count, letters)


def next_step(count: int, letters: Sequence[Letter]) -> int:
    """Return how many letters the next step reads, after one that was to read `count` and read these."""
    weight = max(1, sum(len(letter.payload) for letter in letters) // len(letters))
    return max(1, min(BATCH_LIMIT, count * 2, LETTERS_STEP_BYTES // weight))


def redrive(
    queue: QueueSession,
    where: LetterFilter,
    options: RedriveOptions,
    to: Queue[bytes] | None,
    on_step: OnRedriven,
) -> RedriveResult:
    """Publish letters again, oldest first, in their queue or in `to`; each step is whole, so it may be cut off."""
    sum_of = RedriveResult()
    pace = Pace(options.rate)
    for letters in _steps(queue, where, options):
        words = _copy(queue, letters, options, to) if to else _again(queue, letters, options)
        sum_of = RedriveResult(
            sum_of.found + len(letters),
            sum_of.redriven + words.count("redriven"),
            sum_of.alive + words.count("alive"),
            sum_of.gone + words.count("not_found"),
            sum_of.kept + words.count("kept"),
        )
        on_step(len(letters), sum_of)
        pace.wait(words.count("redriven"), partial(on_step, 0, sum_of))
    return sum_of


def count(queue: QueueSession, where: LetterFilter, on_step: OnLetters) -> int:
    """Count the chosen letters; call `on_step` after each step with how many it looked at, and the sum."""
    found = 0
    for looked, letters in walk_letters(queue, where):
        found += len(letters)
        on_step(looked, found)
    return found


def delete(queue: QueueSession, where: LetterFilter, on_step: OnLetters) -> int:
    """Delete letters; return how many. Their messages have ended already, so the account stays as it is."""
    deleted = 0
    for looked, letters in walk_letters(queue, where):
        if letters:
            deleted += queue.run(queries.delete_letters(queue.keys, [one.letter for one in letters]))
        on_step(looked, deleted)
    return deleted


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
        self._per_second, self._free_at = per_second, time.monotonic()

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


def _again(queue: QueueSession, letters: list[Letter], options: RedriveOptions) -> list[Any]:
    ttl_ms, answers = milliseconds(QueueSettings().ttl), list[Any]()
    for some in by_bytes(letters):
        rows = [(one.letter, one.id, _retries(one, options)) for one in some]
        call = transitions.redrive(queue.keys, rows, ttl_ms=ttl_ms, delay_ms=milliseconds(options.delay))
        words = queue.run(call)
        answers += words
    return answers


def _copy(queue: QueueSession, letters: list[Letter], options: RedriveOptions, to: Queue[bytes]) -> list[Any]:
    """
    Publish letters in another queue and delete them here.

    The two lie in different slots of a Cluster, so it is two steps. Cut off between them, the letter is still here
    and its message there; made again, the publish answers `duplicate`, for the id is of this death alone.
    """
    takes = taker(to)
    orders = {one.letter: order for one in letters if takes(order := _order(one, options))}
    if orders:
        to.publish_many(orders.values())
        queue.run(queries.delete_letters(queue.keys, orders))
    return ["redriven" if one.letter in orders else "kept" for one in letters]


def _order(letter: Letter, options: RedriveOptions) -> Outgoing[bytes]:
    return Outgoing(
        body=letter.payload,
        id=copy_id(letter),
        delay=options.delay,
        retries=_retries(letter, options),
        headers=letter.header.headers,
        dedup=COPY_WINDOW_SECONDS,
    )


def _retries(letter: Letter, options: RedriveOptions) -> int:
    if options.retries is not None:
        return options.retries
    return QueueSettings().retries if letter.header.retries is None else letter.header.retries
