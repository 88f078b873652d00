"""The difference between a body and what came back from its JSON, by place and type, never by value."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Generic, TypeVar, get_args, get_origin, is_typeddict

import msgspec
import msgspec.inspect

from reliq.errors import BodyError, ConfigurationError, UndecodableError

if TYPE_CHECKING:
    from collections.abc import Callable


#: The types of JSON itself: a value of another type comes back as one of these where nothing gives its type.
_JSON_OWN = (str, int, float, bool, list, dict)
_CONTAINERS = (list, tuple, Mapping)


def is_model(value: object) -> bool:
    """Say whether `value` is an instance of a pydantic model."""
    return hasattr(type(value), "model_validate_json")


def fields_of(value: object) -> Iterator[tuple[str, Any]]:
    """Yield the parts of `value` with their places, `.name`, `[0]` or `[...]`; nothing of what has no parts."""
    if is_model(value):
        names = [*type(value).model_fields, *(getattr(value, "model_extra", None) or {})]  # type: ignore[attr-defined]
        yield from ((f".{name}", getattr(value, name)) for name in names)
    elif isinstance(value, msgspec.Struct):
        yield from ((f".{name}", getattr(value, name)) for name in value.__struct_fields__)
    elif is_dataclass(value) and not isinstance(value, type):
        yield from ((f".{one.name}", getattr(value, one.name)) for one in fields(value))
    elif isinstance(value, Mapping):
        yield from (("[...]", part) for part in value.values())
    elif isinstance(value, list | tuple):
        yield from ((f"[{number}]", part) for number, part in enumerate(value))


def difference(sent: Any, back: Any, path: str = "$") -> str:
    """
    Say where `back` is not what was `sent`, and why; empty when it is.

    What JSON has no type for and no annotation names, such as a datetime in a `dict[str, Any]`, comes back as JSON's own
    type: that is no difference.
    """
    if sent is back or sent == back:
        return ""
    is_whole = is_model(sent) or isinstance(sent, msgspec.Struct) or is_dataclass(sent)
    if is_whole and type(sent) is not type(back) and not isinstance(back, _JSON_OWN):
        return f"a {type(sent).__name__} would be read as {type(back).__name__}, without what is its own, at `{path}`"
    if type(sent) is type(back) or (isinstance(sent, _CONTAINERS) and isinstance(back, _CONTAINERS)):
        ours, theirs = list(fields_of(sent)), list(fields_of(back))
        if ours and len(ours) == len(theirs):
            pairs = zip(ours, theirs, strict=True)
            return next(filter(None, (difference(a, b, path + place) for (place, a), (_, b) in pairs)), "")
    return "" if _is_same(sent, back) else f"{_why_different(sent)} at `{path}`"


def _is_same(sent: Any, back: Any) -> bool:
    """Say whether two parts that are not equal are the same to JSON."""
    if hasattr(sent, "get_secret_value"):
        return False
    compares: Any = type(sent).__eq__
    if type(sent) is type(back) and compares is object.__eq__:
        return True
    if isinstance(back, _JSON_OWN) and not isinstance(sent, (*_JSON_OWN, type(None))):
        return True
    try:
        return msgspec.json.encode(sent) == msgspec.json.encode(back)
    except (TypeError, ValueError):
        return False


def _why_different(sent: Any) -> str:
    if hasattr(sent, "get_secret_value"):
        return "a secret is written as asterisks (give the field a field_serializer that returns get_secret_value())"
    return f"a {type(sent).__name__} that is left out (exclude), or is read as another value or type,"


#: JSON is read into these as it is: a body of such a type comes back unchanged once its class is right.
UNTYPED = (Any, dict, list, int, float, bool)

_PLACE = re.compile(r" - at `(?P<path>[^`]*)`$")
_SAFE_COMPLAINT = re.compile(r"Expected `[^`]*`, got `[^`]*`|Object missing required field `[^`]*`|Expected `[^`]*`")


class JsonBodies:
    """
    Bodies as msgspec writes and reads them.

    Raises:
        ConfigurationError: `kind` is no type that JSON can be read into.
    """

    def __init__(self, kind: Any) -> None:
        self.encode = msgspec.json.Encoder(enc_hook=_from_pydantic).encode
        self.decode = _decoder(kind).decode

    def plain(self, body: Any) -> Any:
        """Return `body` as dicts, lists and scalars."""
        return msgspec.to_builtins(body, enc_hook=_from_pydantic)

    def complaint(self, error: Exception) -> str:
        """Say what is wrong with a body that was read, and where, without the value itself."""
        text = str(error) if isinstance(error, msgspec.MsgspecError) else ""
        place = _PLACE.search(text)
        said = _SAFE_COMPLAINT.match(text)
        return f"{said[0] if said else type(error).__name__} at `{place['path'] if place else '$'}`"


class ModelBodies:
    """Bodies of one pydantic model, by their aliases and without what is computed."""

    def __init__(self, kind: Any) -> None:
        self.decode = kind.model_validate_json
        self._schema = kind.model_json_schema

    def encode(self, body: Any) -> bytes:
        """Return `body` as JSON."""
        text: bytes = body.model_dump_json(by_alias=True, round_trip=True, warnings=False).encode()
        return text

    def plain(self, body: Any) -> Any:
        """Return `body` as dicts, lists and scalars."""
        return body.model_dump(warnings=False)

    def complaint(self, error: Exception) -> str:
        """Say what is wrong with a body that was read, and where, without the value itself."""
        if not hasattr(error, "errors"):
            return f"{type(error).__name__} at `$`"
        first = error.errors(include_input=False, include_url=False, include_context=False)[0]
        known = _names(self._schema)
        path = "".join(f".{part}" if part in known else "[...]" for part in first["loc"])
        return f"{first['type']} at `${path}`"


class PydanticBodies(ModelBodies):
    """
    Bodies that have models within a union, a list or another type.

    Raises:
        ConfigurationError: pydantic knows nothing of a part of `kind`.
    """

    def __init__(self, kind: Any) -> None:
        from pydantic import TypeAdapter  # noqa: PLC0415  whoever has a model has it; nobody else needs it

        try:
            self._adapter = TypeAdapter(kind)
        except Exception as error:
            said = str(error).partition("\n")[0]
            raise ConfigurationError(f"pydantic cannot read JSON into the body type {kind}: {said}") from error
        self.decode = self._adapter.validate_json
        self._schema = self._adapter.json_schema

    def encode(self, body: Any) -> bytes:
        """Return `body` as JSON."""
        return self._adapter.dump_json(body, by_alias=True, round_trip=True, warnings=False)

    def plain(self, body: Any) -> Any:
        """Return `body` as dicts, lists and scalars."""
        return self._adapter.dump_python(body, warnings=False)


def bodies_of(kind: Any) -> JsonBodies | ModelBodies:
    """Return how bodies of `kind` are written and read."""
    if _is_model_class(kind):
        return ModelBodies(kind)
    return PydanticBodies(kind) if _has_model(kind) else JsonBodies(kind)


def unencodable(body: Any, path: str = "$") -> str:
    """Say which part of `body` JSON cannot hold, and why, without its value; empty when it can hold all of it."""
    if is_model(body):
        for place, part in fields_of(body):
            try:
                body.model_dump(mode="json", include={place[1:]}, warnings=False)
            except Exception as error:
                return unencodable(part, path + place) or f"{_why_refused(part, error)} at `{path}{place}`"
    try:
        msgspec.json.encode(body, enc_hook=_from_pydantic)
    except RecursionError:
        return f"it is nested too deeply at `{path}`"
    except Exception as error:
        for place, part in fields_of(body):
            if why := unencodable(part, path + place):
                return why
        return f"{_why_refused(body, error)} at `{path}`"
    return ""


def type_name(kind: Any) -> str:
    """Return the type `kind` as it is written in code."""
    return kind.__name__ if isinstance(kind, type) and get_origin(kind) is None else str(kind)


def _why_refused(body: Any, error: Exception) -> str:
    if isinstance(error, UnicodeEncodeError):
        return "text with half of a surrogate pair"
    if isinstance(error, OverflowError):
        return "a number beyond 64 bits"
    if isinstance(body, bytes) or "utf-8" in str(error):
        return "bytes that are no UTF-8 (pydantic: ConfigDict(ser_json_bytes='base64', val_json_bytes='base64'))"
    kind = type(body)
    name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
    if kind.__module__ == "numpy":
        return f"JSON cannot hold a {name} ({type(error).__name__}); `tolist()` makes it Python's own,"
    return f"JSON cannot hold a {name} ({type(error).__name__})"


def _has_model(kind: Any) -> bool:
    """Say whether a model of pydantic is written in `kind`, as it is or within a union, a list and so on."""
    return _is_model_class(kind) or any(map(_has_model, get_args(kind)))


def _is_model_class(kind: Any) -> bool:
    return isinstance(kind, type) and hasattr(kind, "model_validate_json")


def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    try:
        decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(kind, dec_hook=_into_pydantic)
        strange = isinstance(msgspec.inspect.type_info(kind), msgspec.inspect.CustomType)
        why = "it says nothing of its fields" if strange else ""
    except (TypeError, NameError, ValueError) as error:
        why = str(error)
    if why:
        raise ConfigurationError(
            f"body type {type_name(kind)} cannot be read from JSON ({why}); use a dataclass, TypedDict, "
            f"msgspec.Struct, pydantic model, a union of models, dict, list, a scalar, str or bytes"
        )
    return decoder


def _into_pydantic(kind: Any, value: Any) -> Any:
    if not _is_model_class(kind):
        raise TypeError(f"nothing is known of {type_name(kind)}")
    return kind.model_validate_json(msgspec.json.encode(value))


def _from_pydantic(value: Any) -> Any:
    if not is_model(value):
        raise TypeError(f"nothing is known of {type_name(type(value))}")
    return value.model_dump(mode="json", by_alias=True, round_trip=True)


def refuse_infinite(body: Any) -> None:
    """Raise BodyError when a float in `body` is not finite: JSON would make it null without a word."""
    heap = [body]
    while heap:
        match heap.pop():
            case float() as number if not math.isfinite(number):
                raise BodyError("it has a float that is NaN or infinite")
            case dict() as parts:
                heap.extend(parts.values())
            case list() | tuple() | set() | frozenset() as parts:
                heap.extend(parts)


def _names(schema_of: Callable[[], dict[str, Any]]) -> set[object]:
    """Return the names of all fields, as JSON has them: other parts of an error's path are content."""
    try:
        schema = schema_of()
    except Exception:  # of a field that no schema describes
        return set()
    parts = [schema, *schema.get("$defs", {}).values()]
    return {name for part in parts for name in part.get("properties", ())}


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
