"""Bodies to JSON and back: by msgspec, or by pydantic where one of its models is part of the type."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any, get_args, get_origin

import msgspec
import msgspec.inspect

from reliq.codec.differences import fields_of, is_model
from reliq.errors import BodyError, ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable

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
                return unencodable(part, path + place) or f"{_why(part, error)} at `{path}{place}`"
    try:
        msgspec.json.encode(body, enc_hook=_from_pydantic)
    except RecursionError:
        return f"it is nested too deeply at `{path}`"
    except Exception as error:
        for place, part in fields_of(body):
            if why := unencodable(part, path + place):
                return why
        return f"{_why(body, error)} at `{path}`"
    return ""


def type_name(kind: Any) -> str:
    """Return the type `kind` as it is written in code."""
    return kind.__name__ if isinstance(kind, type) and get_origin(kind) is None else str(kind)


def _why(body: Any, error: Exception) -> str:
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
