"""A user with exactly the rule of `reliq acl` for operators can run every operator command, and nothing else."""

import re
import time

import pytest
from handling import handle_all
from transition import run_transition

from reliq import Admin, ConfigurationError, OutgoingMessage, Queue
from reliq.redis.commands import RunningJob

#: Rights that these calls do not need: for `watch`, for later pages, for other repairs.
ELSEWHERE = {"HRANDFIELD", "LREM", "RENAMENX", "EVAL", "ZCOUNT", "ZRANK"}
#: Commands that move messages between the shards of a queue; tests/admin/test_shards_command.py runs them.
ELSEWHERE |= {"HSETNX", "SADD", "WAIT"}


@pytest.fixture(params=[(), ("--server", "6.2")], ids=["this server", "6.2"])
def rule(request, command):
    """Return the output of `reliq acl` for an operator of two queues."""
    done = command("acl", "--role", "operator", "--queue", "q", "--queue", "other", *request.param)
    assert done.code == 0, done.err
    return done.out


@pytest.fixture
def operator(client, rule, url):
    """Make a user with this rule and a password; return its URL."""
    client.execute_command("ACL", "SETUSER", "reliq-operator", "reset")
    client.execute_command(*rule.split())
    client.execute_command("ACL", "SETUSER", "reliq-operator", "on", ">secret")
    client.acl_log_reset()
    yield url.replace("redis://", "redis://reliq-operator:secret@")
    client.acl_deluser("reliq-operator")


@pytest.fixture
def scene(url, client, alive, queue, claim, die):
    """Messages in every state, dead letters, a lost message, and a worker."""
    other = Queue("other", url=url)
    other.publish({}, delay=600)
    other.publish_many(OutgoingMessage(body={}, id=f"keyed{at}", key="tenant") for at in range(3))
    die("d1", "d2", "d3", error="no such card")
    for id in ("d4", "failing", "redelivered", "lost", "held"):
        queue.publish({"id": id}, id=id)
    ended, failing, *_ = claim(queue, 9, lease_ms=600_000)
    run_transition(queue, "nack", [(ended, 0, "rejected 1 no such card", b"{}")])
    run_transition(queue, "nack", [(failing, 600_000, "failed 1 gateway down", b"{}")])
    client.zrem(queue.keys.unack, "lost", "redelivered")
    client.rpush(queue.keys.retry, "redelivered")
    client.hset(queue.keys.lease, "redelivered", "suspect")
    for at in range(6):
        queue.publish({"at": at}, id=f"ready{at}")
        queue.publish({"at": at}, id=f"later{at}", delay=600)
    alive("w", running=(RunningJob("q", "held", 1, time.time()),))
    client.persist("reliq:worker:w")
    return queue


def ran(client):
    """Return the commands that Redis has run since its statistics were reset, including commands of scripts."""
    figures = client.info("commandstats")
    return {name.removeprefix("cmdstat_").partition("|")[0].upper() for name in figures if figures[name]["calls"]}


SEEING = [
    ("queues", '"queue":"q"'),
    ("workers", '"id":"w"'),
    ("workers q --running", '"id":"held"'),
    ("queues other --check", '"missing":0'),
    *((f"list q --state {state}", '"id":') for state in ("pending", "ready", "unack", "retry", "garbage", "dead")),
    ("list q --state ready --match at", '"ready0"'),
    ("show q ready1", '"ready1"'),
    ("show q d1", '"rejected"'),
    ("list q --state ended", '"dead"'),
    ("list q --kind acked", "[]"),
    ("list q --state dead", '"no such card"'),
    ("show q d2", '"no such card"'),
    ("keys other", '"tenant"'),
    ("keys other --all", '"tenant"'),
    ("limits other", '"per_key":null'),
    ("list other --state waiting", '"keyed0"'),
    ("show other keyed1", '"in turn"'),
]
ACTING = [
    ("publish q {} --id one --delay 1s", '"published"'),
    ("publish q {} --id two --dedup 1h", '"published"'),
    ("publish q --jsonl FILE", '"published":2'),
    ("cancel q one ready0", '"cancelled"'),
    ("publish q {} --id ready0 --delay 5s", ""),
    ("cancel q --state pending --match two --yes", '"done":'),
    ("redrive q d1 --yes", '"done":1'),
    ("redrive q d2 --to other --yes", '"done":1'),
    ("purge q --state dead --reason rejected --yes", '"done":1'),
    ("move q other --state pending --limit 2 --yes", '"done":2'),
    ("move q other --state ready --limit 2 --yes", '"done":'),
    *((f"purge q --state {state} --yes", "") for state in ("pending", "ready", "retry", "garbage", "unack", "dead")),
    ("limits other --per-key 2 --key-rate 5/s", '"per_key":2'),
    ("pause other --key tenant --for 1h", '"asleep"'),
    ("resume other --key tenant", '"was_paused":true'),
    ("purge other --key tenant --yes", '"done":3'),
    ("pause q --reason full --for 30m", ""),
    ("queues", '"full"'),
    ("resume q", '"was_paused":true'),
    ("check q --repair", '"lost"'),
]


