"""
The templates, and their values that are not plain: badges, curves, and messages without their contents.

The contents of messages are removed from a value before a template gets it, unless its visitor asks for them and may see them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from jinja2 import Environment, FileSystemLoader, StrictUndefined, pass_context
from markupsafe import Markup

from reliq.admin.screens import format_missing, format_number, format_rate, pretty, start_of
from reliq.message import BARE, Header
from reliq.metrics.crons import TICK_LATE_SECONDS
from reliq.text import clamp_time, format_duration, pluralize, printable, shell_command

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jinja2.runtime import Context

    from reliq.admin import CronState, MinuteStats, QueueSnapshot
    from reliq.message import Pause

T = TypeVar("T")

TEMPLATES = Path(__file__).parent / "templates"
STATIC = Path(__file__).parent / "static"
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
#: Between minutes that are further apart no worker was alive: a gap in the curve.
GAP_SECONDS = 150.0
#: The fields that hold texts of a publisher or a handler.
CARRIED = {"error", "body", "payload", "headers", "header", "text", "summary"}


def redacted(value: T) -> T:
    """Return `value` without bodies, headers and texts of errors, at any depth."""
    result: Any = value
    if is_dataclass(value) and not isinstance(value, type):
        values = {field.name: getattr(value, field.name) for field in fields(value) if field.init}
        result = replace(
            value, **{name: _empty(one) if name in CARRIED else redacted(one) for name, one in values.items()}
        )
    elif isinstance(value, list | tuple):
        result = type(value)(map(redacted, value))
    elif isinstance(value, dict):
        result = {key: redacted(item) for key, item in value.items()}
    return result  # type: ignore[no-any-return]


def _empty(value: Any) -> Any:
    """Return the empty value of that type."""
    if isinstance(value, Header):
        return BARE
    if isinstance(value, Mapping):
        return {}
    return None if value is None else type(value)()


class QueueBadge(NamedTuple):
    """A few words beside a queue; the level is `bad` (red), `warn`, or empty."""

    level: str
    text: str


def is_unwatched(view: QueueSnapshot) -> bool:
    """Return whether messages wait in a queue without a worker, and none is acked."""
    return view.workers == 0 and view.alive > 0 and not (view.rates and view.rates.acked)


def marks(view: QueueSnapshot) -> list[QueueBadge]:
    """Return why a queue needs attention, the gravest first; nothing for a healthy queue."""
    badges = [QueueBadge("bad", "no worker")] if is_unwatched(view) else []
    if view.away:
        badges.append(QueueBadge("bad", format_missing(view.away)))
    if view.pause is not None:
        badges.append(_paused(view.pause))
    elif view.late is not None and view.late >= LATE_SECONDS:
        level = "bad" if view.late >= TOO_LATE_SECONDS else "warn"
        badges.append(QueueBadge(level, f"{format_duration(view.late)} late"))
    failed = view.rates.failed if view.rates else 0.0
    failing = failed / (failed + view.rates.acked) if view.rates and failed > 0 else 0.0
    if failing >= SOME_FAIL:
        badges.append(QueueBadge("bad" if failing >= MOST_FAIL else "warn", f"{failing:.0%} of deliveries fail"))
    if view.workers is None:
        badges.append(QueueBadge("warn", "workers unknown"))
    elif view.workers and (view.busy or 0) >= (view.slots or 0) > 0:
        badges.append(QueueBadge("warn", "all slots busy"))
    return badges


def cron_marks(view: CronState) -> list[QueueBadge]:
    """Return why a periodic entry needs attention; nothing for an entry that ticks."""
    badges = []
    if not view.is_served:
        badges.append(QueueBadge("bad", "no worker has it"))
    elif view.late > TICK_LATE_SECONDS:
        badges.append(QueueBadge("bad", f"its tick is {format_duration(view.late)} late"))
    if view.next is None:
        badges.append(QueueBadge("warn", "its schedule cannot be read here"))
    if view.pause is not None:
        badges.append(_paused(view.pause))
    return badges


def _paused(pause: Pause) -> QueueBadge:
    return QueueBadge("warn", f"paused: {pause.reason}" if pause.reason else "paused")


def curve(minutes: Sequence[MinuteStats], numbers: Sequence[float | None], now: float, top: float) -> list[str]:
    """
    Return the points of a line for each stretch of minutes without a gap, in a box that ends now.

    Args:
        minutes: the oldest first, without minutes that no worker stored.
        numbers: a number for each of them; None where it is unknown.
        now: in unix seconds.
        top: the number that touches the upper edge.
    """
    stretches = list[list[str]]()
    last = float("-inf")
    for minute, number in zip(minutes, numbers, strict=True):
        if number is None or now - minute.at > HOUR_SECONDS:
            continue
        if minute.at - last > GAP_SECONDS:
            stretches.append([])
        x = WIDTH * min(1.0, 1 - (now - minute.at) / HOUR_SECONDS)
        y = HEIGHT - 1 - (HEIGHT - 2) * min(1.0, number / (top or 1.0))
        stretches[-1].append(f"{x:.1f},{y:.1f}")
        last = minute.at
    return [" ".join(points) for points in stretches]


def ages(minutes: Sequence[MinuteStats]) -> list[float | None]:
    """Return for each minute how long the oldest message had waited: 0 when none waited, None when it is unknown."""
    return [minute.oldest if minute.waiting else 0.0 for minute in minutes]


def share(part: float, whole: float) -> float:
    """Return `part` of `whole` in percent."""
    return round(min(100.0, 100 * part / whole), 1) if whole > 0 else 0.0


def _harmless(value: Any) -> Any:
    """Return a value that a template prints, without characters that a browser or a terminal obeys."""
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _date(at: float) -> datetime:
    return datetime.fromtimestamp(clamp_time(at), UTC)


@pass_context
def _ago(context: Context, at: float) -> str:
    """Return how long ago `at` was, or in how long it will be, by the page's `now`."""
    seconds = context["now"] - at
    if abs(seconds) < 1:
        return "now"
    return f"{format_duration(seconds)} ago" if seconds > 0 else f"in {format_duration(-seconds)}"


def templates(title: str = "reliq") -> Environment:
    """
    Return the templates. Every text is escaped; a character that hides or moves others is shown as its escape.

    Args:
        title: the name in the head of each page and in the browser's tab.
    """
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_harmless,
    )
    environment.filters.update(
        amount=format_number,
        rate=format_rate,
        spoken=format_duration,
        clock=lambda at: f"{_date(at):%d %b %Y, %H:%M:%S} UTC",
        iso=lambda at: f"{_date(at):%Y-%m-%dT%H:%M:%SZ}",
        ago=_ago,
        plural=pluralize,
        partial=format_missing,
        body=lambda body: Markup("\n").join(printable(line) for line in pretty(body)),
        start=lambda body: start_of(body, 120),
    )
    environment.globals.update(
        title=title,
        curve=curve,
        ages=ages,
        share=share,
        marks=marks,
        cron_marks=cron_marks,
        is_unwatched=is_unwatched,
        typed=shell_command,
        # Each address has the digest of the file: browsers keep the file for a year.
        digests={path.name: hashlib.sha256(path.read_bytes()).hexdigest()[:12] for path in STATIC.iterdir()},
    )
    return environment
