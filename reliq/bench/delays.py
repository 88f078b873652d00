"""How late a handler begins: after the due time of a delayed message, and after the publish when it was idle."""

import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from reliq.bench.report import Figure, percentile
from reliq.bench.stage import BODY, Stage
from reliq.bench.workers import Workers
from reliq.message import Outgoing

#: Messages a second that a client surely publishes one by one: the first is due when the last is published.
SLOWEST_PUBLISH = 1500
PICKUP_PAUSE_SECONDS = 0.03
#: Publishes before the clock counts.
WARM_UP = 5
MS = 1000


def lateness(stage: Stage, rate: int) -> list[Figure]:
    """Have messages come due at `rate` a second, one idle worker waiting; never early is shown by the least."""
    count = round(rate * stage.scale.late_seconds)
    offset = stage.clock_offset()
    with stage.workers("timed") as workers:
        first = time.time() + offset + 1 + count / SLOWEST_PUBLISH
        stage.queue.publish_many(_due(first, rate, count))
        rows = _rows(stage, workers)
    late = [(began + offset - due) * MS for began, due, _ in rows]
    return _figures("lateness", f"at {rate}/s", late)


def pickup(stage: Stage) -> list[Figure]:
    """Publish to an idle worker, one message at a time: from before the publish to the start of the handler."""
    with stage.workers("timed") as workers:
        _publish_slowly(stage, WARM_UP)
        _rows(stage, workers)
        _publish_slowly(stage, stage.scale.pickups)
        rows = _rows(stage, workers)
    return _figures("pickup", "by an idle worker", [(began - sent) * MS for began, _, sent in rows])


def _due(first: float, rate: int, count: int) -> Iterator[Outgoing[dict[str, Any]]]:
    for number in range(count):
        yield Outgoing(body=BODY, at=datetime.fromtimestamp(first + number / rate, UTC))


def _publish_slowly(stage: Stage, count: int) -> None:
    for _ in range(count):
        time.sleep(PICKUP_PAUSE_SECONDS)
        stage.queue.publish({**BODY, "sent": time.time()})


def _rows(stage: Stage, workers: Workers) -> list[tuple[float, float, float]]:
    """Return what was noted once everything is done."""
    for _ in stage.until_empty(workers):
        pass
    return [(began, due, sent) for answer in workers.look() for began, due, sent in answer["rows"]]


def _figures(part: str, name: str, values: list[float]) -> list[Figure]:
    return [
        Figure(part=part, name=f"{name}, {label}", value=value, unit="ms")
        for label, value in (
            ("least", min(values)),
            ("p50", percentile(values, 50)),
            ("p99", percentile(values, 99)),
        )
    ]
