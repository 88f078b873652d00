"""A node of a Cluster is killed or hangs: only its own commands fail, and a separate thread probes it."""

import asyncio
import sqlite3
import threading
from contextlib import closing

import pytest
import redis
from waiting import eventually

from reliq import Relay
from reliq.errors import RedisUnavailableError
from reliq.outbox.relay import OutboxMover
from reliq.outbox.tables import ddl
from reliq.redis.client import Client
from reliq.redis.cluster import CircuitBreakers
from reliq.redis.commands import Command
from reliq.redis.connection import NotSentError, is_failure, run_blocking
from reliq.redis.server import Connection

pytestmark = pytest.mark.slow


@pytest.fixture
def keys(cluster, queues):
    """Return a list key on each node, by its port; the first list has one element, the second two, and so on."""
    found, wire = {port: queue.keys.lane("x") for port, queue in queues.items()}, Connection.to(cluster.url).wire()
    eventually(
        lambda: not any(map(is_failure, run_blocking(wire.exchange(lengths(found))))), "every node is used again"
    )
    run_blocking(wire.exchange([("RPUSH", key, *range(at)) for at, key in enumerate(found.values(), 1)]))
    return found


@pytest.fixture
def paused(cluster, keys, stand_still):
    """Pause a node; return its port."""
    port = next(iter(keys))
    stand_still(cluster.server_at(port))
    return port


def lengths(keys):
    return [("LLEN", key) for key in keys.values()]


def test_a_round_trip_to_every_node_is_answered_in_its_places(exchange, keys):
    a, b, c = keys.values()

    replies = exchange([("LLEN", c), ("LLEN", a), ("INCR", a), ("LLEN", b), ("PING",), ("LLEN", c)])

    assert replies[:2] + replies[3:] == [3, 1, 2, b"PONG", 3]
    assert isinstance(replies[2], redis.ResponseError)


def test_paused_node_fails_its_own_commands_by_timeout_then_at_once(exchange, keys, paused):
    first, then = exchange(lengths(keys)), exchange(lengths(keys))

    assert first[1:] == then[1:] == [2, 3]
    assert is_failure(first[0])
    assert "in the background" not in str(first[0])
    assert isinstance(then[0], NotSentError)
    assert f"127.0.0.1:{paused} does not answer and is tried again in the background" in str(then[0])


def test_node_that_falls_silent_fails_its_own_commands_over_open_connections_too(cluster, keys, stand_still):
    async def twice():
        wire = Connection.to(cluster.url).async_wire()
        before = await wire.exchange(lengths(keys))
        stand_still(cluster.server_at(next(iter(keys))))
        after = await wire.exchange(lengths(keys))
        await Connection.to(cluster.url).aclose()
        return before, after

    before, after = asyncio.run(twice())

    assert before == [1, 2, 3]
    assert isinstance(after[0], redis.TimeoutError)
    assert after[1:] == [2, 3]


def test_resumed_node_is_used_again(cluster, exchange, keys, paused):
    exchange(lengths(keys))
    cluster.resume(cluster.server_at(paused))

    eventually(lambda: exchange(lengths(keys)) == [1, 2, 3], "every node answers")


def test_a_call_says_whether_it_may_have_run_at_the_node_that_failed(cluster, keys, paused):
    client = Client(Connection.to(cluster.url).wire())
    requests = [Command(command, int) for command in lengths(keys)]

    (first, *others), (then, *_) = client.run_all(requests), client.run_all(requests)

    assert others == [2, 3]
    assert [(type(one), one.maybe_ran) for one in (first, then)] == [
        (RedisUnavailableError, True),
        (RedisUnavailableError, False),
    ]
    with pytest.raises(RedisUnavailableError):
        client.run(requests[0])


def test_a_further_try_is_for_the_failed_requests_alone(cluster, keys, paused):
    client = Client(Connection.to(cluster.url).wire())
    requests = [Command(("RPUSH", key, "more"), int) for key in keys.values()]
    client.run_all(requests[:1])  # now the client knows that the node does not answer
    resumes = threading.Timer(0.2, cluster.resume, [cluster.server_at(paused)])
    resumes.start()

    answers = client.run_all(requests, for_seconds=60)

    assert answers[1:] == [3, 4]
    assert answers[0] >= 2
    resumes.join()


