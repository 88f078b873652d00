"""`reliq queues` with accounts, and `workers` with running handlers: the first questions of a person on call."""

import re
import threading
import time

import pytest
from waiting import eventually

from reliq import Consumer, Queue, WorkerSettings
from reliq.keys import QUEUES_KEY, Layout
from reliq.redis.commands import RunningJob


@pytest.fixture
def busy(url, queue):
    """A worker in this process whose handler keeps one message in flight until the test ends."""
    inside, over = threading.Event(), threading.Event()
    consumer = Consumer(url)

    @consumer.handler(queue)
    def stay(body):
        inside.set()
        assert over.wait(100)

    queue.publish({"n": 1}, id="stays")
    consumer.start(WorkerSettings(concurrency=2))
    assert inside.wait(100)
    yield consumer._engine._heartbeat
    over.set()
    consumer.stop()


def view_of(command, name, *words):
    return {view["queue"]: view for view in command("queues", "--json", *words).json["queues"]}[name]


def test_workers_are_unknown_while_redis_is_full(command, queue, client):
    queue.publish({})
    client.config_set("maxmemory", 1)
    try:
        shown, listed, found = command("queues"), command("workers"), view_of(command, queue.name)
    finally:
        client.config_set("maxmemory", 0)

    assert shown.out.endswith("The workers are unknown: Redis refuses writes, because its memory is full.\n")
    assert re.search(rf"^{queue.name} .* \? *$", shown.out, re.MULTILINE)
    assert found["workers"] is None
    assert (listed.code, "the workers are unknown: Redis refuses writes" in listed.err) == (1, True)
    assert view_of(command, queue.name)["workers"] == 0


def test_queues_shows_every_state_the_lateness_and_workers(command, queue, client, die, alive):
    queue.publish_many([{}] * 3)
    with queue.receive(limit=3) as jobs:
        for job in jobs:
            job.nack(delay=3600)
    queue.publish({}, delay=3600)
    die("dead")
    queue.publish({})
    client.set(queue.keys.msg("old"), b'RELIQ/1 {"d":1000,"r":3}\n{}')
    client.rpush(queue.keys.ready, "old")

    alive("w1", queues=("q", "other"), running=(RunningJob("q", "m", 1, time.time()),))
    alive("w2", queues=("q",), slots=3)
    alive("w3", queues=("other",))

    view = view_of(command, "q")

    numbers = {"pending": 1, "ready": 2, "unack": 3, "backoff": 3, "retry": 0, "garbage": 0, "dead": 1, "rates": None}
    numbers |= {"workers": 2, "slots": 7, "busy": 1}
    assert {name: view[name] for name in numbers} == numbers
    assert view["late"] > 1_700_000_000 - 1000


def test_rates_count_the_moves_between_two_looks(admin, command, queue):
    queue.publish_many({"n": number} for number in range(9))
    watcher = admin.watch()
    assert watcher.look().overview.queues[0].rates is None
    queue.publish_many({"n": number} for number in range(5))
    with queue.receive(limit=3) as jobs:
        jobs[0].nack(delay=60)
        jobs[1].reject()

    rates = watcher.look().overview.queues[0].rates

    moved = [getattr(rates, name) * rates.over_seconds for name in ("arrived", "acked", "failed", "ended")]
    assert [round(number) for number in moved] == [5, 1, 2, 0]


def test_queues_shows_who_paused_a_queue_why_and_for_how_long(command, queue, client):
    queue.publish({})
    queue.pause(reason="gateway down", for_=1800)
    out = command("queues").out
    assert re.search(r"^q is paused by \S+@\S+ \S+ ago, for (30m|29m\d+s) more: gateway down$", out, re.MULTILINE)
    assert view_of(command, "q")["pause"]["reason"] == "gateway down"

    client.set(queue.keys.paused, "by hand", px=7_200_000)  # by something else
    out = command("queues").out
    assert re.search(r"^q is paused, for (2h|1h59m) more: by hand$", out, re.MULTILINE)


def test_scan_finds_queues_of_any_layout_that_the_registry_lost(command, url, client, monkeypatch):
    monkeypatch.setattr("reliq.admin.queues.STEP_KEYS", 10)
    layouts = ("reliq", "hdt3213", "hdt3213:tag", "hdt3213:prefix=shop:dp")
    for layout in layouts:
        Queue("q", bytes, url=url, layout=Layout.parse(layout)).publish_many([b"x"] * 30)
    scan = ("queues", "--scan", "--json")
    assert len(command(*scan).json["queues"]) == len(layouts), "no queue is there twice"
    client.delete(QUEUES_KEY)
    client.hset("not a queue:retry:cnt", "a", "1")
    client.hset("{reliq:not so either!}:retry:cnt", "a", "1")
    client.config_resetstat()

    assert command("queues", "--json").json["queues"] == []
    found = command(*scan).json["queues"]

    assert {(view["queue"], view["layout"], view["ready"]) for view in found} == {("q", one, 30) for one in layouts}
    assert client.info("commandstats")["cmdstat_scan"]["calls"] > 5, "in short steps"


