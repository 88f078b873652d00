"""One consumer process: reliq's own engine with handlers that behave as the seed says. Stops on SIGTERM."""

import asyncio
import random
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tenacity import wait_fixed

from reliq import Job, Nack, Reject, Snooze, WorkerSettings
from reliq.events import Event, RenewalLate
from reliq.transport.connection import WORKER_TIMEOUT_SECONDS, Connection
from tests.harness.chaos.history import Journal
from tests.harness.chaos.pest import pester
from tests.harness.chaos.tap import Tap, TappedConsumer
from tests.harness.chaos.workload import GROWING, LEASE_SECONDS, QUEUES, SHARES, Conduct, conduct

#: A thread that sleeps so long is expected back soon; when it is not, something held the process up.
BEAT_SECONDS, STALL_SECONDS = 0.1, 0.5
SNOOZE_SECONDS = 0.3
#: The queues whose handlers are coroutines.
OF_COROUTINES = ("frail", "spread")


def build(seed: int, journal: Journal, names: Iterable[str]) -> TappedConsumer:
    """Return the consumer of some queues; whatever it does is written down."""

    @contextmanager
    def lifespan() -> Iterator[None]:
        journal.write("ready")
        yield

    consumer = TappedConsumer(lifespan=lifespan, observers=[lambda event: note_lateness(journal, event)])
    consumer.journal = journal

    def begin(job: Job[dict[str, Any]]) -> Conduct:
        journal.write("start", id=job.id, nonce=job._held.delivery.claimed.nonce, name=job.body["name"])
        waited = (job.due or 0.0) - (job.enqueued or 0.0)
        put_off = waited > job.body["delay"] + SNOOZE_SECONDS / 2
        way = conduct(seed, job.body["name"], job.attempt or 1, put_off=put_off)
        # No letters in the queue that grows: the change is not finished before they are gone from their old homes.
        return replace(way, answer="ack") if job.queue == GROWING and way.answer == "reject" else way

    def end(job: Job[dict[str, Any]], way: Conduct) -> None:
        journal.write("end", id=job.id, nonce=job._held.delivery.claimed.nonce, how=way.answer)
        answer(way)

    def plain(_body: dict[str, Any], job: Job[dict[str, Any]]) -> None:
        way = begin(job)
        time.sleep(way.seconds)
        end(job, way)

    async def coroutine(_body: dict[str, Any], job: Job[dict[str, Any]]) -> None:
        way = begin(job)
        await asyncio.sleep(way.seconds)
        end(job, way)

    for name in names:
        handler = coroutine if name in OF_COROUTINES else plain
        consumer.handler(QUEUES[name], lease=LEASE_SECONDS, backoff=wait_fixed(0.2))(handler)
    return consumer


def answer(way: Conduct) -> None:
    """Answer as a handler does: by an exception, or by none."""
    match way.answer:
        case "nack":
            raise Nack(delay=0.1)
        case "raise":
            raise ValueError("as the seed says")
        case "snooze":
            raise Snooze(delay=SNOOZE_SECONDS)
        case "reject":
            raise Reject(reason="as the seed says")


def note_lateness(journal: Journal, event: Event) -> None:
    if isinstance(event, RenewalLate):
        journal.write("late", seconds=event.seconds)


def note_stalls(journal: Journal, over: threading.Event) -> None:
    """Write down when this process, or the whole machine, was held up: paused, or starved of the processor."""
    before = time.monotonic()
    while not over.wait(BEAT_SECONDS):
        if time.monotonic() - before > STALL_SECONDS:
            journal.write("stalled", since=before)
        before = time.monotonic()


def main(path: str, seed: str, slots: str, kind: str) -> int:
    journal = Journal(Path(path))
    consumer = build(int(seed), journal, SHARES[kind])
    threading.Thread(target=note_stalls, args=(journal, threading.Event()), daemon=True).start()
    wire = Connection.to(None).wire(WORKER_TIMEOUT_SECONDS)
    pester(Tap(wire, journal, late=True), random.Random(f"{seed} {Path(path).stem}"))
    return consumer.run(WorkerSettings(concurrency=int(slots), grace=1.0))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
