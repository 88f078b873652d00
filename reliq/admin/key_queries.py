"""The plain commands by which operators go through the keys of a queue's messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from reliq.call import Command, id_text
from reliq.replies import read_ids
from reliq.rights import runs

if TYPE_CHECKING:
    from reliq.keys import Keys

#: Sorted sets whose members are keys of messages.
KeySet = Literal["ring", "asleep"]


@runs("ring:ZSCAN asleep:ZSCAN")
def keys_among(keys: Keys, among: KeySet, cursor: int, count: int) -> Command[tuple[int, list[str]]]:
    """Read about `count` keys that may be served, or sleep; return where the next are (0: these were the last), and them."""
    return Command(
        ("ZSCAN", getattr(keys, among), cursor, "COUNT", count),
        lambda reply: (int(reply[0]), read_ids(reply[1][::2])),
    )


@runs("ring:ZRANGE asleep:ZRANGE")
def first_keys(keys: Keys, among: KeySet, count: int) -> Command[list[str]]:
    """Read the first `count` keys that may be served, or sleep, in the order of their turns or ends."""
    return Command(("ZRANGE", getattr(keys, among), 0, count - 1), read_ids)


@runs("held:ZRANGE")
def keys_holding(keys: Keys, after: str | None, count: int) -> Command[list[str]]:
    """Read the keys of the next `count` messages that hold a place, after those of the key `after`; each once."""
    start = "-" if after is None else f"({after}\1"
    return Command(
        ("ZRANGE", keys.held, start, "+", "BYLEX", "LIMIT", 0, count),
        lambda reply: list(dict.fromkeys(id_text(one.partition(b"\0")[0]) for one in reply)),
    )


@runs("limits:EXISTS ring:EXISTS held:EXISTS asleep:EXISTS")
def has_keys(keys: Keys) -> Command[bool]:
    """Say whether messages of a queue have, or had, keys."""
    return Command(("EXISTS", keys.limits, keys.ring, keys.held, keys.asleep), bool)


@runs("held:ZSCAN")
def places_scanned(keys: Keys, cursor: int, count: int) -> Command[tuple[int, list[tuple[str, str]]]]:
    """Read about `count` places, each as key and id; return where the next are (0: these were the last), and them."""

    def read(reply: Any) -> tuple[int, list[tuple[str, str]]]:
        members = [id_text(one).partition("\0") for one in reply[1][::2]]
        return int(reply[0]), [(key, id) for key, _, id in members]

    return Command(("ZSCAN", keys.held, cursor, "COUNT", count), read)
