"""The limits of a Redis: the same scripts, a SET and a list, driven by one client with nothing around them."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

from reliq import transitions
from reliq.bench.node import plain_client_of
from reliq.bench.stage import BODY, CLIENT_TIMEOUT_SECONDS, PART_SECONDS, Stage
from reliq.errors import ReliqError
from reliq.ids import new_id, token
from reliq.queue import Queue
from reliq.settings import QueueSettings, milliseconds
from reliq.transitions import CallNumber
from reliq.wireformat import envelope_rest

CALL_SIZE = 100
LEASE_MS = 30_000
#: The shortest sleep, in seconds, between two looks for what is due.
LEAST_SLEEP_SECONDS = 0.0002


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
    key, body = list_of(stage.queue), b"x" * 100
    with plain_client_of(stage.url, stage.queue.name, CLIENT_TIMEOUT_SECONDS) as client:
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
    lane, calls = token(), stage.scale.many // CALL_SIZE
    began = time.perf_counter()
    for number in range(1, calls + 1):
        taken = stage.queue.moves.claim(CallNumber(lane, number), limit=CALL_SIZE, lease_ms=LEASE_MS).claimed
        stage.ask(transitions.bodies(stage.queue.keys, [one.id for one in taken], max_body=QueueSettings().max_body))
        stage.queue.moves.ack([(one, None) for one in taken])
    return calls * CALL_SIZE / (time.perf_counter() - began)


def begin_when_due(stage: Stage, dues: Sequence[float], note: Callable[[float], None]) -> None:
    """
    Sleep until messages are due, then promote, claim and read them; call `note` with each one's due time.

    The messages were published; their due times are unix seconds of this machine, in order.

    Raises:
        ReliqError: some have not come PART_SECONDS after the last was due.
    """
    lane, done, number = token(), 0, 0
    while done < len(dues):
        if time.time() > dues[-1] + PART_SECONDS:
            raise ReliqError(f"only {done} of {len(dues)} messages came due; does something else take them?")
        time.sleep(max(LEAST_SLEEP_SECONDS, dues[done] - time.time()))
        stage.queue.moves.promote(limit=CALL_SIZE)
        number += 1
        taken = stage.queue.moves.claim(CallNumber(lane, number), limit=CALL_SIZE, lease_ms=LEASE_MS).claimed
        if taken:
            stage.ask(
                transitions.bodies(stage.queue.keys, [one.id for one in taken], max_body=QueueSettings().max_body)
            )
        for due in dues[done : done + len(taken)]:
            note(due)
        stage.queue.moves.ack([(one, None) for one in taken])
        done += len(taken)


def list_of(queue: Queue[Any]) -> str:
    """Return the key of a list, or of a plain string, that lies among the queue's keys and is removed with them."""
    return queue.keys.msg("bare")


@contextmanager
def handing_over(stage: Stage) -> Iterator[Callable[[], object]]:
    """Yield a function that pushes a body with the time in it to the list that `take_over` waits at."""
    with plain_client_of(stage.url, stage.queue.name, CLIENT_TIMEOUT_SECONDS) as client:
        client.ping()  # connects, which is no part of a pickup
        key = list_of(stage.queue)
        yield lambda: client.lpush(key, json.dumps({**BODY, "sent": time.time()}))


def take_over(url: str, queue: Queue[Any], note: Callable[[float], None]) -> None:
    """Wait for bodies in the queue's plain list, for ever; call `note` with the time when each was sent."""
    key = list_of(queue)
    with plain_client_of(url, queue.name, CLIENT_TIMEOUT_SECONDS) as client:
        while True:
            if taken := client.blpop([key], timeout=1):
                note(float(json.loads(taken[1])["sent"]))


def _fill(stage: Stage) -> float:
    """Publish by the script, with the terms of a queue's defaults; return messages a second."""
    terms = QueueSettings()
    value = envelope_rest(terms.retries) + stage.queue.codec.encode(BODY)
    lane, calls = token(), stage.scale.many // CALL_SIZE
    batches = [[(new_id(), value) for _ in range(CALL_SIZE)] for _ in range(calls)]
    began = time.perf_counter()
    for number, batch in enumerate(batches, 1):
        stage.queue.moves.publish(
            batch, CallNumber(lane, number), ttl_ms=milliseconds(terms.ttl), retries=terms.retries
        )
    return calls * CALL_SIZE / (time.perf_counter() - began)
