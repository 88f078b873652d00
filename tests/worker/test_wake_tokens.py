"""A worker with queues in several slots of a Cluster wakes up immediately; a failing node stops only its own queues."""

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from waiting import eventually

from reliq import Consumer, Queue
from reliq.events import Acked, RedisRecovered, RedisUnavailable, Started
from reliq.redis.client import Client
from reliq.redis.server import WORKER_TIMEOUT_SECONDS, Connection

pytestmark = pytest.mark.slow


@pytest.fixture
def queues_on(cluster):
    """Make queues, each on the next primary."""

    def make(count):
        homes, found, number = cluster.primaries(), [], 0
        while len(found) < count:
            queue, number = Queue(f"q{number}", str, url=cluster.url), number + 1
            if cluster.primary_of(queue.keys.wake) is homes[len(found) % len(homes)]:
                found.append(queue)
        return found

    return make


@pytest.fixture
def blocked(cluster):
    """Return the number of blocked clients in the Cluster."""
    return lambda: sum(cluster.client(one).info("clients")["blocked_clients"] for one in cluster.primaries())


@pytest.fixture
def all_ran(cluster, ran):
    """Return how often the primaries have run each client command."""
    return lambda: sum((ran(cluster.client(one)) for one in cluster.primaries()), Counter())


def test_messages_are_found_by_their_tokens_alone(
    no_looks, no_returns, queues_on, cluster, blocked, all_ran, start, recorder
):
    count = 20
    consumer, queues = Consumer(cluster.url, observers=[recorder]), queues_on(count)
    for queue in queues:
        consumer.handler(queue)(lambda body: None)
    looks = all_ran()["srandmember"]
    start(consumer)
    eventually(lambda: all_ran()["srandmember"] >= looks + count, "the janitor's first round is over")
    eventually(lambda: blocked() == count, "a wait for each queue stands")
    before = all_ran()

    for number in range(40):
        queues[number % count].publish("x")
        recorder.wait_for(Acked, number + 1)

    made = all_ran() - before
    assert made["lpop"] == 0
    assert made["blpop"] <= 40  # a new wait after each token
    assert made["evalsha"] == 4 * 40  # publish, claim, bodies, ack


def test_a_worker_without_room_passes_the_token_on(no_looks, queues_on, cluster, blocked, start, recorder, gate):
    held, other = queues_on(2)
    full, idle = (Consumer(cluster.url, observers=[recorder]) for _ in range(2))
    full.handler(held)(lambda body: gate.pass_through())
    took = []
    for consumer in (full, idle):
        consumer.handler(other)(lambda body, consumer=consumer: took.append(consumer))
    start(full, concurrency=1)
    eventually(lambda: blocked() == 2, "the first one waits")
    held.publish("x")
    gate.wait_for()
    eventually(lambda: blocked() == 1, "the wait of the other queue still stands")
    start(idle)
    eventually(lambda: blocked() == 2, "and the second waits: the token goes to who waits for longer")

    other.publish("y")

    recorder.wait_for(Acked, queue=other.name)
    assert took == [idle]


def test_tokens_that_came_during_a_stop_go_to_other_processes(queue, caller, client):
    tokens = caller.wake_tokens()
    [(place, shards)] = tokens.serve([queue.keys]).items()
    tokens.expect(place, shards)
    eventually(lambda: client.info("clients")["blocked_clients"] == 1, "it waits")
    client.rpush(queue.keys.wake, "1")
    eventually(lambda: client.llen(queue.keys.wake) == 0, "the token is on its way")

    tokens.close()
    tokens.close()

    assert client.llen(queue.keys.wake) == 1


def test_a_sharded_queue_is_worked_on_at_every_server(no_looks, cluster, blocked, start, recorder, spread, put):
    queue, consumer = Queue("orders", str, url=cluster.url), Consumer(cluster.url, observers=[recorder])
    client = Client.to(Connection.to(cluster.url), WORKER_TIMEOUT_SECONDS)
    shards = spread(queue, 16, at=cluster.client(cluster.primary_of(queue.keys.map)))
    for keys in shards:
        put(keys, ["x"] * 50, by=client)
    consumer.handler(queue)(lambda body: None)
    engine = start(consumer)
    recorder.wait_for(Acked, 16 * 50)
    eventually(lambda: blocked() == 16, "a wait for each shard stands")

    for keys in shards:
        put(keys, ["y"], by=client)
    recorder.wait_for(Acked, 16 * 51)

    assert len({cluster.primary_of(keys.wake) for keys in shards}) == 3
    assert {event.queue for event in recorder.of(Started)} == {"orders"}
    for _ in range(2):  # as for a process that is replaced and then stopped
        engine.stop_claiming()
    eventually(lambda: blocked() == 0, "nothing waits any more")


@contextmanager
def worked_on(queues):
    """Publish to queues all the time; return the longest time without a start of each queue, by name."""
    over, last = threading.Event(), {queue.name: time.monotonic() for queue in queues}
    gaps = dict.fromkeys(last, 0.0)

    def publish():
        while not over.wait(0.01):
            for queue in queues:
                queue.publish("x")

    def note(event):
        if isinstance(event, Started) and event.queue in gaps:
            now = time.monotonic()
            gaps[event.queue] = max(gaps[event.queue], now - last[event.queue])
            last[event.queue] = now

    with ThreadPoolExecutor() as pool:
        published = pool.submit(publish)
        try:
            yield note, gaps
        finally:
            over.set()
    published.result()


def goes_on(recorder, queues):
    """Wait until twenty more messages of each queue were handled."""
    marks = {queue.name: len(recorder.ids(Acked, queue=queue.name)) for queue in queues}
    for queue in queues:
        recorder.wait_for(Acked, marks[queue.name] + 20, queue=queue.name)


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_server_that_fails_stops_its_own_queues_alone(queues_on, cluster, start, recorder, how):
    queues = queues_on(6)
    sick = cluster.primary_of(queues[0].keys.wake)
    theirs = [queue for queue in queues if cluster.primary_of(queue.keys.wake) is sick]
    healthy = [queue for queue in queues if queue not in theirs]
    with worked_on(healthy) as (note, gaps):
        consumer = Consumer(cluster.url, observers=[recorder, note])
        for queue in queues:
            consumer.handler(queue)(lambda body: None)
        start(consumer)
        goes_on(recorder, healthy)
        gaps.update(dict.fromkeys(gaps, 0.0))

        sick.kill() if how == "killed" else cluster.pause(sick)
        for queue in theirs:
            recorder.wait_for(RedisUnavailable, queue=queue.name)
        goes_on(recorder, healthy)
        worst = max(gaps.values())

        assert {event.queue for event in recorder.of(RedisUnavailable)} == {queue.name for queue in theirs}
        assert worst < 10  # generous for busy machines; if the whole worker waits it is 11
        if how == "killed":
            for queue in theirs:
                recorder.wait_for(RedisRecovered, queue=queue.name)  # a replica was promoted
                queue.publish("x")
            goes_on(recorder, healthy)
            for queue in theirs:
                recorder.wait_for(Acked, queue=queue.name)
