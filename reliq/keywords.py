"""Keyword arguments that a call does not know: refused with the name of the call that was made, and the near one."""

from __future__ import annotations

from functools import wraps
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

C = TypeVar("C", bound=type)


def check_keywords(call: str, given: Iterable[str], known: Collection[str], advice: str = "") -> None:
    """Raise TypeError, as for a function without `**options`, when one of `given` is not among `known`."""
    strange = [name for name in given if name not in known]
    if not strange:
        return
    near = import_module("difflib").get_close_matches(strange[0], known, 1)  # few programs need it
    hint = f"Did you mean {near[0]!r}?" if near else advice or f"It takes {', '.join(sorted(known))}"
    raise TypeError(f"{call}() got an unexpected keyword argument {strange[0]!r}. {hint}")


def checking_keywords(kind: C) -> C:
    """Have a dataclass, all of whose fields are keywords, refuse others as `check_keywords` does."""
    made = vars(kind)["__init__"]

    @wraps(made)
    def __init__(self: Any, **given: Any) -> None:  # noqa: N807  it takes the place of that
        try:
            made(self, **given)
        except TypeError:
            check_keywords(kind.__name__, given, kind.__dataclass_fields__)  # type: ignore[attr-defined]
            raise

    kind.__init__ = __init__  # type: ignore[misc]
    return kind
