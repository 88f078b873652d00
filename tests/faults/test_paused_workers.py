"""A machine was paused: its worker continues after other workers have taken over its messages."""

import threading
import time

import pytest
from broken import stopped
from transition import run_transition
from waiting import eventually

from reliq.handlers.settlement import RELEASED
from reliq.lua.transitions import CallNumber
from reliq.worker.runner import Runner
from reliq.worker.slots import HandlerCall, deliveries_of

pytestmark = pytest.mark.slow

#: Longer than a lease.
PAUSE_SECONDS = 9.5


def test_worker_paused_beyond_its_leases_starts_no_prefetched_message(worker, faulty, admin):
    faulty.PAUSED.publish_many(range(600))
    process = worker("--queue", "paused", "--processes", "2", "--concurrency", "1")
    eventually(lambda: faulty.PAUSED.counts().totals.get("acked", 0) > 50, "both work")

    with stopped(process.children()[0].pid):
        finished = admin.hkeys("note:done")
        threading.Event().wait(PAUSE_SECONDS)

    eventually(lambda: faulty.PAUSED.counts().alive == 0, "everything is worked")
    counts = faulty.PAUSED.counts()
    assert (counts.missing, counts.dead, counts.totals["acked"]) == (0, 0, 600)
    times = admin.hgetall("note:done")
    assert len(times) == 600
    # May have run twice: finished messages whose ack was pending, and the message in the only slot of the paused process.
    assert len({id for id, count in times.items() if count != b"1"} - {*finished}) <= 1


@pytest.mark.parametrize("over", [True, False])
def test_prefetched_message_starts_only_while_its_lease_lasts(faulty, over):
    [handler] = faulty.consumer.chosen(["steady"])
    faulty.STEADY.publish(1)
    sent_at = time.monotonic() - (handler.lease_seconds if over else 0.0)
    [claimed] = run_transition(faulty.STEADY, "claim", CallNumber("paused", 1), limit=1, lease_ms=60_000).claimed
    deliveries, settled = deliveries_of([claimed], handler, sent_at), []
    run = HandlerCall(deliveries, handler, time.monotonic(), None)
    running = Runner(lambda deliveries, outcome: settled.append((deliveries, outcome)), (), (), threading.Event())

    assert running.begin(run) is not over

    assert settled == ([(deliveries, RELEASED)] if over else [])
