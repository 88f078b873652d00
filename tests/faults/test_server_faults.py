"""Redis is cut off, paused, killed, emptied or full under load: no confirmed message is lost, and work continues."""

import os
import random

import pytest
from broken import hold
from publishing import Publisher
from waiting import eventually

from reliq import OutgoingMessage, PublishFailed

pytestmark = pytest.mark.slow

#: Number of disturbances in a run.
FAULTS = 8


@pytest.fixture
def faults(server, admin):
    """Return the faults of Redis and of a worker, by name."""

    def restart():
        server.kill()
        server.start()

    def fill_up(publisher):
        refused = len(publisher.refused)
        admin.config_set("maxmemory", 1)
        eventually(lambda: len(publisher.refused) > refused, "a publish is refused")
        admin.config_set("maxmemory", 0)

    return {
        "CLIENT KILL": lambda *_: admin.client_kill_filter(_type="normal", skipme=True),
        "CLIENT PAUSE": lambda *_: admin.client_pause(400, all=False),
        "SCRIPT FLUSH": lambda *_: admin.script_flush(),
        "SIGSTOP of Redis": lambda *_: hold(0.4, server.pid),
        "SIGKILL of Redis": lambda *_: restart(),
        "SIGSTOP of a worker, longer than its lease": lambda process, _: hold(2.5, process.children()[0].pid),
        "SIGKILL of a worker": lambda process, _: process.children()[0].kill(),
        "no memory": lambda _, publisher: fill_up(publisher),
    }


def done(admin) -> set[str]:
    return {id.decode() for id in admin.hkeys("note:done")}


@pytest.mark.timeout(400)
def test_faults_of_redis_and_workers_lose_no_message(faults, worker, faulty, admin):
    chance = random.Random(5)
    process = worker("--queue", "counted", "--processes", "2", "--concurrency", "4", "--log-level", "error")
    eventually(lambda: len(process.children()) == 2, "the worker runs")
    order = [*faults] * (FAULTS // len(faults))
    chance.shuffle(order)

    with Publisher(faulty.COUNTED) as publisher:
        for name in order:
            before = len(publisher.confirmed)
            eventually(lambda at=before: len(publisher.confirmed) > at + 20, f"publishes go on before {name}")
            eventually(lambda: len(process.children()) == 2, f"both processes run before {name}")
            faults[name](process, publisher)
    eventually(lambda: faulty.COUNTED.counts().alive == 0, "everything is worked in the end")

    counts = faulty.COUNTED.counts()
    assert publisher.confirmed - done(admin) == set()
    assert done(admin) - publisher.confirmed - publisher.unknown == set()
    assert (counts.missing, counts.dead) == (0, 0)
    assert len(publisher.refused) > 0
    assert not process.said("Traceback"), "".join(process.lines)


def test_redis_without_memory_refuses_publishes_and_workers_drain_it(worker, faulty, admin):
    faulty.DEEDS.publish_many(["good"] * 2000)
    faulty.DEEDS.publish_many(OutgoingMessage(body="good", delay=0.5) for _ in range(100))
    admin.config_set("maxmemory", 1)

    with pytest.raises(PublishFailed) as failure:
        faulty.DEEDS.publish("good")
    process = worker("--queue", "deeds", "--processes", "2", "--burst-delayed")

    assert failure.value.outcome == "refused"
    assert process.wait(150) == 0
    assert admin.config_get("maxmemory") == {"maxmemory": "1"}
    counts = faulty.DEEDS.counts()
    assert (counts.alive, counts.dead, counts.missing, counts.totals["acked"]) == (0, 0, 0, 2100)


def test_flushall_under_load_loses_no_later_message(worker, faulty, admin, monkeypatch):
    monkeypatch.setattr("reliq.publish.PUBLISH_SECONDS", 60.0)  # on a busy machine the disk may hang
    process = worker("--queue", "counted", "--queue", "long", "--concurrency", "4")
    faulty.LONG.publish(1.0)
    faulty.COUNTED.publish_many(range(50), chunk=5)
    faulty.COUNTED.publish(1, delay=3600)
    eventually(lambda: admin.hlen("note:started") == 1, "a handler runs")

    admin.flushall()

    ids = [faulty.COUNTED.publish(number).id for number in range(50)]
    eventually(lambda: faulty.COUNTED.counts().totals.get("acked", 0) >= 50, "what came after it is worked")
    eventually(lambda: admin.hget("note:done", ids[-1]), "by the same process")
    assert len(process.children()) == 1
    assert faulty.COUNTED.counts().missing == 0


#: The last outages run with RELIQ_LONG only.
OUTAGES = [1, *([15, 60] if os.environ.get("RELIQ_LONG") else [])]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("seconds", OUTAGES)
def test_worker_works_again_after_an_outage_of_redis(seconds, worker, faulty, server):
    process = worker("--queue", "counted", "--processes", "2")
    faulty.COUNTED.publish(0)
    eventually(lambda: faulty.COUNTED.counts().totals.get("acked") == 1, "the worker works")
    eventually(lambda: len(process.children()) == 2, "both processes run")
    children = {child.pid for child in process.children()}

    server.kill()
    hold(seconds)
    server.start()
    faulty.COUNTED.publish(1)

    eventually(lambda: faulty.COUNTED.counts().totals.get("acked") == 2, "the worker works again")
    assert process.process.poll() is None
    assert {child.pid for child in process.children()} == children
