"""The state word of a message in `B:lease`, as lua/prelude.lua has it: the part of it that clients read."""

import re

_SUSPECT = re.compile(r"suspect(?P<deaths>\d{0,2})")
_HELD = re.compile(r"(?:(?P<deaths>\d{1,2})~)?(?P<lane>[^.~]+)\.\d+:(?P<lease>\d+)!?")


def waits(word: str) -> bool:
    """Say whether a message in unack is held by nobody: it waits there until it is delivered again."""
    return word == "nacked" or is_suspect(word)


def is_suspect(word: str) -> bool:
    """Say whether the last delivery of a message that nobody holds ended by its lease."""
    return _SUSPECT.fullmatch(word) is not None


def deaths(word: str) -> int:
    """Return how many deliveries in a row ended by their lease."""
    waiting, held = _SUSPECT.fullmatch(word), _HELD.fullmatch(word)
    if waiting:
        return int(waiting["deaths"] or 1)
    return int(held["deaths"] or 0) if held else 0


def lane(word: str) -> str:
    """Return by which lane a message was claimed, empty when none holds it."""
    held = _HELD.fullmatch(word)
    return held["lane"] if held else ""


def lease_ms(word: str) -> int | None:
    """Return how long the claim that holds a message said, None when none does."""
    held = _HELD.fullmatch(word)
    return int(held["lease"]) if held else None
