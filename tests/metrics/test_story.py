"""A story with a real Prometheus: in each act the dashboard's first row shows the fault, and its alert fires."""

import signal
from dataclasses import dataclass

import psutil
import pytest
from ports import free_port
from stage import Stage, faster_rules
from waiting import eventually
from worker_process import Command

from reliq import Queue
from reliq.testing.server import EmbeddedRedis

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
PROCESSES, POISON = 2, 12
#: Panels without data while Redis is unreachable.
OF_REDIS = {"The account", "Redis version", "Queues not shown"}
#: No queue of the story has keys.
OF_KEYS = {"Largest keys", "Keys in turn and asleep"}


@pytest.fixture
def own_redis(server_path, tmp_path, monkeypatch):
    """A Redis that the story stops and restarts."""
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
    server: EmbeddedRedis
    worker: Command

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
    yield Scene(stage, staged.ORDERS, own_redis, running)
    staged.ORDERS.close()


def test_dashboard_and_alerts_show_each_fault(scene):
    for act in (at_rest, frozen_and_killed, poisoned, redis_away, worker_dead):
        act(scene)
        may_be_silent = {"Firing now"} | OF_KEYS | (OF_REDIS if act is redis_away else set())
        said = f"{act.__name__}: every panel but {may_be_silent} shows something"
        eventually(lambda: scene.stage.silent_panels() <= may_be_silent, said)  # noqa: B023  it is asked at once


def at_rest(scene):
    scene.orders.publish_many(["good"] * 30)
    scene.acked(30)

    shown = scene.stage.shows(
        Redis=1, Targets_down=0, Processes=PROCESSES, Longest_wait=0, Paused=0, Died_in_1_hour=0, Alerts=0
    )
    assert 0 <= shown["Fullest worker"] <= 1
    assert set(scene.stage.colours().values()) == {"green"}, scene.stage.now()
    assert scene.stage.firing() == set()
    line = scene.stage.table("Queues now")["orders"]
    assert {line[state] for state in ("pending", "ready", "unack", "retry", "garbage", "dead", "paused")} == {0}
    account = {"published": 30, "acked": 30, "alive": 0, "missing": 0}
    eventually(lambda: account.items() <= scene.stage.table("The account")["orders"].items(), "the account is whole")
    assert max(ages[-1] for ages in scene.stage.graph("Last claim age").values()) < 3
    assert scene.stage.graph("Since the last tick")["heartbeat",][-1] < 60


def frozen_and_killed(scene):
    children = scene.worker.children()
    children[0].suspend()
    scene.stage.fires("ReliqWorkerStalled")
    for _ in range(4):
        (victim, *_) = scene.worker.children()
        victim.send_signal(signal.SIGKILL)
        eventually(lambda gone=victim: replaced(scene, gone), "the killed process is replaced")

    scene.stage.fires("ReliqWorkersRestarting")
    scene.stage.shows(Processes=PROCESSES, Alerts=lambda number: number >= 1)
    assert max(scene.stage.graph("Restarts")["killed",]) >= 1
    assert scene.stage.marked("Processes replaced")


def replaced(scene, gone):
    children = scene.worker.children()
    return len(children) == PROCESSES and gone.pid not in {child.pid for child in children}


def poisoned(scene):
    scene.orders.publish_many(["poison"] * POISON)

    scene.stage.fires("ReliqDeadLettersRising", "ReliqRetryStorm")
    scene.stage.shows(Died_in_1_hour=POISON)
    assert scene.stage.colours()["Died in 1 hour"] == "red"
    assert scene.stage.table("Queues now")["orders"]["dead"] == POISON
    assert scene.stage.table("The account")["orders"]["missing"] == 0
    assert max(scene.stage.graph("Failed")["orders",]) > 0.5
    eventually(lambda: ("ValueError",) in scene.stage.graph("Failures by exception"), "the exception's class is shown")


def redis_away(scene):
    scene.server.kill()

    scene.stage.fires("ReliqRedisDown")
    scene.stage.shows(Redis=0, Longest_wait=-1, Paused=-1, Processes=PROCESSES, Targets_down=0)
    assert scene.stage.colours()["Redis"] == "red"
    assert scene.stage.colours()["Longest wait"] == "#666"
    assert "ReliqWorkerStalled" not in scene.stage.firing()
    assert scene.stage.marked("Redis away")


def worker_dead(scene):
    scene.server.start()
    scene.orders.publish("good")
    scene.acked(31)
    scene.stage.shows(Redis=1, Longest_wait=0)
    supervisor = psutil.Process(scene.worker.process.pid)
    for one in (supervisor, *supervisor.children(recursive=True)):
        one.send_signal(signal.SIGKILL)
    scene.orders.publish_many(["good"] * 20)
    scene.orders.publish("good", delay=0.1)

    alerts = {"ReliqTargetDown", "ReliqNoWorkers", "ReliqNobodyClaims"}
    scene.stage.fires(*alerts, "ReliqOldestMessageTooOld", "ReliqTickLate")
    shown = scene.stage.shows(
        Targets_down=1, Processes=0, Redis=1, Fullest_worker=-1, Longest_wait=lambda seconds: seconds > 3
    )
    assert shown["Alerts"] >= 4
    assert alerts <= set(scene.stage.table("Firing now"))
    colours = scene.stage.colours()
    assert {colours[title] for title in ("Targets down", "Processes", "Alerts")} == {"red"}
    # A due message that no process has promoted counts as waiting.
    assert scene.stage.graph("Backlog")["orders",][-1] == 21
    assert scene.stage.table("Queues now")["orders"]["pending"] == 1
