"""The planner of a worker process publishes the due ticks (planned runs) of the schedules that Redis stores."""

from __future__ import annotations

import logging
import random
import time
from typing import TYPE_CHECKING

from reliq.errors import ConfigurationError
from reliq.handlers.registration import TICK_HEADER, plan as plan_ticks
from reliq.keys import plan_id
from reliq.lua import transitions
from reliq.lua.transitions import DuePlan, PlanTick
from reliq.schedule import Schedule
from reliq.schedules import PAGE, Row
from reliq.settings import BATCH_LIMIT, DAY_SECONDS, MIB
from reliq.text import chunked_by_size, printable
from reliq.wire_format import envelope_rest
from reliq.worker.loop import QueueBackoff

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from reliq.keys import Keys
    from reliq.redis.client import Client

logger = logging.getLogger("reliq")

#: A worker checks for due schedules at least this often, because Redis does not notify workers of new schedules.
CHECK_SECONDS = 1.0
#: How often the planner checks a queue that has no schedules.
ABSENT_SECONDS = 10.0
#: One script call publishes messages with at most this many bytes together.
TICK_BYTES = 4 * MIB
#: reliq has its own random generator, so that an application that seeds the module `random` gets the expected numbers.
_chance = random.SystemRandom()


class Planner:
    """
    Publish the due ticks (planned runs) of the schedules that Redis stores.

    Every process tries to publish each tick, and Redis accepts it only once. To check for due schedules, one short
    script call for each queue is enough, however many schedules the queue has. If this process cannot read a schedule,
    it leaves the schedule to other processes.
    """

    def __init__(self, client: Client, shards: Sequence[Keys]) -> None:
        self._client = client
        self._shards = [keys for keys in shards if not keys.bare]
        self._skip: dict[Keys, int] = {}  # how many due schedules the next step skips in each queue
        self._absent_until: dict[Keys, float] = {}  # when to check a queue without schedules again
        self._unreadable: set[Keys] = set()
        self._backoff = QueueBackoff("planner", client.observers)

    def step(self) -> float:
        """Publish the due ticks of up to PAGE schedules of each queue; return the seconds until the next step."""
        began = time.monotonic()
        shards = [
            keys
            for keys in self._shards
            if not self._backoff.waits(keys) and self._absent_until.get(keys, 0.0) <= began
        ]
        looks = [transitions.plan_due(keys, skip=self._skip.get(keys, 0), limit=PAGE) for keys in shards]
        wait_ms = CHECK_SECONDS * 1000
        for keys, answer in zip(shards, self._client.run_all(looks), strict=True):
            if isinstance(answer, Exception):
                self._backoff.note(keys, answer)
                continue
            if not answer.due and answer.wait_ms < 0:
                self._absent_until[keys] = began + ABSENT_SECONDS
            left, ticks = 0, list[PlanTick]()
            for plan in answer.found:
                try:
                    ticks += ticks_of(plan, answer.now_ms)
                except (ConfigurationError, ValueError, OverflowError) as error:
                    left += 1
                    self._report(keys, plan.name, error)
            calls = [
                transitions.plan_tick(keys, some)
                for some in chunked_by_size(ticks, lambda tick: len(tick.value), TICK_BYTES, BATCH_LIMIT)
            ]
            answers = self._client.run_all(calls) if calls else []
            failed = [error for error in answers if isinstance(error, Exception)]
            if failed:
                self._backoff.note(keys, failed[0])
                continue
            self._backoff.over(keys)
            skip = self._skip.pop(keys, 0)
            if left and skip + len(answer.found) < answer.due:  # the next step skips the unreadable schedules
                self._skip[keys] = skip + left
                wait_ms = 0
            # Many more schedules are due. Skip a random number, so that processes read different schedules.
            elif answer.due - len(answer.found) > PAGE and not left:
                self._skip[keys] = _chance.randrange(answer.due - len(answer.found) - PAGE)
            if ticks or (skip and not left):
                wait_ms = 0
            elif answer.wait_ms > 0:
                wait_ms = min(wait_ms, answer.wait_ms)
        return max(0.0, wait_ms / 1000 - (time.monotonic() - began))

    def _report(self, keys: Keys, name: str, error: Exception) -> None:
        if keys not in self._unreadable:  # report only one schedule, because there may be many
            self._unreadable.add(keys)
            logger.error(
                "queue %s: this worker cannot read schedule %s, and maybe others, and leaves them to other workers: %s",
                *(keys.name, printable(name), error),
            )


def ticks_of(plan: DuePlan, now_ms: int) -> Iterator[PlanTick]:
    """
    Yield the ticks of a due schedule, the oldest first.

    For a deleted or paused schedule, yield a tick that only removes the schedule's due time from Redis.

    Raises:
        ValueError, OverflowError, ConfigurationError: this version of reliq, or this machine, cannot read the schedule.
    """
    row = Row.parse(plan.row) if plan.row else None
    if row is None or row.pause:
        yield PlanTick(plan_id(plan.name, 0), plan.name, "", plan.since, "")
        return
    schedule, header = Schedule.parse(row.options.schedule), row.header
    since, at = plan.since, int(float(plan.since))
    retries = header.retries or 0
    oldest = now_ms // 1000 - int(DAY_SECONDS) - 1  # ticks before this time are skipped
    for planned in plan_ticks(schedule, at - 1, now_ms // 1000, row.options.catch_up):
        next = schedule.next_after(planned.at if planned.is_published else max(planned.at, oldest))
        value = b""
        if planned.is_published:
            headers = {**header.headers, TICK_HEADER: schedule.moment(planned.at).isoformat()}
            value = envelope_rest(retries, now_ms, 0, headers, None, header.line or "") + row.body
        id = plan_id(plan.name, planned.at)
        after: str | int = "" if next is None else next
        yield PlanTick(id, plan.name, row.revision, since, after, row.options.ttl_ms, retries, value, header.line or "")
        since = str(after)
