"""What this Redis can do: the same scripts, and a SET, driven by one client with nothing around them."""

import time
from collections.abc import Callable
from statistics import median

from reliq import reads
from reliq.bench.stage import ANSWER_SECONDS, BODY, Stage
from reliq.codec import envelope_rest
from reliq.doors.ids import new_id, token
from reliq.pools import plain_client
from reliq.settings import QueueSettings, milliseconds
from reliq.transitions import Turn

BATCH = 100
LEASE_MS = 30_000


def in_turns(stage: Stage, ours: Callable[[], float], limit: Callable[[Stage], float]) -> tuple[float, float]:
    """Measure both, one after the other, in as many rounds as the scale says; return their medians."""
    pairs = []
    for _ in range(stage.scale.rounds):
        bare = limit(stage)
        pairs.append((ours(), bare))
        stage.empty()
    ours_all, bare_all = zip(*pairs, strict=True)
    return median(ours_all), median(bare_all)


def sets(stage: Stage) -> float:
    """Return how many SETs of 100 bytes a second redis-py makes, one by one."""
    key, body = stage.queue.keys.msg("bare"), b"x" * 100
    with plain_client(stage.url, ANSWER_SECONDS) as client:
        client.ping()
        began = time.perf_counter()
        for _ in range(stage.scale.singles):
            client.set(key, body)
        seconds = time.perf_counter() - began
        client.delete(key)
    return stage.scale.singles / seconds


def publishes(stage: Stage) -> float:
    """Return how many messages a second the script publishes, 100 a call."""
    rate = _fill(stage)
    stage.empty()
    return rate


def drains(stage: Stage) -> float:
    """Return how many messages a second the scripts claim and ack, the bodies read between, 100 a call."""
    _fill(stage)
    lane, calls = token(), stage.scale.many // BATCH
    began = time.perf_counter()
    for number in range(1, calls + 1):
        taken = stage.queue.moves.claim(Turn(lane, number), limit=BATCH, lease_ms=LEASE_MS).claimed
        stage.ask(reads.bodies(stage.queue.keys, [one.id for one in taken]))
        stage.queue.moves.ack([(one, None) for one in taken])
    return calls * BATCH / (time.perf_counter() - began)


def _fill(stage: Stage) -> float:
    """Publish by the script, with the terms of a queue's defaults; return messages a second."""
    terms = QueueSettings()
    value = envelope_rest(terms.retries) + stage.queue.codec.encode(BODY)
    lane, calls = token(), stage.scale.many // BATCH
    batches = [[(new_id(), value) for _ in range(BATCH)] for _ in range(calls)]
    began = time.perf_counter()
    for number, batch in enumerate(batches, 1):
        stage.queue.moves.publish(batch, Turn(lane, number), ttl_ms=milliseconds(terms.ttl), retries=terms.retries)
    return calls * BATCH / (time.perf_counter() - began)
