"""What a process holds, as its supervisor finds it in Redis when the process says nothing."""

import pytest

from reliq.leases import Leases
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
