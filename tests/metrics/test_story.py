"""A story with a real Prometheus: in each act the first screen shows the fault, and its alert fires."""

import signal
import sqlite3
from contextlib import closing
from dataclasses import dataclass

import psutil
import pytest
import redis
from ports import free_port
from stage import Stage, faster_rules
from waiting import eventually
from worker_process import Command

from reliq import Queue
from reliq.testing.server import EmbeddedRedis

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
PROCESSES, POISON = 2, 12
#: Tiles without data while Redis is away.
OF_REDIS = {"Memory", "Failed", "Died 1h"}
HEALTHY = {"Redis": 1, "Memory": -1, "Targets": 0, "Oldest": 0, "Failed": 0, "Died 1h": 0, "Alerts": 0}


@pytest.fixture
def own_redis(server_path, tmp_path, monkeypatch):
    """A Redis that the story fills, stops and restarts."""
    for module in ("publish", "queue"):
        monkeypatch.setattr(f"reliq.{module}.PUBLISH_SECONDS", 60.0)  # on a busy machine the disk may hang
    options = {"appendonly": "yes", "appendfsync": "always"}
    with EmbeddedRedis(server=server_path, port=free_port(), options=options) as server:
        monkeypatch.setenv("STORY_OUTBOX", str(tmp_path / "outbox.db"))
        yield server


@pytest.fixture
def url(own_redis):
    return own_redis.url


@dataclass
class Scene:
    stage: Stage
    orders: Queue
    tenants: Queue
    server: EmbeddedRedis
    worker: Command
    outbox: str

    def limit_memory(self, limit):
        with closing(redis.Redis.from_url(self.server.url)) as connection:
            connection.config_set("maxmemory", limit)

    def acked(self, number):
        eventually(lambda: self.orders.counts().totals.get("acked", 0) >= number, f"{number} orders are acked")


@pytest.fixture
def scene(environment, own_redis, worker, command, prometheus, tmp_path):
    import staged

    (tmp_path / "rules.yml").write_text(faster_rules())
    running, port = worker("--concurrency", "4", processes=PROCESSES, app="staged:consumer")
    other = free_port()
    command("exporter", "--port", str(other))
    stage = Stage(prometheus(tmp_path / "rules.yml", port, other))
    yield Scene(stage, staged.ORDERS, staged.TENANTS, own_redis, running, staged.OUTBOX)
    staged.ORDERS.close()


def test_dashboard_and_alerts_show_each_fault(scene):
    for act in (at_rest, paused, redis_full, frozen_and_killed, poisoned, redis_away, worker_dead):
        act(scene)
        may_be_silent = OF_REDIS if act is redis_away else set()
        said = f"{act.__name__}: every panel but {may_be_silent} shows something"
        eventually(lambda: scene.stage.silent_panels() <= may_be_silent, said)  # noqa: B023  it is asked at once


def at_rest(scene):
    scene.orders.publish_many(["good"] * 30)
    scene.tenants.publish("good", key="a")
    scene.acked(30)

    scene.stage.shows(**HEALTHY, Busy_5m=lambda share: 0 <= share < 0.8)
    scene.stage.coloured("green")
    eventually(lambda: not scene.stage.firing(), "no alert fires")
    eventually(lambda: set(scene.stage.table("Firing now")) == {"nothing fires"}, "the table of alerts says so")
    empty = dict.fromkeys(("pending", "ready", "running", "backoff", "retry", "dead", "late", "state"), 0)
    scene.stage.row("Queues now", "orders", **empty)
    scene.stage.row("The account", "orders", published=30, acked=30, alive=0, missing=0)


def paused(scene):
    scene.orders.pause(reason="a test")
    scene.orders.publish("good")
    scene.stage.fires("ReliqPausedLong")
    scene.stage.shows(Oldest=0)
    scene.stage.row("Queues now", "orders", ready=1, state=1)
    scene.orders.resume()
    scene.acked(31)


