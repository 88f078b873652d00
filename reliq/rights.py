"""Notes which commands a function makes on which keys: ACL rules are made of them, and tests compare them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from reliq.lua import Use

F = TypeVar("F", bound="Callable[..., Any]")

#: Each function that makes commands -> the commands, each with its key, empty for one without.
USES: dict[Callable[..., Any], frozenset[Use]] = {}


def runs(text: str) -> Callable[[F], F]:
    """
    Note that a function makes the commands of `text`, such as `unack:ZSCORE,ZRANGE msg:GET INFO`.

    It is the form of the scripts' headers: a key as `Keys` or `reliq.keys` names it, and what is run on it.
    """
    parts = [part.rpartition(":") for part in text.split()]
    uses = frozenset((command, key) for key, _, commands in parts for command in commands.split(","))

    def note(function: F) -> F:
        USES[function] = uses
        return function

    return note
