"""Worker processes and their running handlers, read from the records that the processes write."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reliq.admin import calls
from reliq.admin.session import AdminBase
from reliq.errors import ConfigurationError
from reliq.redis.commands import Worker
from reliq.settings import seconds

if TYPE_CHECKING:
    from collections.abc import Collection

    from reliq.message import Duration
    from reliq.redis.commands import StackReport
    from reliq.redis.session import Session

#: A wait for stacks polls this often.
STACK_POLL_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Running:
    """
    A running handler, from a worker record that is at most 5 s old.

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
    A worker process, and the stacks of its handlers.

    Attributes:
        record: its latest record; None when that is over 15 s old: the process is dead, or its interpreter is blocked.
        asked: for how many seconds a request for its stacks has waited; None when there is no request.
        report: the stacks that it reported last, kept for ten minutes; None when it has reported none since the request.
    """

    id: str
    record: Worker | None
    asked: float | None
    report: StackReport | None


class WorkerReads(AdminBase):
    """Worker processes and their running handlers."""

    def workers(self) -> list[Worker]:
        """Return the record of every worker process that is alive, at most 5 s old."""
        return workers_alive(self._redis.session())

    def worker(self, id: str) -> WorkerView:
        """Return a worker process, and the stacks of its handlers when `Admin.ask_stacks` asked for them."""
        requests = [*calls.worker_records([id]), *calls.asked_stacks(id)]
        record, waits_ms, report, is_known = self._redis.session().read_each(requests, None)
        if record is None and not is_known:
            raise ConfigurationError(
                f"no worker {id[:40]!r} was alive within the last hour; `reliq workers` lists them"
            )
        return WorkerView(id, record, None if waits_ms is None else waits_ms / 1000, report)

    def running(self, queue: str, *, longer_than: Duration = 0.0) -> list[Running]:
        """Return the handlers of a queue that have run for `longer_than` seconds, the longest running first."""
        least = seconds("longer_than", longer_than)
        session = self._redis.queue(queue)
        rows = running_in(workers_alive(session), queue, least)
        return [row for row in rows if session.has(row.id)]


class WorkerActions(WorkerReads):
    """Requests to worker processes."""

    def ask_stacks(self, worker: str) -> None:
        """
        Ask a worker process for the stacks of its handlers; `worker` has the answer, within 5 s.

        It holds files, lines and functions, and no values. A process with a blocked interpreter does not answer.

        Raises:
            ConfigurationError: there is no such worker, or its record is older than 15 s.
        """
        if self.worker(worker).record is None:
            raise ConfigurationError(
                f"worker {worker} has written no record for 15 s: it is dead, or a handler blocks its interpreter"
            )
        self._redis.session().run_all(calls.ask_stacks(worker))

    def stacks(self, workers: Collection[str], *, for_seconds: Duration = 10.0) -> dict[str, StackReport]:
        """Ask worker processes for their stacks; return the reports that came within `for_seconds`, at most a minute."""
        wait = seconds("for_seconds", for_seconds, most=60)
        session = self._redis.session()
        session.run_all([request for id in workers for request in calls.ask_stacks(id)])
        reports: dict[str, StackReport] = {}
        until = time.monotonic() + wait
        while waiting := [id for id in workers if id not in reports]:
            answers = session.run_all([request for id in waiting for request in calls.asked_stacks(id)])[1::3]
            reports |= {id: report for id, report in zip(waiting, answers, strict=True) if report is not None}
            if time.monotonic() >= until:
                break
            time.sleep(STACK_POLL_SECONDS)
        return reports


def workers_alive(session: Session) -> list[Worker]:
    """Return the record of every worker process that is alive, sorted by host and pid."""
    ids = session.run(calls.worker_ids())
    answers = session.try_all(calls.worker_records(ids))
    # A malformed record, or a record on a server that is away, hides no other.
    workers = [answer for answer in answers if isinstance(answer, Worker)]
    return sorted(workers, key=lambda worker: (worker.host, worker.pid))


def running_in(workers: list[Worker], queue: str | None = None, longer_than: float = 0.0) -> list[Running]:
    """Return the running handlers, of one queue or of all, the longest running first."""
    now = time.time()
    rows = list[Running]()
    for worker in workers:
        for job in worker.running:
            # A record is up to some seconds old; a worker's clock may be ahead of ours.
            for_seconds = max(now, worker.seen) - job.started
            if queue in (None, job.queue) and for_seconds >= longer_than:
                place = (worker.id, worker.host, worker.pid, worker.seen)
                rows.append(Running(job.queue, job.id, job.attempt, job.started, for_seconds, *place))
    return sorted(rows, key=lambda row: -row.seconds)
