"""What the calls of many scripts have in common: arguments, and readers of replies."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from reliq.call import Arg, id_text
from reliq.keys import Keys


@dataclass(frozen=True, slots=True)
class Turn:
    """One numbered call in a lane: repeated, it gets its first answer."""

    lane: str
    number: int


def clock_arg(clock: int | None) -> Arg:
    """Return the time that a script goes by: empty for Redis' own."""
    return "" if clock is None else clock


def bare_arg(keys: Keys) -> Arg:
    """Return whether a queue's values are bare bodies, without an envelope."""
    return "1" if keys.bare else ""


def texts(reply: Iterable[bytes]) -> tuple[str, ...]:
    """Return the ids of a reply."""
    return tuple(id_text(one) for one in reply)


def words(reply: Sequence[bytes], asked: Sequence[Any], known: Sequence[str]) -> list[str]:
    """Return one word for each that was asked for; raise ValueError when there are more, fewer, or others."""
    found = [word.decode() for word in reply]
    if len(found) != len(asked) or not set(found) <= set(known):
        raise ValueError
    return found
