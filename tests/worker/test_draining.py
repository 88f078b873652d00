"""Drains and bursts end when no message is due, log the reason of a wait, and report failing handlers."""

import logging
import time

import pytest
from lost_scripts import lose
from tenacity import wait_fixed

from reliq import BodyError, ConfigurationError, Nack, OutgoingMessage, Snooze, WorkerSettings
from reliq.lua import script
from reliq.lua.transitions import promote
from reliq.redis.client import Client
from reliq.redis.server import Connection
from reliq.worker.claims import ServedQueues
from reliq.worker.engine import Drained

LATER = 3600


@pytest.fixture
def seen(queue, consumer):
    """Return the bodies that a handler got; it raises for `bad` and `exit`, and postpones `nack` and `snooze`."""
    bodies = []
    raised = {
        "bad": BodyError("the gateway said no"),
        "exit": SystemExit(3),
        "nack": Nack(LATER),
        "snooze": Snooze(LATER),
    }

    @consumer.handler(queue, backoff=wait_fixed(LATER))  # the default may be short enough that a drain waits for it
    def handle(body):
        bodies.append(body)
        if body in raised:
            raise raised[body]

    return bodies


@pytest.fixture
def drained(url, acking, inflight_of):
    """Return the state that a drain of the test's consumer checks."""
    client, served = Client.to(Connection.to(url), LATER), ServedQueues(acking.handlers)
    served.read(client)
    return Drained(client, served, inflight_of())


def test_a_drain_leaves_messages_that_are_due_later_put_off_or_paused(queue, consumer, seen):
    soon, late = OutgoingMessage(body="soon", delay=0.05), OutgoingMessage(body="late", delay=LATER)
    queue.publish_many(["now", "nack", "snooze", soon, late])

    consumer.drain()

    assert sorted(seen) == ["nack", "now", "snooze", "soon"]
    counts = queue.counts()
    assert (counts.pending, counts.unack, counts.ready, counts.retry) == (2, 1, 0, 0)
    queue.publish("x")
    queue.pause()
    consumer.drain()
    assert (len(seen), queue.counts().ready) == (4, 1)


def test_a_drain_of_delayed_messages_waits_for_them_and_for_a_backoff(queue, consumer):
    attempts = []

    @consumer.handler(queue, backoff=wait_fixed(1.2))
    def handle(body, job):
        attempts.append(job.attempt)
        if job.attempt == 1:
            raise Nack

    queue.publish("x", delay=0.05)

    consumer.drain(delayed=True)

    assert attempts == [1, 2]
    assert queue.counts().alive == 0


def test_a_drain_raises_the_error_of_a_handler_on_request_and_leaves_the_message(queue, consumer, seen):
    queue.publish("bad")
    with pytest.raises(BodyError, match="the gateway said no"):
        consumer.drain()
    assert queue.counts().unack == 1

    queue.publish("exit")
    with pytest.raises(RuntimeError, match="a handler raised SystemExit at test_draining.py") as caught:
        consumer.drain()
    assert isinstance(caught.value.__cause__, SystemExit)

    queue.publish("bad")
    consumer.drain(raise_errors=False)
    assert seen == ["bad", "exit", "bad"]
    assert queue.counts().unack == 3


def test_a_drain_waits_for_messages_of_other_consumers_and_logs_it(queue, consumer, seen, start, caplog, monkeypatch):
    monkeypatch.setattr("reliq.worker.engine.REPORT_SECONDS", 0.0)
    caplog.set_level(logging.INFO, "reliq")
    queue.publish("x")
    with queue.receive() as jobs:
        assert len(jobs) == 1
        engine = start()
        assert not engine.is_drained(delayed=False)

    assert "drain: waiting for q: 1 unack" in caplog.text
    assert engine.is_drained(delayed=False)


def test_a_worker_in_a_burst_does_not_wait_for_messages_due_later(queue, consumer, seen):
    queue.publish("now")
    queue.publish("later", delay=LATER)

    assert consumer.run(WorkerSettings(burst=True)) == 0

    assert (seen, queue.counts().pending) == (["now"], 1)
    with pytest.raises(ConfigurationError, match="burst must be True, False or 'delayed', not a str"):
        WorkerSettings(burst="all")


def test_a_drain_promotes_messages_though_redis_has_lost_the_script(queue, drained, client):
    queue.publish("x", id="x", key="a", delay=LATER)
    assert drained.look(delayed=False)  # this process has seen that all messages are in Redis
    client.zadd(queue.keys.pending, {"x": time.time() - 1})
    lose(client, "promote")

    assert not drained.look(delayed=False)


def test_a_drain_waits_for_a_message_that_another_worker_promotes_beside_it(queue, drained, caller):
    class Beside(Client):
        def run_all(self, requests, **options):
            if getattr(requests[0], "script", None) == script("promote"):  # the message has been counted as pending
                caller.run(promote(queue.keys, clock=round((time.time() + 1) * 1e6)))
            return super().run_all(requests, **options)

    queue.publish("x", delay=0.5)
    drained._client.__class__ = Beside

    assert not drained.look(delayed=False)
    assert queue.counts().ready == 1
