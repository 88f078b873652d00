"""A primary dies while its replica lags behind, and the replica takes its place: what is lost, and what is not."""

import os
import signal
import threading

import pytest
import redis
from waiting import eventually

from reliq import BulkResult, Durability, PublishFailed, Queue

#: Together with what the sockets between two servers hold back, more than they can hold.
LARGE, MANY = b"x" * 1_000_000, 40
WAIT = Durability.replicas(1, timeout=0.1)


class Publisher(threading.Thread):
    """Publishes until its Redis is gone, and keeps the receipts."""

    def __init__(self, url, durability, body=b"small"):
        super().__init__(daemon=True)
        self._queue, self._durability, self._body = Queue("q", bytes, url=url), durability, body
        self.receipts = []

    def run(self):
        try:
            while True:
                self.receipts.append(self._queue.publish(self._body, durability=self._durability))
        except PublishFailed:
            self._queue.close()

    def ids(self, durable):
        return {one.id for one in list(self.receipts) if one.durable is durable}


def promoted(replica):
    """The queue at the replica, once that is the primary."""
    os.kill(replica.pid, signal.SIGCONT)
    with redis.Redis.from_url(replica.url) as client:
        client.replicaof("NO", "ONE")
        eventually(lambda: client.info("replication")["role"] == "master", "the replica takes over")
    return Queue("q", bytes, url=replica.url)


def delivered(queue):
    """The ids of everything that comes out of a queue."""
    ids = set()
    while True:
        with queue.receive(limit=500) as jobs:
            if not jobs:
                return ids
            ids |= {job.id for job in jobs}


def test_what_was_confirmed_outlives_the_primary_and_what_was_not_is_counted(replicated, server_path, capsys):
    primary, replica = replicated(server_path)
    queue = Queue("q", bytes, url=primary.url)
    careful = [Publisher(primary.url, WAIT) for _ in range(3)]
    for one in careful:
        one.start()
    eventually(lambda: sum(len(one.ids(True)) for one in careful) >= 200, "200 messages are confirmed")

    os.kill(replica.pid, signal.SIGSTOP)
    result: BulkResult = queue.publish_many([LARGE] * MANY)
    careless = [queue.publish(b"small") for _ in range(100)]
    eventually(lambda: all(one.ids(False) for one in careful), "each publisher is told that nobody confirms")
    primary.kill()
    for one in careful:
        one.join()
    queue.close()

    after = promoted(replica)
    there = delivered(after)
    confirmed = set().union(*(one.ids(True) for one in careful))
    told = set().union(*(one.ids(False) for one in careful))
    lost = {one.id for one in careless} - there
    with capsys.disabled():
        print(
            f"\nreplica stopped, primary killed, replica promoted: of {len(confirmed)} confirmed by WAIT"
            f" {len(confirmed - there)} lost; of {len(told)} whose receipt said False {len(told - there)} lost;"
            f" of {len(careless)} published without asking {len(lost)} lost"
        )
    assert confirmed - there == set()
    assert len(confirmed) >= 200
    assert (result.published, result.durable) == (MANY, None)
    assert lost
    assert after.counts().missing == 0
    after.close()


def test_a_message_that_is_delivered_again_after_a_promotion_keeps_its_id(replicated, server_path):
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

    assert delivered(after) == {receipt.id}
    after.close()


@pytest.mark.usefixtures("impatient")
def test_who_publishes_to_a_replica_is_refused(replicated, server_path, call):
    _, replica = replicated(server_path)
    queue = Queue("q", bytes, url=replica.url)

    with pytest.raises(PublishFailed, match="read only replica") as caught:
        call(queue, "publish", b"x", durability=WAIT)

    assert caught.value.outcome == "refused"
    queue.close()
