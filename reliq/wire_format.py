"""
The text formats of data in Redis: failures, message headers, retry counts, and the states of messages.

Of an exception and its causes, reliq stores class, file and line. The text of an exception may contain parts of a body,
so it is stored in a separate field, and logged only if a setting allows this.

An envelope is a header line followed by the encoded body. The state word of a message is the text in the hash `lease`
that shows its state.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from traceback import extract_tb, walk_tb
from typing import TYPE_CHECKING, Any
from unicodedata import category

import msgspec

from reliq.errors import ConfigurationError
from reliq.message import BARE, PRIORITY_LINES, RETRIES_LIMIT, STATUS_STATES, Header, Status, split_line
from reliq.text import class_name, clean_text, printable, whole_number

if TYPE_CHECKING:
    from types import TracebackType


#: The maximum number of exceptions that are stored from a chain of causes, and from an exception group.
CHAIN_LIMIT = 5
#: A traceback has at most this many frames. The outermost frames are left out.
FRAMES_LIMIT = 50
#: The maximum length of the list of source lines that is stored with an error, in characters.
PLACES_LIMIT = 280

_LINKS = {
    True: "The above exception was the direct cause of the following exception:",
    False: "During handling of the above exception, another exception occurred:",
}


def described(error: BaseException) -> str:
    """Return the class of an exception and the first 200 characters of its text, on one line."""
    text = " ".join(clean_text(error, 1000).split())[:200]
    return f"{class_name(error)}: {text}" if text else class_name(error)


def placed(error: BaseException) -> str:
    """
    Return the class and the source lines of an exception and of its causes.

    In the example `ValueError at jobs.py:31 > gateway.py:77, from KeyError at cache.py:12`, the first line is in the
    handler, the second line raised the exception, and KeyError is the cause. The texts of the exceptions are left out,
    because they may contain parts of a body.
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
    """
    Return the traceback of an exception and its causes, without the frames before the handler.

    Args:
        with_text: whether to include the texts of the exceptions, and the code of the source lines.
    """
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
    """Yield an exception and then its causes; the bool is True for a cause that was given with `raise … from`."""
    seen: set[int] = set()
    one: BaseException | None = error
    is_cause = False
    while one is not None and id(one) not in seen and len(seen) < CHAIN_LIMIT:
        yield one, is_cause
        seen.add(id(one))
        is_cause = one.__cause__ is not None
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)


def _members(error: BaseException) -> list[BaseException]:
    """Return the exceptions in an exception group; an empty list if `error` is not an exception group."""
    return list(error.exceptions[:CHAIN_LIMIT]) if isinstance(error, BaseExceptionGroup) else []


def from_handler(traceback: TracebackType | None) -> TracebackType | None:
    """Remove reliq's own frames from the start of a traceback, so that it begins in the handler or a middleware."""
    while traceback and str(traceback.tb_frame.f_globals.get("__name__", "")).startswith("reliq."):
        traceback = traceback.tb_next
    return traceback


#: The separators in stored failures: RS between two failures, GS before the time of a failure, US between its other
#: fields.
RS = "\x1e"
GS = "\x1d"
US = "\x1f"
#: At most this many failures of a message are parsed.
FAILURES_LIMIT = 10

_SEPARATORS = re.compile(r"[\x1d-\x1f]")


