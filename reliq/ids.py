"""
Ids: 22 characters, ordered by time: eight for the millisecond, fourteen (84 bits) of chance.

One that was generated for another shard than 0 ends in that, as `0Vbf89lhRui2b337UWjH2Q~3`; a chosen id has no `~`.
"""

import os
import re
import time
from binascii import b2a_base64
from hashlib import sha256
from uuid import UUID

from reliq.errors import ConfigurationError
from reliq.hashtags import SHARDS_LIMIT
from reliq.message import Duration, Header
from reliq.settings import milliseconds

_DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_VALUES = {digit: value for value, digit in enumerate(_DIGITS)}
_TIME_LENGTH = 8
_TOKEN_LENGTH = 14
#: Chance is asked of the kernel for this many tokens at a time: for each one it would be the most of what an id costs.
_STOCK_TOKENS = 128
_ID_LENGTH = 22
_PERIODIC = "cron."
_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_OF_SHARD = re.compile(r"[A-Za-z0-9]{8}[A-Za-z0-9_-]{14}~([1-9][0-9]{0,2})")
#: Generated ids are of these times, in unix ms: from 2020 up to 2100. One of 86 other ids of their shape looks so too.
_FIRST_MS, _LAST_MS = 1_577_836_800_000, 4_102_444_800_000
_URL_SAFE = bytes.maketrans(b"+/", b"-_")

#: Tokens in stock, by the process that drew them: a fork that Python is not told of, as uWSGI's, copies them too.
_stock: dict[int, list[str]] = {}

_last: tuple[int, str] = (0, "0" * _TIME_LENGTH)


def new_id(shard: int = 0) -> str:
    """Return an id that no other call returns, for a message of a shard."""
    return f"{_time_part()}{token()}~{shard}" if shard else _time_part() + token()


def of_shard(id: str, shard: int) -> str:
    """Return a generated id for another shard; its time and chance stay."""
    return f"{id[:_ID_LENGTH]}~{shard}" if shard else id[:_ID_LENGTH]


def home(id: str, shards: int) -> int:
    """
    Return in which of so many shards a message of this id is.

    A generated id says it; that of a periodic entry is in shard 0, where the entry is; another chosen one goes by the
    first eight bytes of its SHA-256. What is in shard h of N is in shard h mod M of M when M divides N, so that a number
    of shards that is doubled moves ids to new shards alone.
    """
    return 0 if shards == 1 else _place(id) % shards


def tick_id(entry: str, at: int) -> str:
    """Return the id of the message of a periodic entry's tick."""
    return f"{_PERIODIC}{entry}.{at}"


def run_id(entry: str, asked_ms: int) -> str:
    """Return the id of the message of a run of a periodic entry that somebody asked for."""
    return f"{_PERIODIC}{entry}.run.{asked_ms}"


def _place(id: str) -> int:
    if id.startswith(_PERIODIC):
        return 0
    if generated := _OF_SHARD.fullmatch(id):
        return int(generated[1])
    made = made_at(id)
    if made is not None and _FIRST_MS <= made < _LAST_MS:
        return 0
    return int.from_bytes(sha256(id.encode("utf-8", "surrogateescape")).digest()[:8])


def token() -> str:
    """Return a name for one client or process, of 14 characters: 84 bits, for what two share would be one's for both."""
    try:
        return _stock[os.getpid()].pop()
    except (KeyError, IndexError):
        chance = b2a_base64(os.urandom(_STOCK_TOKENS * _TOKEN_LENGTH * 6 // 8), newline=False)
        text = chance.translate(_URL_SAFE).decode("ascii")
        first, *others = (text[at : at + _TOKEN_LENGTH] for at in range(0, len(text), _TOKEN_LENGTH))
        _stock.clear()
        _stock[os.getpid()] = others
        return first


def made_at(id: str) -> int | None:
    """Return when a generated id was made, in unix ms by its maker's clock; None for another shape."""
    if len(id) > _ID_LENGTH and _OF_SHARD.fullmatch(id):
        id = id[:_ID_LENGTH]
    if len(id) != _ID_LENGTH or not all(digit in _VALUES for digit in id[:_TIME_LENGTH]):
        return None
    ms = 0
    for digit in id[:_TIME_LENGTH]:
        ms = ms * 62 + _VALUES[digit]
    return ms


def check_id(id: str | UUID) -> str:
    """
    Return an id as text.

    Raises:
        ConfigurationError: it is not 1 to 128 of `A-Z a-z 0-9 _ . : -`, nor one that reliq has generated.
    """
    if isinstance(id, UUID):
        return str(id)
    if not isinstance(id, str):
        raise ConfigurationError(f"id must be a str or a UUID, not {type(id).__name__}: give str(…)")
    if _ID.fullmatch(id) is None and not _is_of_shard(id):
        raise ConfigurationError(f"id must be 1 to 128 of A-Z a-z 0-9 _ . : - , not {id[:40]!r}")
    return id


def _is_of_shard(id: str) -> bool:
    """Say whether an id was generated for another shard than 0."""
    generated = _OF_SHARD.fullmatch(id)
    return generated is not None and int(generated[1]) < SHARDS_LIMIT


def incarnation_of(id: str, header: Header) -> int:
    """Return what tells a message from another one of its id: what its publish said, or when that was; 0 of a bare body."""
    if header.incarnation is not None:
        return header.incarnation
    return header.enqueued if header.enqueued is not None else made_at(id) or 0


def first_published(queue: str, id: str, header: Header) -> tuple[str, str, int]:
    """Return queue, id and incarnation of the first publication of a message, which copies in other queues keep."""
    return *(header.origin or (queue, id)), incarnation_of(id, header)


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
