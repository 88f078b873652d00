"""Worker processes and their running handlers, as read from the records that worker processes write to Redis."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reliq.admin import calls
from reliq.admin.session import AdminBase
from reliq.errors import ConfigurationError, RedisUnavailableError
from reliq.metrics.snapshot import SERVER_FACTS, facts_in
from reliq.redis.commands import StackReport, Worker
from reliq.settings import seconds

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from reliq.message import Duration
    from reliq.redis.session import Session

#: Seconds to sleep between two checks whether workers have reported the requested stacks.
STACK_POLL_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Running:
    """
    A running handler, as read from a worker record. Workers write their records every 5 s.

    Attributes:
        attempt: number of the delivery, 1 for the first; None for a body without an envelope.
        started: start of the handler, in unix seconds by the worker's clock.
        seconds: for how many seconds the handler has been running.
        worker: the id of the worker process.
        seen: when the record was written, in unix seconds by the worker's clock.
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
        record: its latest record; None if the record is over 15 s old, because the process is dead or its interpreter
            is blocked.
        asked: for how many seconds a request for its stacks has been waiting; None if no request is waiting.
        report: the stacks that it reported last, kept for ten minutes; None if it has not reported since the last
            request.
    """

    id: str
    record: Worker | None
    asked: float | None
    report: StackReport | None


class WorkerReads(AdminBase):
    """The methods that read worker processes and their running handlers."""

    def workers(self) -> list[Worker]:
        """
        Return the records of all worker processes.

        A process writes its record every 5 s. The record of a killed process stays for up to 15 s.

        Raises:
            RedisUnavailableError: Redis does not answer, or it has no records because it refuses writes of workers.
        """
        session = self._session()
        workers = workers_alive(session)
        if not workers and (why := refusal_of_writes(info_of(session))):
            raise RedisUnavailableError(f"the workers are unknown: {why}")
        return workers

    def worker(self, id: str) -> WorkerView:
        """Return a worker process, with the stacks that it reported after `Admin.ask_stacks`."""
        requests = [*calls.worker_records([id]), *calls.asked_stacks(id)]
        record, waits_ms, report, is_known = self._session().read_each(requests, None)
        if record is None and not is_known:
            raise ConfigurationError(
                f"no worker {id[:40]!r} was alive within the last hour; `reliq workers` lists them"
            )
        return WorkerView(id, record, None if waits_ms is None else waits_ms / 1000, report)

    def running(self, queue: str, *, longer_than: Duration = 0.0) -> list[Running]:
        """Return the handlers of a queue that have run for at least `longer_than` seconds, the longest first."""
        least = seconds("longer_than", longer_than)
        session = self._queue(queue)
        rows = running_in(workers_alive(session), queue, least)
        return [row for row in rows if session.has(row.id)]


class WorkerActions(WorkerReads):
    """The methods that send requests to worker processes."""

    def ask_stacks(self, worker: str) -> None:
        """
        Request the stacks of a worker's handlers. After up to 5 s, the method `worker` returns the stacks.

        The stacks contain files, lines and functions, but no values. A process whose interpreter is blocked does not
        report its stacks.

        Raises:
            ConfigurationError: there is no worker with this id, or its record is older than 15 s.
        """
        if self.worker(worker).record is None:
            raise ConfigurationError(
                f"worker {worker} has written no record for 15 s: it is dead, or a handler blocks its interpreter"
            )
        self._session().run_all(calls.ask_stacks(worker))

    def stacks(self, workers: Collection[str], *, for_seconds: Duration = 10.0) -> dict[str, StackReport]:
        """
        Request the stacks of worker processes, and wait for them; return the reports that arrive in time, by worker id.

        Args:
            workers: ids of the worker processes.
            for_seconds: seconds to wait for the reports, at most a minute.
        """
        wait = seconds("for_seconds", for_seconds, most=60)
        session = self._session()
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


def info_of(session: Session) -> dict[str, dict[str, str]]:
    """
    Return the values of INFO for each Redis server, by the server's name.

    The sections of INFO that this user may not read are missing.
    """
    return {name: facts_in(sections) for name, sections in session.client.run_everywhere(SERVER_FACTS).items()}


def refusal_of_writes(servers: Mapping[str, Mapping[str, str]]) -> str:
    """
    Return why a Redis server refuses writes, such as the records of workers: its memory is full, or its disk fails.

    Return an empty text if neither is the case.

    Args:
        servers: the values of INFO for each Redis server.
    """
    for facts in servers.values():
        used, limit, apart = (
            int(facts.get(name, 0)) for name in ("used_memory", "maxmemory", "mem_not_counted_for_evict")
        )
        if limit and used - apart > limit:
            return "Redis refuses writes, because its memory is full"
        if "err" in (facts.get("aof_last_write_status"), facts.get("rdb_last_bgsave_status")):
            return "Redis refuses writes, because it cannot write to its disk"
    return ""


def workers_alive(session: Session) -> list[Worker]:
    """Return the record of every living worker process, sorted by host and pid."""
    ids = session.run(calls.worker_ids())
    answers = session.try_all(calls.worker_records(ids))
    # Skip malformed records, and records on servers that do not answer.
    workers = [answer for answer in answers if isinstance(answer, Worker)]
    return sorted(workers, key=lambda worker: (worker.host, worker.pid))


def running_in(workers: list[Worker], queue: str | None = None, longer_than: float = 0.0) -> list[Running]:
    """Return the handlers of a queue, or of all queues, that have run for `longer_than` seconds, the longest first."""
    now = time.time()
    rows = list[Running]()
    for worker in workers:
        for job in worker.running:
            # The worker's clock may be ahead of the clock of this process, so use the later of the two times.
            for_seconds = max(now, worker.seen) - job.started
            if queue in (None, job.queue) and for_seconds >= longer_than:
                place = (worker.id, worker.host, worker.pid, worker.seen)
                rows.append(Running(job.queue, job.id, job.attempt, job.started, for_seconds, *place))
    return sorted(rows, key=lambda row: -row.seconds)
