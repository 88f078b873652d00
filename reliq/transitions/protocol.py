"""The calls of many scripts share these arguments and readers of replies."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from reliq.call import Arg, id_text
from reliq.keys import Keys
from reliq.settings import BATCH_LIMIT, whole

#: A lease, a tombstone or any other span in ms: a hundred years.
LONGEST_SPAN_MS = 100 * 366 * 86_400_000

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class CallNumber:
    """
    One call of a lane: made again under its number, it gets its first answer and changes nothing.

    Attributes:
        lane: names whoever makes one call at a time; Redis keeps the last number and answer of each.
        number: above that of the lane's last call, or the same to make that call again.
    """

    lane: str
    number: int


def clock_arg(clock: int | None) -> Arg:
    """Return the unix microseconds that a script takes for the time; empty text has it ask Redis."""
    return "" if clock is None else clock


def bare_arg(keys: Keys) -> Arg:
    """Return whether a queue's values are bare bodies, without an envelope."""
    return "1" if keys.bare else ""


def bounded(name: str, some: Sequence[S]) -> Sequence[S]:
    """Return the items of a call; raise ConfigurationError for more than one call takes."""
    if len(some) > BATCH_LIMIT:
        whole(f"number of {name}", len(some), most=BATCH_LIMIT)
    return some


def once(ids: Sequence[str]) -> tuple[str, ...]:
    """Return the ids without those that were there before: a script takes each for another message."""
    return tuple(dict.fromkeys(ids))


def limit_arg(limit: int, *, least: int = 0) -> int:
    """Return how many messages a call is for at most; raise ConfigurationError when it is more than one call takes."""
    if type(limit) is int and least <= limit <= BATCH_LIMIT:
        return limit
    return whole("limit", limit, least=least, most=BATCH_LIMIT)


def span(name: str, ms: int) -> int:
    """Return a time in ms; raise ConfigurationError for one below 1 or over a hundred years."""
    if type(ms) is int and 0 < ms <= LONGEST_SPAN_MS:
        return ms
    return whole(name, ms, least=1, most=LONGEST_SPAN_MS)


def texts(reply: Iterable[bytes]) -> tuple[str, ...]:
    """Return the ids of a reply."""
    return tuple(id_text(one) for one in reply)


def answers(reply: Sequence[bytes], ids: Sequence[str], asked: Sequence[str], known: Sequence[str]) -> list[str]:
    """Return the word for each id that was `asked` for, where the script was given `ids`, each of them once."""
    told = dict(zip(ids, words(reply, ids, known), strict=True))
    return [told[id] for id in asked]


def words(reply: Sequence[bytes], asked: Sequence[Any], known: Sequence[str]) -> list[str]:
    """Return one word for each that was asked for; raise ValueError when there are more, fewer, or others."""
    found = [word.decode() for word in reply]
    if len(found) != len(asked) or not set(found) <= set(known):
        raise ValueError
    return found