def test_operator_may_run_every_command_and_needs_every_right(
    scene, operator, rule, refused, client, command, tmp_path
):
    file = tmp_path / "orders.jsonl"
    file.write_text('{"line": 1}\n{"line": 2}\n')
    client.config_resetstat()

    for line, said in (*SEEING, *ACTING):
        words = [str(file) if word == "FILE" else word for word in line.split()]
        code, out, error = command(*words, "--json", url=operator)
        assert (code, refused()) == (0, []), (line, error)
        assert said in out, line

    rights = {right.upper() for right in re.findall(r"\+(\w+)", rule)}
    assert rights - ran(client) <= ELSEWHERE
    assert scene.counts().missing == 0


def test_operator_may_watch_and_ask_the_doctor(scene, operator, refused, client, command):
    look = Admin(operator).watch().look()

    assert ({view.queue for view in look.overview.queues}, look.overview.unreadable) == ({"q", "other"}, {})
    assert look.overview.workers[0].running[0].id == "held"
    assert {failure.error for failure in look.errors} == {"gateway down", "no such card"}
    assert look.ends

    done = command("doctor", "--role", "operator", "--queue", "q", "--json", url=operator)

    verdicts = {one["name"]: one["verdict"] for one in done.json}
    knows = "unknown" if client.info("server")["redis_version"].startswith("6.") else "ok"
    assert (done.code, done.err) == (0, "")
    assert {one.partition("|")[0] for one in refused()} <= {"config"}, "what it calls unknown"
    assert verdicts["rights: operator"] == knows


def test_operator_of_other_queues_sees_a_queue_as_unreadable(scene, operator, url, command):
    Queue("third", url=url).publish({})

    for words in ("pause third", "list third --state ready", "publish third {}", "check third"):
        done = command(*words.split(), url=operator)
        assert (done.code, bool(re.search("permission|NOPERM", done.err))) == (1, True), words
    checked = command("queues", "third", "--check", url=operator)
    assert (checked.code, "permission" in checked.out + checked.err) == (1, True)
    assert [*command("queues", "--json", url=operator).json["unreadable"]] == ["third"]


def test_operator_may_change_shards_periodic_entries_and_due_times(login, refused, client, url, alive):
    admin = Admin(login("operator", "q"))
    queue = Queue("q", url=url)
    queue.publish_many(OutgoingMessage(body={}, id=f"order-{at}", delay=600 * (at % 2), dedup=60) for at in range(40))
    alive("w", queues=())
    schedule = {"daily schedule": "0 6 * * *", "daily seen": int(time.time()), "daily last": int(time.time()) - 7300}
    client.hset(queue.keys.cron, mapping=schedule)
    admin.pause_cron("q", "daily")
    admin.resume_cron("q", "daily")
    with pytest.raises(ConfigurationError, match="no worker has published"):
        admin.run_cron("q", "daily", wait=0.01)
    client.hset(queue.keys.cron, "daily seen", 1)
    admin.delete_cron("q", "daily")
    queue.schedule("tenant", every=60, body={})
    admin.pause_schedule("q", "tenant")
    assert [one.name for one in admin.schedules("q")] == ["tenant"]
    assert admin.resume_schedule("q", "tenant")
    admin.delete_schedule("q", "tenant")
    assert admin.reschedule("q", "order-1", delay=900) == "rescheduled"
    admin.stacks(["w"], for_seconds=0.01)
    admin.queues(["q"], scan=True)
    for number in (4, 1):
        admin.resize("q", number)
        handle_all(Queue("q", url=url))
        assert not admin.finish_resize("q")
    admin.purge("q", "pending")
    client.hset("reliq:queues", "q", 1)
    admin.delete_queue("q", letters=True)

    assert refused() == []


def test_viewer_may_run_every_command_that_reads_and_no_other(scene, login, refused, client, command):
    viewer = login("viewer", "q", "other")
    for key in client.scan_iter():
        client.persist(key)
    before = {key: client.dump(key) for key in client.scan_iter()}
    reading = [*SEEING, ("check q", '"lost"'), ("shards q", '"n":1'), ("cron list", "[]")]

    for line, said in reading:
        code, out, error = command(*line.split(), "--json", url=viewer)
        assert (code in (0, 1), refused()) == (True, []), (line, error)
        assert said in out, line
    assert Admin(viewer).history("q") == []
    for line, _ in ACTING:
        command(*line.split(), url=viewer)

    assert len(refused()) > 5
    assert {key: client.dump(key) for key in client.scan_iter()} == before
