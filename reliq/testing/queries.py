"""The plain commands of the testing kit, which go to a server of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reliq.call import Command
from reliq.replies import read_ids, read_nothing
from reliq.rights import runs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reliq.keys import Keys


@runs("line:LRANGE")
def line_ids(keys: Keys, line: str) -> Command[list[str]]:
    """Read the ids that wait under a key, the oldest first."""
    return Command(("LRANGE", keys.line(line), 0, -1), lambda reply: read_ids(reply[::-1]))


@runs("DBSIZE")
def keys_there() -> Command[int]:
    """Count the keys of the database."""
    return Command(("DBSIZE",), int)


@runs("FLUSHDB")
def empty() -> Command[None]:
    """Empty the database."""
    return Command(("FLUSHDB",), read_nothing)


@runs("PTTL")
def expiries(any_keys: Sequence[str]) -> list[Command[int]]:
    """Read in how many ms keys expire; below 0: never, or gone."""
    return [Command(("PTTL", key), int) for key in any_keys]


@runs("PEXPIRE")
def expire(any_key: str, lasts_ms: int) -> Command[bool]:
    """Have a key expire in so many ms; below 1: at once."""
    return Command(("PEXPIRE", any_key, lasts_ms), bool)
