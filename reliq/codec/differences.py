"""The difference between a body and what came back from its JSON, by place and type, never by value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import msgspec

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
    return "" if _is_same(sent, back) else f"{_why(sent)} at `{path}`"


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


def _why(sent: Any) -> str:
    if hasattr(sent, "get_secret_value"):
        return "a secret is written as asterisks (give the field a field_serializer that returns get_secret_value())"
    return f"a {type(sent).__name__} that is left out (exclude), or is read as another value or type,"
