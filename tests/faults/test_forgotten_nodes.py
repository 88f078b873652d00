"""The other nodes of a Cluster forget a node, and meet it again, while workers handle messages."""

import pytest
from cluster_moves import forget, meet
from waiting import eventually

from reliq import Consumer, Queue, WorkerSettings

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("which", ["primary", "replica"])
def test_work_goes_on_while_a_node_is_forgotten_and_met_again(which, cluster, at_work):
    work = at_work(cluster)
    key = work.queues[0].keys.ready
    server = cluster.primary_of(key) if which == "primary" else cluster.replica_of(key)

    forget(cluster, server)
    for queue in work.queues[which == "primary" :]:  # clients that ask the other nodes find no owner of its slots
        work.goes_on(queue.name)
    meet(cluster, server)
    cluster.wait_until_ok()
    for queue in work.queues:
        work.goes_on(queue.name)
    assert work.everything_ran()


def test_a_worker_that_begins_while_a_node_is_away_works_at_the_others(cluster):
    gone, there = Queue("sturdy", int, url=cluster.url), Queue("frail", int, url=cluster.url)
    for server in (cluster.replica_of(gone.keys.ready), cluster.primary_of(gone.keys.ready)):
        server.kill()
    ran, consumer = [], Consumer(url=cluster.url)
    for queue in (gone, there):

        @consumer.handler(queue)
        def note(body: int) -> None:
            ran.append(body)

    there.publish(1)
    consumer.start(WorkerSettings(concurrency=2))
    eventually(lambda: ran == [1], "the message of the other queue is worked on")
    consumer.stop(grace=1)
    for queue in (gone, there):
        queue.close()
