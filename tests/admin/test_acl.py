"""`Admin.acl`: users with exactly the printed rule do all of their role, and are refused the rest."""

import ast
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import redis
from typed import reliq

from reliq import (
    Admin,
    ConfigurationError,
    Layout,
    PublishFailed,
    Queue,
    RedisRefusedError,
    commands,
    crons,
    minutes,
    stacks,
    transitions as t,
)
from reliq.admin import key_queries, queries, queue_queries, server
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
#: Modules that make scripts or commands and play no role, with the reason.
NO_ROLE = {
    "admin/acl/roles.py",  # the table itself
    "admin/acl/probe.py",  # what it may not read is unknown
    "admin/doctor/probe.py",
    "admin/scripts.py",  # who makes the users may load the scripts
    "cli/demo_story.py",  # it has a Redis of its own
    "cli/queue_names.py",  # a shell's question: without rights it is offered no names
    "client/moves.py",  # single moves, for tools and tests
    "publish/durability.py",  # for who publishes with durability: +wait or +waitaof, which not every server knows
    "bench/bare.py",  # tries what a server can do, as whoever may do all
    "bench/bench.py",
    "bench/node.py",
    "bench/removal.py",
    "bench/stage.py",
    "testing/drain.py",  # a test's own Redis
    "testing/kit.py",
    "testing/published.py",
    "testing/travel.py",
}


@pytest.fixture(params=[Layout.RELIQ, Layout.hdt3213(), Layout.hdt3213(hash_tag=True)], ids=str)
def layout(request):
    return request.param


@pytest.fixture
def login(client, url):
    """Make a user with exactly the rights of a role on queues; return its URL."""
    made = []

    def make(role, *queues, layout=Layout.RELIQ, **options):
        rule = Admin(url, layout=layout).acl([role], queues, user=f"the-{role}", **options)
        client.execute_command("ACL", "SETUSER", rule.user, "reset", *rule.rules, "on", ">secret")
        client.acl_log_reset()
        made.append(rule.user)
        return url.replace("redis://", f"redis://{rule.user}:secret@")

    yield make
    for user in made:
        client.execute_command("ACL", "DELUSER", user)


@pytest.fixture
def refused(client):
    """What users were refused since the last was made, but for what a new connection says and asks on the off chance."""
    by_the_way = ("client", "info")
    return lambda: sorted({one["object"] for one in client.acl_log() if not one["object"].startswith(by_the_way)})


@pytest.fixture
def knows_selectors(client):
    return not client.info("server")["redis_version"].startswith("6.")


def refuses(url, *command):
    with redis.Redis.from_url(url) as user, pytest.raises(redis.exceptions.NoPermissionError):
        user.execute_command(*command)
    return True


EVERYBODYS_LIMITS = [
    ("FLUSHALL",),
    ("CONFIG", "GET", "*"),
    ("KEYS", "*"),
    ("ACL", "LIST"),
    ("GET", "foreign"),
    ("SHUTDOWN",),
]


@pytest.mark.parametrize("role", roles.ROLES)
@pytest.mark.parametrize("command", EVERYBODYS_LIMITS, ids=lambda command: command[0])
def test_no_role_goes_beyond_its_queues(role, command, login):
    assert refuses(login(role, "q"), *command)


def test_a_producer_publishes_in_every_way(login, refused, layout, url):
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


def test_a_producer_is_refused_what_is_not_its_business(login, url, knows_selectors):
    as_producer = login("producer", "q")
    queue, own = Queue("q", bytes, url=url), Queue("q", bytes, url=as_producer)
    id = queue.publish(b"secret").id

    assert refuses(as_producer, "MGET", queue.keys.msg(id))
    assert refuses(as_producer, "RPOP", queue.keys.ready)
    assert refuses(as_producer, "LRANGE", queue.keys.ready, 0, -1)
    assert refuses(as_producer, "GET", "reliq:worker:w")
    for move in (
        lambda: own.moves.claim(t.CallNumber("w", 1), limit=1, lease_ms=1000),
        lambda: own.cancel(id),
        own.letters,
        lambda: Queue("other", bytes, url=as_producer).publish(b"body", id="m"),
    ):
        with pytest.raises(Exception, match="permission|NOPERM|can't|may not"):
            move()
    if knows_selectors:
        assert refuses(as_producer, "GET", queue.keys.msg(id))
        assert refuses(as_producer, "ZREM", queue.keys.pending, "x")
        assert refuses(as_producer, "DEL", queue.keys.msg(id))
        assert refuses(as_producer, "DEL", queue.keys.ready)
        assert refuses(as_producer, "ZADD", queue.keys.unack, 1, id)
    assert queue.counts().ready == 1


