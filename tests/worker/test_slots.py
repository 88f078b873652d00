"""The table of slots: what waits, what runs, and how much more may be claimed."""

import time

import pytest

from reliq.events import Acked
from reliq.message import Claimed
from reliq.worker.claims import QueueClaims
from reliq.worker.delivery import deliveries_of
from reliq.worker.inflight import Inflight
from reliq.worker.slots import HOLD_SECONDS


def test_as_many_messages_are_prefetched_as_start_soon_and_none_of_slow_handlers(queue, consumer):
    consumer.handler(queue)(lambda body: None)
    (handler,) = consumer.handlers
    for seconds, ahead in ((HOLD_SECONDS / 10, 40), (HOLD_SECONDS / 1000, 1500), (HOLD_SECONDS, 0), (60, 0)):
        inflight, claims = Inflight([handler], 4), [QueueClaims(handler)]
        assert inflight.wait_for_capacity(claims, 0)[0].ahead == 0  # nobody knows how long it takes
        deliveries = deliveries_of([Claimed("m", "me.1", 3)], handler, time.monotonic())
        inflight.add(deliveries)
        inflight.hold(deliveries)
        run = inflight.next_plain(None)
        run.started_at -= seconds

        inflight.next_async([run])  # it has ended

        assert inflight.wait_for_capacity(claims, 0)[0].ahead == pytest.approx(ahead, rel=0.1)


def test_a_batch_that_lingers_beside_busy_threads_has_one_that_waits_for_it(queue, consumer, start, recorder, gate):
    """Twelve messages are a batch of ten and two that linger: the thread of the ten does not come back."""

    @consumer.handler(queue, batch=10, linger=0.2)
    def handle(bodies):
        if len(bodies) == 10:
            gate.pass_through()

    queue.pause()
    queue.publish_many(["x"] * 12)
    start(concurrency=4)
    queue.resume()

    gate.wait_for()

    recorder.wait_for(Acked, 2)
