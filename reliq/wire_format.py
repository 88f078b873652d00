"""Exceptions as text: class and place, of causes too, which anybody may read; the exception's own text when asked for."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from traceback import extract_tb, walk_tb
from typing import TYPE_CHECKING
from unicodedata import category

import msgspec

from reliq.errors import ConfigurationError
from reliq.message import BARE, PRIORITY_LINES, RETRIES_LIMIT, Header
from reliq.text import class_name, clean_text, printable, whole_number

if TYPE_CHECKING:
    from types import TracebackType


#: At most this many exceptions of a chain, and members of a group, are written.
CHAIN_LIMIT = 5
#: At most this many frames of a traceback are written, the innermost.
FRAMES_LIMIT = 50
#: The places beside a text have at most this many characters.
PLACES_LIMIT = 280

_LINKS = {
    True: "The above exception was the direct cause of the following exception:",
    False: "During handling of the above exception, another exception occurred:",
}


def described(error: BaseException) -> str:
    """Return the class of `error` and at most 200 characters of its text, on one line."""
    text = " ".join(clean_text(error, 1000).split())[:200]
    return f"{class_name(error)}: {text}" if text else class_name(error)


def placed(error: BaseException) -> str:
    """
    Return the class of `error`, the line of the handler that it came through, the line that raised it, and its causes.

    Example: `ValueError at jobs.py:31 > gateway.py:77, from KeyError at cache.py:12`. There is no text of an exception
    in it, which may hold a piece of a body.
    """
    places: list[str] = []
    for number, (one, _) in enumerate(_chain(error)):
        frames = list(walk_tb(from_handler(one.__traceback__)))
        lines = [
            f"{clean_text(PurePath(frame.f_code.co_filename).name, 100)}:{line}"
            for frame, line in frames[:1] + frames[-1:]
        ]
        if number:
            places.append(f"from {class_name(one)}" + (f" at {lines[-1]}" if lines else ""))
        elif lines:
            places.append("at " + " > ".join(dict.fromkeys(lines)))
    if members := _members(error):
        places.append(f"of {', '.join(map(class_name, members))}")
    return f"{class_name(error)} {printable(', '.join(places))[:PLACES_LIMIT]}".rstrip()


def traceback_of(error: BaseException, *, with_text: bool) -> str:
    """Return the traceback of `error` and of its causes, from the handler on; texts and lines of code only `with_text`."""
    parts: list[str] = []
    chain = list(_chain(error))
    for number, (one, is_cause) in reversed(list(enumerate(chain))):
        frames = extract_tb(from_handler(one.__traceback__), limit=-FRAMES_LIMIT)
        lines = (
            frames.format() if with_text else [f'  File "{f.filename}", line {f.lineno}, in {f.name}\n' for f in frames]
        )
        head = "Traceback (most recent call last):\n" if lines else ""
        said = printable(f"{class_name(one)}: {clean_text(one)}" if with_text else class_name(one))
        inside = f" of {', '.join(map(placed, _members(one)))}" if _members(one) else ""
        parts.append(f"{head}{''.join(lines)}{said}{inside}")
        if number:
            parts.append(f"\n{_LINKS[is_cause]}\n")
    return "\n".join(parts)


def _chain(error: BaseException) -> Iterator[tuple[BaseException, bool]]:
    """Yield `error`, what it was raised from, and so on; each with whether that was its direct cause."""
    seen: set[int] = set()
    one: BaseException | None = error
    is_cause = False
    while one is not None and id(one) not in seen and len(seen) < CHAIN_LIMIT:
        yield one, is_cause
        seen.add(id(one))
        is_cause = one.__cause__ is not None
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)


def _members(error: BaseException) -> list[BaseException]:
    """Return the exceptions in a group, none of one that is no group."""
    return list(error.exceptions[:CHAIN_LIMIT]) if isinstance(error, BaseExceptionGroup) else []


def from_handler(traceback: TracebackType | None) -> TracebackType | None:
    """Return the part of `traceback` that is not ours: from the handler, or a middleware, on."""
    while traceback and str(traceback.tb_frame.f_globals.get("__name__", "")).startswith("reliq."):
        traceback = traceback.tb_next
    return traceback


#: They part the failures of a message, the time from the rest of one, and the fields of that.
RS = "\x1e"
GS = "\x1d"
US = "\x1f"
#: Failures of one message that are read.
FAILURES_LIMIT = 10

_SEPARATORS = re.compile(r"[\x1d-\x1f]")


@dataclass(frozen=True, slots=True)
class FailureNote:
    """
    One failure of a message.

    Attributes:
        reason: one of `DEATH_REASONS`; empty when nothing is known.
        attempt: the delivery that failed, 1 for the first; None when nobody knows.
        text: what the exception or the handler said; it may hold a piece of a body.
        raised: class and place of the exception, and of its causes, which hold none; empty when nothing was raised.
        by: the process that ran the handler, as host:pid; empty when nobody says.
        took_ms: for how many ms the handler ran; None when nobody says.
        at_ms: when it failed, in unix ms by Redis' clock; None when nobody says.
    """

    reason: str = ""
    attempt: int | None = None
    text: str = ""
    raised: str = ""
    by: str = ""
    took_ms: int | None = None
    at_ms: int | None = None

    @classmethod
    def parse(cls, value: str | bytes | None) -> FailureNote:
        """Return the newest failure of a value; of one that something else wrote, as far as it has the parts."""
        return next(iter(cls.parse_all(value)), cls())

    @classmethod
    def parse_all(cls, value: str | bytes | None) -> list[FailureNote]:
        """Return the failures of a value, the newest first."""
        text = value.decode("utf-8", "replace") if isinstance(value, bytes) else value or ""
        notes = []
        for note in filter(None, text.split(RS, FAILURES_LIMIT)[:FAILURES_LIMIT]):
            fields, _, at = note.partition(GS)
            first, raised, by, took = [*fields.split(US, 3), "", "", ""][:4]
            reason, attempt, said = [*first.split(" ", 2), "", ""][:3]
            notes.append(cls(reason, whole_number(attempt), said, raised, by, whole_number(took), whole_number(at)))
        return notes

    def __str__(self) -> str:
        attempt, took = ("-" if number is None else str(number) for number in (self.attempt, self.took_ms))
        texts = (_SEPARATORS.sub(" ", text) for text in (self.text, self.raised, self.by))
        told = f"{self.reason} {attempt} " + US.join((*texts, took.strip("-")))
        return told.rstrip(US) + ("" if self.at_ms is None else f"{GS}{self.at_ms}")

    @property
    def error(self) -> str:
        """The text, and the places of an exception and its causes."""
        places = self.raised.partition(" ")[2]
        return f"{self.text} ({places})" if places else self.text

    @property
    def summary(self) -> str:
        """Reason and error for a person."""
        return f"{self.reason}: {self.error}" if self.error else self.reason


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
    publication_id: int | None = None,
    line: str = "",
    origin: tuple[str, str] | None = None,
) -> bytes:
    """Return what follows the due time in an envelope, up to the body (times in ms); `line` is a key or a priority's."""
    if not headers and window_ms is None and not line:
        return b',"r":%d}\n' % retries
    rest = f',"r":{retries}'
    if window_ms is not None:
        rest += f',"e":{enqueued},"w":{window_ms}' + (f',"i":{publication_id}' if publication_id is not None else "")
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
    """Return whether a message may have such a key."""
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
    due = header.due
    retries = header.retries
    # Every envelope of ours has a due time and retries.
    if due is None or retries is None or not (0 <= due < NUMBER_LIMIT and 0 <= retries <= RETRIES_LIMIT):
        return BARE, value
    for number in (header.enqueued, header.window_ms, header.publication_id):
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


class Backoff(StateWord):
    """The message waits for its redelivery after a nack."""


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
