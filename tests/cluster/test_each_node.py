"""Operator commands about a whole Redis ask every node of a Cluster."""

import json
import threading
import time

import pytest
from typer.testing import CliRunner
from waiting import eventually

from reliq import Admin, ConfigurationError, Consumer, Queue
from reliq.admin.doctor import Finding
from reliq.cli.app import app
from reliq.keys import QUEUES_KEY
from reliq.lua import script, script_names
from reliq.metrics import queues as scrapes
from reliq.metrics.serving import queue_collector
from reliq.redis.client import Client
from reliq.redis.connection import ServerConnections, run_blocking
from reliq.redis.server import Connection
from tests.cluster_moves import SlotMove
from tests.cluster_servers import NODE_TIMEOUT_MS
from tests.metrics.patience import page

pytestmark = pytest.mark.slow


def named(found, name):
    return [(one.verdict, one.what) for one in found if one.name == name]


@pytest.fixture
def admin(cluster):
    Connection.to(cluster.url).named.clear()
    return Admin(cluster.url)


def test_a_scan_finds_the_queues_of_every_node(cluster, queues, admin):
    for queue in queues.values():
        queue.publish(1)
    wire = Connection.to(cluster.url).wire()
    run_blocking(wire.exchange([("DEL", QUEUES_KEY)]))

    assert not admin.queues().queues
    assert {one.queue for one in admin.queues(scan=True).queues} == {queue.name for queue in queues.values()}


def test_scripts_are_loaded_at_every_node_and_at_the_replicas_that_may_be_promoted(cluster, queues, admin):
    for server in cluster.nodes:
        cluster.ask(server, "SCRIPT", "FLUSH")

    names = admin.load_scripts()

    own = set(names) - set(script_names())  # scripts of `check` and of operators
    assert {cluster.client(server).info("memory")["number_of_cached_scripts"] for server in cluster.nodes} == {
        len({script(name).sha for name in script_names()}) + len(own)
    }


def test_the_doctor_asks_every_node_and_replica(cluster, admin):
    found = admin.doctor()

    primaries = ", ".join(sorted(f"127.0.0.1:{one.port}" for one in cluster.primaries()))
    assert named(found, "slots") == [("ok", "every slot has a node that answers (on each of 6)")]
    assert named(found, "coverage") == [("ok", "cluster-require-full-coverage is no (on each of 6)")]
    assert named(found, "node timeout") == [("ok", "cluster-node-timeout is 1000 ms (on each of 6)")]
    assert named(found, "eviction") == [("ok", "maxmemory-policy is noeviction, and no key was evicted (on each of 6)")]
    assert named(found, "replicas") == [("warning", f"1 replica, and min-replicas-to-write is 0 (on {primaries})")]
    assert len(named(found, "version")) == 1


@pytest.fixture
def odd(cluster):
    """A primary with an eviction policy and a longer node timeout."""

    def configure(policy, timeout):
        cluster.ask(odd, "CONFIG", "SET", "maxmemory-policy", policy)
        cluster.ask(odd, "CONFIG", "SET", "cluster-node-timeout", timeout)

    odd = cluster.primaries()[-1]
    configure("allkeys-lru", 15000)
    yield odd
    configure("noeviction", NODE_TIMEOUT_MS)


def test_the_doctor_names_the_node_that_differs(cluster, odd):
    ran = CliRunner().invoke(app, ["doctor", "--json", "--url", cluster.url])

    found = [Finding(**one) for one in json.loads(ran.stdout)]
    assert ran.exit_code == 1
    assert ("bad", f"maxmemory-policy is allkeys-lru (on 127.0.0.1:{odd.port})") in named(found, "eviction")
    assert ("warning", f"cluster-node-timeout is 15000 ms (on 127.0.0.1:{odd.port})") in named(found, "node timeout")


def test_the_doctor_says_which_node_is_away_and_which_slots_nobody_has(cluster, admin, monkeypatch):
    monkeypatch.setattr("reliq.redis.session.PATIENCE_SECONDS", 0.1)
    admin.doctor()
    gone = cluster.primaries()[0]
    replica = cluster.server_at(cluster.client(gone).info("replication")["slave0"]["port"])
    replica.kill()
    gone.kill()
    healthy = cluster.primaries()[-1]
    eventually(lambda: b"cluster_slots_fail:0" not in cluster.ask(healthy, "CLUSTER", "INFO"), "its slots have failed")

    found = admin.doctor()

    assert any(f"127.0.0.1:{gone.port}" in what for _, what in named(found, "server"))
    assert ("bad", True) in {(verdict, "slots have no node" in what) for verdict, what in named(found, "slots")}


@pytest.fixture
def login(cluster, admin):
    """Make a user with exactly the rights of roles on a queue, on every node; return its URL."""

    def make(roles, queue):
        made = f"{roles}{queue.name}"  # a separate URL: existing connections belong to another user of this name
        rule = admin.acl(roles, [queue.name], user="the-user")
        for server in cluster.nodes:
            cluster.ask(server, "ACL", "SETUSER", "the-user", "reset", *rule.rules, "on", ">secret")
            cluster.ask(server, "ACL", "LOG", "RESET")
        return cluster.url.replace("://", "://the-user:secret@") + f"?max_connections={len(made)}"

    yield make
    for server in cluster.nodes:
        cluster.ask(server, "ACL", "DELUSER", "the-user")