def test_a_producer_without_eval_publishes_in_every_way_once_the_scripts_are_loaded(login, refused, client, url):
    client.script_flush()
    as_producer = login("producer", "q", without_eval=True)
    queue = Queue("q", bytes, url=as_producer)

    with pytest.raises(PublishFailed, match="may not EVAL, and Redis lacks the script: run `reliq scripts load`"):
        queue.publish(b"too early")
    assert "EVAL" in Admin(as_producer).doctor(roles=["producer"], queue="q")[-1].what
    client.acl_log_reset()
    code, out, _ = reliq("scripts", "load", url=url)
    queue.publish(b"now")
    queue.publish(b"late", delay=60)
    queue.publish(b"mine", id="mine")

    assert code == 0
    assert out.endswith("scripts are loaded\n")
    assert (queue.publish(b"mine", id="mine").status, queue.publish_many([b"1", b"2"]).published) == ("duplicate", 2)
    assert refused() == []
    assert refuses(as_producer, "EVAL", "return 1", 0)
    assert refuses(as_producer, "SCRIPT", "LOAD", "return 1")


def test_the_doctor_warns_of_a_producer_that_may_run_any_script_and_knows_one_that_may_not(login, url, knows_selectors):
    Admin(url).load_scripts()
    verdicts = {
        without: {
            one.name: one.verdict
            for one in Admin(login("producer", "q", without_eval=without)).doctor(roles=["producer"], queue="q")
        }
        for without in (False, True)
    }

    assert (verdicts[False]["eval"], verdicts[True]["eval"]) == ("warning", "ok")
    rights = "ok" if knows_selectors else "unknown"  # 6.2 does not tell
    assert (verdicts[False]["rights: producer"], verdicts[True]["rights: producer"]) == (rights, rights)


def test_a_whole_worker_runs_as_a_consumer(login, refused, url):
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


def test_a_consumer_receives_without_a_decorator(login, refused, url):
    Queue("q", bytes, url=url).publish_many([b"1", b"2", b"3"])
    queue = Queue("q", bytes, url=login("consumer", "q"))

    with queue.receive(limit=3, wait=1) as jobs:
        jobs[0].nack(delay=0)
        jobs[1].snooze(delay=1)

    assert refused() == []


def test_a_consumer_is_refused_another_queue_and_what_is_done_to_queues(login, url, knows_selectors):
    as_consumer = login("consumer", "q")
    queue, other = Queue("q", bytes, url=as_consumer), Queue("other", bytes, url=as_consumer)

    with pytest.raises(RedisRefusedError, match="permission|NOPERM|can't|may not"):
        other.moves.claim(t.CallNumber("w", 1), limit=1, lease_ms=1000)
    assert refuses(as_consumer, "RENAME", queue.keys.ready, queue.keys.retry)
    if knows_selectors:
        assert refuses(as_consumer, "HGETALL", "reliq:queues")
        assert refuses(as_consumer, "SET", queue.keys.paused, "1")
        assert refuses(as_consumer, "DEL", queue.keys.ready)


def test_an_operator_does_all_that_there_is_to_do(login, refused, layout, url, client):
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


def test_an_operator_puts_a_key_of_another_type_aside(login, refused, client):
    admin = Admin(login("operator", "q"))
    client.set(admin.redis_keys("q").retry, "not ours")

    [fault] = admin.check("q", repair=True, patience=0).faults

    assert (fault.name, fault.mended) == ("wrong-type", 1)
    assert refused() == []


def test_an_operator_uses_the_command(login, refused, url):
    Queue("q", url=url).publish({})
    code, out, error = reliq("check", "q", url=login("operator", "q"))

    assert (code, error) == (0, "")
    assert out.endswith("the queue is sound.\n")
    assert refused() == []


def test_an_operator_is_refused_another_queue_and_what_a_worker_does(login, url, knows_selectors):
    as_operator = login("operator", "q")

    with pytest.raises(RedisRefusedError, match="permission|NOPERM|can't|may not"):
        Queue("other", bytes, url=as_operator).counts()
    if not knows_selectors:  # what it publishes and purges with is all that a claim takes
        return
    Queue("q", bytes, url=url).publish(b"body")
    with pytest.raises(RedisRefusedError, match="permission|NOPERM|can't|may not"):
        Queue("q", bytes, url=as_operator).moves.claim(t.CallNumber("w", 1), limit=1, lease_ms=1000)


def test_an_exporter_sees_every_figure(login, refused, url, client, layout):
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


