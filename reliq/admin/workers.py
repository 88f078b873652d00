"""Worker processes and their running handlers, by the records that the processes write."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reliq.admin import calls
from reliq.redis.commands import Worker

if TYPE_CHECKING:
    from reliq.admin.session import Session
    from reliq.redis.commands import StackReport


@dataclass(frozen=True, slots=True)
class Running:
    """
    One running handler, from a worker record that is at most 5 s old.

    Attributes:
        attempt: 1 for the first delivery; None for a bare body.
        started: in unix seconds, by its worker's clock.
        seconds: for how long it runs.
        worker: the id of its process.
        seen: when the record was written, in unix seconds by its worker's clock.
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


@dataclass(frozen=True, slots=True)
class WorkerView:
    """
    One worker process, and the stacks of its handlers.

    Attributes:
        record: its latest record; None when that is over 15 s old: the process is dead, or its interpreter is blocked.
        asked: for how many seconds a request for its stacks has waited; None when there is no request.
        report: the stacks that it reported last, kept for ten minutes; None when it has reported none since the request.
    """

    id: str
    record: Worker | None
    asked: float | None
    report: StackReport | None


def workers_alive(session: Session) -> list[Worker]:
    """Return the record of every worker process that is alive, sorted by host and pid."""
    ids = session.run(calls.worker_ids())
    answers = session.try_all(calls.worker_records(ids))
    # A record that is malformed, or whose server of several is away, hides no other.
    workers = [answer for answer in answers if isinstance(answer, Worker)]
    return sorted(workers, key=lambda worker: (worker.host, worker.pid))


def running_in(workers: list[Worker], queue: str | None = None, longer_than: float = 0.0) -> list[Running]:
    """Return the running handlers, of one queue or of all, the longest running first."""
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
