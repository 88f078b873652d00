"""What an operator asks of a whole Redis is asked of every node of a Cluster."""

import json
import threading
from collections import Counter

import pytest
from typer.testing import CliRunner
from waiting import eventually

from reliq import Admin, ConfigurationError, Consumer, Queue
from reliq.admin.doctor import Facts, Finding, findings, judged_shards, together
from reliq.cli.app import app
from reliq.keys import QUEUES_KEY, Keys
from reliq.lua import script, script_names
from reliq.metrics.snapshot import SnapshotReader, facts_of
from reliq.redis.client import Client
from reliq.redis.connection import run_blocking
from reliq.redis.server import Connection
from reliq.redis.shards import ShardMap
from tests.cluster_moves import SlotMove
from tests.cluster_servers import NODE_TIMEOUT_MS

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

    own = set(names) - set(script_names())  # of the check and of the operator's question
    assert {cluster.client(server).info("memory")["number_of_cached_scripts"] for server in cluster.nodes} == {
        len({script(name).sha for name in script_names()}) + len(own)
    }


def test_the_doctor_asks_every_node_and_replica(cluster, admin):
    found = admin.doctor()

    assert named(found, "slots") == [("ok", "every slot has a node that answers (on each of 6)")]
    assert named(found, "coverage") == [("ok", "cluster-require-full-coverage is no (on each of 6)")]
    assert named(found, "node timeout") == [("ok", "cluster-node-timeout is 1000 ms (on each of 6)")]
    assert named(found, "eviction") == [("ok", "maxmemory-policy is noeviction (on each of 6)")]
    assert named(found, "replicas") == [("warning", "1 replica, and min-replicas-to-write is 0 (on each of 3)")]
    assert {verdict for verdict, _ in named(found, "version")} == {"ok"}


def test_the_doctor_looks_at_how_shards_are_spread(cluster, admin):
    assert named(admin.doctor(), "spread") == [("ok", "queues with several shards: 0, spread evenly over 3 servers")]
    Queue("many", int, url=cluster.url).publish(1)
    run_blocking(Connection.to(cluster.url).wire().exchange([("SET", Keys("many").map, ShardMap(1, 16, 16).text)]))

    assert named(admin.doctor(), "spread") == [("ok", "queues with several shards: 1, spread evenly over 3 servers")]


def test_doctor_warns_of_too_many_shards_on_one_server():
    even, odd = Counter(a=6, b=5, c=5), Counter(a=10, b=6)

    assert judged_shards({"x": even}, 3).verdict == "ok"
    assert judged_shards({"x": even, "orders": odd}, 3).what == "10 of 16 shards of orders lie on a"


@pytest.fixture
def odd(cluster):
    """A primary that may evict, and waits longer for other nodes."""

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

    assert f"127.0.0.1:{gone.port}" in {what.partition(" ")[0] for _, what in named(found, "server")}
    assert ("bad", True) in {(verdict, "slots have no node" in what) for verdict, what in named(found, "slots")}


@pytest.mark.parametrize(
    ("told", "name", "verdict"),
    [
        ({"config": {"cluster-require-full-coverage": "yes"}}, "coverage", "warning"),
        ({"config": {}}, "coverage", "unknown"),
        ({"config": {"cluster-node-timeout": "5001"}}, "node timeout", "warning"),
        ({"config": {}}, "node timeout", "unknown"),
        ({"cluster": {}}, "slots", "unknown"),
        ({"cluster": {"cluster_state": "ok", "cluster_slots_ok": "16383"}}, "slots", "bad"),
        ({"cluster": {"cluster_state": "fail", "cluster_slots_ok": "16384"}}, "slots", "bad"),
    ],
    ids=["coverage", "no coverage", "node timeout", "no node timeout", "no slots", "a slot missing", "failed"],
)
def test_doctor_judges_the_facts_of_a_node(told, name, verdict):
    [finding] = [one for one in findings(Facts(info={"cluster_enabled": "1"}, **told)) if one.name == name]

    assert finding.verdict == verdict
    assert finding.mend


def test_equal_findings_of_several_nodes_are_merged():
    memory = [Finding("memory", "ok", f"{used} MiB") for used in (1, 2)]
    bad = Finding("memory", "bad", "full", "means", "mend")

    assert together({"a": memory[:1], "b": memory[1:], "c": [bad]}) == [
        Finding("memory", "ok", "each by its own figures (on a, b)"),
        Finding("memory", "bad", "full (on c)", "means", "mend"),
    ]
    assert together({"": [bad]}) == [bad]


@pytest.fixture
def login(cluster, admin):
    """Make a user with exactly the rights of roles on a queue, at every node; return its URL."""

    def make(roles, queue):
        made = f"{roles}{queue.name}"  # a URL of its own: connections have met another user by this name
        rule = admin.acl(roles, [queue.name], user="the-user")
        for server in cluster.nodes:
            cluster.ask(server, "ACL", "SETUSER", "the-user", "reset", *rule.rules, "on", ">secret")
            cluster.ask(server, "ACL", "LOG", "RESET")
        return cluster.url.replace("://", "://the-user:secret@") + f"?max_connections={len(made)}"

    yield make
    for server in cluster.nodes:
        cluster.ask(server, "ACL", "DELUSER", "the-user")


def denied(cluster):
    """The commands that the nodes refused to users, but what redis-py says of itself, which it does without."""
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


def test_eviction_policy_of_any_node_is_reported_and_no_worker_starts(cluster, queues, odd):
    consumer, client = Consumer(cluster.url), Client(Connection.to(cluster.url).wire())
    for queue in queues.values():
        consumer.handler(queue)(lambda body: None)

    facts = [SnapshotReader(client).look().facts for _ in range(5)]

    assert {one["maxmemory_policy"] for one in facts} == {"allkeys-lru"}
    with pytest.raises(ConfigurationError, match=f"must be noeviction, not allkeys-lru at 127.0.0.1:{odd.port}"):
        consumer.start()


def test_info_of_many_servers_has_the_fullest_the_sums_and_the_worst():
    a = {"used_memory": "5", "maxmemory": "10", "evicted_keys": "1", "aof_enabled": "1", "connected_clients": "2"}
    b = {"used_memory": "6", "maxmemory": "100", "evicted_keys": "2", "aof_enabled": "0", "connected_clients": "3"}
    policies = [{"maxmemory_policy": "allkeys-lru"}, {"maxmemory_policy": "noeviction"}]

    assert facts_of([a | policies[1], b | policies[0]]) == {
        "used_memory": "5",
        "maxmemory": "10",
        "evicted_keys": "3",
        "connected_clients": "5",
        "aof_enabled": "0",
        "maxmemory_policy": "allkeys-lru",
    }
    assert facts_of([a]) == a
    assert facts_of([]) == {}
    assert facts_of([{}, {}]) == {}