def denied(cluster):
    """Return the commands that the nodes refused, without redis-py's optional commands."""
    refused = {row["object"] for server in cluster.nodes for row in cluster.client(server).acl_log()}
    return refused - {"client", "client|setinfo"}


def test_acl_of_producer_and_consumer_is_enough_while_a_slot_moves(cluster, queues, login, monkeypatch):
    monkeypatch.setattr("reliq.publish.PUBLISH_SECONDS", 60.0)
    queue = next(iter(queues.values()))
    url = login(["producer", "consumer"], queue)
    theirs, consumer, done = Queue(queue.name, int, url=url), Consumer(url), []
    consumer.handler(theirs)(done.append)
    move = SlotMove(cluster, queue.keys.ready)
    move.begin()
    ends = threading.Timer(0.2, move.end)
    ends.start()

    assert theirs.publish(1).status == "published"
    ends.join()
    assert theirs.publish(2).status == "published"
    consumer.start()
    eventually(lambda: sorted(done) == [1, 2], "a worker with these rights works")
    consumer.stop()

    assert denied(cluster) == set()
    theirs.close()


@pytest.mark.parametrize("role", ["operator", "exporter"])
def test_acl_of_operator_and_exporter_is_enough_in_a_cluster(cluster, queues, login, role):
    queue = next(iter(queues.values()))
    queue.publish(1)
    url = login([role], queue)

    assert Queue(queue.name, int, url=url).counts().alive == 1
    assert denied(cluster) == set()


@pytest.fixture
def patient_scrapes(monkeypatch):
    """Let a scrape wait longer for a node, because the machine of the tests may be slow."""
    monkeypatch.setattr(scrapes, "SCRAPE_SECONDS", 10.0)
    monkeypatch.setattr(scrapes, "SLOW_SECONDS", 0.8)  # less than the longest wait for a reply


@pytest.mark.usefixtures("patient_scrapes")
def test_eviction_policy_of_any_node_is_reported_and_no_worker_starts(cluster, queues, odd):
    consumer = Consumer(cluster.url)
    for queue in queues.values():
        consumer.handler(queue)(lambda body: None)

    found = page(queue_collector(Connection.to(cluster.url)))

    evicts = {f"127.0.0.1:{one.port}": float(one.port == odd.port) for one in cluster.primaries()}
    assert by_server(found, "reliq_redis_eviction_enabled") == evicts
    with pytest.raises(ConfigurationError, match=f"Redis 127.0.0.1:{odd.port} may evict messages"):
        consumer.start()


@pytest.fixture
def collector(cluster, queues, patient_scrapes):
    """Return the collector of an exporter that has seen a message of each node's queue."""
    for queue in queues.values():
        queue.publish(1)
    collector = queue_collector(Connection.to(cluster.url))
    assert set(by_queue(page(collector), "reliq_queue_unreadable").values()) == {0}
    return collector


def by_server(found, name):
    return {dict(labels)["server"]: number for (metric, labels), number in found.items() if metric == name}


def by_queue(found, name):
    return {dict(labels)["queue"]: number for (metric, labels), number in found.items() if metric == name}


@pytest.mark.parametrize("which", ["registry", "other"])
def test_node_that_is_away_hides_no_metric_of_the_others(cluster, queues, collector, stand_still, which):
    registry = cluster.primary_of(QUEUES_KEY).port
    away = registry if which == "registry" else next(port for port in queues if port != registry)
    stand_still(cluster.server_at(away))

    began = time.monotonic()
    found = page(collector)

    assert time.monotonic() - began < 2 * scrapes.SCRAPE_SECONDS
    assert by_server(found, "reliq_redis_up") == {f"127.0.0.1:{port}": float(port != away) for port in queues}
    assert by_queue(found, "reliq_queue_unreadable") == {one.name: float(port == away) for port, one in queues.items()}
    assert set(by_server(found, "reliq_redis_scrape_seconds")) == {
        f"127.0.0.1:{port}" for port in queues if port != away
    }
    assert set(by_queue(found, "reliq_backlog")) == {one.name for port, one in queues.items() if port != away}


def test_slow_node_is_up_with_its_seconds_and_hides_no_queue_of_the_others(cluster, queues, collector, monkeypatch):
    slow = cluster.primary_of(QUEUES_KEY).port
    receive, avoid, is_avoided, is_over = ServerConnections.receive, Client.avoid, threading.Event(), threading.Event()
    events = iter([is_avoided])

    async def late(self, *arguments):
        if self.server == f"127.0.0.1:{slow}":
            next(events, is_over).wait(60)  # the first reply comes when the node counts as slow, that to a ping later
        return await receive(self, *arguments)

    def noted(self, servers):
        avoid(self, servers)
        is_avoided.set()

    monkeypatch.setattr(ServerConnections, "receive", late)
    monkeypatch.setattr(Client, "avoid", noted)
    monkeypatch.setattr(scrapes, "SLOW_SECONDS", 3.0)

    found = page(collector)
    is_over.set()

    assert set(by_server(found, "reliq_redis_up").values()) == {1}
    seconds = by_server(found, "reliq_redis_scrape_seconds")
    assert seconds.pop(f"127.0.0.1:{slow}") > max(seconds.values())
    assert by_queue(found, "reliq_queue_unreadable") == {one.name: float(port == slow) for port, one in queues.items()}
