"""A Cluster moves a queue's slot between nodes under load: each call runs completely or not at all."""

import pytest
from cluster_moves import SlotMove, move_at_once, neighbour
from waiting import eventually

from reliq import PublishFailed
from tests.cluster_servers import LiveCluster

pytestmark = pytest.mark.slow


def test_while_a_slot_moves_a_call_changes_nothing_or_everything(queue_at, cluster):
    queue = queue_at(cluster.url)
    queue.publish_many(str(number) for number in range(20))
    move = SlotMove(cluster, queue.keys.ready)
    nodes = [cluster.client(one) for one in (move.source, move.target)]
    move.begin()
    ready = queue.keys.ready.encode()
    confirmed, refused = 20, 0

    for share in (0, 0.5, 1):
        keys = [key for key in move.left() if key != ready]
        move.take(*keys[: int(share * len(keys))])
        before = [dump(client) for client in nodes]
        try:
            confirmed += queue.publish("in the middle", id=f"at-{share}").status == "published"
        except PublishFailed as failure:
            refused += 1
            assert failure.outcome == "refused"
            assert [dump(client) for client in nodes] == before
    move.end()

    confirmed += queue.publish("afterwards").status == "published"
    assert refused > 0
    assert (queue.counts().ready, queue.counts().missing) == (confirmed, 0)
    with queue.receive(limit=100, wait=5) as jobs:
        assert len(jobs) == confirmed
    assert (queue.counts().alive, queue.counts().missing) == (0, 0)


def dump(client):
    """Return every key of a node with its value, including a slot that is being moved to it."""
    keys = sorted(client.scan_iter())
    values = [client.pipeline(transaction=False).execute_command("ASKING").dump(key).execute()[1] for key in keys]
    return dict(zip(keys, values, strict=True))


def test_a_slot_that_is_held_open_holds_up_no_other_queue_and_loses_nothing(cluster, at_work):
    work = at_work(cluster)
    held, free = (one.name for one in work.queues)
    move = SlotMove(cluster, work.queues[0].keys.ready)

    move.begin()
    left = move.left()
    move.take(*left[: len(left) // 2])
    eventually(lambda: work.refused[held] >= 1, "a publish to the queue in the middle gives up, after two seconds")
    work.goes_on(free)
    move.end()
    work.goes_on(held)

    assert work.refused[free] == 0
    assert work.everything_ran()


def test_a_slot_that_moves_at_once_fails_no_publish(newest_server, at_work):
    with LiveCluster(newest_server) as cluster:
        work = at_work(cluster)
        moved = work.queues[0]
        target = neighbour(cluster, cluster.primary_of(moved.keys.ready))

        move_at_once(cluster, moved.keys.ready)
        work.goes_on(moved.name)

        assert cluster.primary_of(moved.keys.ready) is target
        assert set(work.refused.values()) == {0}
        assert work.everything_ran()
