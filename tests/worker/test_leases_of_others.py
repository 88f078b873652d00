"""What a process holds, as its supervisor finds it in Redis when the process says nothing."""

import json

import pytest

from reliq import Consumer, Queue
from reliq.health import Pulse
from reliq.process.child import Child
from reliq.process.leases import Leases
from reliq.process.recovery import Recovery
from reliq.transitions import Turn

LANE = "lane-of-another"


@pytest.fixture
def leases(consumer, queue):
    consumer.handler(queue)(lambda body: None)
    return Leases(consumer)


@pytest.mark.parametrize("count", ["5000000", "9" * 5000])
def test_a_count_that_is_beyond_all_measure_stops_nothing(leases, queue, client, count):
    queue.publish_many(["x"] * 3)
    odd, *others = queue.moves.claim(Turn(LANE, 1), limit=3, lease_ms=60_000).claimed
    client.hset(queue.keys.counts, odd.id, count)

    leases.release("q", leases.held("q", LANE))

    again = queue.moves.claim(Turn("another", 1), limit=3, lease_ms=60_000).claimed
    assert {one.id for one in others} <= {one.id for one in again}


def test_nothing_that_goes_wrong_there_ends_a_supervisor_and_other_queues_are_settled(url, tmp_path, caplog):
    consumer, queue = Consumer(url), Queue("good", str, url=url)
    for one in (Queue("bad", str, url=url), queue):
        consumer.handler(one)(lambda body: None)
    queue.publish("x", id="x")
    (held,) = queue.moves.claim(Turn(LANE, 1), limit=1, lease_ms=60_000).claimed
    child = Child(0, tmp_path, Pulse(), consumer.handlers)
    rows = [{"queue": "bad", "id": "x", "nonce": None, "left": 1}]
    rows += [{"queue": "good", "id": held.id, "nonce": held.nonce, "left": held.left}]
    child.report.write_text(json.dumps(rows))

    Recovery(consumer, concurrency=2).give_back(child, 1)

    assert "bad: what a process held could not be settled" in caplog.text
    assert queue.counts().ready == 1


def test_a_supervisor_does_not_wait_for_a_redis_that_is_away_once_for_each_queue(own_server, tmp_path, caplog):
    consumer, names = Consumer(own_server.url), ["a", "b", "c"]
    for name in names:
        consumer.handler(Queue(name, str))(lambda body: None)
    child = Child(0, tmp_path, Pulse(), consumer.handlers)
    child.report.write_text(json.dumps([{"queue": one, "id": "x", "nonce": "n.1:9", "left": 1} for one in names]))
    own_server.stop()

    Recovery(consumer, concurrency=2).give_back(child, 1)

    (told,) = [one.getMessage() for one in caplog.records if "could not be settled" in one.getMessage()]
    assert told.startswith("a, b, c: ")
