"""What was measured to go wrong in Go's hdt3213/delayqueue goes right here."""

import os
import time

import pytest
import redis
from listener import Repeated
from tenacity import wait_fixed

from reliq import Consumer, Outgoing, Queue, WorkerSettings
from reliq.transitions import CallNumber

SOON = wait_fixed(0.05)
#: The original was held up by a million; in CI a part shows that the work of a call is bounded.
DUE_AT_ONCE = 1_000_000 if os.environ.get("RELIQ_LONG") else 100_000


@pytest.fixture
def queue(url):
    queue = Queue("q", str, url=url)
    yield queue
    queue.close()


@pytest.fixture
def consumer(url):
    return Consumer(url)


def test_leases_do_not_run_out_in_the_local_buffer(queue, consumer):
    """With its default settings the original lost 28,772 of 100,000: it leased all and worked one after another."""
    done = []

    @consumer.handler(queue, lease=3)
    def handle(body):
        time.sleep(0.004)
        done.append(body)

    queue.publish_many(str(number) for number in range(3000))  # in all more than two leases of work

    consumer.drain(WorkerSettings(concurrency=2))

    assert sorted(map(int, done)) == list(range(3000))
    totals = queue.counts().totals
    assert (totals["acked"], totals["claimed"] - totals.get("released", 0)) == (3000, 3000)
    assert totals.get("retried_lease", 0) == 0


@pytest.mark.parametrize("panic", [SystemExit, KeyboardInterrupt, RuntimeError, GeneratorExit])
def test_a_panic_ends_neither_the_consumer_nor_a_message(queue, consumer, panic):
    """One panic ended the original: 0 of 5 were handled, and all were deleted."""
    done = []

    @consumer.handler(queue, backoff=SOON)
    def handle(body, job):
        if body == "panics" and job.attempt == 1:
            raise panic
        done.append(body)

    queue.publish("panics")
    queue.publish_many(["good"] * 4)

    consumer.drain(delayed=True, raise_errors=False)

    assert sorted(done) == ["good"] * 4 + ["panics"]
    assert (queue.counts().totals["acked"], queue.counts().missing) == (5, 0)


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

    queue.publish_many(Outgoing(body=str(number), delay=0.013 * number) for number in range(100))

    consumer.drain(delayed=True, raise_errors=False)

    assert early == []
    assert queue.counts().totals["acked"] == 100


def test_no_lease_ends_early(queue, client):
    """The original's leases were up to a second short."""
    queue.publish("x")
    seconds, micros = client.time()
    queue.moves.claim(CallNumber("w", 1), limit=1, lease_ms=300)

    while not queue.moves.reclaim().overdue:
        pass

    after, after_micros = client.time()
    assert (after - seconds) + (after_micros - micros) / 1e6 >= 0.3


class Pinger(Repeated):
    """Pings Redis without a break, and keeps how long the worst answer took."""

    def __init__(self, url):
        super().__init__()
        self.worst, self._client = 0.0, redis.Redis.from_url(url)

    def __exit__(self, *error):
        super().__exit__(*error)
        self._client.close()

    def _work(self):
        while not self._over.is_set():
            sent_at = time.monotonic()
            self._client.ping()
            self.worst = max(self.worst, time.monotonic() - sent_at)


@pytest.mark.timeout(240)
def test_redis_is_not_held_up_by_very_many_messages_that_are_due_at_once(queue, client, url):
    """One script of the original moved a million: 2 s in which Redis answered nobody."""
    for start in range(0, DUE_AT_ONCE, 10_000):
        client.zadd(queue.keys.pending, {f"m{number}": 1.0 for number in range(start, start + 10_000)})
    moved = []

    with Pinger(url) as pinger:
        while not moved or moved[-1]:
            moved.append(queue.moves.promote()[0])

    mean = client.info("commandstats")["cmdstat_evalsha"]["usec_per_call"] / 1000
    print(f"{DUE_AT_ONCE} due at once: a promote took {mean:.2f} ms, the worst PING {pinger.worst * 1000:.1f} ms")
    assert max(moved) == 500
    assert sum(moved) == DUE_AT_ONCE == client.llen(queue.keys.ready)


def test_expired_messages_use_up_no_slot(queue, consumer, client):
    """Each expired message took one of the original's fetches for ever: in the end it fetched nothing."""
    done = []
    consumer.handler(queue)(done.append)
    ids = [queue.publish("expires").id for _ in range(60)]
    client.delete(*(queue.keys.msg(id) for id in ids))
    queue.publish("good")

    consumer.drain(WorkerSettings(concurrency=2))

    assert done == ["good"]
    assert (queue.counts().totals["expired"], queue.counts().missing) == (60, 0)


def test_a_late_nack_brings_nothing_back(queue, client):
    """In Lua a member that is not there is false, not nil: the original's nack put a finished id into unack again."""
    queue.publish("x")
    [claimed] = queue.moves.claim(CallNumber("w", 1), limit=1, lease_ms=60_000).claimed
    queue.moves.ack([(claimed, None)])

    answer = queue.moves.nack([(claimed, 0, "failed 1 late", b"")])

    assert answer.lost == (claimed.id,)
    assert not client.exists(queue.keys.unack, queue.keys.retry, queue.keys.retries_left, queue.keys.garbage)
    assert queue.counts().alive == 0
