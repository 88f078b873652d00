"""A Cluster moves a queue's slot from node to node under load: calls are refused whole, or made whole."""

import pytest
import redis
from ports import free_port
from waiting import eventually

from reliq import PublishFailed, Queue

SLOTS = 16384


@pytest.fixture
def nodes(own_server):
    """Two nodes that know each other; the first has every slot."""
    clients = []
    for _ in range(2):
        server = own_server(cluster_enabled="yes", cluster_node_timeout="5000", at_port=free_port())
        clients.append(redis.Redis("127.0.0.1", server.port))
    first, second = clients
    first.execute_command("CLUSTER", "ADDSLOTS", *range(SLOTS))
    first.execute_command("CLUSTER", "MEET", "127.0.0.1", second.connection_pool.connection_kwargs["port"])
    for client in clients:
        eventually(lambda client=client: knows_all(client), "the nodes know each other")
    yield first, second
    for client in clients:
        client.close()


def knows_all(client):
    info = client.execute_command("CLUSTER", "INFO")
    return b"cluster_known_nodes:2" in info and b"cluster_state:ok" in info


@pytest.fixture
def queue(nodes):
    client = redis.RedisCluster(host="127.0.0.1", port=nodes[0].connection_pool.connection_kwargs["port"])
    queue = Queue("q", str, url=client)
    yield queue
    queue.close()
    client.close()


class Move:
    """The move of a queue's slot from one node to the other, step by step."""

    def __init__(self, queue, nodes):
        self._from, self._to = nodes
        self._slot = self._from.execute_command("CLUSTER", "KEYSLOT", queue.keys.ready)
        self._ids = [client.execute_command("CLUSTER", "MYID").decode() for client in nodes]

    def begin(self):
        self._to.execute_command("CLUSTER", "SETSLOT", self._slot, "IMPORTING", self._ids[0])
        self._from.execute_command("CLUSTER", "SETSLOT", self._slot, "MIGRATING", self._ids[1])

    def left(self):
        return self._from.execute_command("CLUSTER", "GETKEYSINSLOT", self._slot, 1000)

    def take(self, *keys):
        port = self._to.connection_pool.connection_kwargs["port"]
        self._from.execute_command("MIGRATE", "127.0.0.1", port, "", 0, 5000, "KEYS", *keys)

    def end(self):
        self.take(*self.left())
        for client in (self._to, self._from):
            client.execute_command("CLUSTER", "SETSLOT", self._slot, "NODE", self._ids[1])


def test_while_a_slot_moves_a_call_changes_nothing_or_everything(queue, nodes):
    queue.publish_many(str(number) for number in range(20))
    move = Move(queue, nodes)
    move.begin()
    ready = queue.keys.ready.encode()
    confirmed, refused = 20, 0

    for share in (0, 0.5, 1):
        keys = [key for key in move.left() if key != ready]
        if moving := keys[: int(share * len(keys))]:
            move.take(*moving)
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
    """Every key of a node and its value, also of a slot that is on its way to it."""
    keys = sorted(client.scan_iter())
    values = [client.pipeline(transaction=False).execute_command("ASKING").dump(key).execute()[1] for key in keys]
    return dict(zip(keys, values, strict=True))


def test_work_goes_on_after_its_slot_has_moved(queue, nodes):
    queue.publish("before")
    move = Move(queue, nodes)
    move.begin()
    move.end()

    with queue.receive(wait=5) as [job]:
        assert job.body == "before"
    assert queue.publish("after").status == "published"
    assert nodes[0].keys(queue.keys.ready.replace("ready", "*")) == []
