"""
What templates show beside plain values: redacted messages, badges of queues, and curves.

The contents of messages are taken out of a value before a page gets it, unless its visitor asked for it and may.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from reliq.admin.screens import format_missing
from reliq.message import BARE, Header
from reliq.metrics.crons import TICK_LATE_SECONDS
from reliq.text import format_duration

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reliq.admin import CronState, MinuteStats, QueueSnapshot


#: A message that has waited for this many seconds is late, as in the alerts.
LATE_SECONDS = 60.0
#: A message that has waited for this many seconds is much too late, as in the alerts.
TOO_LATE_SECONDS = 300.0
#: The share of deliveries that fail from which a queue gets a warning.
SOME_FAIL = 0.1
#: The share of deliveries that fail from which a queue is marked as bad.
MOST_FAIL = 0.5
#: A curve is drawn in a box of WIDTH x HEIGHT units; the picture is stretched to its place.
WIDTH = 240.0
HEIGHT = 60.0
#: The box of a curve shows this many seconds.
HOUR_SECONDS = 3600.0
#: Notes that lie further apart than this were not made by workers alive in between: a gap.
GAP_SECONDS = 150.0
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
        return {key: redacted(item) for key, item in value.items()}
    return value


def _empty(value: Any) -> Any:
    """Return the empty value of that type."""
    if isinstance(value, Header):
        return BARE
    if isinstance(value, Mapping):
        return {}
    return None if value is None else type(value)()


BadgeLevel = Literal["bad", "warn", ""]


class QueueBadge(NamedTuple):
    """A few words beside a queue; `bad` is red, `warn` asks for a look, and "" only tells."""

    level: BadgeLevel
    text: str


def is_unwatched(view: QueueSnapshot) -> bool:
    """Return whether messages wait in a queue that nobody works on: no worker is there, and nothing is acked."""
    return view.workers == 0 and view.alive > 0 and not (view.rates and view.rates.acked)


def marks(view: QueueSnapshot) -> list[QueueBadge]:
    """Return why a queue wants a look, the gravest first; nothing for a queue that is well."""
    badges = [QueueBadge("bad", "nobody works on it")] if is_unwatched(view) else []
    if view.away:
        badges.append(QueueBadge("bad", format_missing(view.away)))
    if view.pause is not None:
        badges.append(QueueBadge("warn", "paused" + (f": {view.pause.reason}" if view.pause.reason else "")))
    elif view.late is not None and view.late >= LATE_SECONDS:
        level: BadgeLevel = "bad" if view.late >= TOO_LATE_SECONDS else "warn"
        badges.append(QueueBadge(level, f"{format_duration(view.late)} late"))
    failing = failed_share(view)
    if failing >= SOME_FAIL:
        badges.append(QueueBadge("bad" if failing >= MOST_FAIL else "warn", f"{failing:.0%} of deliveries fail"))
    if view.workers is None:
        badges.append(QueueBadge("warn", "workers unknown"))
    elif view.workers and (view.busy or 0) >= (view.slots or 0) > 0:
        badges.append(QueueBadge("warn", "all slots busy"))
    return badges


def failed_share(view: QueueSnapshot) -> float:
    """Return which part of the deliveries failed; 0 while nothing was counted."""
    if view.rates is None or view.rates.failed <= 0:
        return 0.0
    return view.rates.failed / (view.rates.failed + view.rates.acked)


def cron_marks(view: CronState) -> list[QueueBadge]:
    """Return why a periodic entry wants a look; nothing for one that ticks."""
    badges = []
    if not view.is_served:
        badges.append(QueueBadge("bad", "no worker has it"))
    elif view.late > TICK_LATE_SECONDS:
        badges.append(QueueBadge("bad", f"its tick is {format_duration(view.late)} late"))
    if view.next is None:
        badges.append(QueueBadge("warn", "its schedule cannot be read here"))
    if view.pause is not None:
        badges.append(QueueBadge("warn", "paused" + (f": {view.pause.reason}" if view.pause.reason else "")))
    return badges


class Sparkline:
    """
    A number of each minute, and where it lies in a box whose right edge is now.

    Args:
        minutes: the oldest first; those that nobody noted are missing.
        numbers: one for each of them; None where nobody knows.
        now: in unix seconds.
        top: the number that touches the upper edge.
    """

    def __init__(self, minutes: Sequence[MinuteStats], numbers: Sequence[float | None], now: float, top: float) -> None:
        self._noted = [
            (minute.at, number)
            for minute, number in zip(minutes, numbers, strict=True)
            if number is not None and now - minute.at <= HOUR_SECONDS
        ]
        self._now = now
        self._top = top or 1.0

    def lines(self) -> list[str]:
        """Return the points of a line for each stretch without a gap."""
        stretches = list[list[str]]()
        last = float("-inf")
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


def ages(minutes: Sequence[MinuteStats]) -> list[float | None]:
    """Return for each minute how long the oldest message had waited: 0 when none did, None when nobody knows."""
    return [minute.oldest if minute.waiting else 0.0 for minute in minutes]


def share(part: float, whole: float) -> float:
    """Return how many of 100 `part` is of `whole`."""
    return round(min(100.0, 100 * part / whole), 1) if whole > 0 else 0.0
