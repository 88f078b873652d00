"""Periodic entries as Redis has them: the fields of the hash `cron`, which `reliq.schedule` describes."""

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

#: A schedule that no process has named for longer than this many seconds is in force nowhere; as in register.lua.
UNSERVED_SECONDS = 30
#: A tick that is later than this many seconds is reported: workers look every few of them.
TICK_LATE_SECONDS = 5.0
#: Reasons for which a tick is skipped.
SKIPS = ("paused", "overlap")


@dataclass(frozen=True, slots=True)
class CronState:
    """
    A periodic entry as Redis has it; times are unix seconds by its clock.

    Attributes:
        layout: of its queue, as `--layout` takes it.
        schedule: a cron expression and its time zone, or `every` and seconds; as the process that started last has it.
        seen: when a process with that schedule reported last; 0 when none did.
        last: the tick up to which all is done.
        next: the first tick that is not done; None when the schedule cannot be read here, or has no further tick.
        ticked: the last tick that was published; None when there is none.
        last_id: its last message; empty when there was none.
        missed: how many ticks were not published in time.
        skipped: reason -> how many ticks were skipped: `paused`, `overlap`.
        pause: who paused it and why; None when it is not paused.
        late: for how many seconds the next tick has been due; several seconds mean that no process publishes.
        is_served: whether a process with this schedule reported within half a minute.
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
        """Return the entry with the figures that depend on the moment."""
        late = 0.0 if self.next is None else max(0.0, round(now - self.next, 3))
        return replace(self, late=late, is_served=now - self.seen <= UNSERVED_SECONDS, is_alive=is_alive)


def cron_states(keys: Keys) -> Command[list[CronState]]:
    """Read the periodic entries of a queue, by name."""

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
