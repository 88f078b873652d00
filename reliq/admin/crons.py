"""Methods with which operators read and change periodic jobs and stored schedules."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import msgspec

from reliq.admin.queues import chosen
from reliq.admin.session import AdminBase, QueueSession
from reliq.errors import ConfigurationError
from reliq.keys import Keys, run_id
from reliq.lua import transitions
from reliq.metrics.crons import SKIPS, UNSERVED_SECONDS, CronState, cron_states
from reliq.queue import pause_by
from reliq.redis import commands
from reliq.redis.commands import Command
from reliq.redis.connection import BLOCKING, Driver, run_blocking
from reliq.schedule import Schedule
from reliq.schedules import StoredSchedule, StoredSchedules
from reliq.settings import seconds
from reliq.text import shell_command, whole_number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reliq.message import Duration
    from reliq.redis.session import Session

#: Seconds to sleep between two checks whether a worker has published the message of a periodic job.
RUN_POLL_SECONDS = 0.1
#: `resume_cron` counts at most this many skipped ticks in one script call.
TICKS_TOGETHER = 100_000
#: The fields that each periodic job has in the Redis hash `cron`. The module `reliq.schedule` describes them.
FIELDS = ("schedule", "seen", "former", "former_seen", "last", "ticked", "id", "missed", *SKIPS, "pause", "asked")


class CronReads(AdminBase):
    """The method that reads the periodic jobs of queues."""

    def crons(self, names: Sequence[str] = ()) -> list[CronState]:
        """Return the periodic jobs of the named queues, or of all registered queues, sorted by name."""
        session = self._session()
        return crons_of(session, chosen(session, [self._queue(name).keys for name in names]).queues)

    def schedules(self, queue: str, *, prefix: str = "", limit: int = 1000) -> list[StoredSchedule]:
        """Return the stored schedules of a queue, with the arguments of `Queue.schedules`."""
        return run_blocking(_stored(self._queue(queue)).read(BLOCKING, prefix, limit))


class CronActions(AdminBase):
    """The methods that change periodic jobs."""

    def run_cron(self, queue: str, name: str, *, wait: Duration = 15.0) -> str:
        """
        Run a periodic job now, even while it is paused; return the id of its message.

        This call waits until a running worker has published the message.

        Args:
            queue: name of the queue.
            name: name of the periodic job.
            wait: seconds to wait for a worker.

        Raises:
            ConfigurationError: the queue has no job of this name, no worker has the job in its code, or no worker has
                published the message within `wait` seconds.
        """
        for_seconds = seconds("wait", wait)
        session = self._queue(queue)
        cron, now_ms = _cron(session, name)
        if not cron.is_served:
            raise ConfigurationError(f"no worker has the periodic job {name!r} now: start a worker with this job")
        key, field = session.keys.cron, f"{name} asked"
        read_request = Command(("HGET", key, field), lambda reply: whole_number(reply or b""))
        asked_ms = session.run(read_request)
        if asked_ms is None:
            asked_ms = now_ms
            session.run(Command(("HSET", key, field, asked_ms), int))
        until = time.monotonic() + for_seconds
        while session.run(read_request) is not None:
            if time.monotonic() > until and session.run(Command(("HDEL", key, field), int)):
                raise ConfigurationError(
                    f"no worker has published the periodic job {name!r} within {for_seconds:.10g} s; see worker logs"
                )
            time.sleep(RUN_POLL_SECONDS)
        return run_id(name, asked_ms)

    def pause_cron(self, queue: str, name: str, *, reason: str = "", by: str = "") -> None:
        """
        Pause a periodic job: until `resume_cron`, its ticks (due runs) are skipped and counted.

        Args:
            queue: name of the queue.
            name: name of the periodic job.
            reason: why the job is paused, for other operators.
            by: name of the operator who pauses the job; by default user@host.
        """
        session = self._queue(queue)
        pause = pause_by(by, reason)
        _cron(session, name)
        session.run(Command(("HSET", session.keys.cron, f"{name} pause", msgspec.json.encode(pause)), int))

    def resume_cron(self, queue: str, name: str) -> bool:
        """Resume a periodic job; return whether it was paused. Ticks during the pause are not run later."""
        session = self._queue(queue)
        cron, now_ms = _cron(session, name)
        counted = -1
        # Count the ticks that were skipped during the pause, because perhaps no worker was running to count them.
        while cron.pause and cron.last != counted:
            counted = cron.last
            # If this version of reliq cannot read the schedule, the next tick is None.
            schedule = None if cron.next is None else Schedule.parse(cron.schedule)
            if schedule and (ticks := schedule.ticks(cron.last, now_ms // 1000, most=TICKS_TOGETHER)):
                skipped = transitions.Tick(name, cron.schedule, ticks[-1], cron.last, missed=len(ticks))
                session.run(transitions.tick(session.keys, skipped, ttl_ms=1, retries=0))
                cron, _ = _cron(session, name)
        return session.run(Command(("HDEL", session.keys.cron, f"{name} pause"), bool))

    def delete_cron(self, queue: str, name: str) -> None:
        """
        Delete the state that Redis stores for a periodic job, after you have removed the job from the code.

        Raises:
            ConfigurationError: the queue has no job of this name, or a worker still has the job in its code.
        """
        session = self._queue(queue)
        cron, _ = _cron(session, name)
        if cron.is_served:
            raise ConfigurationError(
                f"a worker has the periodic job {name!r} in its code, and would register it again: remove the job from "
                f"the code, stop the workers that have it, and try again after {UNSERVED_SECONDS} s"
            )
        session.run(Command(("HDEL", session.keys.cron, *(f"{name} {field}" for field in FIELDS)), int))

    def pause_schedule(self, queue: str, name: str, *, reason: str = "", by: str = "") -> None:
        """
        Pause a stored schedule: until `resume_schedule`, its ticks (due runs) are skipped.

        Args:
            queue: name of the queue.
            name: name of the schedule.
            reason: why the schedule is paused, for other operators.
            by: name of the operator who pauses the schedule; by default user@host.

        Raises:
            ConfigurationError: the queue has no schedule of this name.
        """
        pause = msgspec.json.encode(pause_by(by, reason))
        run_blocking(_stored(self._queue(queue), name).change(BLOCKING, "pause", name, pause))

    def resume_schedule(self, queue: str, name: str) -> bool:
        """Resume a stored schedule; return whether it was paused. Ticks during the pause are not run later."""
        return run_blocking(_stored(self._queue(queue), name).resume(BLOCKING, name))

    def delete_schedule(self, queue: str, name: str) -> None:
        """Delete a stored schedule; raise ConfigurationError if the queue has no schedule of this name."""
        run_blocking(_stored(self._queue(queue), name).change(BLOCKING, "delete", name))


def _stored(queue: QueueSession, name: str = "") -> StoredSchedules:
    """Return an object that reads and changes stored schedules; raise ConfigurationError if `name` is not stored."""

    async def ask(_driver: Driver, request: Any) -> Any:
        return queue.run(request)

    if name and not queue.run(Command(("HEXISTS", queue.keys.plans, name), bool)):
        see = shell_command("schedules", queue.keys.name, layout=queue.keys.layout)
        raise ConfigurationError(f"queue {queue.keys.name!r} has no stored schedule {name[:100]!r}; see `{see}`")
    unused: Any = None
    return StoredSchedules(queue.keys, unused, unused, ask)


def crons_of(session: Session, queues: Sequence[Keys]) -> list[CronState]:
    """
    Return the periodic jobs of `queues`, sorted by name.

    If Redis refuses to read a queue, its jobs are omitted.
    """
    now_ms, *answers = session.try_all([commands.server_ms(), *map(cron_states, queues)])
    if isinstance(now_ms, Exception):
        raise now_ms
    found = [
        (keys, cron) for keys, crons in zip(queues, answers, strict=True) if isinstance(crons, list) for cron in crons
    ]
    counts = session.try_all([commands.retries_left(keys, [cron.last_id]) for keys, cron in found])
    crons = [
        cron.at(now_ms / 1000, is_alive=isinstance(left, list) and left[0] is not None)
        for (_, cron), left in zip(found, counts, strict=True)
    ]
    return sorted(crons, key=lambda cron: (cron.name, cron.queue))


def _cron(queue: QueueSession, name: str) -> tuple[CronState, int]:
    """
    Return the periodic job `name` of a queue, and the server's time in unix ms.

    Raises:
        ConfigurationError: the queue has no periodic job of this name.
    """
    states, now_ms = queue.run_all([cron_states(queue.keys), commands.server_ms()])
    crons = {cron.name: cron for cron in states}
    if name not in crons:
        known = f"it has {', '.join(crons)}" if crons else "it has none"
        raise ConfigurationError(f"queue {queue.name!r} has no periodic job {str(name)[:80]!r}; {known}")
    return crons[name].at(now_ms / 1000, is_alive=False), now_ms
