"""Bodies to bytes and back. Never pickle: a message is data, not code."""

from __future__ import annotations

from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Generic, TypeVar, get_args, get_origin, is_typeddict

from reliq.codec.differences import difference
from reliq.codec.formats import UNTYPED, bodies_of, refuse_infinite, type_name, unencodable
from reliq.errors import BodyError, ConfigurationError, UndecodableError

if TYPE_CHECKING:
    from collections.abc import Callable

B = TypeVar("B")


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
        self._as_plain: Callable[[Any], Any] | None = None
        if kind is bytes:
            self._encode = self._decode = bytes
        elif kind is str:
            self._encode, self._decode = str.encode, bytes.decode
        else:
            bodies = bodies_of(self.kind)
            self._encode, self._decode, self._complaint = bodies.encode, bodies.decode, bodies.complaint
            self._as_plain = bodies.plain

    def encode(self, body: B) -> bytes:
        """Return `body` as bytes; raise BodyError when it is not of the queue's type or cannot be encoded."""
        if self._plain is not None and not _is_a(body, self._plain):
            raise BodyError(f"body must be {type_name(self.kind)}, not {_class_told(body, self._plain)}")
        try:
            payload = self._encode(body)
            if self._as_plain and b"null" in payload:
                refuse_infinite(self._as_plain(body))
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


def _class_told(body: object, wanted: type) -> str:
    """Name the class of `body`, and say so when it has the name of the one that is wanted."""
    name = type(body).__name__
    if name != wanted.__name__:
        return name
    return (
        f"a {name} of another definition (a class that was defined again, as in a notebook, wants its queue made again)"
    )


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
