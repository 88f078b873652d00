"""The cost of reliq at rest: round trips of an idle worker, and memory of messages that wait."""

import time
from datetime import timedelta

from reliq.bench.report import Figure
from reliq.bench.stage import BODY, Stage
from reliq.outgoing import Outgoing

SETTLE_SECONDS = 1.5
DELAY = timedelta(hours=1)


def idle(stage: Stage) -> list[Figure]:
    """Count the round trips of a worker that has nothing to do."""
    with stage.workers("plain") as workers:
        time.sleep(SETTLE_SECONDS)
        before, began = workers.look()[0]["round_trips"], time.monotonic()
        time.sleep(stage.scale.idle_seconds)
        after, ended = workers.look()[0]["round_trips"], time.monotonic()
    return [Figure(part="idle", name="one worker", value=(after - before) / (ended - began), unit="round trips/s")]


def memory(stage: Stage) -> list[Figure]:
    """Weigh ready and delayed messages: what Redis uses with them, less what it uses before and after."""
    return [
        Figure(part="memory", name="a ready message", value=_weight(stage, timedelta(0)), unit="bytes"),
        Figure(part="memory", name="a delayed message", value=_weight(stage, DELAY), unit="bytes"),
    ]


def _weight(stage: Stage, delay: timedelta) -> float:
    count = stage.scale.stored
    before = _used(stage)
    stage.queue.publish_many(Outgoing(body=BODY, delay=delay) for _ in range(count))
    full = _used(stage)
    stage.empty()
    return (full - (before + _used(stage)) / 2) / count


def _used(stage: Stage) -> int:
    return int(stage.facts("memory")["used_memory"])
