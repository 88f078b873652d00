"""The contents of messages are taken out of a value before a page gets it, unless its visitor asked for it and may."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from reliq.message import BARE, Header

#: The fields that hold what a publisher or a handler wrote.
CARRIED = {"error", "body", "payload", "headers", "header", "text", "summary"}


def redacted(value: Any) -> Any:
    """Return `value` without bodies, headers and texts of errors, however deep they lie in it."""
    if is_dataclass(value) and not isinstance(value, type):
        changes = {
            field.name: _empty(getattr(value, field.name))
            if field.name in CARRIED
            else redacted(getattr(value, field.name))
            for field in fields(value)
            if field.init
        }
        return replace(value, **changes)
    if isinstance(value, list | tuple):
        return type(value)(map(redacted, value))
    if isinstance(value, dict):
        return {key: redacted(one) for key, one in value.items()}
    return value


def _empty(value: Any) -> Any:
    """Return the value of that type that says nothing."""
    if isinstance(value, Header):
        return BARE
    if isinstance(value, Mapping):
        return {}
    return None if value is None else type(value)()
