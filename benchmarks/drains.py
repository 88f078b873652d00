"""A full queue is worked off: messages a second, Redis commands and CPU time for each."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import psutil

from benchmarks.stage import LOOK_SECONDS, START_SECONDS, Running, Stage
from benchmarks.steps import StepError
from benchmarks.works import MOST, Work

#: A worker at work that makes no headway for so long has failed.
STALL_SECONDS = 8.0
#: What is worked before the clock starts: by then every process is at work.
HEAD_SHARE = 0.15


@dataclass(frozen=True, slots=True)
class Watch:
    """
    How long a drain is watched.

    Attributes:
        seconds: the most, from when the head is done.
        share: of the messages that the peer has to work in a whole measure.
    """

    seconds: float
    share: float = 1.0


class Drained(NamedTuple):
    """What one drain gave: messages a second; for each message, commands in Redis and µs of CPU time."""

    rate: float
    commands: float
    worker_cpu: float
    redis_cpu: float


class _Spent(NamedTuple):
    """How many messages are left, and the CPU seconds spent by then: of the worker's processes, and of Redis."""

    left: int
    worker: float
    redis: float


def drain(stage: Stage, work: Work, processes: int, watch: Watch) -> Drained:
    """Fill the queue, start the worker, and watch."""
    peer, client = stage.peer, stage.client
    count = round(min(peer.drained, MOST.get(work, peer.drained)) * watch.share)
    stage.empty()
    stage.fill(count, work)
    whole = peer.backlog(client)
    client.start_counting()
    looks: list[tuple[float, int]] = []
    with stage.worker(processes, work) as running:
        for look in _looks(stage, running, whole, watch):
            looks.append(look)
            if look[1] == whole:
                begun = _spent(stage, running, look[1])
        ended, commands = _spent(stage, running, look[1]), client.commands_of_others()
    ahead = [look for look in looks if look[1] >= whole * (1 - HEAD_SHARE)]
    (first, before), (last, after) = ahead[-1], looks[-1]
    return Drained(
        rate=(before - after) / (last - first),
        commands=commands / (whole - after),
        worker_cpu=(ended.worker - begun.worker) / (begun.left - ended.left) * 1e6,
        redis_cpu=(ended.redis - begun.redis) / (begun.left - ended.left) * 1e6,
    )


def _looks(stage: Stage, running: Running, whole: int, watch: Watch) -> Iterator[tuple[float, int]]:
    """Yield monotonic seconds and how many messages are left, until none is or it was watched long enough."""
    began, busy_since, moved_at, before = time.monotonic(), None, time.monotonic(), whole
    yield began, whole
    while before:
        time.sleep(LOOK_SECONDS)
        now, left = time.monotonic(), stage.peer.backlog(stage.client)
        running.check()
        yield now, left
        if busy_since is None and left < whole * (1 - HEAD_SHARE):
            busy_since = now
        moved_at = now if left != before else moved_at
        before = left
        if now - moved_at > (START_SECONDS if left >= whole else STALL_SECONDS):
            raise StepError(f"drain: {left} of {whole} messages stayed where they were: {stage.worker_says()}")
        if busy_since and now - busy_since > watch.seconds:
            return


def _spent(stage: Stage, running: Running, left: int) -> _Spent:
    """Return what the worker's processes and Redis have spent so far."""
    parent = psutil.Process(running.process.pid)
    server = psutil.Process(stage.client.info("server")["process_id"])
    return _Spent(left, sum(map(cpu_seconds, (parent, *parent.children(recursive=True)))), cpu_seconds(server))


def cpu_seconds(process: psutil.Process) -> float:
    """Return what a process has spent so far, 0 for one that is gone."""
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0  # it ended while we looked
    return float(times.user + times.system)
