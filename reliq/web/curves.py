"""Curves of numbers over time, as the points of SVG polylines."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reliq.admin.history import Minute

#: A curve is drawn in a box of this many units; the picture is stretched to its place.
WIDTH, HEIGHT = 240.0, 60.0
#: A curve of fewer minutes begins so much further to the right.
MINUTES_SHOWN = 60


class Curve:
    """
    Some numbers, one for each minute, and where they lie in a box.

    Args:
        numbers: the oldest first; None where nobody counted, which leaves a gap.
        top: the number that touches the upper edge.
    """

    def __init__(self, numbers: Sequence[float | None], top: float | None = None) -> None:
        self.numbers = [*[None] * (MINUTES_SHOWN - len(numbers)), *numbers]
        self.top = top or max((number for number in numbers if number is not None), default=0.0) or 1.0

    def lines(self) -> list[str]:
        """Return the points of a line for each stretch without a gap."""
        placed = [(index, number) for index, number in enumerate(self.numbers)]
        stretches = (list(some) for is_gap, some in groupby(placed, lambda one: one[1] is None) if not is_gap)
        return [" ".join(self._point(index, number or 0.0) for index, number in some) for some in stretches]

    def areas(self) -> list[str]:
        """Return the points around the area below each line."""
        return [
            f"{line.split(',')[0]},{HEIGHT:g} {line} {line.split()[-1].split(',')[0]},{HEIGHT:g}"
            for line in self.lines()
        ]

    def _point(self, index: int, number: float) -> str:
        across = index * WIDTH / (len(self.numbers) - 1)
        return f"{across:.1f},{HEIGHT - 1 - (HEIGHT - 2) * min(1.0, number / self.top):.1f}"


def ages(minutes: Sequence[Minute]) -> list[float | None]:
    """Return for each minute how long the oldest message had waited: 0 when none did, None when nobody knows."""
    return [minute.oldest if minute.waiting else 0.0 for minute in minutes]


def share(part: float, whole: float) -> float:
    """Return how many of 100 `part` is of `whole`."""
    return round(min(100.0, 100 * part / whole), 1) if whole > 0 else 0.0
