"""Dead letters that are published again: by one script where their ids are at home, and else in three steps."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from reliq import commands, transitions
from reliq.chunks import chunked_by_size
from reliq.errors import ConfigurationError
from reliq.ids import home
from reliq.message import Letter
from reliq.settings import BATCH_LIMIT, MIB, milliseconds, seconds, whole
from reliq.wireformat import envelope_rest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from reliq.call import Call, Command
    from reliq.client.shards import Shards
    from reliq.keys import Keys
    from reliq.message import Duration
    from reliq.settings import QueueSettings
    from reliq.transitions import AskStatus, PublishAnswer, RedriveStatus

#: One call of a redrive writes back at most this many bytes of bodies: a script holds all others up.
LETTER_BYTES = 8 * MIB

_LETTER_NAME = re.compile(r"\d{1,20}-\d{1,20}")


class Way(NamedTuple):
    """
    The way of a letter to the shard where its id is at home now.

    Each step may be the last before the process dies. Made again within ten minutes, the publish adds nothing: it has
    the number of its letter.
    """

    letter: Letter
    ask: Call[list[AskStatus]]
    look: Command[list[Letter]]
    publish: Call[PublishAnswer]
    delete: Command[int]


class Redriving:
    """
    Letters of a queue on their way back into it.

    Attributes:
        left: those of which Redis has said nothing yet, or that they must go by a later map.
        redriven: how many are published again.

    Raises:
        ConfigurationError: something is no letter, or they are too many for one call.
    """

    def __init__(self, shards: Shards, settings: QueueSettings, letters: Sequence[Letter], delay: Duration) -> None:
        if not isinstance(letters, list | tuple) or not all(isinstance(one, Letter) for one in letters):
            raise ConfigurationError(
                f"letters must be a list of dead letters, as `letters()` returns them, not {type(letters).__name__}"
            )
        whole("number of letters", len(letters), most=BATCH_LIMIT)
        self._shards, self._retries = shards, settings.retries
        self._ttl_ms, self._delay_ms = milliseconds(settings.ttl), milliseconds(seconds("delay", delay))
        self.left, self.redriven = list(letters), 0

    def calls(self) -> list[tuple[Call[list[RedriveStatus]], list[Letter]]]:
        """Return the calls for the letters that are at home where they lie, each with its letters."""
        at_home: dict[int, list[Letter]] = {}
        for one in self.left:
            if self._home(one) == one.shard:
                at_home.setdefault(one.shard, []).append(one)
        return [(self._call(some), some) for letters in at_home.values() for some in by_bytes(letters)]

    def told(self, letters: Sequence[Letter], answers: list[RedriveStatus]) -> None:
        """Note what a shard has answered about its letters."""
        self.redriven += answers.count("redriven")
        done = {id(one) for one, answer in zip(letters, answers, strict=True) if answer != "stale"}
        self.left = [one for one in self.left if id(one) not in done]

    def ways(self) -> Iterator[Way]:
        """Yield the way of each letter whose id has another home than the shard where it lies."""
        for one in [one for one in self.left if self._home(one) != one.shard]:
            yield self._way(one)

    def may_go(self, way: Way, answers: list[AskStatus], found: list[Letter]) -> bool:
        """Say whether a letter may be published at home, as the shard has answered where it lies, if it still does."""
        is_free = answers == ["free"] and [one.id for one in found] == [way.letter.id]
        if not is_free and answers != ["stale"]:
            self.left = [one for one in self.left if one is not way.letter]
        return is_free

    def is_there(self, way: Way, answer: PublishAnswer) -> bool:
        """Say whether a letter is published at home, and is to be deleted where it lies."""
        if answer.is_stale:
            return False
        self.left = [one for one in self.left if one is not way.letter]
        return not answer.refused

    def deleted(self, count: int) -> None:
        """Note that a letter is deleted where it lay; 0: somebody else has done it."""
        self.redriven += count

    def _home(self, letter: Letter) -> int:
        return home(letter.id, self._shards.map.n)

    def _left(self, letter: Letter) -> int:
        return self._retries if letter.header.retries is None else letter.header.retries

    def _call(self, letters: Sequence[Letter]) -> Call[list[RedriveStatus]]:
        rows = [(one.letter, one.id, self._left(one)) for one in letters]
        keys, fence = self._shards.keys(letters[0].shard), self._shards.map.fence
        return transitions.redrive(keys, rows, ttl_ms=self._ttl_ms, delay_ms=self._delay_ms, fence=fence)

    def _way(self, letter: Letter) -> Way:
        old, new, fence = self._shards.keys(letter.shard), self._shards.keys(self._home(letter)), self._shards.map.fence
        header, left = letter.header, self._left(letter)
        start = envelope_rest(
            left,
            header.enqueued,
            header.window_ms,
            header.headers,
            header.incarnation,
            header.line or "",
            header.origin,
        )
        publish = transitions.publish(
            new,
            [(letter.id, start + letter.payload)],
            transitions.CallNumber(f"letter-{letter.letter}.{letter.shard}", 1),
            ttl_ms=self._ttl_ms,
            retries=left,
            delay_ms=self._delay_ms,
            window_ms=header.window_ms or 0,
            replace=True,
            fence=fence,
        )
        ask = transitions.ask(old, [letter.id], fence=fence, replace=True)
        look = commands.letters_between(old, letter.letter, letter.letter, count=1)
        return Way(letter, ask, look, publish, commands.delete_letters(old, [letter.letter]))


def listing(keys: Keys, limit: int, after: str) -> Command[list[Letter]]:
    """Return the command that reads dead letters; raise ConfigurationError for a limit or place not allowed."""
    if not isinstance(after, str) or (after and _LETTER_NAME.fullmatch(after) is None):
        raise ConfigurationError("after must be the `letter` of a dead letter, such as '1700000000000-0', or empty")
    count, first = whole("limit", limit, least=1, most=BATCH_LIMIT), f"({after}" if after else "-"
    return commands.letters_between(keys, first, "+", count=count)


def first_letters(all: Iterable[list[Letter]], limit: int) -> list[Letter]:
    """Return the oldest of the letters of several shards: `limit`, and those that died at once with the last of them."""
    letters = sorted((one for some in all for one in some), key=_place)
    last = _place(letters[limit - 1])[:2] if len(letters) > limit else None
    return [one for one in letters if last is None or _place(one)[:2] <= last]


def _place(letter: Letter) -> tuple[int, int, int]:
    ms, _, number = letter.letter.partition("-")
    return int(ms), int(number), letter.shard


def by_bytes(letters: Sequence[Letter]) -> Iterator[list[Letter]]:
    """Yield letters in pieces of at most `LETTER_BYTES` of bodies, or of one: a script holds all others up."""
    return chunked_by_size(letters, lambda letter: len(letter.payload), LETTER_BYTES, BATCH_LIMIT)
