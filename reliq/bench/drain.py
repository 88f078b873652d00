"""How fast a full queue is worked by a handler that does nothing."""

import time

from reliq.bench import bare
from reliq.bench.jobs import KINDS
from reliq.bench.report import Figure
from reliq.bench.stage import Stage
from reliq.text import count_of

#: Kinds of handler and numbers of processes.
COURSES = (*((kind, 1) for kind in KINDS), ("plain", 2))
#: This share of the messages is worked before the clock starts: by then every process is at work.
HEAD_SHARE = 0.1


def drain(stage: Stage, kind: str, processes: int) -> list[Figure]:
    """Work a full queue with default settings; return its rate beside that of the bare scripts."""
    name = f"{kind} handler, {count_of(processes, 'process', 'processes')}"
    rate, limit = bare.in_turns(stage, lambda: drain_rate(stage, kind, processes), bare.drains)
    return [Figure(part="drain", name=name, value=rate, unit="messages/s", bare=limit)]


def drain_rate(stage: Stage, kind: str, processes: int) -> float:
    """Return messages a second, from the last look before a tenth is done until all are acked."""
    stage.queue.pause(reason="benchmark")
    stage.fill(stage.scale.drained)
    with stage.workers(kind, processes) as workers:
        stage.queue.resume()
        looks = [(time.monotonic(), stage.scale.drained), *stage.until_empty(workers)]
    ahead = [look for look in looks if look[1] >= stage.scale.drained * (1 - HEAD_SHARE)]
    (first, alive), (last, _) = ahead[-1], looks[-1]
    return alive / (last - first)
