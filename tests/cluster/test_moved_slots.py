"""Moving slots: MOVED and ASK are followed within the round trip, TRYAGAIN by the client's next attempt."""

import threading

import pytest
import redis
from waiting import eventually

from reliq.errors import RedisUnavailableError
from reliq.redis.client import Client
from reliq.redis.commands import Command
from reliq.redis.connection import error_code, run_blocking
from reliq.redis.server import Connection
from tests.cluster_moves import SlotMove

pytestmark = pytest.mark.usefixtures("patient")


@pytest.fixture
def queue(queues):
    return next(iter(queues.values()))


@pytest.fixture
def move(cluster, queue, exchange):
    exchange([("PING",)])  # reads the topology
    return SlotMove(cluster, queue.keys.ready)


def refusals(cluster, server, word):
    """Return how often a server has replied with this error, by Redis' errorstats."""
    return cluster.client(server).info("errorstats").get(f"errorstat_{word}", {}).get("count", 0)


def test_moved_slot_is_followed_in_the_same_round_trip_and_remembered(cluster, queue, move, exchange):
    exchange([("RPUSH", queue.keys.lane("x"), 1)])
    move.begin()
    move.end()
    before = refusals(cluster, move.source, "MOVED")

    replies = [exchange([("PING",), ("RPUSH", queue.keys.lane("x"), 2), ("WAIT", 1, 5000)]) for _ in range(3)]

    assert replies == [[b"PONG", 2, 1], [b"PONG", 3, 1], [b"PONG", 4, 1]]
    assert refusals(cluster, move.source, "MOVED") <= before + 1


def test_missing_key_of_a_moving_slot_is_read_at_its_new_node(cluster, queue, move, exchange):
    old, new = queue.keys.lane("old"), queue.keys.lane("new")
    exchange([("RPUSH", old, 1)])
    move.begin()

    replies = exchange([("RPUSH", old, 2), ("RPUSH", new, 1), ("WAIT", 1, 5000), ("RPUSH", new, 2)])

    assert replies == [2, 1, 1, 2]
    assert move.left() == [old.encode()]
    assert refusals(cluster, move.source, "ASK") > 0
    move.end()
    assert exchange([("LLEN", old), ("LLEN", new)]) == [2, 2]


def test_a_call_whose_keys_are_at_both_ends_is_put_off_until_they_are_together(cluster, queue, move, exchange):
    here, there = queue.keys.lane("here"), queue.keys.lane("there")
    exchange([("SET", here, 1), ("SET", there, 2)])
    move.begin()
    move.take(there.encode())

    [refused] = exchange([("MGET", here, there)])

    assert isinstance(refused, redis.ResponseError)
    assert error_code(refused) == "TRYAGAIN"
    client = Client(Connection.to(cluster.url).wire())
    request = Command(("MGET", here, there), list)
    with pytest.raises(RedisUnavailableError, match="TRYAGAIN|Multiple keys") as caught:
        client.run(request)
    assert not caught.value.maybe_ran
    ends = threading.Thread(target=move.end)
    ends.start()
    assert client.run(request, for_seconds=60) == [b"1", b"2"]
    ends.join()


def test_neighbours_of_a_slot_on_its_way_notice_nothing(cluster, queues, queue, move, exchange):
    others = [("PING",), *(("LLEN", one.keys.ready) for one in queues.values() if one is not queue)]
    move.begin()

    assert exchange([("MGET", queue.keys.lane("x"), queue.keys.lane("y")), *others])[1:] == [b"PONG", 0, 0]
    move.end()


def test_a_node_that_has_given_all_its_slots_away_is_left(cluster, queues):
    """After a manual failover no node has failed; clients learn of it from a single redirect."""
    connection = Connection.to(cluster.url)
    wire, keys = connection.wire(), [queue.keys.ready for queue in queues.values()]
    lengths = [("LLEN", key) for key in keys]
    assert run_blocking(wire.exchange(lengths)) == [0, 0, 0]
    old, new = cluster.primary_of(keys[0]), cluster.replica_of(keys[0])

    cluster.ask(new, "CLUSTER", "FAILOVER")
    eventually(lambda: cluster.client(new).role()[0] == b"master", "the replica is promoted")

    assert run_blocking(wire.exchange(lengths)) == [0, 0, 0]

    def is_left():  # a node may tell of the promotion a moment later than another
        answers = run_blocking(wire.exchange(lengths))
        return answers == [0, 0, 0] and f"127.0.0.1:{old.port}" not in wire.each() and len(wire._nodes) == 3

    eventually(is_left, "the topology is read again, and the node is left")