@dataclass(frozen=True, slots=True)
class FailureNote:
    """
    One failure of a message, as stored in Redis.

    An attribute that is not known is empty or None.

    Attributes:
        reason: one of `DEATH_REASONS`.
        attempt: the number of the failed delivery; 1 for the first delivery.
        text: the text of the exception, or the reason that the handler gave. It may contain parts of a body.
        raised: class and source lines of the exception and its causes, without their texts. Empty if no exception was
            raised.
        by: the process that ran the handler, as host:pid.
        took_ms: how long the handler ran, in ms.
        at_ms: when the message failed, in unix ms by Redis' clock.
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
        """Parse the newest of the stored failures. If another program wrote the text, parse as much as possible."""
        return next(iter(cls.parse_all(value)), cls())

    @classmethod
    def parse_all(cls, value: str | bytes | None) -> list[FailureNote]:
        """Parse all stored failures of a message, newest first."""
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
        """The text of the failure, followed by the source lines of the exception in parentheses."""
        places = self.raised.partition(" ")[2]
        return f"{self.text} ({places})" if places else self.text

    @property
    def summary(self) -> str:
        """The reason and the error in one text, for display."""
        return f"{self.reason}: {self.error}" if self.error else self.reason


MAGIC = b"RELIQ/1 "
#: An envelope begins with this text. The publish script adds the due time, because it is computed by Redis' clock.
ENVELOPE_START = 'RELIQ/1 {"d":'
#: The maximum length of the header line in bytes. A message with a longer first line is a body without a header.
HEADER_LIMIT = 16_384
#: The maximum size of the option `headers` of a publish as JSON, in bytes.
HEADERS_LIMIT = 8192
#: The maximum size of a checkpoint as a JSON string, in bytes. Checkpoint, headers and message key together fit into
#: HEADER_LIMIT.
CHECKPOINT_LIMIT = 4096
#: The due time is within the first bytes of a stored message. So many bytes are enough to read it.
DUE_BYTES = 32
#: The maximum length of a message key, in bytes.
KEY_LIMIT = 128
#: Times and durations in ms must be below this number, because Lua scripts in Redis compute larger numbers inexactly.
NUMBER_LIMIT = 2**53

_HEADER_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_DUE = re.compile(rb'RELIQ/1 \{"d":([0-9]{1,16})[,}]')
_SUCCESSOR = r"(?:\+[0-9]{1,16}\.[0-9]{1,16}(?:>[0-9]{1,16})?)?"
_HELD = re.compile(r"(?:(?P<deaths>[0-9]{1,2})~)?(?P<lane>[^.~]+)\.[0-9]+:(?P<lease>[0-9]{1,16})" + _SUCCESSOR)
_DEBOUNCED = re.compile(r">[0-9]{1,16}")
_SUSPECT = re.compile(r"suspect(?P<deaths>[0-9]{0,2})")
_DELAYED = re.compile(r"@(?P<due>[0-9]{1,18})(?P<doubt>\?)?")

_header_decoder = msgspec.json.Decoder(Header)
#: Encodes the cursor of a checkpoint. Raises an exception for NaN, infinite numbers, and values of types that JSON does
#: not have, such as dates and UUIDs.
_encode_cursor = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def envelope_rest(
    retries: int,
    enqueued: int | None = None,
    window_ms: int | None = None,
    headers: Mapping[str, str] | None = None,
    publication_id: int | None = None,
    line: str = "",
    origin: tuple[str, str] | None = None,
) -> bytes:
    """
    Return the part of a header line that follows the due time.

    The arguments are explained in `Header`. `line` is the name of the key queue of the message, followed by its cost.
    """
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
    Encode the option `headers` of a publish as JSON.

    Raises:
        ConfigurationError: a name is not 1 to 64 characters of A-Z a-z 0-9 _ . -, a value is not text, or the JSON is
            larger than 8 KiB.
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
    Check a message key and return it.

    Raises:
        ConfigurationError: the key is not text of 1 to 128 bytes in UTF-8, or has control characters or lone
            surrogates.
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
    """Return whether `text` is a valid message key."""
    is_short = 0 < len(text.encode("utf-8", "surrogatepass")) <= KEY_LIMIT
    return is_short and not any(category(one) in ("Cc", "Cs") for one in text)


def count_text(left: int, line: str = "") -> str:
    """Return the value of a message in the hash `retry:cnt`: its retries left and the name of its key queue."""
    return f"{left} {line}" if line else str(left)


def read_count(raw: bytes | None) -> tuple[int | None, str]:
    """
    Parse the value of a message in the hash `retry:cnt`.

    Return the number of retries left (None if it is not valid) and the name of the key queue.
    """
    left, _, line = (raw or b"").partition(b" ")
    return whole_number(left), split_line(line.decode("utf-8", "replace"))[0]


def encoded_checkpoint(number: int, published: int, cursor: Any, report: str = "") -> str:
    """
    Encode a checkpoint of a job as a JSON string.

    Args:
        number: the number of the checkpoint.
        published: the number of unnamed follow-up messages that the job has published before.
        cursor: the cursor; it is encoded as JSON within the string.
        report: the progress of the job, a fraction and a note. It is added after a line feed. Empty without progress.

    Raises:
        ConfigurationError: JSON cannot hold the cursor, or the checkpoint is larger than 4 KiB.
    """
    try:
        text = msgspec.json.encode(f"{number} {published} {_encode_cursor(cursor)}")
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"a cursor must be a value of JSON, not {type(cursor).__name__} ({error})") from None
    if len(text) > CHECKPOINT_LIMIT:
        raise ConfigurationError(
            f"a cursor must be at most {CHECKPOINT_LIMIT} bytes of JSON, not {len(text)}: save a position, not the work"
        )
    return (text[:-1] + msgspec.json.encode(f"\n{report}")[1:] if report else text).decode()


def parse_status(life: int | None, state: bytes, left: bytes, failures: bytes, text: bytes) -> Status[Any]:
    """
    Parse the reply of the script `status`, and return the status of the message. Its result is not decoded.

    Args:
        life: the publish time of the message. The result of another message with the same id is ignored. None accepts
            all results.
        state: the state of the message.
        left: the value of the message in the hash `retry:cnt`; empty if the message has ended.
        failures: the stored failures of the message, newest first.
        text: the header line of a message that has not ended, or the stored result of an acked message; otherwise
            empty.
    """
    if state == b"acked":
        _, enqueued, attempt, value = text.split(b" ", 3)
        if life not in (None, int(enqueued)):
            return Status("gone")
        is_kept = not value.startswith(b"!")
        error = "" if is_kept else value[1:].decode()
        return Status("acked", value if is_kept else None, error, attempt=whole_number(attempt))
    failure = FailureNote.parse(failures)
    header, _ = open_envelope(text)
    retries_left, _ = read_count(left)
    attempts = failure.attempt
    if header.retries is not None and retries_left is not None:
        attempts = max(0, header.retries - retries_left) + (state in (b"running", b"backoff"))
    word = state.decode()
    if word not in STATUS_STATES:
        raise ValueError(f"unknown message state {word!r}")
    return Status(word, None, failure.summary, *header.progress, attempts)


def open_envelope(value: bytes, *, bare: bool = False) -> tuple[Header, bytes]:
    """
    Split a stored message into its header and its body. A message without a valid header line is a bare body.

    A header with a number out of range is not valid, so code that uses its numbers need not check them.

    Args:
        value: the message as stored in Redis.
        bare: whether the queue stores all bodies without headers.
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
    # Every header that reliq has written contains a due time and a number of retries.
    if due is None or retries is None or not (0 <= due < NUMBER_LIMIT and 0 <= retries <= RETRIES_LIMIT):
        return BARE, value
    for number in (header.enqueued, header.window_ms, header.publication_id):
        if number is not None and not 0 <= number < NUMBER_LIMIT:
            return BARE, value
    line = header.line
    if line is not None:
        name, cost = split_line(line)
        if not (name in PRIORITY_LINES.values() or is_key(name) or (not name and cost > 1)):
            return BARE, value
    return header, value[end + 1 :]


