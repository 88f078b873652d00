"""Periodic entries as Redis has them: the fields of the hash `cron`, which `reliq.schedule` describes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from reliq.errors import ConfigurationError
from reliq.redis.commands import Command, id_text, read_pause, runs
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
        schedule: as text.
        seen: when a process with that schedule last said that it is there; 0 when none did.
        last: the tick up to which all is done.
        ticked: the last tick that was published; None when none was.
        id: of the last message; empty when there was none.
        missed: how many ticks nobody published in time.
        skipped: why -> how many ticks were skipped: `paused`, `overlap`.
        pause: None when it is not paused.
    """

    entry: str
    schedule: str
    seen: int
    last: int
    ticked: int | None
    id: str
    missed: int
    skipped: Mapping[str, int]
    pause: Pause | None

    @property
    def next(self) -> int | None:
        """The first tick that is not done; None when the schedule cannot be read here, or never comes again."""
        try:
            return Schedule.parse(self.schedule).next_after(self.last)
        except ConfigurationError:
            return None

    def ticks(self, until: int, *, most: int) -> list[int]:
        """Return the ticks until a moment that are not done; none when the schedule cannot be read here."""
        try:
            return Schedule.parse(self.schedule).ticks(self.last, until, most=most)
        except ConfigurationError:
            return []

    def is_served(self, now: float) -> bool:
        """Say whether a process with this schedule was there a moment before `now`."""
        return now - self.seen <= UNSERVED_SECONDS


@runs("cron:HGETALL")
def cron_states(keys: Keys) -> Command[list[CronState]]:
    """Read the periodic entries of a queue, by name."""
    return Command(("HGETALL", keys.cron), _states)


def _states(reply: Any) -> list[CronState]:
    """Return the entries of the hash; what has no schedule is none of ours."""
    pairs = reply.items() if isinstance(reply, dict) else zip(reply[::2], reply[1::2], strict=True)
    rows: dict[str, dict[str, bytes]] = {}
    for name, value in pairs:
        entry, _, field = name.decode("utf-8", "replace").rpartition(" ")
        rows.setdefault(entry, {})[field] = value
    return [_state(entry, row) for entry, row in sorted(rows.items()) if entry and "schedule" in row]


def _state(entry: str, row: Mapping[str, bytes]) -> CronState:
    def number(field: str) -> int | None:
        found = whole_number(row.get(field, b""))
        return None if found is None else max(0, min(found, LAST_SECOND))

    return CronState(
        entry=entry,
        schedule=row["schedule"].decode("utf-8", "replace"),
        seen=number("seen") or 0,
        last=number("last") or 0,
        ticked=number("ticked"),
        id=id_text(row.get("id", b"")),
        missed=number("missed") or 0,
        skipped={why: number(why) or 0 for why in SKIPS},
        pause=read_pause(row["pause"]) if "pause" in row else None,
    )
