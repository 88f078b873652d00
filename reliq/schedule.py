"""
The schedules of periodic jobs, and the state of these jobs in Redis.

`Schedule` computes the ticks (due times) of a periodic job, from a cron expression in a time zone, or at equal
intervals. In the Redis hash `cron` of a queue, each periodic job has several fields, named `JOB FIELD`:

    schedule   the schedule of the job in the worker process that started last
    seen       when a process last registered the job with this schedule, in unix seconds, up to ten seconds too early
    former     the schedule before the last change; the field `former_seen` is the same as `seen`, for this schedule
    last       the latest tick that was published, skipped or missed, in unix seconds; no earlier tick will be published
    ticked     the last tick that was published, in unix seconds
    id         the id of the job's last message; a user may have requested this message
    missed     how many ticks were not published in time
    paused     how many ticks were skipped during a pause
    overlap    how many ticks were skipped because the job's last message had not ended
    pause      the job's pause: user, time and reason, in the format of a queue's pause; absent if it is not paused
    asked      when a user requested an immediate run, in unix ms; deleted when the run is published

The scripts `register` and `tick` write all fields except `pause` and `asked`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from itertools import count, islice, takewhile
from typing import TYPE_CHECKING, Literal
from zoneinfo import ZoneInfo, available_timezones

from cronsim import CronSim, CronSimError

from reliq.errors import ConfigurationError
from reliq.text import LAST_SECOND

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reliq.message import Duration

CatchUp = Literal["skip", "latest", "all"]
#: `Schedule.next_after` computes no ticks in the last 100 years before `datetime` ends, which is after the year 9999.
CENTURY_SECONDS = 100 * 366 * 86_400
#: The longest interval: ten years, in seconds.
LONGEST_INTERVAL = 3650 * 86_400

_EPOCH = datetime.fromtimestamp(0, UTC)
#: How many different values each field of a cron expression can have.
_FIELD_SIZES = (60, 24, 31, 12, 7)
_EVERY = "every"


@dataclass(frozen=True, slots=True)
class Schedule:
    """
    A schedule, which computes the ticks (due times) of a periodic job in unix seconds.

    `str(schedule)` returns the text that Redis stores, and `Schedule.parse` parses this text.

    If a clock change skips an hour, a cron expression with a fixed hour and minute ticks at the end of that hour.
    If a clock change repeats an hour, the expression ticks only in the first of both hours. An expression with a star
    in the field for hours or minutes does not tick for a skipped hour, and ticks in both repeated hours.

    Attributes:
        expression: a cron expression of five fields; empty for equal intervals.
        tz: the name of the time zone of the expression.
        interval: the seconds between two ticks, counted from the start of 1970; 0 for a cron expression.
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
                    f"a cron expression must have steps of at most {size} in field {number}, not {shown}, because each field "
                    "restarts at its first value: for equal intervals use Consumer.every"
                )
        made = cls(" ".join(expression.split()), tz)
        _zone(tz)
        try:
            CronSim(made.expression, _EPOCH)
        except CronSimError as error:
            raise ConfigurationError(f"the cron expression {shown} is not valid: {str(error).lower()}") from None
        return made

    @classmethod
    def every(cls, interval: Duration) -> Schedule:
        """
        Return a schedule of equal intervals.

        Raises:
            ConfigurationError: `interval` is not a whole number of seconds, from one second to ten years.
        """
        number = interval.total_seconds() if isinstance(interval, timedelta) else interval
        is_number = isinstance(number, int | float) and not isinstance(number, bool)
        if not is_number or not 1 <= number <= LONGEST_INTERVAL or number != int(number):
            raise ConfigurationError(
                f"interval must be 1 to {LONGEST_INTERVAL} whole seconds, as int or timedelta, not {str(interval)[:40]!r}"
            )
        return cls(interval=int(number))

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """Parse the text of a schedule in Redis; raise ConfigurationError if the text is not valid."""
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
        """
        Return the first tick after a time in unix seconds.

        Return None if there is no tick in the next fifty years, or if the time is less than 100 years before year
        10000.
        """
        return next(self._from(unix), None) if unix <= LAST_SECOND - CENTURY_SECONDS else None

    def moment(self, tick: int) -> datetime:
        """Return a tick as an aware datetime in the schedule's time zone."""
        return datetime.fromtimestamp(tick, _zone(self.tz))

    def _from(self, after: int) -> Iterator[int]:
        """Yield the ticks after a time. If a clock change moves two ticks to the same second, yield it only once."""
        if self.interval:
            yield from count((after // self.interval + 1) * self.interval, self.interval)
        for at in CronSim(self.expression, self.moment(after)):
            tick = int(at.timestamp())
            if tick > after:
                yield tick
                after = tick


def _zone(name: str) -> tzinfo:
    """Return the time zone with this name; raise ConfigurationError if the name is unknown."""
    if name == "UTC":
        return UTC
    try:
        return ZoneInfo(name)
    except (ValueError, TypeError, OSError, KeyError):  # OSError if the name is a folder, KeyError if it is unknown
        pass
    if isinstance(name, str) and not available_timezones():
        raise ConfigurationError(
            f"time zone {name[:80]!r} is unknown, because this machine has no time zones: install the package tzdata"
        )
    raise ConfigurationError(f"tz must be the name of a time zone, such as 'Europe/Berlin', not {str(name)[:80]!r}")