def envelope_due(start: bytes) -> int | None:
    """Parse the due time in unix ms from the first DUE_BYTES of a stored message; None for a bare body."""
    found = _DUE.match(start)
    return int(found[1]) if found else None


@dataclass(frozen=True, slots=True)
class StateWord:
    """
    The state of a message, parsed from its state word in the hash `lease`.

    Each subclass is a kind of state. An object of this base class means that the state word is not valid.

    Attributes:
        cancelled: whether the message is cancelled. Then the next script that processes the message ends it.
        deaths: how many of the last deliveries in a row ended because their lease expired. If it is above 0, the
            message may have killed its worker process.
    """

    cancelled: bool = False
    deaths: int = 0

    @property
    def waits(self) -> bool:
        """Whether a message in `unack` is not leased, but waits for its next delivery."""
        return isinstance(self, Backoff | Suspect)

    @staticmethod
    def parse(text: str | bytes | None) -> StateWord:
        """Parse the state word of a message; None or an empty text if it has none."""
        word = text.decode("utf-8", "surrogateescape") if isinstance(text, bytes) else text or ""
        cancelled = word.endswith("!")
        word = word.removesuffix("!")
        if not word or (cancelled and word == "purged") or _DEBOUNCED.fullmatch(word):
            return Unset(cancelled)
        if word == "nacked":
            return Backoff(cancelled)
        if held := _HELD.fullmatch(word):
            nonce = word.partition("+")[0]
            return Held(cancelled, int(held["deaths"] or 0), nonce, held["lane"], int(held["lease"]))
        if suspect := _SUSPECT.fullmatch(word):
            return Suspect(cancelled, int(suspect["deaths"] or 1))
        if delayed := _DELAYED.fullmatch(word):
            return Delayed(cancelled, 1 if delayed["doubt"] else 0, int(delayed["due"]))
        return StateWord(cancelled)


class Unset(StateWord):
    """The message waits for its first delivery. It has no state word, or the state word of a debounced message."""


@dataclass(frozen=True, slots=True)
class Held(StateWord):
    """
    The message is leased.

    Attributes:
        nonce: the nonce that proves the lease.
        lane: the sequence of script calls (lane) to which the claim of the message belongs.
        lease_ms: the longest lease that the message was given, in ms.
    """

    nonce: str = ""
    lane: str = ""
    lease_ms: int = 0


class Backoff(StateWord):
    """The message waits for its redelivery after a nack."""


class Suspect(StateWord):
    """The lease of the last delivery expired, so the message may have killed its worker process."""


@dataclass(frozen=True, slots=True)
class Delayed(StateWord):
    """
    The due time of the message was changed while its id was in a list such as `ready`.

    Attributes:
        due_ms: the new due time, in unix ms.
    """

    due_ms: int = 0


def claim_nonce(lane: str, number: int, lease_ms: int) -> str:
    """Return the nonce of a claim; it contains the call sequence (lane), the call number and the lease in ms."""
    return f"{lane}.{number}:{lease_ms}"


def receipt_nonce(nonce: str, deaths: int) -> str:
    """
    Return the nonce with which a claimed message is acked or nacked.

    If the leases of the last deliveries of the message expired, the nonce includes the number of these deliveries,
    `deaths`.
    """
    return f"{deaths}~{nonce}" if deaths else nonce


def lane_of(nonce: str) -> str:
    """Return the call sequence (lane) in the nonce of a claim; an empty text if `nonce` is not valid."""
    word = StateWord.parse(nonce)
    return word.lane if isinstance(word, Held) else ""
