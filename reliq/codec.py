"""
Encode message bodies to bytes and decode them by their type. Check that a decoded body equals the original.

Error messages contain the path and the type of an invalid field, but never its value, because bodies may be
confidential.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from types import UnionType
from typing import Annotated, Any, Generic, TypeVar, get_args, get_origin, is_typeddict

import msgspec
import msgspec.inspect

from reliq.errors import BodyError, ConfigurationError, UndecodableError

B = TypeVar("B")

#: The Python types of JSON values. If a field has no type annotation, its value is decoded as one of these types.
_JSON_TYPES = (str, int, float, bool, list, dict)
_CONTAINERS = (list, tuple, Mapping)
#: A publish does not check how bodies of these types are decoded, because these types have no annotated fields.
_UNTYPED = (Any, dict, list, int, float, bool)

_PLACE = re.compile(r" - at `(?P<path>[^`]*)`$")
_SAFE_COMPLAINT = re.compile(r"Expected `[^`]*`, got `[^`]*`|Object missing required field `[^`]*`|Expected `[^`]*`")


def fields_of(value: object) -> Iterator[tuple[str, Any]]:
    """
    Yield the values that `value` directly contains, each with its path.

    The path is `.name` for a field of an object, `[0]` for an item of a list, and `[...]` for a value of a dict.
    """
    if _is_model_class(type(value)):
        names = [*type(value).model_fields, *(getattr(value, "model_extra", None) or {})]  # type: ignore[attr-defined]
        yield from ((f".{name}", getattr(value, name)) for name in names)
    elif isinstance(value, msgspec.Struct):
        parts = ((f".{name}", getattr(value, name)) for name in value.__struct_fields__)
        yield from (part for part in parts if part[1] is not msgspec.UNSET)
    elif is_dataclass(value) and not isinstance(value, type):
        yield from ((f".{field.name}", getattr(value, field.name)) for field in fields(value))
    elif isinstance(value, Mapping):
        yield from (("[...]", part) for part in value.values())
    elif isinstance(value, list | tuple):
        yield from ((f"[{number}]", part) for number, part in enumerate(value))


def difference(sent: Any, back: Any, path: str = "$") -> str:
    """
    Describe where and how a decoded body differs from the original; return an empty text if they are equal.

    A value without a type annotation is decoded as a JSON type, for example a datetime in a `dict[str, Any]` becomes
    text. This does not count as a difference.

    Args:
        sent: the original body, or a value in it.
        back: the decoded body, or the same value in it.
        path: the path of this value in the body.
    """
    if sent is back or sent == back:
        return ""
    has_fields = _is_model_class(type(sent)) or isinstance(sent, msgspec.Struct) or is_dataclass(sent)
    if has_fields and type(sent) is not type(back) and not isinstance(back, _JSON_TYPES):
        return f"a {type(sent).__name__} would be read as {type(back).__name__}, without its own fields, at `{path}`"
    if type(sent) is type(back) or (isinstance(sent, _CONTAINERS) and isinstance(back, _CONTAINERS)):
        sent_parts = list(fields_of(sent))
        back_parts = list(fields_of(back))
        if sent_parts and len(sent_parts) == len(back_parts):
            for (place, part), (_, part_back) in zip(sent_parts, back_parts, strict=True):
                if why := difference(part, part_back, path + place):
                    return why
            return ""
    if hasattr(sent, "get_secret_value"):
        return (
            "a secret is written as asterisks (give the field a field_serializer that returns get_secret_value()) "
            f"at `{path}`"
        )
    equals: Any = type(sent).__eq__
    if type(sent) is type(back) and equals is object.__eq__:
        return ""
    if isinstance(back, _JSON_TYPES) and not isinstance(sent, (*_JSON_TYPES, type(None))):
        return ""
    try:
        if msgspec.json.encode(sent) == msgspec.json.encode(back):
            return ""
    except (TypeError, ValueError):
        pass
    return f"a {type(sent).__name__} that is left out (exclude), or is read as another value or type, at `{path}`"


class RawBodies:
    """Encodes and decodes bodies of the types bytes and str; str is stored as UTF-8."""

    def __init__(self, kind: Any) -> None:
        self.encode = bytes if kind is bytes else str.encode
        self.decode = bytes if kind is bytes else bytes.decode

    def complaint(self, error: Exception) -> str:
        """Describe a decoding error, but not the value that caused it."""
        return f"{type(error).__name__} at `$`"


class JsonBodies:
    """
    Encodes and decodes bodies with msgspec.

    Raises:
        ConfigurationError: `kind` is not a type that JSON can be decoded into.
    """

    def __init__(self, kind: Any) -> None:
        self.encode = msgspec.json.Encoder(enc_hook=_from_pydantic).encode
        try:
            self.decode = msgspec.json.Decoder(kind, dec_hook=_into_pydantic).decode
            is_custom = isinstance(msgspec.inspect.type_info(kind), msgspec.inspect.CustomType)
            why = "its fields are not annotated" if is_custom else ""
        except (TypeError, NameError, ValueError) as error:
            why = str(error)
        if why:
            raise ConfigurationError(
                f"body type {type_name(kind)} cannot be read from JSON ({why}); use a dataclass, TypedDict, "
                f"msgspec.Struct, pydantic model, a union of models, dict, list, a scalar, str or bytes"
            )

    def plain(self, body: Any) -> Any:
        """Return `body` as dicts, lists and scalars."""
        return msgspec.to_builtins(body, enc_hook=_from_pydantic)

    def complaint(self, error: Exception) -> str:
        """Describe a decoding error with the path of the faulty field, but without its value."""
        text = str(error) if isinstance(error, msgspec.MsgspecError) else ""
        place = _PLACE.search(text)
        complaint = _SAFE_COMPLAINT.match(text)
        return f"{complaint[0] if complaint else type(error).__name__} at `{place['path'] if place else '$'}`"


class ModelBodies:
    """Encodes and decodes bodies of one pydantic model, with field aliases and without computed fields."""

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
        """Describe a decoding error with the path of the faulty field, but without its value."""
        if not hasattr(error, "errors"):
            return f"{type(error).__name__} at `$`"
        first = error.errors(include_input=False, include_url=False, include_context=False)[0]
        try:
            schema = self._schema()
            parts = [schema, *schema.get("$defs", {}).values()]
            names = {name for part in parts for name in part.get("properties", ())}
        except Exception:  # pydantic cannot create a schema for a part of the type
            names = set()
        # Show only the names of fields. Other parts of the path, such as keys of a dict, are content of the message.
        path = "".join(f".{part}" if part in names else "[...]" for part in first["loc"])
        return f"{first['type']} at `${path}`"


class PydanticBodies(ModelBodies):
    """
    Encodes and decodes bodies of a type that contains pydantic models, such as a union or a list of models.

    Raises:
        ConfigurationError: pydantic does not support a part of `kind`.
    """

    def __init__(self, kind: Any) -> None:
        from pydantic import TypeAdapter  # noqa: PLC0415  pydantic is optional and needed only for its models

        try:
            self._adapter = TypeAdapter(kind)
        except Exception as error:
            reason = str(error).partition("\n")[0]
            raise ConfigurationError(f"pydantic cannot read JSON into the body type {kind}: {reason}") from error
        self.decode = self._adapter.validate_json
        self._schema = self._adapter.json_schema

    def encode(self, body: Any) -> bytes:
        """Return `body` as JSON."""
        return self._adapter.dump_json(body, by_alias=True, round_trip=True, warnings=False)

    def plain(self, body: Any) -> Any:
        """Return `body` as dicts, lists and scalars."""
        return self._adapter.dump_python(body, warnings=False)


def unencodable(body: Any, path: str = "$") -> str:
    """Describe the first value in `body` that cannot be written as JSON, and why; empty if the body has none."""
    if _is_model_class(type(body)):
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
    """Return the type `kind` as it is written in source code."""
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
    if kind is dict:  # `unencodable` has encoded each value separately, so a key of the dict causes the error
        return f"JSON cannot hold a key of this dict ({type(error).__name__})"
    article = "an" if name[0] in "aeiou" else "a"
    if kind.__module__ == "numpy":
        return f"JSON cannot hold {article} {name} ({type(error).__name__}); `tolist()` makes it Python's own,"
    return f"JSON cannot hold {article} {name} ({type(error).__name__})"


def _has_model(kind: Any) -> bool:
    """Return whether `kind` is a pydantic model, or contains one, for example in a union or a list."""
    return _is_model_class(kind) or any(map(_has_model, get_args(kind)))


def _is_model_class(kind: Any) -> bool:
    return isinstance(kind, type) and hasattr(kind, "model_validate_json")


def _into_pydantic(kind: Any, value: Any) -> Any:
    if not _is_model_class(kind):
        raise TypeError(f"cannot encode or decode {type_name(kind)}")
    return kind.model_validate_json(msgspec.json.encode(value))


def _from_pydantic(value: Any) -> Any:
    if not _is_model_class(type(value)):
        raise TypeError(f"cannot encode or decode {type_name(type(value))}")
    return value.model_dump(mode="json", by_alias=True, round_trip=True)


def _refuse_infinite(body: Any) -> None:
    """Raise BodyError if `body` contains NaN or an infinite float, because JSON would silently turn it into null."""
    heap = [body]
    while heap:
        match heap.pop():
            case float() as number if not math.isfinite(number):
                raise BodyError("a float is NaN or infinite")
            case dict() as parts:
                heap.extend(parts.values())
            case list() | tuple() | set() | frozenset() as parts:
                heap.extend(parts)


class Codec(Generic[B]):
    """
    Encodes bodies of the type `kind` to bytes, and decodes them.

    `bytes` are stored unchanged, and `str` as UTF-8. Pydantic models are stored as the JSON that pydantic writes. All
    other types, such as dataclasses, TypedDicts, lists and numbers, are stored as JSON by their type annotations.

    Args:
        kind: the type of the bodies.
        validate: whether to decode each encoded body, and to refuse it if it differs from the original.

    Raises:
        ConfigurationError: `kind` is not a type that JSON can be decoded into.
    """

    def __init__(self, kind: Any, *, validate: bool = True) -> None:
        if not isinstance(validate, bool):
            raise ConfigurationError(f"validate must be True or False, not {str(validate)[:40]!r}")
        self.kind = Any if kind is object else kind
        self._class = _class_of(kind)
        self._is_number = self._class in (int, float)
        self._accepted = (int, float) if self._class is float else self._class or object
        self._is_validated = validate and self.kind not in (*_UNTYPED, bytes, str)
        if kind in (bytes, str):
            self._bodies: RawBodies | JsonBodies | ModelBodies = RawBodies(kind)
        elif _is_model_class(kind):
            self._bodies = ModelBodies(kind)
        else:
            self._bodies = PydanticBodies(kind) if _has_model(kind) else JsonBodies(self.kind)
        self._encode: Callable[[Any], bytes] = self._bodies.encode
        self._decode: Callable[[bytes], Any] = self._bodies.decode
        self._as_plain = None if isinstance(self._bodies, RawBodies) else self._bodies.plain

    def encode(self, body: B) -> bytes:
        """Encode `body` to bytes; raise BodyError if it has the wrong type or cannot be encoded."""
        if not isinstance(body, self._accepted) or (self._is_number and isinstance(body, bool)):
            name = type(body).__name__
            if self._class and name == self._class.__name__:
                name = (
                    f"a {name} of another definition (after you define a class again, as in a notebook, create its "
                    "queue again)"
                )
            raise BodyError(f"body must be {type_name(self.kind)}, not {name}")
        try:
            payload = self._encode(body)
            if self._as_plain and b"null" in payload:
                _refuse_infinite(self._as_plain(body))
        except Exception as error:  # methods of the body run here and may raise any exception
            why = str(error) if isinstance(error, BodyError) else ""
            with suppress(Exception):
                why = why or unencodable(body)
            raise BodyError(
                f"body of type {type(body).__name__} cannot be encoded: {why or f'({type(error).__name__})'}; "
                f"use types that JSON can hold, or bytes on a queue of bytes"
            ) from None
        if self._is_validated:
            try:
                lost = difference(body, self._decode(payload))
            except Exception as error:
                why = self._bodies.complaint(error)
                raise BodyError(
                    f"body must be {type_name(self.kind)}, but a worker could not decode it: {why}"
                ) from None
            if lost:
                raise BodyError(f"body of type {type(body).__name__} would change when a worker decodes it: {lost}")
        return payload

    def decode(self, payload: bytes) -> B:
        """Decode a body; raise UndecodableError with the path of the invalid field if it does not match the type."""
        try:
            body: B = self._decode(payload)
        except Exception as error:  # validators of the body's class run here and may raise any exception
            raise UndecodableError(f"body is not {type_name(self.kind)}: {self._bodies.complaint(error)}") from None
        return body


def _class_of(kind: Any) -> type | None:
    """Return the class that all bodies of the type `kind` have; None if they can have different classes."""
    if get_origin(kind) is Annotated:
        return _class_of(get_args(kind)[0])
    if is_typeddict(kind):
        return dict
    origin = get_origin(kind) or kind
    return origin if isinstance(origin, type) and origin not in (Any, UnionType) else None
