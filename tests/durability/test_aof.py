"""`Durability.aof`: a publish waits until the message is on disk. Redis has WAITAOF since 7.2."""

import os
import signal

import pytest
import redis

from reliq import ConfigurationError, Durability, PublishFailed, Queue
from reliq.redis import commands
from reliq.testing.server import bundled_server

pytestmark = pytest.mark.usefixtures("patient")

ALWAYS = {"appendonly": "yes", "appendfsync": "always"}


def test_durability_becomes_a_wait_command():
    assert commands.confirmation(Durability.replicas(2, timeout=0.5)).command == ("WAIT", 2, 500)
    assert commands.confirmation(Durability.aof()).command == ("WAITAOF", 1, 0, 2000)
    assert commands.confirmation(Durability.aof(local=False, replicas=2, timeout=1)).command == ("WAITAOF", 0, 2, 1000)


@pytest.mark.parametrize(
    ("durability", "reply", "confirmed"),
    [
        (Durability.replicas(2), 1, (False, 1, None)),
        (Durability.replicas(2), 3, (True, 3, None)),
        (Durability.aof(), [1, 0], (True, 0, True)),
        (Durability.aof(), [0, 5], (False, 5, False)),
        (Durability.aof(replicas=1), [1, 0], (False, 0, True)),
        (Durability.aof(replicas=1), [0, 1], (False, 1, False)),
        (Durability.aof(local=False, replicas=1), [0, 1], (True, 1, None)),
    ],
    ids=["too few", "enough", "disk", "no disk", "disk alone", "replica alone", "replica's disk"],
)
def test_reply_to_a_wait_is_read_as_a_confirmation(durability, reply, confirmed):
    assert commands.confirmation(durability).read(reply) == confirmed


def test_aof_durability_on_an_old_server_is_refused_with_both_versions(start, make_queue, call):
    server = start(bundled_server(), **ALWAYS)
    queue = make_queue(server)

    with pytest.raises(ConfigurationError) as caught:
        call(queue, "publish", {}, durability=Durability.aof())

    with redis.Redis.from_url(server.url) as client:
        version = client.info("server")["redis_version"]
        ran = {name for name in client.info("commandstats") if "eval" in name}
    assert str(caught.value).startswith(f"durability by aof needs Redis 7.2 or newer (WAITAOF), not {version};")
    assert ran == set()
    assert call(queue, "publish", {}).status == "published"


def test_aof_durability_on_a_server_without_aof_is_refused(start, newest_server, make_queue, call):
    queue = make_queue(start(newest_server))

    with pytest.raises(ConfigurationError, match="needs `appendonly yes` in the server's redis.conf"):
        call(queue, "publish", {}, durability=Durability.aof())

    assert call(queue, "counts").totals == {}


def test_message_on_disk_survives_a_kill_of_the_server(start, newest_server, make_queue, call):
    writing = start(newest_server, **ALWAYS)
    queue = make_queue(writing)

    receipts = [call(queue, "publish", {"n": n}, durability=Durability.aof(timeout=20)) for n in range(3)]
    writing.kill()
    writing.start()

    assert [(one.durable, one.on_disk, one.replicas) for one in receipts] == [(True, True, 0)] * 3
    with queue.receive(limit=5) as jobs:
        assert {job.id for job in jobs} == {receipt.id for receipt in receipts}


def test_disk_that_is_too_late_is_reported_as_not_durable(start, newest_server, make_queue, call):
    server = start(newest_server, appendonly="yes", appendfsync="no")

    receipt = call(make_queue(server), "publish", {}, durability=Durability.aof(timeout=0.1))

    assert (receipt.status, receipt.durable, receipt.on_disk) == ("published", False, False)


def test_disks_of_replicas_are_counted_apart(replicated, newest_server, make_queue, call):
    primary, replica = replicated(newest_server, **ALWAYS)
    queue = make_queue(primary)

    there = call(queue, "publish", {}, durability=Durability.aof(local=False, replicas=1, timeout=20))
    os.kill(replica.pid, signal.SIGSTOP)
    away = call(queue, "publish", {}, durability=Durability.aof(replicas=1, timeout=0.2))
    os.kill(replica.pid, signal.SIGCONT)

    assert (there.durable, there.replicas, there.on_disk) == (True, 1, None)
    assert (away.durable, away.replicas, away.on_disk) == (False, 0, True)


@pytest.mark.usefixtures("impatient")
def test_aof_durability_on_a_server_that_is_away_refuses_the_publish(call):
    nobody = Queue("q", url="redis://127.0.0.1:1/0")

    with pytest.raises(PublishFailed) as caught:
        call(nobody, "publish", {}, durability=Durability.aof())

    assert caught.value.outcome == "refused"
