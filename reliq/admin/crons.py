"""Periodic entries as an operator sees and changes them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec

from reliq.admin.queues import chosen
from reliq.admin.session import AdminBase
from reliq.errors import ConfigurationError
from reliq.keys import run_id
from reliq.lua import transitions
from reliq.metrics.crons import SKIPS, UNSERVED_SECONDS, CronState, cron_states
from reliq.queue import pause_by
from reliq.redis import commands
from reliq.redis.commands import Command
from reliq.schedule import Schedule
from reliq.settings import seconds
from reliq.text import whole_number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reliq.admin.session import QueueSession
    from reliq.keys import Keys
    from reliq.message import Duration
    from reliq.redis.session import Session

#: A requested run is polled this often until a worker has published it.
RUN_POLL_SECONDS = 0.1
#: One call of a resume counts at most this many skipped ticks.
TICKS_TOGETHER = 100_000
#: The fields of an entry in the hash `cron`; see reliq.schedule.
FIELDS = ("schedule", "seen", "former", "former_seen", "last", "ticked", "id", "missed", *SKIPS, "pause", "asked")


class CronReads(AdminBase):
    """The periodic entries of queues."""

    def crons(self, names: Sequence[str] = ()) -> list[CronState]:
        """Return the periodic entries of the queues named, or of all in the registry, by name."""
        session = self._redis.session()
        return crons_of(session, chosen(session, [self._redis.queue(name).keys for name in names]).queues)


class CronActions(AdminBase):
    """Changes of periodic entries."""

    def run_cron(self, queue: str, name: str, *, wait: Duration = 15.0) -> str:
        """
        Have a worker publish the message of a periodic entry at once, even while it is paused; return the message's id.

        Raises:
            ConfigurationError: the queue has no such entry, no worker has it, or none has published within `wait`.
        """
        for_seconds = seconds("wait", wait)
        session = self._redis.queue(queue)
        cron, now_ms = _cron(session, name)
        if not cron.is_served:
            raise ConfigurationError(f"no worker has the periodic entry {name!r} now: start one that publishes it")
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
                    f"no worker has published the periodic entry {name!r} within {for_seconds:.10g} s; see their logs"
                )
            time.sleep(RUN_POLL_SECONDS)
        return run_id(name, asked_ms)

    def pause_cron(self, queue: str, name: str, *, reason: str = "", by: str = "") -> None:
        """Have the ticks of a periodic entry skipped, and counted, until `resume_cron`; `by` is user@host by default."""
        session = self._redis.queue(queue)
        pause = pause_by(by, reason)
        _cron(session, name)
        session.run(Command(("HSET", session.keys.cron, f"{name} pause", msgspec.json.encode(pause)), int))

    def resume_cron(self, queue: str, name: str) -> bool:
        """Have the next tick of a periodic entry published; return whether it was paused. Ticks until now are skipped."""
        session = self._redis.queue(queue)
        cron, now_ms = _cron(session, name)
        counted = -1
        while cron.pause and cron.last != counted:  # there may be no worker to count the skipped ticks
            counted = cron.last
            # A schedule that cannot be read here has no next tick.
            schedule = None if cron.next is None else Schedule.parse(cron.schedule)
            if schedule and (ticks := schedule.ticks(cron.last, now_ms // 1000, most=TICKS_TOGETHER)):
                skipped = transitions.Tick(name, cron.schedule, ticks[-1], cron.last, missed=len(ticks))
                session.run(transitions.tick(session.keys, skipped, ttl_ms=1, retries=0))
                cron, _ = _cron(session, name)
        return session.run(Command(("HDEL", session.keys.cron, f"{name} pause"), bool))

    def delete_cron(self, queue: str, name: str) -> None:
        """Remove the state of a periodic entry that is no longer in the code; raise while a worker has it."""
        session = self._redis.queue(queue)
        cron, _ = _cron(session, name)
        if cron.is_served:
            raise ConfigurationError(
                f"a worker has the periodic entry {name!r}, and would register it again: take it out of the code, and wait "
                f"{UNSERVED_SECONDS} s after the last worker with it has ended"
            )
        session.run(Command(("HDEL", session.keys.cron, *(f"{name} {field}" for field in FIELDS)), int))


def crons_of(session: Session, queues: Sequence[Keys]) -> list[CronState]:
    """Return the periodic entries of queues, by name; none of a queue that refuses."""
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
    """Return an entry and Redis' clock in ms; raise ConfigurationError when the queue has no entry of that name."""
    states, now_ms = queue.run_all([cron_states(queue.keys), commands.server_ms()])
    crons = {cron.name: cron for cron in states}
    if name not in crons:
        known = f"it has {', '.join(crons)}" if crons else "it has none"
        raise ConfigurationError(f"queue {queue.name!r} has no periodic entry {str(name)[:80]!r}; {known}")
    return crons[name].at(now_ms / 1000, is_alive=False), now_ms