def test_a_promoted_replica_takes_the_place_of_a_killed_node_and_its_pool_is_dropped(cluster, keys):
    port, connection = next(iter(keys)), Connection.to(cluster.url)
    wire = connection.wire()
    assert run_blocking(wire.exchange(lengths(keys))) == [1, 2, 3]

    cluster.server_at(port).kill()
    replies = run_blocking(wire.exchange(lengths(keys)))

    assert is_failure(replies[0])
    assert replies[1:] == [2, 3]

    def is_replaced():  # a node may tell of the promotion a moment later than another
        answers = run_blocking(wire.exchange(lengths(keys)))
        return answers == [1, 2, 3] and f"127.0.0.1:{port}" not in wire.each() and len(wire._nodes) == 3

    eventually(is_replaced, "the replica is asked, and the pool of the killed node is dropped")


def test_commands_go_on_while_the_topology_is_read(cluster, keys, monkeypatch):
    wire, asked, over = Connection.to(cluster.url).wire(), threading.Event(), threading.Event()
    run_blocking(wire.exchange(lengths(keys)))

    def hangs(*_, **__):
        asked.set()
        assert over.wait(60)
        return [None, []]

    monkeypatch.setattr(wire._servers, "_ask", hangs)
    wire.note(wire.node_for(keys[next(iter(keys))]), redis.ConnectionError("a connection was reset"))
    assert asked.wait(60)

    assert run_blocking(wire.exchange(lengths(keys))) == [1, 2, 3]
    over.set()


def test_all_nodes_away_are_a_failure_in_every_place(cluster, exchange, keys):
    for port in keys:
        cluster.pause(cluster.server_at(port))

    replies = exchange(lengths(keys))

    assert [is_failure(one) for one in replies] == [True, True, True]


# ---- a circuit breaker alone ------------------------------------------------


class Node:
    """A fake node: counts the probes and fails all probes before number `answers`; none ends before `may_answer`."""

    def __init__(self, answers):
        self.tries, self._answers = 0, answers
        self.tried, self.may_answer = threading.Semaphore(0), threading.Event()

    def __call__(self, _node):
        self.may_answer.wait(60)
        self.tries += 1
        self.tried.release()
        if self.tries < self._answers:
            raise redis.TimeoutError("not yet")


def test_a_node_that_does_not_answer_is_tried_by_one_thread_until_it_does():
    node, looks = Node(answers=3), []
    breakers = CircuitBreakers(node, lambda: looks.append(1))
    for _ in range(20):
        breakers.trip("a", redis.TimeoutError("late"))

    with pytest.raises(NotSentError, match=r"^a does not answer and is tried again in the background \(late\)$"):
        breakers.check("a")
    breakers.check("b")
    node.may_answer.set()
    eventually(lambda: not breakers._open, "the node is used again")

    assert (node.tries, len(looks)) == (3, 2)


@pytest.mark.parametrize(
    "end", [lambda breakers: breakers.keep(()), lambda breakers: breakers.keep({"b"})], ids=["closed", "left"]
)
def test_a_node_that_left_or_was_closed_is_not_tried_any_more(end):
    node = Node(answers=10**9)
    node.may_answer.set()
    breakers = CircuitBreakers(node, lambda: None)
    breakers.trip("a", redis.TimeoutError("late"))
    assert node.tried.acquire(timeout=60)

    end(breakers)

    breakers.check("a")
    eventually(lambda: not any("reliq-ping-a" in one.name for one in threading.enumerate()), "its thread ends")


def test_a_server_that_answers_a_ping_by_a_refusal_answers():
    def refuses(_node):
        raise redis.exceptions.NoPermissionError("this user may not PING")

    breakers = CircuitBreakers(refuses, lambda: None)
    breakers.trip("a", redis.TimeoutError("late"))

    eventually(lambda: not breakers._open, "the node is used again")


def test_relay_that_begins_while_a_node_is_away_moves_the_rows_of_other_queues(cluster, queues, stand_still, tmp_path):
    """The relay has read no shard map yet, and cannot read the map of the queue on the paused node."""
    with closing(sqlite3.connect(tmp_path / "shop.db")) as tx:
        for statement in ddl("sqlite"):
            tx.execute(statement)
        for queue in queues.values():
            queue.publish_in(tx, 1)
        tx.commit()
    paused, *alive = queues
    stand_still(cluster.server_at(paused))

    with closing(OutboxMover(Relay(f"sqlite:///{tmp_path}/shop.db"), cluster.url)) as mover:
        assert mover.move() == len(queues) - 1

    assert [queues[port].counts().ready for port in alive] == [1] * len(alive)
