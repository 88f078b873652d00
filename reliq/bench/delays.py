"""How late a handler begins: after the due time of a delayed message, and after the publish when it was idle."""

import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from reliq.bench import bare
from reliq.bench.report import Figure, percentile
from reliq.bench.stage import BODY, CLIENT_TIMEOUT_SECONDS, Stage
from reliq.bench.workers import Workers
from reliq.errors import ReliqError
from reliq.outgoing import Outgoing

#: Any client publishes at least this many messages a second, so the first is due after the last is published.
SLOWEST_PUBLISH = 1500
PICKUP_PAUSE_SECONDS = 0.03
#: Publishes before the clock counts.
WARM_UP = 5
MS = 1000


def lateness(stage: Stage, rate: int) -> list[Figure]:
    """Let messages come due at `rate` a second while an idle worker waits; the least figure shows that none is early."""
    count = round(rate * stage.scale.late_seconds)
    offset = stage.clock_offset()
    with stage.workers("timed") as workers:
        stage.queue.publish_many(_due(_dues(rate, count), offset))
        rows = _rows(stage, workers, count)
    late = [(began + offset - due) * MS for began, due, _ in rows]
    dues = _dues(rate, count)
    stage.queue.publish_many(_due(dues, offset))
    limit: list[float] = []
    bare.begin_when_due(stage, dues, lambda due: limit.append((time.time() - due) * MS))
    return _figures("lateness", f"at {rate}/s", late, limit)


def pickup(stage: Stage) -> list[Figure]:
    """Publish to an idle worker, one message at a time: from before the publish to the start of the handler."""
    with stage.workers("timed") as workers:
        rows = _picked_up(stage, workers, lambda: stage.queue.publish({**BODY, "sent": time.time()}))
    with stage.workers("bare") as workers, bare.handing_over(stage) as hand_over:
        limit = _picked_up(stage, workers, hand_over)
    return _figures("pickup", "by an idle worker", rows, limit)


def _dues(rate: int, count: int) -> list[float]:
    """Return due times at `rate` a second by this machine's clock, the first when all can have been published."""
    first = time.time() + 1 + count / SLOWEST_PUBLISH
    return [first + number / rate for number in range(count)]


def _due(dues: Sequence[float], offset: float) -> Iterator[Outgoing[dict[str, Any]]]:
    for due in dues:
        yield Outgoing(body=BODY, at=datetime.fromtimestamp(due + offset, UTC))


def _picked_up(stage: Stage, workers: Workers, send: Callable[[], object]) -> list[float]:
    """Send to idle workers, one message at a time; return how many ms each took to arrive."""
    for count in (WARM_UP, stage.scale.pickups):
        for _ in range(count):
            time.sleep(PICKUP_PAUSE_SECONDS)
            send()
        rows = _rows(stage, workers, count)
    return [(began - sent) * MS for began, _, sent in rows]


def _rows(stage: Stage, workers: Workers, count: int) -> list[tuple[float, float, float]]:
    """Wait until everything is done; return the `count` rows that the handlers noted: began, due, sent (unix seconds)."""
    for _ in stage.until_empty(workers):
        pass
    rows: list[tuple[float, float, float]] = []
    until = time.monotonic() + CLIENT_TIMEOUT_SECONDS
    while len(rows) < count:
        workers.check()
        if time.monotonic() > until:
            raise ReliqError(f"only {len(rows)} of {count} messages were noted; does something else take them?")
        rows += [(began, due, sent) for answer in workers.look() for began, due, sent in answer["rows"]]
    return rows


def _figures(part: str, name: str, values: list[float], limit: list[float]) -> list[Figure]:
    return [
        Figure(part=part, name=f"{name}, {label}", value=percentile(values, at), unit="ms", bare=percentile(limit, at))
        for label, at in (("least", 0), ("p50", 50), ("p99", 99))
    ]
