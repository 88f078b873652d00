"""A replica takes the place of its primary. test_promotion_in_a_cluster.py counts what is lost."""

import os
import signal

import pytest
import redis
from waiting import eventually

from reliq import Durability, PublishFailed, Queue


def promoted(replica):
    """The queue at the replica, once that is the primary."""
    os.kill(replica.pid, signal.SIGCONT)
    with redis.Redis.from_url(replica.url) as client:
        client.replicaof("NO", "ONE")
        eventually(lambda: client.info("replication")["role"] == "master", "the replica takes over")
    return Queue("q", bytes, url=replica.url)


def test_message_redelivered_after_a_promotion_keeps_its_id(replicated, server_path):
    primary, replica = replicated(server_path)
    before = Queue("q", bytes, url=primary.url)
    receipt = before.publish(b"x", durability=Durability.replicas(1, timeout=20))
    os.kill(replica.pid, signal.SIGSTOP)
    with redis.Redis.from_url(primary.url) as client:
        client.client_kill_filter(_type="replica")  # the replica never hears of the end
    with before.receive() as [job]:
        assert job.id == receipt.id
    primary.kill()
    before.close()

    after = promoted(replica)

    with after.receive() as [job]:
        assert job.id == receipt.id
    after.close()


@pytest.mark.usefixtures("impatient")
def test_publish_to_a_replica_is_refused(replicated, server_path, call):
    _, replica = replicated(server_path)
    queue = Queue("q", bytes, url=replica.url)

    with pytest.raises(PublishFailed, match="read only replica") as caught:
        call(queue, "publish", b"x", durability=Durability.replicas(1))

    assert caught.value.outcome == "refused"
    queue.close()
