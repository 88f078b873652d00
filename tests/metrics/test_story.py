"""One story, seen by a real Prometheus: the first row says in each act what is wrong, and the alert of it fires."""

import signal

import psutil
import pytest
import redis
from patience import eventually
from ports import free_port
from stage import Stage, faster_rules

from reliq.embedded import EmbeddedRedis
from reliq.keys import Keys

#: All that is waited for, one after the other, on a machine that is busy.
pytestmark = pytest.mark.timeout(400)
PROCESSES, SLOTS, POISON = 2, 8, 12
#: What only Redis knows, and a table shows nothing of while it is away.
OF_REDIS = {"The account", "Redis version", "Queues not shown"}
#: No queue of the story has keys.
OF_KEYS = {"Largest keys", "Keys in turn and asleep"}


@pytest.fixture
def own_redis(server_path, tmp_path, monkeypatch):
    """A Redis that the story may take away and bring back."""
    options = {"appendonly": "yes", "appendfsync": "always"}
    with EmbeddedRedis(server=server_path, port=free_port(), options=options) as server:
        monkeypatch.setenv("STORY_GATE", str(tmp_path / "gate"))
        yield server


@pytest.fixture
def url(own_redis):
    return own_redis.url


@pytest.fixture
def staged(environment):
    import staged

    yield staged
    for queue in (staged.ORDERS, staged.REPORTS, staged.QUIET):
        queue.close()


