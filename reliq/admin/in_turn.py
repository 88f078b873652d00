"""Bulk methods go through the shards of a queue, or the lines of one, one after another."""

from __future__ import annotations

import operator
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Self

P = TypeVar("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Sum:
    """The numbers of a step of a bulk method, which add up to those of all."""

    def __add__(self, other: Self) -> Self:
        return type(self)(*map(operator.add, astuple(self), astuple(other)))


def in_turn(
    parts: Iterable[P],
    do: Callable[[P, Callable[[int, R], None], R], R],
    on_step: Callable[[int, R], None],
    nothing: R,
) -> R:
    """
    Call `do` for each part that is meant, and return the sum of what it returns.

    Args:
        do: is called with the part, the function to call after each step of it, and the sum so far.
        on_step: is called after each step with how many ids it looked at, and the sum over all parts.
    """
    total: Any = nothing
    for part in parts:

        def step(looked: int, sum_of: Any, before: Any = total) -> None:
            on_step(looked, before + sum_of)

        total = total + do(part, step, total)
    return total  # type: ignore[no-any-return]
