"""Workers handle every message of a full queue of 16 shards on a Cluster."""

import pytest
from waiting import eventually

from reliq import Consumer, Queue, WorkerSettings
from reliq.redis.shards import ShardMap

pytestmark = pytest.mark.slow

SHARDS = 16
QUICK, LONG = 5_000, 2_000_000
#: Long enough for the long run on a busy machine.
TIMEOUT_SECONDS = 1800


@pytest.mark.timeout(TIMEOUT_SECONDS)
def test_a_full_queue_of_16_shards_drains_and_nothing_is_lost(request, cluster):
    number = LONG if request.config.getoption("--long") else QUICK
    queue = Queue("orders", int, url=cluster.url, shards=SHARDS)
    cluster.client(cluster.primary_of(queue.keys.map)).set(queue.keys.map, ShardMap(1, SHARDS, SHARDS).text)
    ran = bytearray(number)
    consumer = Consumer(url=cluster.url)

    @consumer.handler(queue)
    def note(order: int) -> None:
        ran[order] += 1

    published = queue.publish_many(range(number), chunk=50).published
    each = [cluster.client(cluster.primary_of(keys.ready)).llen(keys.ready) for keys in queue.shards()]
    consumer.start(WorkerSettings(concurrency=16))
    eventually(lambda: queue.counts().alive == 0, "the queue is empty", TIMEOUT_SECONDS)
    consumer.stop()

    assert (published, sum(each)) == (number, number)
    assert min(each) >= number // SHARDS // 2
    assert (sum(ran), set(ran)) == (number, {1})
    counts = queue.counts()
    queue.close()
    assert (counts.totals["acked"], counts.missing) == (number, 0)
