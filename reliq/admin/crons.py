"""Periodic entries as Redis stores them: their next ticks, and the ticks that were missed or skipped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from reliq.errors import ConfigurationError
from reliq.metrics import crons
from reliq.redis import commands

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reliq.admin.session import QueueSession, Session
    from reliq.keys import Keys
    from reliq.message import Pause
    from reliq.metrics.crons import CronState


@dataclass(frozen=True, slots=True)
class CronView:
    """
    A periodic entry at one moment; times are unix seconds by Redis' clock.

    Attributes:
        layout: of its queue, as `--layout` takes it.
        schedule: a cron expression and its time zone, or `every` and seconds; as the process that started last has it.
        next: the first tick that is not done; None when the schedule cannot be read here, or has no further tick.
        late: for how many seconds that tick has been due; several seconds mean that no process publishes.
        ticked: the last tick that was published; None when there is none.
        is_served: whether a process with this schedule reported within half a minute.
        last_id, is_alive: its last message, and whether that has not ended; with overlap=skip it blocks the next.
        missed: how many ticks were not published in time.
        skipped: reason -> how many ticks were skipped: `paused`, `overlap`.
        pause: who paused it and why; None when it is not paused.
    """

    name: str
    queue: str
    layout: str
    schedule: str
    next: int | None
    late: float
    ticked: int | None
    is_served: bool
    last_id: str
    is_alive: bool
    missed: int
    skipped: Mapping[str, int]
    pause: Pause | None


def crons_of(session: Session, queues: Sequence[Keys]) -> list[CronView]:
    """Return the periodic entries of queues, by name; none of a queue that refuses."""
    now_ms, *answers = session.try_all([commands.server_ms(), *map(crons.cron_states, queues)])
    if isinstance(now_ms, Exception):
        raise now_ms
    rows = [
        (keys, state)
        for keys, states in zip(queues, answers, strict=True)
        if isinstance(states, list)
        for state in states
    ]
    counts = session.try_all([commands.retries_left(keys, [state.id]) for keys, state in rows])
    now = now_ms / 1000
    views = [
        CronView(
            name=state.entry,
            queue=keys.name,
            layout=str(keys.layout),
            schedule=state.schedule,
            next=state.next,
            late=0.0 if state.next is None else max(0.0, round(now - state.next, 3)),
            ticked=state.ticked,
            is_served=state.is_served(now),
            last_id=state.id,
            is_alive=isinstance(left, list) and left[0] is not None,
            missed=state.missed,
            skipped=state.skipped,
            pause=state.pause,
        )
        for (keys, state), left in zip(rows, counts, strict=True)
    ]
    return sorted(views, key=lambda view: (view.name, view.queue))


def cron_state(queue: QueueSession, name: str) -> CronState:
    """Return an entry; raise ConfigurationError when the queue has none of that name."""
    states = {state.entry: state for state in queue.run(crons.cron_states(queue.keys))}
    if name not in states:
        known = f"it has {', '.join(states)}" if states else "it has none"
        raise ConfigurationError(f"queue {queue.name!r} has no periodic entry {str(name)[:80]!r}; {known}")
    return states[name]
