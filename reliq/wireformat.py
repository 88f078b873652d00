"""
The formats that scripts, clients and other versions of reliq share; no other module spells or reads one of these.

The value of a message is an envelope before its body, `RELIQ/1 {"d":1800000000000,"r":3}` and a line feed:

    d   the due time, unix ms: publish, nack, snooze and reschedule write it in place, so it has 13 digits
    r   retries, as published
    e   unix ms of the publish, with a chosen id
    w   ms for which a chosen id stays taken after its end
    i   what tells this message from another of its chosen id, when the publish said so; else that is `e`
    k   the message's key; `high` or `low` after a byte 1 is its priority
    h   the users' headers

The field of a message in the hash `retry:cnt` is the number of retries left; a key follows after a space: `12 tenant-7`.

The state word of a message is its field in the hash `lease`:

    none            it waits for its first delivery, or for one after a nack whose time has come
    NONCE           held: LANE.NUMBER:LEASE_MS of the claim that took it, or a longer lease that it was given since
    2~NONCE         held; its last two deliveries ended by their lease
    nacked          it waits in unack until it is delivered again
    suspect         the same, or in a list; its last delivery ended by its lease
    suspect3        ... its last three did
    @DUE_MS         in a list; whoever claims it moves it to pending, for it was given another due time there
    @DUE_MS?        the same of a suspect, as earlier versions wrote it
    ...!            any of them, or none: it was cancelled, and ends where it is met next

The notes of its failures are those of `reliq.failure_note`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from unicodedata import category

import msgspec

from reliq.errors import ConfigurationError
from reliq.foreign import whole_number
from reliq.message import BARE, PRIORITY_LINES, RETRIES_LIMIT, Header

MAGIC = b"RELIQ/1 "
#: The envelope up to the due time; publish writes the due time itself, by Redis' clock.
ENVELOPE_START = 'RELIQ/1 {"d":'
#: Bytes of the longest envelope; a longer first line is part of a bare body.
HEADER_LIMIT = 16_384
#: Bytes of the users' headers as JSON.
HEADERS_LIMIT = 8192
#: Bytes of a value that hold its due time.
DUE_BYTES = 32
#: Bytes of a message's key.
KEY_LIMIT = 128
#: Times and windows are below this many ms: exact in Redis' scripts, and no sum of them overflows.
NUMBER_LIMIT = 2**53

_HEADER_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_DUE = re.compile(rb'RELIQ/1 \{"d":([0-9]{1,16})[,}]')
_HELD = re.compile(r"(?:(?P<deaths>[0-9]{1,2})~)?(?P<lane>[^.~]+)\.[0-9]+:(?P<lease>[0-9]{1,16})")
_SUSPECT = re.compile(r"suspect(?P<deaths>[0-9]{0,2})")
_DELAYED = re.compile(r"@(?P<due>[0-9]{1,18})(?P<doubt>\?)?")

_header_decoder = msgspec.json.Decoder(Header)


def envelope_rest(
    retries: int,
    enqueued: int | None = None,
    window_ms: int | None = None,
    headers: Mapping[str, str] | None = None,
    incarnation: int | None = None,
    line: str = "",
    origin: tuple[str, str] | None = None,
) -> bytes:
    """Return what follows the due time in an envelope, up to the body (times in ms); `line` is a key or a priority's."""
    if not headers and window_ms is None and not line:
        return b',"r":%d}\n' % retries
    rest = f',"r":{retries}'
    if window_ms is not None:
        rest += f',"e":{enqueued},"w":{window_ms}' + (f',"i":{incarnation}' if incarnation is not None else "")
    if origin:
        rest += f',"o":{msgspec.json.encode(origin).decode()}'
    if line:
        rest += f',"k":{msgspec.json.encode(line).decode()}'
    if headers:
        return rest.encode() + b',"h":' + encoded_headers(headers) + b"}\n"
    return rest.encode() + b"}\n"


def encoded_headers(headers: Mapping[str, str]) -> bytes:
    """
    Return `headers` as JSON.

    Raises:
        ConfigurationError: they are not names of 1 to 64 of A-Z a-z 0-9 _ . - with texts, 8 KiB of JSON in all.
    """
    if not isinstance(headers, Mapping):
        raise ConfigurationError(f"headers must be a mapping of names to texts, not {type(headers).__name__}")
    for name, value in headers.items():
        if not isinstance(name, str) or _HEADER_NAME.fullmatch(name) is None:
            raise ConfigurationError(f"a header's name must be 1 to 64 of A-Z a-z 0-9 _ . - , not {str(name)[:64]!r}")
        if not isinstance(value, str):
            raise ConfigurationError(f"header {name!r} must be a str, not {type(value).__name__}")
    try:
        text = msgspec.json.encode(dict(headers))
    except UnicodeEncodeError:
        raise ConfigurationError("headers must be text that UTF-8 can hold, without lone surrogates") from None
    if len(text) > HEADERS_LIMIT:
        raise ConfigurationError(f"headers must be at most {HEADERS_LIMIT} bytes of JSON in all, not {len(text)}")
    return text