def test_an_exporter_is_refused_bodies_letters_and_every_change(login, url):
    as_exporter = login("exporter", "q")
    keys = Queue("q", bytes, url=url).keys

    for command in (
        ("GET", keys.msg("m")),
        ("MGET", keys.msg("m")),
        ("XRANGE", keys.dead, "-", "+"),
        ("LRANGE", keys.ready, 0, -1),
        ("SET", keys.paused, 1),
        ("DEL", keys.ready),
        ("HSET", "reliq:queues", "x", 1),
    ):
        assert refuses(as_exporter, *command)
    with pytest.raises(Exception, match="permission|NOPERM|can't|may not"):
        Queue("q", bytes, url=as_exporter).publish(b"body")


# ---- the derivation, and the command ----------------------------------------


@cache
def made_by(path):
    """The scripts and commands that a module makes by their names, such as `transitions.ack` and `commands.bodies`."""
    homes = {"transitions": set(script_names()), "ids": {"check_ids", "check_keys"}}
    homes |= {"shardmap": {"shard_map", "map_text", "fence", "declaration"}}
    homes |= {
        home.__name__.rpartition(".")[2]: set(vars(home))
        for home in (commands, crons, minutes, stacks, queries, key_queries, queue_queries, server)
    }
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found.add((node.value.id, node.attr))
        elif isinstance(node, ast.ImportFrom):
            found |= {((node.module or "").rpartition(".")[2], alias.name) for alias in node.names}
            found |= {("shardmap", "fence") for alias in node.names if alias.name == "witnesses"}
    made = {(home, name) for home, name in found if name in homes.get(home, ())}
    known = {(made.__module__.rpartition(".")[2], made.__name__) for made in USES}
    return {(home, name) for home, name in made if home in ("transitions", "ids") or (home, name) in known}


def paths_of(role):
    for player in PLAYERS[role]:
        root = PACKAGE / player
        yield from (
            path
            for path in ([root] if root.suffix else root.rglob("*.py"))
            if str(path.relative_to(PACKAGE)) not in NO_ROLE
        )


@pytest.mark.parametrize("role", PLAYERS)
def test_a_role_has_what_its_modules_make_and_nothing_else(role):
    made = {one for path in paths_of(role) for one in made_by(path)}

    of_check = {CHECK: ("ids", "check_ids"), CHECK_KEYS: ("ids", "check_keys")}
    named = {of_check.get(one, ("transitions", one.name)) for one in roles.SCRIPTS[role]}
    named |= {(one.__module__.rpartition(".")[2], one.__name__) for one in roles.COMMANDS[role]}
    assert named == made


def test_every_module_that_asks_redis_plays_a_role():
    asking = {path for path in PACKAGE.rglob("*.py") if made_by(path)}

    playing = {path for role in PLAYERS for path in paths_of(role)}

    assert {str(path.relative_to(PACKAGE)) for path in asking - playing} <= NO_ROLE


def test_the_command_prints_what_acl_setuser_takes(url, client, knows_selectors):
    code, out, error = reliq("acl", "--role", "consumer", "--role", "producer", "--queue", "a", "--queue", "b", url=url)

    assert code == 0
    assert out.startswith("ACL SETUSER reliq-producer-consumer resetkeys ")
    assert "ACL SETUSER reliq-producer-consumer on >PASSWORD" in error
    assert ("%R~{reliq:b}:lane:*" in out) == knows_selectors
    client.execute_command(*out.split())
    assert client.acl_deluser("reliq-producer-consumer") == 1


@pytest.mark.parametrize(("server", "selectors"), [("6.2", False), ("7.0", True)])
def test_the_command_asks_no_server_when_it_is_told_which(server, selectors, monkeypatch):
    monkeypatch.delenv("RELIQ_URL", raising=False)
    options = ["--role", "exporter", "--queue", "q", "--layout", "hdt3213:tag", "--user", "prometheus", "--json"]

    code, out, _ = reliq("acl", *options, "--server", server)

    rule = json.loads(out)
    assert (code, rule["user"], rule["roles"]) == (0, "prometheus", ["exporter"])
    assert any("{dp:q}:ready" in part for part in rule["rules"])
    assert ("clearselectors" in rule["rules"]) == selectors


def test_a_database_that_is_not_the_first_needs_one_right_more(url):
    assert "+select" in Admin(url.replace("/0", "/1")).acl(["producer"], ["q"]).rules
    assert "+select" not in Admin(url).acl(["producer"], ["q"]).rules


def test_a_role_that_is_none_and_no_queue_are_refused(url):
    with pytest.raises(
        ConfigurationError, match="^a role must be one of producer, consumer, operator, viewer, exporter, not boss$"
    ):
        Admin(url).acl(["boss"], ["q"])
    with pytest.raises(ConfigurationError, match="at least one queue"):
        Admin(url).acl(["producer"], [])
