"""Curves of numbers over time, as the points of SVG polylines."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reliq.admin.history import Minute

#: A curve is drawn in a box of this many units; the picture is stretched to its place.
WIDTH, HEIGHT = 240.0, 60.0
#: The box shows an hour. Notes that lie further apart than this were not made by workers alive in between: a gap.
HOUR_SECONDS, GAP_SECONDS = 3600.0, 150.0


class Curve:
    """
    A number of each minute, and where it lies in a box whose right edge is now.

    Args:
        minutes: the oldest first; those that nobody noted are missing.
        numbers: one for each of them; None where nobody knows.
        now: in unix seconds.
        top: the number that touches the upper edge.
    """

    def __init__(self, minutes: Sequence[Minute], numbers: Sequence[float | None], now: float, top: float) -> None:
        self._noted = [
            (minute.at, number)
            for minute, number in zip(minutes, numbers, strict=True)
            if number is not None and now - minute.at <= HOUR_SECONDS
        ]
        self._now, self._top = now, top or 1.0

    def lines(self) -> list[str]:
        """Return the points of a line for each stretch without a gap."""
        stretches, last = list[list[str]](), float("-inf")
        for at, number in self._noted:
            if at - last > GAP_SECONDS:
                stretches.append([])
            stretches[-1].append(self._point(at, number))
            last = at
        return [" ".join(points) for points in stretches]

    def areas(self) -> list[str]:
        """Return the points around the area below each line."""
        return [
            f"{line.split(',')[0]},{HEIGHT:g} {line} {line.split()[-1].split(',')[0]},{HEIGHT:g}"
            for line in self.lines()
        ]

    def _point(self, at: float, number: float) -> str:
        across = WIDTH * min(1.0, 1 - (self._now - at) / HOUR_SECONDS)
        return f"{across:.1f},{HEIGHT - 1 - (HEIGHT - 2) * min(1.0, number / self._top):.1f}"


def ages(minutes: Sequence[Minute]) -> list[float | None]:
    """Return for each minute how long the oldest message had waited: 0 when none did, None when nobody knows."""
    return [minute.oldest if minute.waiting else 0.0 for minute in minutes]


def share(part: float, whole: float) -> float:
    """Return how many of 100 `part` is of `whole`."""
    return round(min(100.0, 100 * part / whole), 1) if whole > 0 else 0.0
