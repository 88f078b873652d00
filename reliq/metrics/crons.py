"""The state of periodic jobs in Redis: the fields of the hash `cron`, which `reliq.schedule` describes."""

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

#: No process serves a schedule that was not reported for this many seconds. register.lua has the same limit.
UNSERVED_SECONDS = 30
#: A tick that is later than this many seconds is reported: workers check every few seconds.
TICK_LATE_SECONDS = 5.0
#: The reasons to skip a tick.
SKIPS = ("paused", "overlap")


@dataclass(frozen=True, slots=True)
class CronState:
    """
    The state of a periodic job in Redis; times are unix seconds by Redis' clock.

    Attributes:
        layout: the layout of its queue, as `--layout` accepts it.
        schedule: a cron expression and its time zone, or `every` and seconds, from the process that started last.
        seen: when a process last reported this schedule; 0 when none did.
        last: the tick up to which all ticks are done.
        next: the first tick that is not done; None when this version cannot read the schedule, or it has no further tick.
        ticked: the last tick that was published; None when there is none.
        last_id: its last message; empty when there was none.
        missed: how many ticks were not published in time.
        skipped: reason -> how many ticks were skipped: `paused`, `overlap`.
        pause: the operator's pause and its reason; None when it is not paused.
        late: for how many seconds the next tick has been due; several seconds mean that no process publishes it.
        is_served: whether a process reported this schedule within half a minute.
        is_alive: whether its last message has not ended; with overlap=skip such a message blocks the next.
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
        """Return the state with the fields that depend on the current time."""
        late = 0.0 if self.next is None else max(0.0, round(now - self.next, 3))
        return replace(self, late=late, is_served=now - self.seen <= UNSERVED_SECONDS, is_alive=is_alive)


def cron_states(keys: Keys) -> Command[list[CronState]]:
    """Read the periodic jobs of a queue, by name."""

    def read(reply: Any) -> list[CronState]:
        pairs = reply.items() if isinstance(reply, dict) else zip(reply[::2], reply[1::2], strict=True)
        rows: dict[str, dict[str, bytes]] = {}
        for field, value in pairs:
            name, _, what = field.decode("utf-8", "replace").rpartition(" ")
            rows.setdefault(name, {})[what] = value
        # A row without a schedule is another program's.
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
