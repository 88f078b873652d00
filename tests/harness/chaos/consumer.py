"""One consumer process: reliq's engine with handlers whose behaviour the seed decides. Stops on SIGTERM."""

import asyncio
import random
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tenacity import wait_fixed

from reliq import Job, Nack, Reject, ReliqError, Snooze, WorkerSettings
from reliq.events import Event, RenewalLate
from reliq.logs import LogObserver, configure_logging
from reliq.lua import transitions
from reliq.redis.client import Client
from reliq.redis.server import WORKER_TIMEOUT_SECONDS, Connection
from tests.harness.chaos.history import Journal
from tests.harness.chaos.tap import Tap, TappedConsumer
from tests.harness.chaos.workload import (
    GROWING,
    ITEM_SECONDS,
    KEEP_SECONDS,
    LEASE_SECONDS,
    QUEUES,
    SHARES,
    conduct,
    place_keys,
    walk_of,
)

#: Seconds that the stall detector sleeps. If it wakes up much later, the process could not run.
BEAT_SECONDS, STALL_SECONDS = 0.1, 0.5
SNOOZE_SECONDS = 0.3
#: Outcome of a handler -> the exception that it raises.
ANSWERS = {
    "nack": lambda: Nack(delay=0.1),
    "raise": lambda: ValueError("as the seed says"),
    "snooze": lambda: Snooze(delay=SNOOZE_SECONDS),
    "reject": lambda: Reject(reason="as the seed says"),
}
#: Queues with coroutine handlers.
OF_COROUTINES = ("frail", "spread")
#: Seconds between two calls with old receipts, and the kinds of these calls.
PAUSE_SECONDS = 0.1
LATE_CALLS = (
    lambda keys, receipts: transitions.ack(keys, [(one, None) for one in receipts]),
    lambda keys, receipts: transitions.nack(keys, [(one, 0, "failed 1 late", b"") for one in receipts]),
    lambda keys, receipts: transitions.extend(keys, receipts, lease_ms=2000),
    transitions.release,
    lambda keys, receipts: transitions.checkpoint(keys, [(one, 99, '"99 0 99"') for one in receipts]),
)


def build(seed: int, journal: Journal, names: Iterable[str]) -> TappedConsumer:
    """Return the consumer of some queues; it records its calls."""

    @contextmanager
    def lifespan() -> Iterator[None]:
        journal.write("ready")
        yield

    consumer = TappedConsumer(lifespan=lifespan, observers=[lambda event: note_lateness(journal, event), LogObserver()])
    consumer.journal = journal

    @contextmanager
    def work(job: Job[dict[str, Any]]) -> Iterator[Iterable[float]]:
        facts = {"id": job.id, "nonce": job._held.delivery.claimed.nonce}
        walk = walk_of(seed, job.body["name"])
        journal.write("start", **facts, name=job.body["name"], walk=walk)
        waited = (job.due or 0.0) - (job.enqueued or 0.0)
        put_off = waited > job.body["delay"] + SNOOZE_SECONDS / 2
        seconds, answer = conduct(seed, job.body["name"], job.attempt or 1, put_off=put_off)
        if job.queue == GROWING and answer == "reject":
            # The growing queue keeps no dead letters, because a change of its shards ends only when it has moved them all.
            answer = "ack"
        yield steps(job, facts, walk) if walk else [seconds]
        job.spent(job.body["spent"])
        journal.write("end", **facts, how=answer)
        if answer in ANSWERS:
            error = ANSWERS[answer]()
            raise error

    def steps(job: Job[dict[str, Any]], facts: dict[str, str], walk: int) -> Iterator[float]:
        for item in job.resume(range(walk)):
            yield ITEM_SECONDS
            journal.write("item", **facts, item=item)

    def plain(_body: dict[str, Any], job: Job[dict[str, Any]]) -> None:
        with work(job) as pauses:
            for seconds in pauses:
                time.sleep(seconds)

    async def coroutine(_body: dict[str, Any], job: Job[dict[str, Any]]) -> None:
        with work(job) as pauses:
            for seconds in pauses:
                await asyncio.sleep(seconds)

    for name in names:
        handler = coroutine if name in OF_COROUTINES else plain
        options = {"lease": LEASE_SECONDS, "backoff": wait_fixed(0.2), "keep": KEEP_SECONDS.get(name)}
        consumer.handler(QUEUES[name], **options)(handler)
    return consumer


def note_lateness(journal: Journal, event: Event) -> None:
    if isinstance(event, RenewalLate):
        journal.write("trouble", of="late renewal", since=time.monotonic() - event.seconds)


def note_stalls(journal: Journal, over: threading.Event) -> None:
    """Record when this process or the machine was paused or short of CPU."""
    before = time.monotonic()
    while not over.wait(BEAT_SECONDS):
        if time.monotonic() - before > STALL_SECONDS:
            journal.write("trouble", of="stalled", since=before)
        before = time.monotonic()


def pester(tap: Tap, chance: random.Random) -> None:
    """Settle old receipts again, as a late worker does, until the process ends. Redis must refuse each call."""
    client = Client(tap)
    while True:
        time.sleep(PAUSE_SECONDS)
        old = list(tap.spent)
        queue = chance.choice([name for name, _ in old] or [""])
        receipts = [claimed for name, claimed in old if name == queue]
        call = chance.choice(LATE_CALLS)
        if receipts:
            with suppress(ReliqError):  # Redis is unreachable
                client.run(call(place_keys(queue), receipts))


def main(path: str, seed: str, slots: str, kind: str) -> int:
    configure_logging("info")
    journal = Journal(Path(path))
    consumer = build(int(seed), journal, SHARES[kind])
    threading.Thread(target=note_stalls, args=(journal, threading.Event()), daemon=True).start()
    wire = Connection.to(None).wire(WORKER_TIMEOUT_SECONDS)
    late = Tap(wire, journal, late=True), random.Random(f"{seed} {Path(path).stem}")
    threading.Thread(target=pester, args=late, daemon=True).start()
    return consumer.run(WorkerSettings(concurrency=int(slots), grace=1.0))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
