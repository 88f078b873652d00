"""
The HTML templates of the web pages, and functions that prepare values for them.

Pages use `redacted` to remove bodies, headers and error texts before a template gets a message, unless the visitor asks
for them and has the right BODIES.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from jinja2 import Environment, FileSystemLoader, StrictUndefined, pass_context
from markupsafe import Markup

from reliq.admin.screens import format_limit, format_missing, format_number, format_rate, pretty, start_of
from reliq.message import BARE, Header, Pause
from reliq.metrics.crons import TICK_LATE_SECONDS
from reliq.text import clamp_time, format_duration, pluralize, printable, shell_command

if TYPE_CHECKING:
    from jinja2.runtime import Context

    from reliq.admin import CronState, MinuteStats, QueueSnapshot

T = TypeVar("T")

TEMPLATES = Path(__file__).parent / "templates"
STATIC = Path(__file__).parent / "static"
#: A queue gets a warning if its lateness is at least this many seconds. The Prometheus alerts use the same limit.
LATE_SECONDS = 60.0
#: A queue is marked as bad if its lateness is at least this many seconds. The Prometheus alerts use the same limit.
TOO_LATE_SECONDS = 300.0
#: A queue gets a warning if at least this share of its deliveries fails.
SOME_FAIL = 0.1
#: A queue is marked as bad if at least this share of its deliveries fails.
MOST_FAIL = 0.5
#: The size of a chart in SVG units. The page scales the chart.
WIDTH = 240.0
HEIGHT = 60.0
#: The x axis of a chart covers this many seconds.
HOUR_SECONDS = 3600.0
#: A chart has a gap between two stored minutes that are further apart than this many seconds, because no worker ran
#: between them.
GAP_SECONDS = 150.0
#: The names of fields with values from a publisher or a handler, which may be secret. `redacted` empties these fields.
CARRIED = {"error", "body", "cursor", "payload", "headers", "header", "text", "summary", "note"}


def redacted(value: T) -> T:
    """Return a copy of `value` without bodies, headers and error texts, also in nested objects."""
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
    """Return an empty value of the same type as `value`; None for None."""
    if isinstance(value, Header):
        return BARE
    if isinstance(value, Mapping):
        return {}
    return None if value is None else type(value)()


class QueueBadge(NamedTuple):
    """
    A short text about a problem, shown beside the name of a queue or periodic job.

    The level is `bad` (red), `warn`, or empty.
    """

    level: str
    text: str


def is_unwatched(view: QueueSnapshot) -> bool:
    """Return whether a queue has messages but no worker, and no other program acks its messages either."""
    return view.workers == 0 and view.alive > 0 and not (view.rates and view.rates.acked)


def marks(view: QueueSnapshot) -> list[QueueBadge]:
    """Return the badges that show the problems of a queue; an empty list for a healthy queue."""
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
    """Return the badges that show the problems of a periodic job; an empty list for a healthy job."""
    badges = []
    if not view.is_served:
        badges.append(QueueBadge("bad", "no worker has it"))
    elif view.late > TICK_LATE_SECONDS:
        badges.append(QueueBadge("bad", f"its tick is {format_duration(view.late)} late"))
    if view.next is None:
        badges.append(QueueBadge("warn", "this version of reliq cannot read its schedule"))
    if view.pause is not None:
        badges.append(_paused(view.pause))
    return badges


def _paused(pause: Pause) -> QueueBadge:
    return QueueBadge("warn", f"paused: {pause.reason}" if pause.reason else "paused")


def curve(minutes: Sequence[MinuteStats], numbers: Sequence[float | None], now: float, top: float) -> list[str]:
    """
    Return the SVG points of a chart of the last hour, as one text for each line.

    The chart has several lines if there are gaps between the minutes.

    Args:
        minutes: the statistics that workers stored for each minute, oldest first.
        numbers: the value of the chart for each minute; None if unknown.
        now: the time at the right edge of the chart, in unix seconds.
        top: the value at the upper edge of the chart.
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
    """Return for each minute the age of the oldest waiting message in seconds: 0 without messages, None if unknown."""
    return [minute.oldest if minute.waiting else 0.0 for minute in minutes]


def share(part: float, whole: float) -> float:
    """Return `part` as a percentage of `whole`, at most 100; 0 if `whole` is 0."""
    return round(min(100.0, 100 * part / whole), 1) if whole > 0 else 0.0


def _harmless(value: Any) -> Any:
    """Escape control characters in a text that a template prints. Return other values and safe HTML unchanged."""
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _date(at: float) -> datetime:
    return datetime.fromtimestamp(clamp_time(at), UTC)


@pass_context
def _ago(context: Context, at: float) -> str:
    """Format a time in unix seconds relative to the page's `now`: `5m ago` or `in 5m`."""
    seconds = context["now"] - at
    if abs(seconds) < 1:
        return "now"
    return f"{format_duration(seconds)} ago" if seconds > 0 else f"in {format_duration(-seconds)}"


def templates(title: str = "reliq") -> Environment:
    """
    Return the Jinja environment with the templates, which escape HTML and control characters in all values.

    Args:
        title: the title at the top of each page and in the browser tab.
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
        listed=format_limit,
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
        # The URL of each static file contains this digest of its contents, because browsers may cache the file for a
        # year.
        digests={path.name: hashlib.sha256(path.read_bytes()).hexdigest()[:12] for path in STATIC.iterdir()},
    )
    return environment
