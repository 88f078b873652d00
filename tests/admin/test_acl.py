"""`Admin.acl`: a user with exactly the printed rule can do all actions of the role, and nothing else."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import redis
from transition import run_transition

import reliq
from reliq import Admin, ConfigurationError, PublishFailed, Queue, RedisRefusedError
from reliq.admin.acl import ALONE
from reliq.admin.filters import ROLES
from reliq.keys import Keys
from reliq.metrics.snapshot import SnapshotReader
from reliq.redis import commands
from reliq.redis.client import Client
from reliq.redis.server import Connection
from reliq.redis.shards import ShardMap

PACKAGE = Path(reliq.__file__).parent
Q = Keys("q")
BODY = Q.msg("m")
#: Commands that Redis refuses to each role; since Redis 7.0 also commands that it allows on other Redis keys only.
REFUSED = {
    "producer": (f"MGET {BODY}", f"RPOP {Q.ready}", f"LRANGE {Q.ready} 0 -1", "GET reliq:worker:w"),
    "consumer": (f"RENAME {Q.ready} {Q.retry}",),
    "operator": (f"RENAME {Q.ready} {Q.retry}", "GET {reliq:third}:msg:m", "DEL {reliq:third}:ready"),
    "exporter": (
        *(f"GET {BODY}", f"MGET {BODY}", f"XRANGE {Q.dead} - +", f"LRANGE {Q.ready} 0 -1"),
        *(f"SET {Q.paused} 1", f"DEL {Q.ready}", "HSET reliq:queues x 1"),
    ),
    "viewer": (f"SET {Q.paused} 1", f"DEL {Q.ready}"),
}
REFUSED_BY_SELECTORS = {
    "producer": (f"GET {BODY}", f"ZREM {Q.pending} x", f"DEL {BODY}", f"DEL {Q.ready}", f"ZREM {Q.unack} m"),
    "consumer": ("HGETALL reliq:queues", f"SET {Q.paused} 1", f"DEL {Q.ready}"),
}


def unused(client, role):
    """Return the commands that the table of a role has, and that Redis has not run since its statistics were reset."""
    ran = {name.removeprefix("cmdstat_").upper() for name in client.info("commandstats")}
    return {command for commands, _ in ALONE[role] for command in commands.split()} - ran


@pytest.fixture
def knows_selectors(client):
    return not client.info("server")["redis_version"].startswith("6.")


@pytest.mark.parametrize("role", ROLES)
def test_role_is_refused_the_server_and_the_rights_of_others(role, login, knows_selectors):
    server = ("FLUSHALL", "CONFIG GET *", "KEYS *", "ACL LIST", "GET foreign", "SHUTDOWN", "MONITOR")
    by_selectors = REFUSED_BY_SELECTORS.get(role, ()) if knows_selectors else ()

    with redis.Redis.from_url(login(role, "q")) as user:
        for command in (*server, *REFUSED[role], *by_selectors):
            with pytest.raises(redis.exceptions.NoPermissionError):
                user.execute_command(*command.split())


@pytest.mark.parametrize("role", ["producer", "consumer", "operator", "exporter"])
def test_method_that_a_role_may_not_call_raises(role, login, url, claim):
    theirs = Queue("q", bytes, url=url)
    theirs.publish(b"secret", id="m")
    as_role = login(role, "q")
    queue, other = (Queue(name, bytes, url=as_role) for name in ("q", "other"))
    methods = {
        "producer": (
            lambda: claim(queue),
            lambda: queue.cancel("m"),
            queue.dead_letters,
            lambda: other.publish(b"body"),
        ),
        "consumer": (lambda: claim(other),),
        "operator": (other.counts,),
        "exporter": (lambda: queue.publish(b"body"),),
    }

    for method in methods[role]:
        with pytest.raises((RedisRefusedError, PublishFailed), match="permission|NOPERM|can't|may not"):
            method()
    assert theirs.counts().ready == 1


def test_producer_may_publish_in_every_way_and_needs_every_right(login, refused, client, layout, url):
    client.config_resetstat()
    queue = Queue("q", bytes, url=login("producer", "q", layout=layout), layout=layout)

    queue.publish(b"now")
    queue.publish(b"late", delay=60)
    queue.publish(b"sooner", delay=1, id="mine", dedup=5)
    Queue("q", bytes, url=url, layout=layout).cancel("mine", tombstone=60)
    again = [queue.publish(b"again", id="mine").status, queue.publish(b"again", id="mine", ignore_dedup=True).status]
    bulk = queue.publish_many([b"1", b"2"])
    if not layout.bare:
        queue.publish(b"newer", id="mine", on_conflict="replace")
        queue.schedule("tenant", every=3600, body=b"due")
        assert [queue.pause_schedule("tenant"), queue.resume_schedule("tenant")] == [True, True]

    assert again == ["tombstoned", "published"]
    assert bulk.published == 2
    assert refused() == []
    assert unused(client, "producer") <= ({"GETRANGE", "HGET"} if layout.bare else set())


def test_producer_without_eval_publishes_once_the_scripts_are_loaded(login, refused, client, command):
    client.script_flush()
    as_producer = login("producer", "q", without_eval=True)
    queue = Queue("q", bytes, url=as_producer)

    with pytest.raises(PublishFailed, match="may not EVAL, and Redis lacks the script: run `reliq acl --load`"):
        queue.publish(b"too early")
    whats = {one.name: one.what for one in Admin(as_producer).doctor(roles=["producer"], queue="q")}
    assert whats["rights: producer"] == "this user may not EVAL"
    client.acl_log_reset()
    assert command("acl", "--load").code == 0
    queue.publish(b"now")
    queue.publish(b"late", delay=60)
    queue.publish(b"mine", id="mine")

    assert (queue.publish(b"mine", id="mine").status, queue.publish_many([b"1", b"2"]).published) == ("duplicate", 2)
    assert refused() == []
    with redis.Redis.from_url(as_producer) as user:
        for words in (("EVAL", "return 1", 0), ("SCRIPT", "LOAD", "return 1")):
            with pytest.raises(redis.exceptions.NoPermissionError):
                user.execute_command(*words)


def test_doctor_warns_about_a_producer_that_may_run_any_script(login, url, knows_selectors):
    Admin(url).load_scripts()
    rights = "ok" if knows_selectors else "unknown"  # Redis 6.2 does not report selectors
    for without_eval, verdict in ((False, "warning"), (True, "ok")):
        as_producer = Admin(login("producer", "q", without_eval=without_eval))
        verdicts = {one.name: one.verdict for one in as_producer.doctor(roles=["producer"], queue="q")}

        assert (verdicts["eval"], verdicts["rights: producer"]) == (verdict, rights)


@pytest.mark.parametrize("shards", [1, 4], ids="{} shards".format)
def test_consumer_may_run_a_whole_worker_and_needs_every_right(login, refused, client, url, shards):
    queue = Queue("errands", str, url=url, retries=2)
    client.set(queue.keys.map, ShardMap(1, shards, shards).text)
    queue.publish_many(["ack", "nack", "snooze", "reject"])
    queue.publish("late", delay=0.2)
    queue.publish("chosen", id="chosen")
    as_consumer = login("consumer", "errands")
    environment = {**os.environ, "PYTHONPATH": f"{Path(__file__).parent}:{PACKAGE.parent}"}
    command = [sys.executable, "-m", "reliq", "worker", "errands:consumer", "--burst-delayed", "--url", as_consumer]
    client.config_resetstat()

    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)

    totals = queue.counts().totals
    assert done.returncode == 0, done.stderr
    assert (totals["acked"], totals["dead"], totals["nacked"], totals["snoozed"]) == (5, 1, 2, 1)
    assert queue.counts().missing == 0
    assert refused() == []
    # LPOP is for queues that share a wait. A worker counts workers (ZCOUNT) if it has read the map before its first record.
    # A worker that stops while it watches a shard wakes others (RPUSH). The other commands move messages to other shards.
    assert unused(client, "consumer") <= {"LPOP", "RPUSH", "SCAN", "SSCAN", "WAIT", "ZCOUNT"}


@pytest.mark.parametrize("role", ROLES)
def test_status_and_results_are_for_consumers_operators_and_viewers(role, login, url, claim):
    theirs = Queue("q", bytes, url=url)
    ids = [theirs.publish(b"body").id for _ in range(2)]
    run_transition(theirs, "ack", [(claim(theirs)[0], None)], results=["0 1 7"], keep_ms=60_000)
    queue = Queue("q", bytes, url=login(role, "q"))

    if role in ("consumer", "operator", "viewer"):
        assert [queue.status(id).state for id in ids] == ["acked", "ready"]
        assert queue.status(ids[0]).result == 7
    else:
        for id in ids:
            with pytest.raises(RedisRefusedError, match="permission|NOPERM|can't|may not"):
                queue.status(id)


def test_operator_may_put_a_redis_key_of_another_type_aside(login, refused, client, layout):
    admin = Admin(login("operator", "q", layout=layout), layout=layout)
    client.set(admin.redis_keys("q").retry, "not ours")

    [fault] = admin.check("q", repair=True, patience=0).faults

    assert (fault.name, fault.mended) == ("wrong-type", 1)
    assert refused() == []


def test_exporter_may_read_every_figure_and_needs_every_right(login, refused, client, url, layout, claim):
    queue = Queue("q", bytes, url=url, layout=layout)
    queue.publish_many([b"body"] * 3)
    queue.publish(b"late", delay=60)
    claim(queue)
    exporter = Client(Connection.to(login("exporter", "q", layout=layout)).wire())
    snapshots = SnapshotReader(exporter)
    client.config_resetstat()

    look = snapshots.look()
    snapshots.look((time.time() + 3600) * 1000)  # counts the message that is due by then
    [[memory]] = exporter.run_everywhere([commands.server_facts("memory")]).values()

    [sight] = look.queues.values()
    assert (sight.ready, sight.pending, sight.unack, sight.backlog) == (2, 1, 1, 2)
    assert set(sight.oldest) == ({"pending", "unack", "retry"} | ({"ready"} if not queue.keys.bare else set()))
    assert memory["maxmemory_policy"]
    assert refused() == []
    assert unused(client, "exporter") <= ({"GETRANGE", "LINDEX"} if layout.bare else set())


def test_acl_prints_a_command_that_redis_accepts(command, client, knows_selectors):
    code, out, error = command("acl", "--role", "consumer", "--role", "producer", "--queue", "a", "--queue", "b")

    assert code == 0
    assert out.startswith("ACL SETUSER reliq-producer-consumer resetkeys ")
    assert "ACL SETUSER reliq-producer-consumer on >PASSWORD" in error
    assert ("%W~{reliq:b}:msg:*" in out) == knows_selectors
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


def test_acl_for_another_database_includes_select_and_unknown_roles_are_refused(url):
    assert "+select" in Admin(url.replace("/0", "/1")).acl(["producer"], ["q"]).rules
    assert "+select" not in Admin(url).acl(["producer"], ["q"]).rules
    for role, queues, said in (
        ("boss", ["q"], "^a role must be one of .* not boss$"),
        ("producer", [], "at least one"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            Admin(url).acl([role], queues)
