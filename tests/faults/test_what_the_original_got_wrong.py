"""Faults that were measured in Go's hdt3213/delayqueue do not occur in reliq."""

import time

import pytest
from tenacity import wait_fixed

from reliq import Consumer, OutgoingMessage, WorkerSettings


@pytest.fixture
def queue(queue_at, url):
    return queue_at(url)


@pytest.fixture
def consumer(url):
    return Consumer(url)


@pytest.mark.slow
def test_leases_do_not_run_out_in_the_local_buffer(queue, consumer):
    """With default settings the original lost 28,772 of 100,000: it leased all messages and ran them one by one."""
    done = []

    @consumer.handler(queue, lease=3)
    def handle(body):
        time.sleep(0.004)
        done.append(body)

    queue.publish_many(str(number) for number in range(3000))  # more than two leases of work in total

    consumer.drain(WorkerSettings(concurrency=2))

    assert sorted(map(int, done)) == list(range(3000))
    totals = queue.counts().totals
    assert (totals["acked"], totals["claimed"] - totals.get("released", 0)) == (3000, 3000)
    assert totals.get("retried_lease", 0) == 0


def test_nothing_is_early_by_the_clock_of_redis(queue, consumer, client):
    """The original counts whole seconds: messages came up to 0.9 s early."""
    early = []

    @consumer.handler(queue, backoff=wait_fixed(0.123))
    def handle(body, job):
        seconds, micros = client.time()
        if seconds + micros / 1e6 < job.due:
            early.append((body, job.due))
        if job.attempt == 1:
            raise ValueError("the second delivery is not to be early either")

    queue.publish_many(OutgoingMessage(body=str(number), delay=0.013 * number) for number in range(100))

    consumer.drain(delayed=True, raise_errors=False)

    assert early == []
    assert queue.counts().totals["acked"] == 100


def test_expired_messages_use_up_no_slot(queue, consumer, client):
    """In the original, each expired message took a fetch slot permanently until no message was fetched any more."""
    done = []
    consumer.handler(queue)(done.append)
    ids = [queue.publish("expires").id for _ in range(60)]
    client.delete(*(queue.keys.msg(id) for id in ids))
    queue.publish("good")

    consumer.drain(WorkerSettings(concurrency=2))

    assert done == ["good"]
    assert (queue.counts().totals["expired"], queue.counts().missing) == (60, 0)
