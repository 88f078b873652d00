"""`Admin.acl`: users with exactly the printed rule do all of their role, and are refused the rest."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
import redis

from reliq import (
    Admin,
    ConfigurationError,
    Layout,
    PublishFailed,
    Queue,
    RedisRefusedError,
    commands,
    transitions as t,
)
from reliq.admin.acl import roles
from reliq.admin.fsck.ids import CHECK, CHECK_KEYS
from reliq.client.client import Client
from reliq.lua import script_names
from reliq.rights import USES
from reliq.snapshot.snapshot import SnapshotReader
from reliq.transport.connection import Connection

PACKAGE = Path(commands.__file__).parent
#: The modules and folders that play a role; a viewer has the half of an operator's that changes nothing.
PLAYERS = {
    "producer": ("publish", "relay", "client/shards.py"),
    "consumer": (
        *("worker", "receive", "process", "settlement.py", "snapshot", "client/shards.py", "client/tokens.py"),
        *("admin/shard_change.py", "admin/relocate.py"),
    ),
    "operator": ("admin", "control.py", "redriving.py", "publish", "snapshot", "client/shards.py"),
    "exporter": ("snapshot", "metrics", "client/shards.py"),
}
#: Modules of these folders whose calls belong to no role.
NO_ROLE = {"admin/acl/roles.py", "admin/acl/probe.py", "admin/doctor/probe.py", "admin/scripts.py"}
#: With durability a producer needs +wait or +waitaof too, which not every server knows.
NO_ROLE |= {"publish/durability.py"}
NO_PERMISSION = "permission|NOPERM|can't|may not"


@pytest.fixture(params=[Layout.RELIQ, Layout.hdt3213(), Layout.hdt3213(hash_tag=True)], ids=str)
def layout(request):
    return request.param


@pytest.fixture
def knows_selectors(client):
    return not client.info("server")["redis_version"].startswith("6.")


def refuses(url, *command):
    with redis.Redis.from_url(url) as user, pytest.raises(redis.exceptions.NoPermissionError):
        user.execute_command(*command)
    return True


@pytest.mark.parametrize("role", roles.ROLES)
def test_no_role_may_use_other_keys_or_the_server(role, login):
    user = login(role, "q")

    for command in ("FLUSHALL", "CONFIG GET *", "KEYS *", "ACL LIST", "GET foreign", "SHUTDOWN"):
        assert refuses(user, *command.split())


def test_producer_may_publish_in_every_way(login, refused, layout, url):
    queue = Queue("q", bytes, url=login("producer", "q", layout=layout), layout=layout)

    queue.publish(b"now")
    queue.publish(b"late", delay=60)
    queue.publish(b"sooner", delay=1, id="mine", dedup=5)
    Queue("q", bytes, url=url, layout=layout).cancel("mine", tombstone=60)
    again = [queue.publish(b"again", id="mine").status, queue.publish(b"again", id="mine", replace=True).status]
    bulk = queue.publish_many([b"1", b"2"])

    assert again == ["tombstoned", "published"]
    assert bulk.published == 2
    assert refused() == []


def test_producer_may_not_read_claim_or_cancel(login, url, knows_selectors):
    as_producer = login("producer", "q")
    queue, own = Queue("q", bytes, url=url), Queue("q", bytes, url=as_producer)
    id = queue.publish(b"secret").id
    body, ready = queue.keys.msg(id), queue.keys.ready

    for command in (f"MGET {body}", f"RPOP {ready}", f"LRANGE {ready} 0 -1", "GET reliq:worker:w"):
        assert refuses(as_producer, *command.split())
    for move in (
        lambda: own.moves.claim(t.CallNumber("w", 1), limit=1, lease_ms=1000),
        lambda: own.cancel(id),
        own.letters,
        lambda: Queue("other", bytes, url=as_producer).publish(b"body", id="m"),
    ):
        with pytest.raises(Exception, match=NO_PERMISSION):
            move()
    if knows_selectors:
        writes = (f"ZREM {queue.keys.pending} x", f"DEL {body}", f"DEL {ready}", f"ZADD {queue.keys.unack} 1 {id}")
        for command in (f"GET {body}", *writes):
            assert refuses(as_producer, *command.split())
    assert queue.counts().ready == 1


def test_producer_without_eval_publishes_once_the_scripts_are_loaded(login, refused, client, command):
    client.script_flush()
    as_producer = login("producer", "q", without_eval=True)
    queue = Queue("q", bytes, url=as_producer)

    with pytest.raises(PublishFailed, match="may not EVAL, and Redis lacks the script: run `reliq scripts load`"):
        queue.publish(b"too early")
    assert "EVAL" in Admin(as_producer).doctor(roles=["producer"], queue="q")[-1].what
    client.acl_log_reset()
    assert command("scripts", "load").code == 0
    queue.publish(b"now")
    queue.publish(b"late", delay=60)
    queue.publish(b"mine", id="mine")

    assert (queue.publish(b"mine", id="mine").status, queue.publish_many([b"1", b"2"]).published) == ("duplicate", 2)
    assert refused() == []
    assert refuses(as_producer, "EVAL", "return 1", 0)
    assert refuses(as_producer, "SCRIPT", "LOAD", "return 1")


def test_doctor_warns_about_a_producer_that_may_run_any_script(login, url, knows_selectors):
    Admin(url).load_scripts()
    rights = "ok" if knows_selectors else "unknown"  # 6.2 does not say
    for without_eval, verdict in ((False, "warning"), (True, "ok")):
        as_producer = Admin(login("producer", "q", without_eval=without_eval))
        verdicts = {one.name: one.verdict for one in as_producer.doctor(roles=["producer"], queue="q")}

        assert (verdicts["eval"], verdicts["rights: producer"]) == (verdict, rights)


def test_consumer_may_run_a_whole_worker(login, refused, url):
    queue = Queue("errands", str, url=url, retries=2)
    queue.publish_many(["ack", "nack", "snooze", "reject"])
    queue.publish("late", delay=0.2)
    queue.publish("chosen", id="chosen")
    as_consumer = login("consumer", "errands")
    environment = {**os.environ, "PYTHONPATH": f"{Path(__file__).parent}:{PACKAGE.parent}"}
    command = [sys.executable, "-m", "reliq", "worker", "errands:consumer", "--burst=delayed", "--url", as_consumer]

    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)

    totals = queue.counts().totals
    assert done.returncode == 0, done.stderr
    assert (totals["acked"], totals["dead"], totals["nacked"], totals["snoozed"]) == (5, 1, 2, 1)
    assert queue.counts().missing == 0
    assert refused() == []


def test_consumer_may_not_use_another_queue_or_administer_its_own(login, url, knows_selectors):
    as_consumer = login("consumer", "q")
    queue, other = Queue("q", bytes, url=as_consumer), Queue("other", bytes, url=as_consumer)

    with pytest.raises(RedisRefusedError, match=NO_PERMISSION):
        other.moves.claim(t.CallNumber("w", 1), limit=1, lease_ms=1000)
    assert refuses(as_consumer, "RENAME", queue.keys.ready, queue.keys.retry)
    if knows_selectors:
        assert refuses(as_consumer, "HGETALL", "reliq:queues")
        assert refuses(as_consumer, "SET", queue.keys.paused, "1")
        assert refuses(as_consumer, "DEL", queue.keys.ready)


def test_operator_may_administer_a_queue_of_each_layout(login, refused, layout, url, client):
    theirs = Queue("q", bytes, url=url, layout=layout)
    theirs.publish(b"body", id="waits", delay=60)
    theirs.publish(b"body", id="goes")
    theirs.publish(b"body", id="dies", retries=0)
    for claimed in theirs.moves.claim(t.CallNumber("w", 1), limit=9, lease_ms=9000).claimed:
        if claimed.id == "dies":
            theirs.moves.nack([(claimed, 0, "rejected 1 x", b"body")])
    theirs.moves.collect(["dies"], letters_max=9, letters_ms=10**12)
    client.zrem(theirs.keys.unack, "goes")
    as_operator = login("operator", "q", layout=layout)
    queue, admin = Queue("q", bytes, url=as_operator, layout=layout), Admin(as_operator, layout=layout)

    queue.pause(reason="a test", for_=60)
    queue.resume()
    queue.reschedule("waits", delay=30)
    queue.cancel("waits")
    redriven = queue.redrive(queue.letters())
    report = admin.check("q", repair=True, patience=0)
    queue.counts()

    assert redriven == 1
    assert [(fault.name, fault.mended) for fault in report.faults if fault.name != "account"] == [("lost", 1)]
    assert refused() == []


def test_operator_may_put_a_redis_key_of_another_type_aside(login, refused, client):
    admin = Admin(login("operator", "q"))
    client.set(admin.redis_keys("q").retry, "not ours")

    [fault] = admin.check("q", repair=True, patience=0).faults

    assert (fault.name, fault.mended) == ("wrong-type", 1)
    assert refused() == []


def test_operator_may_not_use_another_queue_or_claim(login, url, knows_selectors):
    as_operator = login("operator", "q")

    with pytest.raises(RedisRefusedError, match=NO_PERMISSION):
        Queue("other", bytes, url=as_operator).counts()
    if not knows_selectors:  # what it publishes and purges with is all that a claim takes
        return
    Queue("q", bytes, url=url).publish(b"body")
    with pytest.raises(RedisRefusedError, match=NO_PERMISSION):
        Queue("q", bytes, url=as_operator).moves.claim(t.CallNumber("w", 1), limit=1, lease_ms=1000)


def test_exporter_may_read_every_figure(login, refused, url, client, layout):
    queue = Queue("q", bytes, url=url, layout=layout)
    queue.publish_many([b"body"] * 3)
    queue.publish(b"late", delay=60)
    client.zadd(queue.keys.pending, {"overdue": client.time()[0] - 60})
    queue.moves.claim(t.CallNumber("w", 1), limit=1, lease_ms=60_000)
    client.hset("reliq:queues", queue.keys.entry, 1)
    caller = Client(Connection.to(login("exporter", "q", layout=layout)).wire())

    snapshots = SnapshotReader(caller)
    snapshots.look()
    look = snapshots.look()  # of a queue that Go may share, the first look does not tell for how long messages wait

    [sight] = look.queues
    assert (sight.counts.ready, sight.counts.pending, sight.counts.unack) == (2, 2, 1)
    assert sight.backlog == 3
    assert {"pending", "ready", "unack"} <= sight.oldest.keys()
    assert look.facts["maxmemory_policy"]
    assert refused() == []


def test_exporter_may_not_read_bodies_or_change_anything(login, url):
    as_exporter, keys = login("exporter", "q"), Queue("q", bytes, url=url).keys

    reads = (f"GET {keys.msg('m')}", f"MGET {keys.msg('m')}", f"XRANGE {keys.dead} - +", f"LRANGE {keys.ready} 0 -1")
    for command in (*reads, f"SET {keys.paused} 1", f"DEL {keys.ready}", "HSET reliq:queues x 1"):
        assert refuses(as_exporter, *command.split())
    with pytest.raises(Exception, match=NO_PERMISSION):
        Queue("q", bytes, url=as_exporter).publish(b"body")


def made_by(path):
    """Return the scripts and commands that a module names, such as `transitions.ack` and `commands.bodies`."""
    known = {(made.__module__.rpartition(".")[2], made.__name__) for made in USES}
    known |= {("transitions", name) for name in script_names()} | {("ids", "check_ids"), ("ids", "check_keys")}
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found.add((node.value.id, node.attr))
        elif isinstance(node, ast.ImportFrom):
            found |= {((node.module or "").rpartition(".")[2], alias.name) for alias in node.names}
            found |= {("shardmap", "fence") for alias in node.names if alias.name == "witnesses"}
    return found & known


def paths_of(role):
    for player in PLAYERS[role]:
        root = PACKAGE / player
        yield from (
            path
            for path in ([root] if root.suffix else root.rglob("*.py"))
            if str(path.relative_to(PACKAGE)) not in NO_ROLE
        )


def test_each_role_has_exactly_the_calls_of_its_modules():
    of_check = {CHECK: ("ids", "check_ids"), CHECK_KEYS: ("ids", "check_keys")}
    for role in PLAYERS:
        made = {one for path in paths_of(role) for one in made_by(path)}
        named = {of_check.get(one, ("transitions", one.name)) for one in roles.SCRIPTS[role]}
        named |= {(one.__module__.rpartition(".")[2], one.__name__) for one in roles.COMMANDS[role]}

        assert named == made, role


def test_acl_prints_a_command_that_redis_accepts(command, client, knows_selectors):
    code, out, error = command("acl", "--role", "consumer", "--role", "producer", "--queue", "a", "--queue", "b")

    assert code == 0
    assert out.startswith("ACL SETUSER reliq-producer-consumer resetkeys ")
    assert "ACL SETUSER reliq-producer-consumer on >PASSWORD" in error
    assert ("%R~{reliq:b}:lane:*" in out) == knows_selectors
    client.execute_command(*out.split())
    assert client.acl_deluser("reliq-producer-consumer") == 1


def test_acl_for_a_named_server_version_connects_to_no_redis(command, monkeypatch):
    monkeypatch.delenv("RELIQ_URL")
    options = ["--role", "exporter", "--queue", "q", "--layout", "hdt3213:tag", "--user", "prometheus", "--json"]

    for version, selectors in (("6.2", False), ("7.0", True)):
        rule = command("acl", *options, "--server", version).json
        assert (rule["user"], rule["roles"]) == ("prometheus", ["exporter"])
        assert any("{dp:q}:ready" in part for part in rule["rules"])
        assert ("clearselectors" in rule["rules"]) == selectors


def test_acl_for_another_database_includes_select(url):
    assert "+select" in Admin(url.replace("/0", "/1")).acl(["producer"], ["q"]).rules
    assert "+select" not in Admin(url).acl(["producer"], ["q"]).rules


def test_unknown_role_and_missing_queue_are_refused(url):
    with pytest.raises(ConfigurationError, match="^a role must be one of producer, .* not boss$"):
        Admin(url).acl(["boss"], ["q"])
    with pytest.raises(ConfigurationError, match="at least one queue"):
        Admin(url).acl(["producer"], [])