@pytest.fixture
def scene(staged, own_redis, worker, command, prometheus, tmp_path):
    (tmp_path / "rules.yml").write_text(faster_rules())
    running, port = worker("--concurrency", str(SLOTS // PROCESSES), processes=PROCESSES, app="staged:consumer")
    other = free_port()
    command("exporter", "--port", str(other))
    stage = Stage(prometheus(tmp_path / "rules.yml", {"cluster": "test"}, reliq=(port, other)))
    client = redis.Redis(unix_socket_path=str(own_redis.socket))
    yield Scene(stage, staged, own_redis, client, running, tmp_path / "gate")
    client.close()


class Scene:
    def __init__(self, stage, staged, server, client, worker, gate):
        self.stage, self.server, self.client, self.worker, self.gate = stage, server, client, worker, gate
        self.orders, self.reports = staged.ORDERS, staged.REPORTS

    def acked(self, queue, number):
        eventually(
            lambda: queue.counts().totals.get("acked", 0) >= number, f"{number} messages of {queue.name} are acked"
        )

    def config(self, name, value):
        self.client.config_set(name, value)


def test_the_first_row_says_what_is_wrong_in_every_act_and_each_alert_comes_of_its_fault(scene):
    for act in (
        at_rest,
        frozen_and_killed,
        paused,
        slow,
        poisoned,
        tampered_with,
        ill_configured,
        redis_away,
        worker_dead,
    ):
        act(scene)
        may_be_silent = {"Firing now"} | OF_KEYS | (OF_REDIS if act is redis_away else set())
        scene.stage.speaks(act.__name__, may_be_silent)
        places = scene.stage.queue_places()
        assert len(places) > 20
        assert {tuple(order) for order in places.values()} == {("orders", "quiet", "reports")}, act.__name__


def at_rest(scene):
    scene.orders.publish_many(["good"] * 30)
    scene.acked(scene.orders, 30)

    shown = scene.stage.shows(
        "at rest", Redis=1, Targets_down=0, Processes=PROCESSES, Longest_wait=0, Paused=0, Died_in_1_hour=0, Alerts=0
    )
    assert 0 <= shown["Fullest worker"] <= 1
    assert set(scene.stage.colours().values()) == {"green"}, scene.stage.now()
    assert scene.stage.alarming() == set()
    assert scene.stage.firing() == set()
    assert scene.stage.rules_in_trouble() == []
    line = scene.stage.table("Queues now")["orders"]
    states = {state: line[state] for state in ("pending", "ready", "unack", "retry", "garbage", "dead", "paused")}
    assert set(states.values()) == {0}
    eventually(lambda: account_of(scene, "orders") == (30, 30, 0, 0), "the account is that of the last scrape")
    assert max(scene.stage.last("Last claim age").values()) < 3
    assert scene.stage.last("Since the last tick")["heartbeat",] < 60


def account_of(scene, queue):
    account = scene.stage.table("The account")[queue]
    return tuple(account[kind] for kind in ("published", "acked", "alive", "missing"))


def frozen_and_killed(scene):
    children = scene.worker.children()
    children[0].suspend()
    scene.stage.fires("ReliqWorkerStalled")
    for _ in range(4):
        (victim, *_) = scene.worker.children()
        victim.send_signal(signal.SIGKILL)
        eventually(lambda gone=victim: replaced(scene, gone), "the killed process is replaced")

    scene.stage.fires("ReliqWorkersRestarting")
    scene.stage.shows("killed", Processes=PROCESSES, Alerts=lambda number: number >= 1)
    assert max(scene.stage.graph("Restarts")["killed",]) >= 1
    assert scene.stage.marked("Processes replaced")


def replaced(scene, gone):
    children = scene.worker.children()
    return len(children) == PROCESSES and gone.pid not in {child.pid for child in children}


def paused(scene):
    scene.orders.pause(reason="the story")
    scene.orders.publish_many(["good"] * 4)
    for _ in range(2):
        scene.orders.publish("good", ttl=0.1)

    scene.stage.fires("ReliqPausedLong")
    scene.stage.shows("paused", Paused=1, Redis=1, Longest_wait=0)
    assert scene.stage.colours()["Paused"] == "blue"
    assert "ReliqNobodyClaims" not in scene.stage.firing()
    line = scene.stage.table("Queues now")["orders"]
    assert (line["ready"], line["paused"]) == (6, 1)
    assert scene.stage.last("Backlog")["orders",] == 6
    assert scene.stage.marked("Paused")
    scene.orders.resume()
    scene.acked(scene.orders, 34)
    scene.stage.fires("ReliqMessagesExpiring")
    scene.stage.shows("resumed", Paused=0)


def slow(scene):
    scene.gate.touch()
    scene.reports.publish_many(range(SLOTS + 120))

    scene.stage.fires("ReliqBacklogGrowing", meanwhile=lambda: scene.reports.publish(0))
    scene.stage.fires("ReliqSlotsFull", "ReliqOldestMessageTooOld")
    scene.stage.shows("slow", Fullest_worker=1, Longest_wait=lambda seconds: seconds > 3)
    assert scene.stage.colours()["Fullest worker"] == "red"
    assert max(scene.stage.last("Slots used").values()) == 1
    assert scene.stage.last("In flight")["running",] == SLOTS
    assert max(scene.stage.last("Longest running handler").values()) > 3
    scene.gate.unlink()
    scene.acked(scene.reports, SLOTS + 121)
    scene.stage.shows("quick again", Fullest_worker=lambda share: share < 0.8, Longest_wait=0)


def poisoned(scene):
    scene.orders.publish_many(["poison"] * POISON)

    scene.stage.fires("ReliqDeadLettersRising", "ReliqRetryStorm")
    scene.stage.shows("poisoned", Died_in_1_hour=POISON)
    assert scene.stage.colours()["Died in 1 hour"] == "red"
    assert scene.stage.table("Queues now")["orders"]["dead"] == POISON
    assert scene.stage.table("The account")["orders"]["missing"] == 0
    assert max(scene.stage.graph("Failed")["orders",]) > 0.5
    eventually(
        lambda: ("ValueError",) in scene.stage.graph("Failures by exception"), "the class of the exception is shown"
    )


def tampered_with(scene):
    pending = Keys("orders").pending
    id = scene.orders.publish("later", delay=600).id
    (due,) = [score for _, score in scene.client.zrange(pending, 0, -1, withscores=True)]
    scene.client.zrem(pending, id)

    scene.stage.fires("ReliqAccountBroken")
    eventually(lambda: scene.stage.table("The account")["orders"]["missing"] == 1, "the account says what is missing")
    scene.client.zadd(pending, {id: due})
    eventually(lambda: scene.stage.table("The account")["orders"]["missing"] == 0, "the account is whole again")


def ill_configured(scene):
    scene.config("maxmemory", int(scene.client.info("memory")["used_memory"] * 1.05))
    scene.config("appendonly", "no")

    scene.stage.fires("ReliqRedisMemoryHigh", "ReliqRedisAofOff")
    scene.config("maxmemory", 0)
    scene.config("maxmemory-policy", "allkeys-lru")
    scene.stage.fires("ReliqRedisEvicts")
    scene.config("maxmemory-policy", "noeviction")
    scene.config("appendonly", "yes")
    eventually(lambda: is_written(scene.client.info("persistence")), "Redis writes its file again")


def is_written(facts):
    return facts["aof_enabled"] and not facts["aof_rewrite_in_progress"] and not facts["aof_rewrite_scheduled"]


def redis_away(scene):
    scene.server.kill()

    scene.stage.fires("ReliqRedisDown")
    scene.stage.shows("Redis away", Redis=0, Longest_wait=-1, Paused=-1, Processes=PROCESSES, Targets_down=0)
    assert scene.stage.colours()["Redis"] == "red"
    assert scene.stage.colours()["Longest wait"] == "#666"
    assert "ReliqWorkerStalled" not in scene.stage.firing()
    assert scene.stage.marked("Redis away")


def worker_dead(scene):
    scene.server.start()
    scene.orders.publish("good")
    scene.acked(scene.orders, 35)
    scene.stage.shows("Redis back", Redis=1, Longest_wait=0)
    supervisor = psutil.Process(scene.worker.process.pid)
    for one in (supervisor, *supervisor.children(recursive=True)):
        one.send_signal(signal.SIGKILL)
    scene.orders.publish_many(["good"] * 20)
    scene.orders.publish("good", delay=0.1)

    scene.stage.fires(
        "ReliqTargetDown", "ReliqNoWorkers", "ReliqNobodyClaims", "ReliqOldestMessageTooOld", "ReliqTickLate"
    )
    shown = scene.stage.shows(
        "worker dead", Targets_down=1, Processes=0, Redis=1, Fullest_worker=-1, Longest_wait=lambda seconds: seconds > 3
    )
    assert shown["Alerts"] >= 4
    assert {"ReliqTargetDown", "ReliqNoWorkers", "ReliqNobodyClaims"} <= set(scene.stage.table("Firing now"))
    colours = scene.stage.colours()
    assert {colours[title] for title in ("Targets down", "Processes", "Alerts")} == {"red"}
    # What came due and was promoted by nobody waits too; what is due in ten minutes does not.
    assert scene.stage.last("Backlog")["orders",] == 21
    assert scene.stage.table("Queues now")["orders"]["pending"] == 2