def check_key(key: str) -> str:
    """
    Return the key of a message.

    Raises:
        ConfigurationError: it is not text of 1 to 128 bytes of UTF-8, without control characters or lone surrogates.
    """
    if not isinstance(key, str):
        raise ConfigurationError(f"key must be a str, not {type(key).__name__}: give str(…)")
    if not is_key(key):
        size = len(key.encode("utf-8", "surrogatepass"))
        raise ConfigurationError(
            f"key must be 1 to {KEY_LIMIT} bytes of UTF-8 text without control characters, not {key[:40]!r} of {size} "
            "bytes: shorten it, or give a hash of it"
        )
    return key


def is_key(text: str) -> bool:
    """Say whether a message may have such a key."""
    is_short = 0 < len(text.encode("utf-8", "surrogatepass")) <= KEY_LIMIT
    return is_short and not any(category(one) in ("Cc", "Cs") for one in text)


def count_text(left: int, line: str = "") -> str:
    """Return what the hash `retry:cnt` has of a message: its retries left, and the line in which it waits."""
    return f"{left} {line}" if line else str(left)


def read_count(raw: bytes | None) -> tuple[int | None, str]:
    """Return retries left, None where they are none of ours, and the line of what the hash `retry:cnt` has of a message."""
    left, _, line = (raw or b"").partition(b" ")
    return whole_number(left), line.decode("utf-8", "replace")


def open_envelope(value: bytes, *, bare: bool = False) -> tuple[Header, bytes]:
    """
    Return header and body of a stored value; one whose first line is no envelope is a bare body.

    An envelope with a number that none of ours can have is none: whoever wrote it, nothing is computed with it.
    """
    if bare or not value.startswith(MAGIC):
        return BARE, value
    end = value.find(b"\n", 0, HEADER_LIMIT)
    if end < 0:
        return BARE, value
    try:
        header = _header_decoder.decode(value[len(MAGIC) : end])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return BARE, value
    due, retries = header.due, header.retries
    # Every envelope of ours has a due time and retries.
    if due is None or retries is None or not (0 <= due < NUMBER_LIMIT and 0 <= retries <= RETRIES_LIMIT):
        return BARE, value
    for number in (header.enqueued, header.window_ms, header.incarnation):
        if number is not None and not 0 <= number < NUMBER_LIMIT:
            return BARE, value
    line = header.line
    if line is not None and line not in PRIORITY_LINES.values() and not is_key(line):
        return BARE, value
    return header, value[end + 1 :]


def envelope_due(start: bytes) -> int | None:
    """Return the due time, in unix ms, of a value that begins with the DUE_BYTES of `start`; None of a bare body."""
    found = _DUE.match(start)
    return int(found[1]) if found else None


@dataclass(frozen=True, slots=True)
class StateWord:
    """
    The state of a message in its field of `lease`; of this class itself for a word that nobody writes.

    Attributes:
        cancelled: the message ends where it is met next.
        deaths: how many deliveries in a row ended by their lease; with one it is a suspect.
    """

    cancelled: bool = False
    deaths: int = 0

    @property
    def waits(self) -> bool:
        """Whether a message in unack is held by nobody: it waits there until it is delivered again."""
        return isinstance(self, Backoff | Suspect)

    @staticmethod
    def parse(text: str | bytes | None) -> StateWord:
        """Return what `text` says."""
        word = text.decode("utf-8", "surrogateescape") if isinstance(text, bytes) else text or ""
        cancelled = word.endswith("!")
        word = word.removesuffix("!")
        if not word:
            return Unset(cancelled)
        if word == "nacked":
            return Backoff(cancelled)
        if held := _HELD.fullmatch(word):
            return Held(cancelled, int(held["deaths"] or 0), word, held["lane"], int(held["lease"]))
        if suspect := _SUSPECT.fullmatch(word):
            return Suspect(cancelled, int(suspect["deaths"] or 1))
        if delayed := _DELAYED.fullmatch(word):
            return Delayed(cancelled, 1 if delayed["doubt"] else 0, int(delayed["due"]))
        return StateWord(cancelled)


@dataclass(frozen=True, slots=True)
class Unset(StateWord):
    """No word: the message waits to be delivered."""


@dataclass(frozen=True, slots=True)
class Held(StateWord):
    """
    A claim holds the message.

    Attributes:
        nonce: of its receipt.
        lane: by which it was claimed.
        lease_ms: the longest lease it was given.
    """

    nonce: str = ""
    lane: str = ""
    lease_ms: int = 0


@dataclass(frozen=True, slots=True)
class Backoff(StateWord):
    """The message waits for its redelivery after a nack."""


@dataclass(frozen=True, slots=True)
class Suspect(StateWord):
    """The message's last delivery ended by its lease: it may be what killed its worker."""


@dataclass(frozen=True, slots=True)
class Delayed(StateWord):
    """
    The message stands in a list and was given another due time.

    Attributes:
        due_ms: that time, in unix ms.
    """

    due_ms: int = 0


def claim_nonce(lane: str, number: int, lease_ms: int) -> str:
    """Return the nonce of one claim: the call `number` of `lane`, for a lease of so many ms."""
    return f"{lane}.{number}:{lease_ms}"


def receipt_nonce(nonce: str, deaths: int) -> str:
    """Return the nonce of one message's receipt; that of a suspect says how often it died."""
    return f"{deaths}~{nonce}" if deaths else nonce


def lane_of(nonce: str) -> str:
    """Return by which lane the message of a receipt was claimed; empty when `nonce` is none."""
    word = StateWord.parse(nonce)
    return word.lane if isinstance(word, Held) else ""
