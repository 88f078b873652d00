"""Periodic entries, as Redis knows them: when each ticks next, what was missed; run, paused and forgotten by hand."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reliq import schedule
from reliq.errors import ConfigurationError
from reliq.keys import run_id
from reliq.lua import transitions
from reliq.queue import pause_by
from reliq.redis import commands
from reliq.schedule import UNSERVED_SECONDS, CronState

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reliq.admin.session import QueueSession, Session
    from reliq.keys import Keys
    from reliq.message import Pause

#: Whoever asked for a run looks so many times a second whether it was published.
RUN_LOOK_SECONDS = 0.1
#: A resume counts at most so many ticks in one call.
TICKS_TOGETHER = 100_000


@dataclass(frozen=True, slots=True)
class CronView:
    """
    A periodic entry at one moment; times are unix seconds by Redis' clock.

    Attributes:
        layout: of its queue, as `--layout` takes it.
        schedule: a cron expression and its time zone, or `every` and seconds; as the process that started last has it.
        next: the first tick that is not done; None when the schedule cannot be read here, or never comes again.
        late: for how many seconds that has been due: some seconds of it mean that no process publishes.
        ticked: the last tick that was published; None when none was.
        is_served: whether a process with this schedule said within half a minute that it is there.
        last_id, is_alive: its last message, and whether that has not ended; with overlap=skip it holds up the next.
        missed: how many ticks nobody published in time.
        skipped: why -> how many ticks were skipped: `paused`, `overlap`.
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
    now_ms, *answers = session.try_all([commands.server_ms(), *map(schedule.cron_states, queues)])
    if isinstance(now_ms, Exception):
        raise now_ms
    rows = [
        (keys, state)
        for keys, states in zip(queues, answers, strict=True)
        if isinstance(states, list)
        for state in states
    ]
    alive = session.try_all([commands.retries_left(keys, [state.id]) for keys, state in rows])
    views = [
        _view(keys, state, now_ms / 1000, is_alive=isinstance(left, list) and left[0] is not None)
        for (keys, state), left in zip(rows, alive, strict=True)
    ]
    return sorted(views, key=lambda one: (one.name, one.queue))


def run_cron(queue: QueueSession, name: str, for_seconds: float) -> str:
    """Ask the processes of an entry for its message, and wait until one has published it; return its id."""
    keys, now_ms = queue.keys, queue.run(commands.server_ms())
    state = _state(queue, name)
    if not state.is_served(now_ms / 1000):
        raise ConfigurationError(f"no worker has the periodic entry {name!r} now, and who would publish? start one")
    if (asked := queue.run(schedule.asked_run(keys, name))) is None:
        queue.run(schedule.ask_run(keys, name, asked := now_ms))
    until = time.monotonic() + for_seconds
    while queue.run(schedule.asked_run(keys, name)) is not None:
        if time.monotonic() > until and queue.run(schedule.withdraw_run(keys, name)):
            raise ConfigurationError(
                f"no worker has published the periodic entry {name!r} within {for_seconds:.10g} s; see their logs"
            )
        time.sleep(RUN_LOOK_SECONDS)
    return run_id(name, asked)


def pause_cron(queue: QueueSession, name: str, reason: str, by: str) -> None:
    """Have the ticks of an entry skipped; raise ConfigurationError for an unknown one, or a reason not allowed."""
    pause = pause_by(by, reason)
    _state(queue, name)
    queue.run(schedule.pause_cron(queue.keys, name, pause))


def resume_cron(queue: QueueSession, name: str) -> bool:
    """Have the ticks of an entry published from now on; return whether it was paused. Those until now count as skipped."""
    state, now, settled = _state(queue, name), queue.run(commands.server_ms()) // 1000, -1
    while state.pause and state.last != settled:  # there may be no worker to do it
        settled = state.last
        if ticks := state.ticks(now, most=TICKS_TOGETHER):
            one = transitions.Tick(name, state.schedule, ticks[-1], state.last, missed=len(ticks))
            queue.run(transitions.tick(queue.keys, one, ttl_ms=1, retries=0))
            state = _state(queue, name)
    return queue.run(schedule.resume_cron(queue.keys, name))


def forget_cron(queue: QueueSession, name: str) -> None:
    """Remove what is known of an entry; raise ConfigurationError while a process has it."""
    state, now_ms = _state(queue, name), queue.run(commands.server_ms())
    if state.is_served(now_ms / 1000):
        raise ConfigurationError(
            f"a worker has the periodic entry {name!r}, and would register it again: take it out of the code, and wait "
            f"{UNSERVED_SECONDS} s after the last worker with it has ended"
        )
    queue.run(schedule.forget_cron(queue.keys, name))


def _state(queue: QueueSession, name: str) -> CronState:
    """Return an entry; raise ConfigurationError when the queue has none of that name."""
    states = {one.entry: one for one in queue.run(schedule.cron_states(queue.keys))}
    if name not in states:
        known = f"it has {', '.join(states)}" if states else "it has none"
        raise ConfigurationError(f"queue {queue.name!r} has no periodic entry {str(name)[:80]!r}; {known}")
    return states[name]


def _view(keys: Keys, state: CronState, now: float, *, is_alive: bool) -> CronView:
    coming = state.next
    return CronView(
        name=state.entry,
        queue=keys.name,
        layout=str(keys.layout),
        schedule=state.schedule,
        next=coming,
        late=0.0 if coming is None else max(0.0, round(now - coming, 3)),
        ticked=state.ticked,
        is_served=state.is_served(now),
        last_id=state.id,
        is_alive=is_alive,
        missed=state.missed,
        skipped=state.skipped,
        pause=state.pause,
    )
