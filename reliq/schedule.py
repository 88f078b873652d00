"""
Periodic entries: when they tick, and their state in Redis.

`Schedule` computes the ticks of an entry: from a cron expression in a time zone, or at equal intervals. The hash `cron`
of a queue has several fields for each entry, named `ENTRY FIELD`:

    schedule   the schedule of the process that started last
    seen       when a process with that schedule last reported, in unix seconds, rounded to ten
    former     the previous schedule; former_seen is its `seen`, which processes with that schedule still write
    last       the tick up to which every tick is settled, in unix seconds
    ticked     the last tick that was published, in unix seconds
    id         the id of its last message, including requested runs
    missed, paused, overlap   how many ticks were not published in time; were skipped in a pause; were skipped because
               the last message had not ended
    pause      user, time and reason of its pause, in the format of a queue's pause; absent if it is not paused
    asked      when an immediate run was requested, in unix ms, until it is published

The scripts `register` and `tick` write all fields except `pause` and `asked`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from itertools import count, islice, takewhile
from typing import TYPE_CHECKING
from zoneinfo import ZoneInfo, available_timezones

from cronsim import CronSim, CronSimError

from reliq.errors import ConfigurationError
from reliq.text import LAST_SECOND

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reliq.message import Duration

#: The search range: it ends this long before the last second of `datetime`.
CENTURY_SECONDS = 100 * 366 * 86_400
#: The longest interval: ten years, in seconds.
LONGEST_INTERVAL = 3650 * 86_400

_EPOCH = datetime.fromtimestamp(0, UTC)
#: How many values each field of an expression has.
_FIELD_SIZES = (60, 24, 31, 12, 7)
_EVERY = "every"


@dataclass(frozen=True, slots=True)
class Schedule:
    """
    The ticks of a periodic entry, in unix seconds.

    `str(schedule)` is its text in Redis, and `Schedule.parse` reads the text.

    If the clock changes for daylight saving time, an expression with a fixed hour and minute ticks once: at the end of
    the gap, or at the first of two equal times. An expression with a star in hour or minute follows real time.

    Attributes:
        expression: five cron fields; empty for equal intervals.
        tz: the name of the expression's time zone.
        interval: seconds between two ticks, counted from 1970; 0 for an expression.
    """

    expression: str = ""
    tz: str = "UTC"
    interval: int = 0

    @classmethod
    def cron(cls, expression: str, tz: str = "UTC") -> Schedule:
        """
        Return the schedule of a cron expression: minute, hour, day of the month, month, day of the week.

        Raises:
            ConfigurationError: the expression or the time zone is not valid.
        """
        shown = repr(expression)[:80]
        if not isinstance(expression, str) or len(expression.split()) != len(_FIELD_SIZES):
            raise ConfigurationError(
                f"a cron expression must have five fields, such as '0 6 * * *' for each day at six, not {shown}"
            )
        for number, (field, size) in enumerate(zip(expression.split(), _FIELD_SIZES, strict=True), 1):
            if any(int(step) > size for step in re.findall(r"/(\d+)", field)):
                raise ConfigurationError(
                    f"a cron expression must have steps of at most {size} in field {number}, as every field begins anew, not "
                    f"{shown}: for equal intervals use Consumer.every"
                )
        made = cls(" ".join(expression.split()), tz)
        _zone(tz)
        try:
            CronSim(made.expression, _EPOCH)
        except CronSimError as error:
            raise ConfigurationError(f"the cron expression {shown} is none: {str(error).lower()}") from None
        return made

    @classmethod
    def every(cls, interval: Duration) -> Schedule:
        """Return a schedule of equal intervals; raise ConfigurationError unless it is whole seconds, at least 1."""
        number = interval.total_seconds() if isinstance(interval, timedelta) else interval
        is_number = isinstance(number, int | float) and not isinstance(number, bool)
        if not is_number or not 1 <= number <= LONGEST_INTERVAL or number != int(number):
            raise ConfigurationError(
                f"interval must be whole seconds, 1 to {LONGEST_INTERVAL}, or such a timedelta, not {str(interval)[:40]!r}"
            )
        return cls(interval=int(number))

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """Parse a schedule; raise ConfigurationError for an invalid text."""
        *fields, last = text.split() or [""]
        if fields == [_EVERY] and last.isdecimal():
            return cls.every(int(last))
        return cls.cron(" ".join(fields), last)

    def __str__(self) -> str:
        return f"{_EVERY} {self.interval}" if self.interval else f"{self.expression} {self.tz}"

    def ticks(self, after: int, until: int, *, most: int) -> list[int]:
        """Return up to `most` ticks later than `after` and not later than `until`, earliest first."""
        return list(islice(takewhile(lambda tick: tick <= until, self._from(after)), most))

    def next_after(self, unix: int) -> int | None:
        """Return the first tick after a time; None if there is none in fifty years or before `datetime` ends."""
        return next(self._from(unix), None) if unix <= LAST_SECOND - CENTURY_SECONDS else None

    def moment(self, tick: int) -> datetime:
        """Return a tick as an aware datetime in the schedule's time zone."""
        return datetime.fromtimestamp(tick, _zone(self.tz))

    def _from(self, after: int) -> Iterator[int]:
        """Yield the ticks after a time; two ticks that a clock change moves to the same time count once."""
        if self.interval:
            yield from count((after // self.interval + 1) * self.interval, self.interval)
        for at in CronSim(self.expression, self.moment(after)):
            tick = int(at.timestamp())
            if tick > after:
                yield tick
                after = tick


def _zone(name: str) -> tzinfo:
    """Return a time zone; raise ConfigurationError if the name is unknown."""
    if name == "UTC":
        return UTC
    try:
        return ZoneInfo(name)
    except (ValueError, TypeError, OSError, KeyError):  # OSError for a folder's name, KeyError for an unknown name
        pass
    if isinstance(name, str) and not available_timezones():
        raise ConfigurationError(
            f"time zone {name[:80]!r} is unknown, for this machine has no time zones: install the package tzdata"
        )
    raise ConfigurationError(f"tz must be the name of a time zone, such as 'Europe/Berlin', not {str(name)[:80]!r}")
