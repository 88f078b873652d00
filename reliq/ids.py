"""Ids: 22 characters, ordered by time: eight for the millisecond, fourteen (80 bits) of chance."""

import os
import re
import time
from binascii import b2a_base64
from uuid import UUID

from reliq.errors import ConfigurationError
from reliq.message import Duration
from reliq.settings import milliseconds

_DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_VALUES = {digit: value for value, digit in enumerate(_DIGITS)}
_TIME_LENGTH = 8
_CHANCE_BYTES = 10
_ID_LENGTH = 22
_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_URL_SAFE = bytes.maketrans(b"+/", b"-_")

_last: tuple[int, str] = (0, "0" * _TIME_LENGTH)


def new_id() -> str:
    """Return an id that no other call returns."""
    return _time_part() + token()


def token() -> str:
    """Return a name for one client or process, of 14 characters: 80 bits, for what two share would be one's for both."""
    return b2a_base64(os.urandom(_CHANCE_BYTES), newline=False)[:14].translate(_URL_SAFE).decode("ascii")


def made_at(id: str) -> int | None:
    """Return when a generated id was made, in unix ms by its maker's clock; None for another shape."""
    if len(id) != _ID_LENGTH or not all(digit in _VALUES for digit in id[:_TIME_LENGTH]):
        return None
    ms = 0
    for digit in id[:_TIME_LENGTH]:
        ms = ms * 62 + _VALUES[digit]
    return ms


def check_id(id: str | UUID) -> str:
    """Return a chosen id as text; raise ConfigurationError when it is not 1 to 128 of `A-Z a-z 0-9 _ . : -`."""
    if isinstance(id, UUID):
        return str(id)
    if not isinstance(id, str):
        raise ConfigurationError(f"id must be a str or a UUID, not {type(id).__name__}: give str(…)")
    if _ID.fullmatch(id) is None:
        raise ConfigurationError(f"id must be 1 to 128 of A-Z a-z 0-9 _ . : - , not {id[:40]!r}")
    return id


def chosen_window_ms(id: str, dedup: Duration) -> int | None:
    """Return for how long an id stays taken whose message is gone with its header: `dedup` if it was chosen."""
    return None if made_at(id) is not None else milliseconds(dedup)


def _time_part() -> str:
    global _last  # noqa: PLW0603  the same for a whole millisecond
    ms = time.time_ns() // 1_000_000
    if ms == _last[0]:
        return _last[1]
    digits, rest = "", ms
    for _ in range(_TIME_LENGTH):
        rest, value = divmod(rest, 62)
        digits = _DIGITS[value] + digits
    _last = (ms, digits)
    return digits
