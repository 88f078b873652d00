"""A limit on a Cluster has its own slot: queues on other nodes share it exactly, and none starts while its node is away."""

import pytest
from waiting import eventually

from reliq import Consumer, Limit, Queue, WorkerSettings
from reliq.keys import limit_key, slot_of

LEASE = 60
RATE, BURST = 20, 3


@pytest.fixture
def limit(cluster, queues):
    """A limit on a node of its own."""
    names = (f"api{number}" for number in range(30))
    homes = {cluster.primary_of(limit_key(name)).port: name for name in names}
    return Limit(homes[list(queues)[2]], rate=f"{RATE}/s", burst=BURST)


@pytest.fixture
def serve(cluster):
    """Start workers of some queues; return the times of the claims of their messages, by the clocks of the nodes."""
    claims, consumers = [], []

    def make(*queues, count=2):
        def handler_of(queue):
            client = cluster.client(cluster.primary_of(queue.keys.unack))

            def handle(body, job):
                claims.append(client.zscore(queue.keys.unack, job.id) - LEASE)

            return handle

        for _ in range(count):
            consumers.append(consumer := Consumer(url=cluster.url))
            for queue in queues:
                consumer.handler(queue, lease=LEASE)(handler_of(queue))
            consumer.start(WorkerSettings(concurrency=4))
        return claims

    yield make
    for one in consumers:
        one.stop(grace=0)


def limited(queues, limit, cluster):
    """Return queues with the limit, on the first two nodes."""
    return [Queue(queue.name, int, url=cluster.url, limits=[limit]) for queue in list(queues.values())[:2]]


def test_queues_on_two_nodes_keep_every_window_of_a_limit_on_a_third(cluster, queues, limit, serve):
    both = limited(queues, limit, cluster)
    for queue in both:
        queue.publish_many(range(30))

    claims = serve(*both)

    eventually(lambda: sum(queue.counts().alive for queue in both) == 0, "all messages are handled")
    slots = {slot_of(key.partition("}")[0][1:]) for key in (limit_key(limit.name), *(q.keys.ready for q in both))}
    assert (len(slots), len(claims)) == (3, 60)
    level, before = 0.0, 0.0
    for at in sorted(claims):
        level, before = max(0.0, level - (at - before) * RATE) + 1, at
        assert level <= BURST + RATE * 0.1 + 0.1  # a claim is sent at most 100 ms late, and scores are whole ms


@pytest.mark.slow
def test_queues_start_nothing_while_the_node_of_their_limit_is_away(cluster, queues, limit, serve, stand_still):
    [queue, _], plain = limited(queues, limit, cluster), list(queues.values())[1]
    claims = serve(queue, plain, count=1)
    node = cluster.primary_of(limit_key(limit.name))
    stand_still(node)

    queue.publish_many(range(5))
    plain.publish_many(range(20))

    eventually(lambda: plain.counts().alive == 0, "the other queue is handled")
    assert (len(claims), queue.counts().ready) == (20, 5)
    cluster.resume(node)
    eventually(lambda: len(claims) == 25, "the messages start")
