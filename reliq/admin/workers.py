"""Who is alive and what runs where, as the worker processes say themselves."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reliq import commands
from reliq.errors import RedisUnavailableError
from reliq.roster import Worker

if TYPE_CHECKING:
    from reliq.admin.session import Session


@dataclass(frozen=True, slots=True)
class Running:
    """
    One handler that runs, as its worker said at most 5 s ago.

    Attributes:
        attempt: 1 for the first delivery; None for a bare body.
        started: in unix seconds, by its worker's clock.
        seconds: for how long it runs.
        worker: the id of its process.
        seen: when its worker said so, in unix seconds by its clock.
    """

    queue: str
    id: str
    attempt: int | None
    started: float
    seconds: float
    worker: str
    host: str
    pid: int
    seen: float


def workers_alive(session: Session) -> list[Worker]:
    """Return the record of every worker process that is alive, sorted by host and pid."""
    ids = session.run(commands.worker_ids())
    answers = session.try_all(commands.worker_records(ids))
    found: list[Worker] = []
    for answer in answers:
        if isinstance(answer, RedisUnavailableError):
            raise answer
        found += [answer] if isinstance(answer, Worker) else []  # a record that something else wrote hides no other
    return sorted(found, key=lambda one: (one.host, one.pid))


def running_in(workers: list[Worker], queue: str | None = None, longer_than: float = 0.0) -> list[Running]:
    """Return the handlers that run, of one queue or of all, the longest running first."""
    now = time.time()
    rows = [
        Running(
            slot.queue,
            slot.id,
            slot.attempt,
            slot.started,
            # A record is up to some seconds old; a worker's clock may be ahead of ours.
            max(now, worker.seen) - slot.started,
            worker.id,
            worker.host,
            worker.pid,
            worker.seen,
        )
        for worker in workers
        for slot in worker.running
        if queue in (None, slot.queue)
    ]
    return sorted((row for row in rows if row.seconds >= longer_than), key=lambda row: -row.seconds)
