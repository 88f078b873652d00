"""The dead letters: looked through in bounded steps, counted, deleted; `admin.redrive` publishes them again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from heapq import merge
from typing import TYPE_CHECKING

from reliq import commands
from reliq.admin.in_turn import in_turn
from reliq.settings import BATCH_LIMIT, MIB

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from reliq.admin.filters import Filter, LetterFilter
    from reliq.admin.session import QueueSession
    from reliq.message import Letter

#: The first step reads one letter, for it may be of any size; each later step reads at most twice as many as the one
#: before, and as many as LETTERS_STEP_BYTES are expected to hold.
FIRST_STEP, LETTERS_STEP_BYTES = 1, MIB
#: It is called after each step, with how many letters it looked at and the sum.
OnLetters = Callable[[int, int], None]


def letters_of(queue: QueueSession, where: LetterFilter, without: Collection[int]) -> Iterator[Letter]:
    """Yield the chosen dead letters, oldest first, but for some shards; each is read when it is asked for."""
    parts = [_chosen(part, where) for part in queue.parts if part.keys.shard not in without]
    return merge(*parts, key=lambda letter: letter.died)


def _chosen(part: QueueSession, where: LetterFilter) -> Iterator[Letter]:
    return (letter for _, some in walk_letters(part, where) for letter in some)


def walk_letters(queue: QueueSession, where: Filter) -> Iterator[tuple[int, list[Letter]]]:
    """Yield for each step how many letters it looked at, and the chosen ones, oldest first; later deaths are left out."""
    asked = where.of_letters()
    test = asked.letter_tester()
    first, last = span_of(queue, asked)
    newest = commands.letters_between(queue.keys, first, last, count=1, newest_first=True)
    for letter in queue.run(newest):
        last = letter.letter
    for letters in letters_in(queue, first, last):
        yield len(letters), [letter for letter in letters if test(letter)]


def span_of(queue: QueueSession, where: LetterFilter) -> tuple[str, str]:
    """Return between which places of the stream the letters lie whose age is meant."""
    return where.span(queue.run(commands.server_ms()))


def letters_in(queue: QueueSession, first: str, last: str, *, newest_first: bool = False) -> Iterator[list[Letter]]:
    """Yield the dead letters between two places of their stream, in bounded steps."""
    count, read = FIRST_STEP, partial(commands.letters_between, queue.keys, newest_first=newest_first)
    while letters := queue.run(read(first, last, count=count)):
        yield letters
        behind = f"({letters[-1].letter}"
        first, last = (first, behind) if newest_first else (behind, last)
        weight = max(1, sum(len(letter.payload) for letter in letters) // len(letters))
        count = max(1, min(BATCH_LIMIT, count * 2, LETTERS_STEP_BYTES // weight))


def count(queue: QueueSession, where: LetterFilter, on_step: OnLetters) -> int:
    """Count the chosen letters; call `on_step` after each step with how many it looked at, and the sum."""

    def count_part(part: QueueSession, step: OnLetters, _before: int) -> int:
        found = 0
        for looked, letters in walk_letters(part, where):
            found += len(letters)
            step(looked, found)
        return found

    return in_turn(queue.parts, count_part, on_step, 0)


def delete(queue: QueueSession, where: LetterFilter, on_step: OnLetters) -> int:
    """Delete letters; return how many. Their messages have ended already, so the account stays as it is."""

    def delete_part(part: QueueSession, step: OnLetters, _before: int) -> int:
        deleted = 0
        for looked, letters in walk_letters(part, where):
            if letters:
                deleted += part.run(commands.delete_letters(part.keys, [one.letter for one in letters]))
            step(looked, deleted)
        return deleted

    return in_turn(queue.parts, delete_part, on_step, 0)
