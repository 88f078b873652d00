"""A node of a Cluster is forgotten by the others, and met again, while queues are worked on."""

import pytest
from cluster_moves import forget, meet


@pytest.mark.parametrize("which", ["primary", "replica"])
def test_work_goes_on_while_a_node_is_forgotten_and_met_again(which, cluster, at_work):
    work = at_work(cluster)
    key = work.queues[0].keys.ready
    server = cluster.primary_of(key) if which == "primary" else cluster.replica_of(key)

    forget(cluster, server)
    for queue in work.queues[which == "primary" :]:  # who asks the others now hears of nobody that has its slot
        work.goes_on(queue.name)
    meet(cluster, server)
    cluster.wait_until_ok()
    for queue in work.queues:
        work.goes_on(queue.name)
    assert work.everything_ran()
