"""Read the state of periodic jobs from the Redis hash `cron`; `reliq.schedule` describes the fields of this hash."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from reliq.errors import ConfigurationError
from reliq.redis.commands import Command, id_text, read_pause
from reliq.schedule import Schedule
from reliq.text import LAST_SECOND, whole_number

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reliq.keys import Keys
    from reliq.message import Pause

#: If no process has reported the schedule of a periodic job for this many seconds, no worker serves this job.
#: register.lua has the same limit.
UNSERVED_SECONDS = 30
#: A tick, which is a due time of a periodic job, counts as late after this many seconds.
#: A smaller delay is normal, because workers check every few seconds whether a tick is due.
TICK_LATE_SECONDS = 5.0
#: The reasons for which a worker skips a tick: the job is paused, or its last message has not ended (overlap=skip).
SKIPS = ("paused", "overlap")


@dataclass(frozen=True, slots=True)
class CronState:
    """
    The state of a periodic job in Redis; times are unix seconds by Redis' clock.

    Attributes:
        layout: the layout of the job's queue, as `--layout` accepts it.
        schedule: a cron expression and its time zone, or `every` and seconds, from the worker process that started
            last.
        seen: when a process last reported this schedule; 0 if no process has reported it.
        last: the time of the latest tick that was published, skipped or missed.
        next: the time of the first tick after `last`; None if this version of reliq cannot read the schedule, or if no
            further tick exists.
        ticked: the time of the last tick for which a message was published; None if there is none.
        last_id: the id of the job's last message; empty if there is none.
        missed: how many ticks were not published in time, for example because no worker ran.
        skipped: how many ticks were skipped for each reason: `paused`, `overlap`.
        pause: the operator's pause and its reason; None if the job is not paused.
        late: for how many seconds `next` has been due; more than a few seconds mean that no process publishes it.
        is_served: whether a process reported this schedule in the last half minute.
        is_alive: whether the last message has not ended yet. While it has not ended, a job with overlap=skip skips its
            ticks.
    """

    name: str
    queue: str
    layout: str
    schedule: str
    seen: int
    last: int
    next: int | None
    ticked: int | None
    last_id: str
    missed: int
    skipped: Mapping[str, int]
    pause: Pause | None
    late: float = 0.0
    is_served: bool = False
    is_alive: bool = False

    def at(self, now: float, *, is_alive: bool) -> CronState:
        """Return the state with `late`, `is_served` and `is_alive` set for the time `now` in unix seconds."""
        late = 0.0 if self.next is None else max(0.0, round(now - self.next, 3))
        return replace(self, late=late, is_served=now - self.seen <= UNSERVED_SECONDS, is_alive=is_alive)


def cron_states(keys: Keys) -> Command[list[CronState]]:
    """Return a command that reads the periodic jobs of a queue, sorted by name."""

    def read(reply: Any) -> list[CronState]:
        pairs = reply.items() if isinstance(reply, dict) else zip(reply[::2], reply[1::2], strict=True)
        rows: dict[str, dict[str, bytes]] = {}
        for field, value in pairs:
            name, _, what = field.decode("utf-8", "replace").rpartition(" ")
            rows.setdefault(name, {})[what] = value
        # Skip a job without the field `schedule`: another program wrote it.
        return [_state(keys, name, row) for name, row in sorted(rows.items()) if name and "schedule" in row]

    return Command(("HGETALL", keys.cron), read)


def _state(keys: Keys, name: str, row: Mapping[str, bytes]) -> CronState:
    def number(field: str) -> int | None:
        found = whole_number(row.get(field, b""))
        return None if found is None else max(0, min(found, LAST_SECOND))

    schedule = row["schedule"].decode("utf-8", "replace")
    last = number("last") or 0
    try:
        following = Schedule.parse(schedule).next_after(last)
    except ConfigurationError:
        following = None
    return CronState(
        name=name,
        queue=keys.name,
        layout=str(keys.layout),
        schedule=schedule,
        seen=number("seen") or 0,
        last=last,
        next=following,
        ticked=number("ticked"),
        last_id=id_text(row.get("id", b"")),
        missed=number("missed") or 0,
        skipped={why: number(why) or 0 for why in SKIPS},
        pause=read_pause(row["pause"]) if "pause" in row else None,
    )