def test_workers_lists_workers_until_their_records_expire(command, alive, client):
    alive("w1", queues=("orders", "mails"))

    line = command("workers").out.splitlines()[1]
    assert line.split()[:5] == ["w1", "db1", "7", "1.2.3", "0/4"]
    assert line.endswith("orders mails")
    (told,) = command("workers", "--json").json
    assert (told["host"], told["slots"], told["queues"]) == ("db1", 4, ["orders", "mails"])

    client.delete("reliq:worker:w1")
    assert "--scan" in command("queues").out
    assert command("workers").out == "No worker is alive.\n"
    assert command("workers", "--json").json == []


def test_running_shows_message_worker_and_duration(command, alive, queue):
    queue.publish({})
    now = time.time()
    rows = (
        RunningJob("q", "slow", 2, now - 900),
        RunningJob("q", "quick", 1, now),
        RunningJob("other", "elsewhere", 1, now),
    )
    alive("w1", queues=("q", "other"), running=rows)

    assert [row["id"] for row in command("workers", "q", "--running", "--json").json] == ["slow", "quick"]
    (row,) = command("workers", "q", "--running", "--longer-than", "10m", "--json").json
    assert (row["id"], row["attempt"], row["worker"], row["pid"]) == ("slow", 2, "w1", 7)
    assert 900 <= row["seconds"] < 960
    said = command("workers", "q", "--running").out
    assert ("15m" in said, "Go" in said) == (True, False)
    assert command("workers", "q", "--running", "--longer-than", "2h").out == "Nothing runs for 2h.\n"


def test_running_and_workers_show_the_age_of_old_records(command, alive, queue):
    queue.publish({})
    rows = (RunningJob("q", "m", 1, time.time() - 90),)
    alive("w1", running=rows, seen=time.time() + 60)  # a clock that is ahead
    assert "as of" not in command("workers", "q", "--running").out + command("workers").out

    alive("w2", running=rows, seen=time.time() - 4)

    for words in (["workers", "q", "--running"], ["workers"]):
        assert re.fullmatch(r"as of \d+(\.\d)?s ago", command(*words).out.splitlines()[-1])
        assert all(one["seen"] < time.time() + 61 for one in command(*words, "--json").json)


def test_running_shows_the_messages_and_stacks_of_a_real_worker(command, busy, queue, monkeypatch):
    monkeypatch.setattr("reliq.worker.upkeep.BEAT_SECONDS", 0.05)
    busy._beat_at = 0.0
    busy.wake()
    (row,) = eventually(lambda: command("workers", "q", "--running", "--json").json, "its record says that it runs")
    assert (row["queue"], row["id"], row["attempt"]) == ("q", "stays", 1)

    told = command("workers", "q", "--running", "--stacks").out

    assert re.search(r"^stays in .*:\d+\n  /.*test_queues_command.py:\d+ busy.<locals>.stay$", told, re.MULTILINE)
    (row,) = command("workers", "q", "--running", "--stacks", "--json").json
    assert row["stack"][0].endswith("busy.<locals>.stay")


def test_running_reports_a_process_that_sends_no_stacks(command, alive, queue, monkeypatch):
    monkeypatch.setattr("reliq.admin.workers.STACK_POLL_SECONDS", 0)
    monkeypatch.setattr("reliq.cli.queues.STACK_SECONDS", 0)
    queue.publish({})
    alive("w1", running=(RunningJob("q", "held", 1, time.time()),))

    assert "no answer: a handler blocks the interpreter" in command("workers", "q", "--running", "--stacks").out
    assert command("workers", "q", "--running", "--stacks", "--json").json[0]["stack"] is None


def test_check_of_queues_exits_1_with_the_difference_when_an_account_does_not_add_up(command, queue, client):
    queue.publish_many({"n": number} for number in range(5))
    with queue.receive(limit=2):
        pass
    queue.publish({}, delay=60, id="off")
    queue.cancel("off")
    done = command("queues", "q", "--check")
    assert (done.code, done.out.rstrip().endswith("It adds up.")) == (0, True)
    numbers = ("published", "redriven", "acked", "cancelled", "alive", "missing")
    assert [view_of(command, "q")["account"][name] for name in numbers] == [6, 0, 2, 1, 3, 0]

    client.rpop(queue.keys.ready, 2)
    done = command("queues", "--check")
    assert (done.code, command("queues", "q").code) == (1, 0)
    assert "It does not add up: 2 more came in than ended or are alive." in done.out
    done = command("queues", "--check", "--json")
    assert (done.code, done.json["queues"][0]["account"]["missing"]) == (1, 2)

    client.lpush(queue.keys.ready, "stowaway-1", "stowaway-2", "stowaway-3")
    assert "1 fewer came in than ended or are alive" in command("queues", "q", "--check").out
