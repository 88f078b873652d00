"""A replica is promoted to primary. test_promotion_in_a_cluster.py counts lost messages."""

import os
import signal

import pytest
import redis
from waiting import eventually

from reliq import Durability, PublishFailed

pytestmark = pytest.mark.usefixtures("patient")


def test_message_redelivered_after_a_promotion_keeps_its_id(replicated, server_path, make_queue):
    primary, replica = replicated(server_path)
    before, after = make_queue(primary, bytes), make_queue(replica, bytes)
    receipt = before.publish(b"x", durability=Durability.replicas(1, timeout=20))
    os.kill(replica.pid, signal.SIGSTOP)
    with redis.Redis.from_url(primary.url) as client:
        client.client_kill_filter(_type="replica")  # the replica does not receive the ack
    with before.receive() as [job]:
        assert job.id == receipt.id
    primary.kill()

    os.kill(replica.pid, signal.SIGCONT)
    with redis.Redis.from_url(replica.url) as client:
        client.replicaof("NO", "ONE")
        eventually(lambda: client.info("replication")["role"] == "master", "the replica takes over")

    with after.receive() as [job]:
        assert job.id == receipt.id


@pytest.mark.usefixtures("impatient")
def test_publish_to_a_replica_is_refused(replicated, server_path, make_queue, call):
    _, replica = replicated(server_path)

    with pytest.raises(PublishFailed, match="read only replica") as caught:
        call(make_queue(replica, bytes), "publish", b"x", durability=Durability.replicas(1))

    assert caught.value.outcome == "refused"
