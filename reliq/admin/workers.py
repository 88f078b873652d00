"""Who is alive and what runs where, as the worker processes say themselves."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reliq.errors import ConfigurationError
from reliq.redis import commands
from reliq.redis.commands import Worker

if TYPE_CHECKING:
    from collections.abc import Collection

    from reliq.admin.session import Session
    from reliq.redis.commands import StackReport

#: A wait for stacks looks five times a second whether they have come.
STACK_LOOK_SECONDS = 0.2


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


@dataclass(frozen=True, slots=True)
class WorkerView:
    """
    One worker process, and where its handlers stood.

    Attributes:
        record: the latest that it wrote; None when that is over 15 s ago: it is dead, or its interpreter is held.
        asked: for how many seconds a request for its stacks has waited; None when none waits.
        report: the stacks that it told last, kept for ten minutes; None when it told none since it was asked.
    """

    id: str
    record: Worker | None
    asked: float | None
    report: StackReport | None


def worker_view(session: Session, id: str) -> WorkerView:
    """Return one worker process; raise ConfigurationError when none of that id was alive within the last hour."""
    record, waits_ms, report, is_known = session.read_each([*commands.worker_records([id]), *commands.look(id)], None)
    if record is None and not is_known:
        raise ConfigurationError(f"no worker {id[:40]!r} was alive within the last hour; `reliq workers` lists them")
    return WorkerView(id, record, None if waits_ms is None else waits_ms / 1000, report)


def ask_stacks(session: Session, id: str) -> None:
    """Ask a worker process for its stacks; raise ConfigurationError when none of that id is alive."""
    if worker_view(session, id).record is None:
        raise ConfigurationError(
            f"worker {id} has said nothing for 15 s: it is dead, or a handler holds its interpreter"
        )
    session.run_all(commands.request(id))


def stacks_of(session: Session, ids: Collection[str], for_seconds: float) -> dict[str, StackReport]:
    """Ask worker processes for their stacks and wait for them; return those that came within the time, by worker."""
    session.run_all([one for id in ids for one in commands.request(id)])
    found: dict[str, StackReport] = {}
    until = time.monotonic() + for_seconds
    while waiting := [id for id in ids if id not in found]:
        reports = session.run_all([one for id in waiting for one in commands.look(id)])[1::3]
        found |= {id: report for id, report in zip(waiting, reports, strict=True) if report is not None}
        if time.monotonic() >= until:
            break
        time.sleep(STACK_LOOK_SECONDS)
    return found


def workers_alive(session: Session) -> list[Worker]:
    """Return the record of every worker process that is alive, sorted by host and pid."""
    ids = session.run(commands.worker_ids())
    answers = session.try_all(commands.worker_records(ids))
    # A record that something else wrote, or whose server of several is away, hides no other.
    found = [answer for answer in answers if isinstance(answer, Worker)]
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
