"""Operators look at the lines of keys, and have one key sleep."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Literal

from reliq.call import Call, id_text
from reliq.foreign import moment
from reliq.keys import Keys
from reliq.lua import script
from reliq.transitions.protocol import bounded, clock_arg

KeyState = Literal["in turn", "asleep", "paused", "saturated", "standing", "empty"]

#: Values of a reply before those of keys, and of each key.
_HEAD, _FIELDS = 6, 7


@dataclass(frozen=True, slots=True)
class KeyLine:
    """
    The messages of one key that are due, or run.

    Attributes:
        key: of a priority the line that stands for it.
        waiting: how many are due and wait in the line.
        in_flight: how many hold a place of the key: they run, or an ordered one waits for its redelivery.
        weight: how many have their turn when others have one.
        state: why they wait. `in turn`: for a worker; `asleep`: for `asleep_until`; `paused`: for a resume; `saturated`:
            until one that has a place ends; `standing`: nobody knows, and `reliq check --repair` mends it; `empty`: none
            waits.
        asleep_until: unix seconds by Redis' clock; None when the key does not sleep, or is paused without an end.
    """

    key: str
    waiting: int
    in_flight: int
    weight: float
    state: KeyState
    asleep_until: float | None = None


@dataclass(frozen=True, slots=True)
class KeyLines:
    """
    The lines of a queue.

    Attributes:
        largest: the most that were asked for, those with most waiting messages first; or those that were named.
        in_turn: how many keys wait for a worker.
        asleep: how many keys sleep, or are paused.
        running: how many messages run, over all processes.
        is_full: whether none may start now: the queue's rate or concurrency is used up, or it sleeps.
        asleep_until: until when the whole queue sleeps, in unix seconds by Redis' clock; None when it does not.
        next: the id of the message whose turn comes next; empty when none waits for a worker.
    """

    largest: Sequence[KeyLine]
    in_turn: int
    asleep: int
    running: int
    is_full: bool = False
    asleep_until: float | None = None
    next: str = ""


def lines(keys: Keys, *, most: int = 10, of: Sequence[str] = (), clock: int | None = None) -> Call[KeyLines]:
    """
    Look at the lines of the keys `of`, or at the largest ones.

    The largest are found among up to a hundred keys in turn, a hundred asleep, those of a hundred messages that hold a
    place, and those of 200 messages that are alive, drawn at random: all keys of a queue that has few, and of one that
    has many those with a share of what waits.
    """
    bounded("keys", of)
    one = script("lines")
    return Call(one, one.lead(keys), (clock_arg(clock), most, *of), _lines)


def held_up(keys: Keys, *, most: int, of: Sequence[str] = (), clock: int | None = None) -> Call[dict[str, str]]:
    """
    Return the first message of each key that waits and has no turn: of the keys `of`, and of some others.

    Those are the `most` that sleep longest, and the keys of `most` places that are taken, drawn at random.
    """
    bounded("keys", of)
    one = script("held_up")
    return Call(one, one.lead(keys), (clock_arg(clock), most, *of), _first_of)


def _first_of(reply: list[bytes]) -> dict[str, str]:
    texts = map(id_text, reply)
    return dict(zip(texts, texts, strict=True))


def sleep(keys: Keys, key: str, *, for_ms: int | None, clock: int | None = None) -> Call[bool]:
    """Have one key not served for so many ms, None until it is woken; 0 wakes it. Return whether it slept before."""
    one = script("sleep")
    return Call(one, one.lead(keys), (clock_arg(clock), key, "" if for_ms is None else for_ms), bool)


def _lines(reply: list[Any]) -> KeyLines:
    in_turn, asleep, running, is_full, until, first = reply[:_HEAD]
    found = [_line(*reply[at : at + _FIELDS]) for at in range(_HEAD, len(reply), _FIELDS)]
    return KeyLines(
        found, int(in_turn), int(asleep), max(0, int(running)), bool(is_full), _until(until), id_text(first)
    )


def _line(name: bytes, waiting: int, in_flight: int, most: int, until: bytes, weight: bytes, in_turn: int) -> KeyLine:
    state: KeyState = "standing"
    if until:
        state = "asleep" if _until(until) else "paused"
    elif not waiting:
        state = "empty"
    elif in_turn:
        state = "in turn"
    elif 0 < most <= in_flight:
        state = "saturated"
    return KeyLine(id_text(name), int(waiting), int(in_flight), float(weight), state, _until(until))


def _until(text: bytes) -> float | None:
    """Return until when something sleeps; None when it does not, or has no end."""
    at = float(text) if text else inf
    return None if at == inf else moment(at)
