"""Plain commands that read a queue in bounded pieces."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, get_args

from reliq.call import Command, id_text
from reliq.errors import ConfigurationError, WrongKeyTypeError
from reliq.foreign import moment

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reliq.call import Request, T
    from reliq.client.client import Client
    from reliq.keys import Keys

State = Literal["pending", "ready", "unack", "retry", "garbage", "dead"]
STATES: tuple[State, ...] = get_args(State)
SortedSet = Literal["pending", "unack"]
Hash = Literal["lease", "counts", "errors"]
LISTS = ("ready", "retry")

#: How long a step may take in all before Redis counts as away.
TRY_SECONDS = 2.0
#: A message that is being moved to another queue is due so much later than it was (126 years, in ms).
MOVING_MS = 4 * 10**12
#: Ids of one step.
PIECE = 250


def check_state(state: str, allowed: Sequence[State] = STATES) -> State:
    """Return the name of a state; raise ConfigurationError for another."""
    for one in allowed:
        if one == state:
            return one
    raise ConfigurationError(f"state must be one of {', '.join(allowed)}, not {str(state)[:40]!r}")


def run_all(client: Client, requests: Sequence[Request[Any]]) -> list[Any]:
    """Make requests in one round trip; raise what Redis refused first."""
    answers = client.run_all(requests, for_seconds=TRY_SECONDS)
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    return answers


def read_each(client: Client, requests: Sequence[Request[T]], instead: T) -> list[T]:
    """Make requests in one round trip; a key of another type, which something else wrote, gives `instead`."""
    answers = client.run_all(requests, for_seconds=TRY_SECONDS)
    for at, answer in enumerate(answers):
        if isinstance(answer, WrongKeyTypeError):
            answers[at] = instead
        elif isinstance(answer, Exception):
            raise answer
    return answers


def size(keys: Keys, state: State) -> Command[int]:
    """Count what is in a state."""
    sizes = {
        "pending": Command(("ZCARD", keys.pending), int),
        "ready": Command(("LLEN", keys.ready), int),
        "unack": Command(("ZCARD", keys.unack), int),
        "retry": Command(("LLEN", keys.retry), int),
        "garbage": Command(("SCARD", keys.garbage), int),
        "dead": Command(("XLEN", keys.dead), int),
    }
    return sizes[state]


def ids_at(keys: Keys, state: State, at: int, count: int) -> Command[list[str]]:
    """Read ids of a list or sorted set from the place `at`, what comes first first."""
    if state in LISTS:
        line = {"ready": keys.ready, "retry": keys.retry}[state]
        return Command(("LRANGE", line, -at - count, -at - 1), lambda reply: [id_text(one) for one in reply[::-1]])
    key = {"pending": keys.pending, "unack": keys.unack}[state]
    return Command(("ZRANGE", key, at, at + count - 1), lambda reply: [id_text(one) for one in reply])


def scan_garbage(keys: Keys, cursor: int) -> Command[tuple[int, list[str]]]:
    """Read a piece of the garbage, and where the next begins (0: this was the last)."""
    return Command(
        ("SSCAN", keys.garbage, cursor, "COUNT", PIECE), lambda reply: (int(reply[0]), [id_text(i) for i in reply[1]])
    )


def start(keys: Keys, id: str, length: int) -> Command[bytes]:
    """Read the first bytes of a value; none when it is gone."""
    return Command(("GETRANGE", keys.msg(id), 0, length - 1), bytes)


def value(keys: Keys, id: str) -> Command[bytes | None]:
    """Read a value, None when it is gone."""
    return Command(("GET", keys.msg(id)), lambda reply: reply)


def length(keys: Keys, id: str) -> Command[int]:
    """Return how many bytes a value has."""
    return Command(("STRLEN", keys.msg(id)), int)


def is_there(keys: Keys, id: str) -> Command[bool]:
    """Say whether a message has a value."""
    return Command(("EXISTS", keys.msg(id)), bool)


def left_ms(keys: Keys, id: str) -> Command[int]:
    """Return in how many ms a value expires; below 0 when it does not, or is gone."""
    return Command(("PTTL", keys.msg(id)), int)


def fields(keys: Keys, name: Hash, ids: Sequence[str]) -> Command[list[str]]:
    """Read the texts that a hash has for ids, empty where it has none."""
    key = {"lease": keys.lease, "counts": keys.counts, "errors": keys.errors}[name]
    return Command(
        ("HMGET", key, *ids), lambda reply: ["" if one is None else one.decode("utf-8", "replace") for one in reply]
    )


def scores(keys: Keys, name: SortedSet, ids: Sequence[str]) -> Command[list[float | None]]:
    """Read the scores of ids, None for one that is not there."""
    key = {"pending": keys.pending, "unack": keys.unack}[name]
    return Command(("ZMSCORE", key, *ids), lambda reply: [None if one is None else moment(float(one)) for one in reply])


def server_ms() -> Command[int]:
    """Return Redis' clock in unix ms."""
    return Command(("TIME",), lambda reply: int(reply[0]) * 1000 + int(reply[1]) // 1000)
