"""Bodies to bytes and back, and the envelope around them. Never pickle: a message is data, not code."""

import re
from collections.abc import Callable, Mapping
from types import UnionType
from typing import Annotated, Any, Generic, TypeVar, get_args, get_origin, is_typeddict

import msgspec

from reliq.codec.differences import difference
from reliq.codec.formats import UNTYPED, bodies_of, type_name, unencodable
from reliq.errors import BodyError, ConfigurationError, UndecodableError
from reliq.message import BARE, RETRIES_LIMIT, Header

B = TypeVar("B")

MAGIC = b"RELIQ/1 "
#: What stands before the due time; publish writes the due time itself, by Redis' clock.
ENVELOPE_START = 'RELIQ/1 {"d":'
#: No header line of ours is longer; a longer first line is a bare body.
HEADER_LIMIT = 16_384
#: The users' own part of it.
HEADERS_LIMIT = 8192
#: Times and windows are below this many ms: exact in Redis' scripts, and so far ahead that no sum of them overflows.
NUMBER_LIMIT = 2**53

_HEADER_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")

_header_decoder = msgspec.json.Decoder(Header)


def envelope_rest(
    retries: int, enqueued: int | None = None, window_ms: int | None = None, headers: Mapping[str, str] | None = None
) -> bytes:
    """Return what follows the due time in an envelope, up to the body (times in ms)."""
    if not headers and window_ms is None:
        return b',"r":%d}\n' % retries
    rest = f',"r":{retries}'
    if window_ms is not None:
        rest += f',"e":{enqueued},"w":{window_ms}'
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
    # Every envelope of ours has a due time and retries.
    if not (_is_number(header.due) and _is_number(header.retries, RETRIES_LIMIT + 1)):
        return BARE, value
    if not all(number is None or _is_number(number) for number in (header.enqueued, header.window_ms)):
        return BARE, value
    return header, value[end + 1 :]


def _is_number(number: int | None, limit: int = NUMBER_LIMIT) -> bool:
    return number is not None and 0 <= number < limit


class Codec(Generic[B]):
    """
    A body of the type `kind` to bytes and back.

    `bytes` go as they are, `str` as UTF-8, pydantic models by their own JSON, everything else as
    JSON typed by the annotation (dataclass, TypedDict, `msgspec.Struct`, containers, scalars).

    Args:
        validate: read what was written, so that a body that would not come back as it was sent is refused.

    Raises:
        ConfigurationError: `kind` is no type that JSON can be read into.
    """

    def __init__(self, kind: Any, *, validate: bool = True) -> None:
        if not isinstance(validate, bool):
            raise ConfigurationError(f"validate must be True or False, not {str(validate)[:40]!r}")
        self.kind = Any if kind is object else kind
        self._plain = _class_of(kind)
        self._is_validated = validate and self.kind not in (*UNTYPED, bytes, str)
        self._encode: Callable[[Any], bytes]
        self._decode: Callable[[bytes], Any]
        self._complaint: Callable[[Exception], str] = _plain_complaint
        if kind is bytes:
            self._encode = self._decode = bytes
        elif kind is str:
            self._encode, self._decode = str.encode, bytes.decode
        else:
            bodies = bodies_of(self.kind)
            self._encode, self._decode, self._complaint = bodies.encode, bodies.decode, bodies.complaint

    def encode(self, body: B) -> bytes:
        """Return `body` as bytes; raise BodyError when it is not of the queue's type or cannot be encoded."""
        if self._plain is not None and not _is_a(body, self._plain):
            raise BodyError(f"body must be {type_name(self.kind)}, not {type(body).__name__}")
        try:
            payload = self._encode(body)
        except Exception as error:  # a body's own code runs here, and may raise anything
            raise BodyError(
                f"body of type {type(body).__name__} cannot be encoded: {_why(body, error)}; "
                f"give what JSON can hold, or bytes on a queue of bytes"
            ) from None
        if self._is_validated:
            self._check(body, payload)
        return payload

    def decode(self, payload: bytes) -> B:
        """Return the body in `payload`; raise UndecodableError, with the field's path, when it is not of the type."""
        try:
            body: B = self._decode(payload)
        except Exception as error:  # validators of the body's class run here, and may raise anything
            raise UndecodableError(f"body is not {type_name(self.kind)}: {self._complaint(error)}") from None
        return body

    def _check(self, body: B, payload: bytes) -> None:
        """Raise BodyError when a worker would not get `body` back from `payload`."""
        try:
            back = self._decode(payload)
            lost = difference(body, back)
        except Exception as error:
            said = self._complaint(error)
            raise BodyError(f"body must be {type_name(self.kind)}, and a worker could not read it: {said}") from None
        if lost:
            raise BodyError(f"body of type {type(body).__name__} would not come back as it was sent: {lost}")


def _class_of(kind: Any) -> type | None:
    """Return the class that every body of `kind` is of, None when there is no such class."""
    if get_origin(kind) is Annotated:
        return _class_of(get_args(kind)[0])
    if is_typeddict(kind):
        return dict
    origin = get_origin(kind) or kind
    return origin if isinstance(origin, type) and origin not in (Any, UnionType) else None


def _is_a(body: object, kind: type) -> bool:
    if kind in (int, float) and isinstance(body, bool):
        return False
    return isinstance(body, kind) or (kind is float and isinstance(body, int))


def _why(body: object, error: Exception) -> str:
    """Say why `body` cannot be encoded, and where, without its value."""
    if isinstance(error, BodyError):
        return str(error)
    try:
        return unencodable(body) or f"({type(error).__name__})"
    except Exception:
        return f"({type(error).__name__})"


def _plain_complaint(error: Exception) -> str:
    return f"{type(error).__name__} at `$`"
