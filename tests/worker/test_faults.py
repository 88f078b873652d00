"""Faults around a worker lose no message, and the other messages continue."""

import logging
import shlex
from types import SimpleNamespace

import pytest
import redis
from tenacity import wait_fixed
from waiting import eventually

from reliq import ConfigurationError, Queue
from reliq.errors import RedisUnavailableError
from reliq.events import Acked, Handled, LeaseLost, RedisUnavailable, Started
from reliq.logs import LogObserver
from reliq.worker.engine import reply_seconds
from reliq.worker.health import Pulse, ready

pytestmark = pytest.mark.slow

SOON = wait_fixed(0.01)


def test_work_goes_on_when_redis_was_killed_and_started_again(own_server, own_queue, own_consumer, recorder, gate):
    @own_consumer.handler(own_queue, backoff=SOON, lease=60)
    def handle(body):
        if body == "over the outage":
            gate.pass_through()

    own_queue.publish("over the outage", id="x")
    own_consumer.start()
    gate.wait_for()

    own_server.kill()
    recorder.wait_for(RedisUnavailable)
    gate.open()
    recorder.wait_for(Handled)
    recorder.wait_for(RedisUnavailable, part="settler")
    own_server.start()
    own_queue.publish("after it", id="y")

    recorder.wait_for(Acked, 2)
    own_consumer.stop()
    assert sorted(recorder.ids(Acked)) == sorted(recorder.ids(Started)) == ["x", "y"]  # each ran once
    counts = own_queue.counts()
    assert (counts.alive, counts.missing) == (0, 0)


def test_start_returns_while_redis_is_away_and_the_worker_follows(own_server, own_queue, own_consumer, recorder):
    own_consumer.handler(own_queue)(lambda body: None)
    own_queue.publish("x")
    own_server.kill()

    own_consumer.start()
    with pytest.raises(ConfigurationError, match="has been started"):
        own_consumer.start()
    recorder.wait_for(RedisUnavailable, part="start")
    own_server.start()

    recorder.wait_for(Acked)


def test_stop_ends_a_start_that_waits_for_redis(own_server, own_consumer, recorder, threads_since):
    own_consumer.handler("q")(lambda body: None)
    own_server.kill()
    before = threads_since()
    own_consumer.start()
    recorder.wait_for(RedisUnavailable, part="start")

    assert own_consumer.stop()

    assert not threads_since(before)
    own_server.start()
    own_consumer.start()  # again
    assert own_consumer.stats() is not None


#: Error code -> how to make the server refuse, and accept again.
REFUSALS = {
    "READONLY": ("REPLICAOF 127.0.0.1 1", "REPLICAOF NO ONE"),
    "NOREPLICAS": ("CONFIG SET min-replicas-to-write 1", "CONFIG SET min-replicas-to-write 0"),
}


@pytest.mark.parametrize("code", REFUSALS)
def test_a_worker_whose_claims_are_all_refused_is_not_ready(own_server, own_consumer, recorder, caplog, code):
    refuse, accept = REFUSALS[code]
    caplog.set_level(logging.INFO, "reliq")
    own_consumer.observers.insert(0, LogObserver())
    pulse = Pulse()
    for name in ("q", "other"):
        own_consumer.handler(name)(lambda body: None)
    own_consumer.start()

    def unready():
        pulse.note(own_consumer.stats())
        return ready([pulse], lambda: True)

    with redis.Redis.from_url(own_server.url) as admin:
        admin.execute_command(*shlex.split(refuse))
        eventually(lambda: code in unready(), "it is not ready")
        recorder.wait_for(RedisUnavailable, 8, part="fetcher")
        told = "\n".join(caplog.messages)
        admin.execute_command(*shlex.split(accept))
    eventually(lambda: unready() == "", "it is ready again")

    assert told.count(f"queue q: its Redis refuses: {code}; retrying until it is back") == 1
    assert "is back after" not in told
    Queue("q", url=own_server.url).publish({})
    recorder.wait_for(Acked)


def test_a_drain_without_redis_raises_and_leaves_no_thread(own_server, own_queue, own_consumer, threads_since):
    own_consumer.handler(own_queue)(lambda body: None)
    own_server.kill()
    before = threads_since()  # a thread of an earlier test may be about to end

    with pytest.raises(RedisUnavailableError):
        own_consumer.drain()
    assert not threads_since(before)


def test_a_reply_is_awaited_no_longer_than_the_shortest_lease():
    """A silent connection used to keep a process idle for five seconds, with any lease."""
    for leases, seconds in (((), 5), ((30, 60), 5), ((60, 3), 3), ((0.5, 30), 2)):
        assert reply_seconds([SimpleNamespace(lease_seconds=lease) for lease in leases]) == seconds


def test_cut_connections_leave_no_unknown_lease_and_no_answer_is_lost(queue, consumer, start, recorder, client):
    @consumer.handler(queue, backoff=SOON, lease=60)
    def handle(body, job):
        if job.attempt == 1 and body == "fails":
            raise ValueError

    start(concurrency=4)

    published = 0
    for _ in range(20):
        published += queue.publish_many(["x", "fails"] * 250).published
        recorder.wait_for(Handled, published * 3 // 2 - 600, timeout=100)
        client.client_kill_filter(_type="normal", skipme=True)
        client.script_flush()

    eventually(lambda: not queue.counts().alive, "all have ended")
    counts = queue.counts()
    # A lease that no worker knew of would expire after a minute; all other messages are delivered once.
    assert (counts.missing, counts.totals["acked"], counts.totals.get("retried_lease", 0)) == (0, published, 0)
    assert len(recorder.ids(Started)) == published * 3 // 2
    assert recorder.of(LeaseLost) == []
    assert client.keys(queue.keys.msg("*")) == []


def test_an_observer_that_raises_and_a_body_of_a_wrong_type_do_no_harm(queue, acking, work_until, client):
    def breaks(event):
        raise RuntimeError("the dashboard is down")

    acking.observers.insert(0, breaks)
    queue.publish("x", id="x")
    client.delete(queue.keys.msg("x"))
    client.lpush(queue.keys.msg("x"), "a list")
    queue.publish("y")

    work_until(Acked)
    eventually(lambda: not queue.counts().alive, "both have ended")
    assert queue.counts().totals["expired"] == 1


@pytest.mark.parametrize("key", ["ready", "unack", "wake", "garbage", "pending"])
def test_one_broken_queue_does_not_stop_the_others(make_queue, consumer, start, recorder, client, caplog, key):
    broken, sound = make_queue("broken"), make_queue("sound")
    for queue in (broken, sound):
        consumer.handler(queue, lease=0.3, backoff=SOON)(fails_once)
    place = getattr(broken.keys, key)
    client.delete(place)
    client.hset(place, "a", "b")
    start(concurrency=4)
    for _ in range(5):
        for number in range(20):
            sound.publish(str(number), delay=0.01 * (number % 3))
        recorder.wait_for(Acked, 20, queue="sound")
        recorder.events.clear()

    if key != "garbage":
        eventually(lambda: place in caplog.text, "the broken one is told")

    client.delete(place)
    broken.publish("mended")

    recorder.wait_for(Acked, queue="broken")
    assert sound.counts().alive == 0
    assert "failed; retrying" not in caplog.text  # which a part logs that waits for all shards


def fails_once(body, job):
    if job.attempt == 1 and body == "3":
        raise ValueError(body)
