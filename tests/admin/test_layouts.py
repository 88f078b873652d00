"""Every command works on a queue of the Go original, with any spelling of its Redis keys and any name."""

import re
import shlex
from itertools import cycle

import pytest
from go_original import GoProgram
from handling import bury_all
from test_every_command import COMMANDS, options

from reliq import Layout, PublishFailed, Queue
from reliq.keys import QUEUES_KEY, Keys

LAYOUTS = [Layout.parse(f"hdt3213{of}") for of in ("", ":tag", ":prefix=shop", ":tag,prefix=shop:eu")]
#: Names that the original accepts.
NAMES = ("orders", "order:timeout", "orders/v2", "订单", "a b*", "{x}y", "[red]!")
EACH_NAME = tuple(zip(NAMES, cycle(LAYOUTS)))
#: A call of every command on a queue, in an order in which each has work to do.
CALLS = (
    "publish QUEUE {} --id m --delay 1h",
    "list QUEUE --state pending",
    "show QUEUE m",
    "queues QUEUE --check",
    "check QUEUE",
    "workers QUEUE --running",
    "list QUEUE --state ended",
    "pause QUEUE --for 1h",
    "resume QUEUE",
    "move QUEUE other --state pending --yes",
    "cancel other m --yes",
    "purge QUEUE --state ready --yes",
    "list QUEUE --state dead",
    "show QUEUE dead-0",
    "redrive QUEUE --all --yes",
    "purge QUEUE --state dead --yes",
    "acl --role producer --queue QUEUE",
    "cron list QUEUE",
    "pause QUEUE --cron daily",
    "resume QUEUE --cron daily",
    "delete QUEUE --cron daily --yes",
    "shards QUEUE",
)


def buried(url, client, name, layout):
    """Leave only a dead letter and a periodic job in a queue; return the queue."""
    queue = Queue(name, bytes, url=url, layout=layout)
    queue.publish(b"body", id="dead-0")
    bury_all(queue)
    client.hset(queue.keys.cron, "daily schedule", "every 60")
    return queue


@pytest.mark.parametrize(("name", "layout"), EACH_NAME, ids=str)
def test_every_command_reaches_a_queue_of_go(command, url, client, layout, name):
    buried(url, client, name, layout)
    buried(url, client, "other", layout)

    for call in CALLS:
        words = [name if word == "QUEUE" else word for word in call.split()]
        ran = command(*words, "--layout", layout)
        assert ran.code == 0, (call, ran)

    client.delete(QUEUES_KEY)
    views = command("queues", "--scan", "--json").json["queues"]
    assert (name, str(layout)) in {(view["queue"], view["layout"]) for view in views}, (
        "a scan finds a queue that has nothing but its totals"
    )

    for state in ("pending", "ready"):
        command("purge", name, "--layout", layout, "--state", state, "--yes")
    client.hset(QUEUES_KEY, Keys(name, layout).entry, 1)
    assert command("delete", name, "--layout", layout, "--letters", "--yes").err == ""
    assert command("queues", name, "--check", "--layout", layout).code == 2


def test_every_command_with_the_option_layout_is_called():
    called = {re.split(r" (?:QUEUE|other|--)", call)[0] for call in CALLS}
    elsewhere = {"watch", "doctor", "exporter"} | {"cron run"}  # `cron run` waits for a worker
    keyed = {"keys", "limits", "schedules"}  # a queue of Go has no keys and no stored schedules

    assert {name for name in COMMANDS if "--layout" in options(name)} - called == elsewhere | keyed


def test_scan_tells_a_prefix_with_colons_from_a_name_with_colons(command, url, client):
    for name, prefix in (("a:b", "x"), ("b", "y:a")):
        Queue(name, bytes, url=url, layout=Layout.hdt3213(prefix=prefix)).publish(b"body")
    client.delete(QUEUES_KEY)
    client.lpush("dp:jobs:dead", "of another library")
    client.set("dp:jobs:retry:cnt", "7")

    views = command("queues", "--scan", "--json").json["queues"]

    found = {view["queue"]: view["layout"] for view in views}
    assert found == {"a:b": "hdt3213:prefix=x", "b": "hdt3213:prefix=y:a"}


@pytest.mark.parametrize("layout", LAYOUTS[:2], ids=str)
def test_command_with_the_wrong_layout_names_the_right_one(command, url, layout):
    Queue("orders", bytes, url=url, layout=layout).publish(b"body")

    for words in (["queues", "--check"], ["check"], ["check", "--repair"], ["list"], ["show", "m"], ["pause"]):
        said = f"reliq: there is no queue 'orders' here; there is one with --layout {layout}\n"
        assert command(words[0], "orders", *words[1:]) == (2, "", said)
    unknown = command("check", "nobodys", "--layout", layout)
    assert f"there is no queue 'nobodys' here in the layout {layout}; `reliq queues --scan` lists" in unknown.err


def test_pause_prints_a_command_that_resumes_the_queue(command, url, client):
    for name in NAMES:
        queue = buried(url, client, name, LAYOUTS[3])
        said = command("pause", name, "--layout", LAYOUTS[3]).out

        [line] = re.findall("`(.*)`", said)
        assert command(*shlex.split(line)[1:]).out == f"{name} is resumed\n"
        assert not queue.counts().paused


def test_acl_for_a_name_with_wildcards_allows_that_queue_only(login):
    layout = Layout.hdt3213()
    narrow = login("producer", "a b*", layout=layout)

    assert Queue("a b*", bytes, url=narrow, layout=layout).publish(b"x").status == "published"
    with pytest.raises(PublishFailed):
        Queue("a bc", bytes, url=narrow, layout=layout).publish(b"x")


@pytest.fixture
def go(client):
    return GoProgram(client, Keys("orders", LAYOUTS[0]))


def test_account_of_a_queue_shared_with_go_exits_0_without_a_verdict(command, go, client):
    now = client.time()[0]
    for _ in range(3):
        go.publish(due=now)
    go.promote(now)
    go.ack(go.claim(now))

    ran, told = (command("queues", "orders", "--check", "--layout", "hdt3213", *more) for more in ((), ("--json",)))
    running = command("workers", "orders", "--running", "--layout", "hdt3213").out

    assert (ran.code, told.code) == (0, 0)
    assert "Go programs that share the queue do not count" in ran.out
    assert "Programs in Go do not report running messages." in running
    account = told.json["queues"][0]["account"]
    assert account | {"published": 0, "alive": 2, "missing": None} == account


def test_queue_in_the_go_layout_is_late_by_its_pending_messages_alone(command, go, client):
    client.hset(QUEUES_KEY, go.keys.entry, "1")
    go.publish(due=1)
    go.promote(1)
    [view] = command("queues", "--json").json["queues"]
    assert (view["ready"], view["late"], "ready" in view["oldest"]) == (1, None, False)
    assert command("queues").out.splitlines()[1].split()[:3] == ["orders", "-", "1"]

    go.publish(due=client.time()[0] - 100)
    [view] = command("queues", "--json").json["queues"]
    assert 100 <= view["late"] < 200
