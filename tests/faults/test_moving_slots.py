"""A Cluster moves a queue's slot from node to node under load: calls are refused whole, or made whole."""

import threading

import pytest
from cluster_moves import SlotMove, move_at_once, neighbour
from waiting import eventually

from reliq import Consumer, PublishFailed, Queue, WorkerSettings
from tests.cluster_servers import LiveCluster


@pytest.fixture
def queue(cluster):
    queue = Queue("q", str, url=cluster.url)
    yield queue
    queue.close()


def test_while_a_slot_moves_a_call_changes_nothing_or_everything(queue, cluster):
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
    """Every key of a node and its value, also of a slot that is on its way to it."""
    keys = sorted(client.scan_iter())
    values = [client.pipeline(transaction=False).execute_command("ASKING").dump(key).execute()[1] for key in keys]
    return dict(zip(keys, values, strict=True))


def test_work_goes_on_after_its_slot_has_moved(queue, cluster):
    queue.publish("before")
    move = SlotMove(cluster, queue.keys.ready)
    move.begin()
    move.end()

    with queue.receive(wait=5) as [job]:
        assert job.body == "before"
    assert queue.publish("after").status == "published"
    assert cluster.client(move.source).keys(queue.keys.ready.replace("ready", "*")) == []


class Load(threading.Thread):
    """
    Publishes to two queues in turn until it is stopped.

    Attributes:
        confirmed: what was published, by queue; `refused`: how many publishes of each were not.
    """

    def __init__(self, queues):
        super().__init__(daemon=True)
        self._queues, self._over = queues, threading.Event()
        self.confirmed, self.refused = {one.name: [] for one in queues}, dict.fromkeys([one.name for one in queues], 0)

    def run(self):
        threads = [threading.Thread(target=self._publish, args=(queue,)) for queue in self._queues]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _publish(self, queue):
        number = 0
        while not self._over.wait(0.002):
            number += 1
            try:
                queue.publish(str(number), id=f"{queue.name}-{number}")
            except PublishFailed:
                self.refused[queue.name] += 1
            else:
                self.confirmed[queue.name].append(f"{queue.name}-{number}")

    def stop(self):
        self._over.set()
        self.join()


@pytest.fixture
def at_work():
    """Start a worker and producers on queues of a Cluster, two queues at two nodes; return both and what ran."""
    started = []

    def start(cluster):
        queues = [Queue(name, str, url=cluster.url) for name in ("sturdy", "frail")]
        ran = {one.name: [] for one in queues}
        consumer = Consumer(url=cluster.url)
        for queue in queues:

            @consumer.handler(queue)
            def note(_body: str, job, ids=ran[queue.name]) -> None:
                ids.append(job.id)

        load = Load(queues)
        consumer.start(WorkerSettings(concurrency=4))
        load.start()
        started.append((consumer, load))
        eventually(lambda: all(len(ids) >= 20 for ids in ran.values()), "both queues are worked on")
        return queues, load, ran

    yield start
    for consumer, load in started:
        load.stop()
        consumer.stop()


def everything_ran(queues, load, ran):
    load.stop()
    eventually(lambda: sum(one.counts().alive for one in queues) == 0, "both queues are empty")
    assert {name: sorted(set(ids)) for name, ids in ran.items()} == {
        name: sorted(ids) for name, ids in load.confirmed.items()
    }
    assert [one.counts().missing for one in queues] == [0, 0]


def test_a_slot_that_is_held_open_holds_up_no_other_queue_and_loses_nothing(cluster, at_work):
    queues, load, ran = at_work(cluster)
    held, free = (one.name for one in queues)
    move = SlotMove(cluster, queues[0].keys.ready)

    move.begin()
    left = move.left()
    move.take(*left[: len(left) // 2])
    before = len(ran[free])
    eventually(lambda: load.refused[held] >= 1, "a publish to the queue in the middle gives up, after two seconds")
    meanwhile = len(ran[free]) - before
    move.end()
    before = len(ran[held])
    eventually(lambda: len(ran[held]) > before + 20, "work goes on in the queue that moved")

    assert meanwhile >= 50
    assert load.refused[free] == 0
    everything_ran(queues, load, ran)


def test_a_slot_that_moves_at_once_fails_no_publish(newest_server, at_work):
    with LiveCluster(newest_server) as cluster:
        queues, load, ran = at_work(cluster)
        target = neighbour(cluster, cluster.primary_of(queues[0].keys.ready))

        move_at_once(cluster, queues[0].keys.ready)
        before = len(ran[queues[0].name])
        eventually(lambda: len(ran[queues[0].name]) > before + 20, "work goes on in the queue that moved")

        assert cluster.primary_of(queues[0].keys.ready) is target
        assert load.refused == dict.fromkeys(ran, 0)
        everything_ran(queues, load, ran)
        load.stop()