def redis_full(scene):
    scene.limit_memory("1mb")
    with closing(sqlite3.connect(scene.outbox)) as database, database:
        scene.orders.publish_in(database, "good")

    scene.stage.fires("ReliqRedisMemoryHigh", "ReliqRedisRefuses", "ReliqOutboxLate")
    scene.stage.shows(Memory=lambda share: share > 1, Oldest=lambda seconds: seconds > 3)
    scene.stage.coloured("red", "Memory")
    scene.limit_memory("0")
    scene.acked(32)
    scene.stage.shows(Memory=-1, Oldest=0, Alerts=0)


def frozen_and_killed(scene):
    children = scene.worker.children()
    children[0].suspend()
    scene.stage.fires("ReliqWorkerStalled")
    for _ in range(4):
        (victim, *_) = scene.worker.children()
        victim.send_signal(signal.SIGKILL)
        eventually(lambda gone=victim: replaced(scene, gone), "the killed process is replaced")

    scene.stage.fires("ReliqWorkersRestarting")
    scene.stage.shows(Targets=0, Alerts=lambda number: number >= 1)
    eventually(lambda: max(scene.stage.graph("Restarts").get(("killed",), [0])) >= 1, "the graph shows restarts")
    eventually(lambda: scene.stage.marked("Processes replaced"), "the restarts are marked")


def replaced(scene, gone):
    children = scene.worker.children()
    return len(children) == PROCESSES and gone.pid not in {child.pid for child in children}


def poisoned(scene):
    scene.orders.publish_many(["poison"] * POISON)

    scene.stage.fires("ReliqDeadLettersRising", "ReliqFailuresHigh")
    scene.stage.shows(Died_1h=POISON, Failed=lambda share: share > 0.2)
    scene.stage.coloured("red", "Died 1h", "Failed")
    scene.stage.row("Queues now", "orders", dead=POISON)
    scene.stage.row("The account", "orders", missing=0)
    failures = "Failures by queue and exception"
    eventually(lambda: ("ValueError", "orders") in scene.stage.graph(failures), "the exception's class is shown")


def redis_away(scene):
    scene.server.kill()

    scene.stage.fires("ReliqRedisDown")
    scene.stage.shows(Redis=0, Targets=0)
    scene.stage.coloured("#666", *OF_REDIS)
    scene.stage.coloured("red", "Redis")
    scene.stage.row("Queues now", "orders", state=2)
    others = {"ReliqWorkerStalled", "ReliqQueueUnreadable"}
    eventually(lambda: not others & scene.stage.firing(), "no other alert fires for it")
    eventually(lambda: scene.stage.marked("Redis away"), "the outage is marked")


def worker_dead(scene):
    scene.server.start()
    scene.orders.publish("good")
    scene.acked(33)
    scene.stage.shows(Redis=1, Oldest=0)
    supervisor = psutil.Process(scene.worker.process.pid)
    for one in (supervisor, *supervisor.children(recursive=True)):
        one.send_signal(signal.SIGKILL)
    scene.orders.publish_many(["good"] * 20)
    scene.orders.publish("good", delay=0.1)
    for _ in range(5):
        scene.tenants.publish("good", key="a")

    alerts = {"ReliqTargetDown", "ReliqNoWorkers", "ReliqOldestMessageTooOld", "ReliqOutboxLate"}
    scene.stage.fires(*alerts, "ReliqTickLate")
    scene.stage.shows(
        Targets=1, Redis=1, Busy_5m=-1, Oldest=lambda seconds: seconds > 3, Alerts=lambda number: number >= len(alerts)
    )
    eventually(lambda: alerts <= set(scene.stage.table("Firing now")), "the table shows the alerts")
    scene.stage.coloured("red", "Targets", "Busy 5m", "Alerts")
    # A due message that no process has promoted counts as waiting.
    eventually(lambda: scene.stage.graph("Backlog").get(("orders",), [0])[-1] == 21, "the graph ends at the backlog")
    scene.stage.row("Queues now", "orders", pending=1)
    scene.stage.row("Queues now", "tenants", ready=5, late=lambda seconds: seconds > 3)
