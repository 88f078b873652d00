"""Every command reaches a queue of the Go original, however its keys are spelled and whatever it is called."""

import re
import shlex
from itertools import cycle

import pytest
from go_original import GoProgram
from test_every_command import COMMANDS, options
from waiting import eventually

from reliq import Admin, Layout, PublishFailed, Queue
from reliq.keys import QUEUES_KEY, Keys

LAYOUTS = (
    Layout.hdt3213(),
    Layout.hdt3213(hash_tag=True),
    Layout.hdt3213(prefix="shop"),
    Layout.hdt3213(hash_tag=True, prefix="shop:eu"),
)
#: Names as the original takes them.
NAMES = ("orders", "order:timeout", "orders/v2", "订单", "a b*", "{x}y", "[red]!")
EACH_NAME = tuple(zip(NAMES, cycle(LAYOUTS)))
#: A call of every command on a queue, in an order in which each has something to do.
CALLS = (
    "publish QUEUE {} --id m --delay 1h",
    "list QUEUE --state pending",
    "show QUEUE m",
    "account QUEUE",
    "check QUEUE",
    "running QUEUE",
    "ends QUEUE",
    "pause QUEUE --for 1h",
    "resume QUEUE",
    "move QUEUE other --state pending --yes",
    "cancel other m --yes",
    "purge QUEUE --state ready --yes",
    "dead list QUEUE",
    "dead show QUEUE dead-0",
    "dead redrive QUEUE --all --yes",
    "dead purge QUEUE --all --yes",
    "acl --role producer --queue QUEUE",
    "cron list QUEUE",
    "cron pause --queue QUEUE daily",
    "cron resume --queue QUEUE daily",
    "cron forget --queue QUEUE daily",
    "shards QUEUE",
)


@pytest.fixture
def buried(url, client):
    """Make a queue, and leave in it nothing but a dead letter and a periodic entry."""
    made = []

    def make(name="orders", layout=LAYOUTS[0], letters=1):
        queue = Queue(name, bytes, url=url, layout=layout)
        made.append(queue)
        for number in range(letters):
            queue.publish(b"body", id=f"dead-{number}", retries=0)
            with queue.receive() as [job]:
                job.reject(reason="no route")
            queue.moves.collect([f"dead-{number}"], letters_max=9, letters_ms=10**9)
        client.hset(queue.keys.cron, "daily schedule", "every 60")
        return queue

    yield make
    for queue in made:
        queue.close()


@pytest.mark.parametrize(("name", "layout"), EACH_NAME, ids=str)
def test_every_command_reaches_the_queue(command, buried, layout, name):
    buried(name, layout)
    buried("other", layout)

    for call in CALLS:
        words = [name if word == "QUEUE" else word for word in call.split()]
        ran = command(*words, "--layout", layout)
        assert ran.code == 0, (call, ran)


def test_every_command_that_takes_a_layout_was_called():
    called = {re.split(r" (?:QUEUE|other|--)", call)[0] for call in CALLS}

    assert {name for name in COMMANDS if "--layout" in options(name)} - called == {
        "watch",
        "doctor",
        "exporter",
        "forget",
        "cron run",  # it waits for a worker
        "keys",  # a queue of Go has none
        "limits",
    }


@pytest.mark.parametrize(("name", "layout"), [*zip(NAMES, cycle(LAYOUTS[:3]))], ids=str)
def test_a_scan_finds_a_drained_queue_that_has_dead_letters_and_says_how_to_reach_it(
    command, buried, client, layout, name
):
    buried(name, layout)
    client.delete(QUEUES_KEY)

    [view] = command("queues", "--scan", "--interval", "0", "--json").json["queues"]

    assert (view["queue"], view["dead"]) == (name, 1)
    assert command("account", view["queue"], "--layout", view["layout"]).code == 0


def test_a_prefix_with_colons_is_told_from_a_name_with_colons_by_the_bodies(command, url, client):
    Queue("a:b", bytes, url=url, layout=Layout.hdt3213(prefix="x")).publish(b"body")
    Queue("b", bytes, url=url, layout=Layout.hdt3213(prefix="y:a")).publish(b"body")
    client.delete(QUEUES_KEY)

    views = command("queues", "--scan", "--interval", "0", "--json").json["queues"]

    assert {(view["queue"], view["layout"]) for view in views} == {
        ("a:b", "hdt3213:prefix=x"),
        ("b", "hdt3213:prefix=y:a"),
    }


def test_a_key_of_another_type_is_no_queue(command, client):
    client.lpush("dp:jobs:dead", "of another library")
    client.set("dp:jobs:retry:cnt", "7")

    assert command("queues", "--scan", "--interval", "0", "--json").json["queues"] == []


@pytest.mark.parametrize("layout", LAYOUTS[:2], ids=str)
def test_a_queue_that_is_named_in_the_wrong_layout_is_named_in_the_right_one(command, url, layout):
    Queue("orders", bytes, url=url, layout=layout).publish(b"body")

    for words in (["account"], ["check"], ["check", "--repair"], ["list"], ["show", "m"], ["pause"]):
        ran = command(words[0], "orders", *words[1:])
        assert (ran.code, ran.out) == (2, "")
        assert ran.err == (f"reliq: there is no queue 'orders' here; there is one with --layout {layout}\n")


def test_a_queue_that_is_nowhere_is_unknown_in_its_layout(command):
    for layout in LAYOUTS:
        ran = command("check", "orders", "--layout", layout)
        assert (ran.code, ran.out) == (2, "")
        assert ran.err == (
            f"reliq: there is no queue 'orders' here in the layout {layout}; `reliq queues --scan` lists what there is\n"
        )


def test_a_pause_says_the_line_that_ends_it(command, buried):
    for name in NAMES:
        queue = buried(name, LAYOUTS[3])
        said = command("pause", name, "--layout", LAYOUTS[3]).out

        [line] = re.findall("`(.*)`", said)
        assert command(*shlex.split(line)[1:]).out == f"{name} is resumed\n"
        assert not queue.counts().paused


def test_a_pause_of_a_queue_of_reliqs_own_says_no_layout(command, queue):
    queue.publish({})

    assert command("pause", "q").out == "q is paused; `reliq resume q` ends it\n"


@pytest.mark.parametrize("text", ["", "go", "hdt3213:", "hdt3213:cluster", "hdt3213:tag,no-tag", "hdt3213:prefix="])
def test_a_layout_that_is_none_is_refused_with_those_there_are(command, text):
    ran = command("check", "orders", "--layout", text)

    assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
    assert "prefix" in ran.err


def test_a_worker_on_it_has_it_in_the_registry_and_so_in_every_list(command, url, buried):
    buried("order:timeout", LAYOUTS[1])
    buried("order:timeout", LAYOUTS[0])
    buried("orders", Layout.RELIQ)

    views = command("queues", "--interval", "0", "--json").json["queues"]

    assert {(view["queue"], view["layout"]) for view in views} == {
        ("order:timeout", "hdt3213"),
        ("order:timeout", "hdt3213:tag"),
        ("orders", "reliq"),
    }
    assert "hdt3213:tag" in command("queues", "--interval", "0").out


def test_a_rule_for_a_name_with_signs_of_patterns_is_for_that_queue_alone(url, client):
    layout = Layout.hdt3213()
    rule = Admin(url, layout=layout).acl(["producer"], ["a b*"], user="narrow")
    client.execute_command("ACL", "SETUSER", "narrow", "reset", *rule.rules, "on", ">secret")
    try:
        narrow = url.replace("redis://", "redis://narrow:secret@")
        assert Queue("a b*", bytes, url=narrow, layout=layout).publish(b"x").status == "published"
        with pytest.raises(PublishFailed):
            Queue("a bc", bytes, url=narrow, layout=layout).publish(b"x")
        client.execute_command(*shlex.split(str(rule)))
    finally:
        client.acl_deluser("narrow")


@pytest.fixture
def go(client):
    return GoProgram(client, Keys("orders", LAYOUTS[0]))


def test_an_account_beside_go_says_what_it_cannot_know_and_is_no_failure(command, go, client):
    now = client.time()[0]
    for _ in range(3):
        go.publish(due=now)
    go.promote(now)
    go.ack(go.claim(now))

    ran, told = (command("account", "orders", "--layout", "hdt3213", *more) for more in ((), ("--json",)))

    assert (ran.code, told.code) == (0, 0)
    assert "A program in Go that shares the queue counts nothing" in ran.out
    assert "add up." not in ran.out.replace("need not add up.", "")
    assert told.json | {"published": 0, "alive": 2, "missing": None, "balanced": None} == told.json


def test_an_account_of_reliqs_own_that_does_not_add_up_is_a_failure_still(command, queue, client):
    queue.publish({})
    client.hincrby(queue.keys.totals, "published", 5)

    assert command("account", "q").code == 1
    assert command("account", "q", "--json").json["balanced"] is False


def test_what_waits_and_tells_no_time_is_not_said_to_be_late_by_nothing(command, go, client):
    client.hset(QUEUES_KEY, go.keys.entry, "1")
    go.publish(due=1)
    go.promote(1)

    [view] = command("queues", "--interval", "0", "--json").json["queues"]
    row = command("queues", "--interval", "0").out.splitlines()[1].split()

    assert (view["ready"], view["late"]) == (1, None)
    assert row[:3] == ["orders", "?", "1"]


def test_what_is_overdue_in_pending_is_late_by_that(command, go, client):
    client.hset(QUEUES_KEY, go.keys.entry, "1")
    go.publish(due=client.time()[0] - 100)

    [view] = command("queues", "--interval", "0", "--json").json["queues"]

    assert 100 <= view["late"] < 200


def test_a_watch_sees_for_how_long_go_has_let_a_message_wait(url, go, client):
    client.hset(QUEUES_KEY, go.keys.entry, "1")
    go.publish(due=1)
    go.promote(1)
    watcher = Admin(url).watch()

    assert watcher.look().overview.queues[0].late is None
    eventually(lambda: watcher.look().overview.queues[0].late > 0, "a later look knows since when")


def test_what_a_program_in_go_runs_is_not_said_to_be_nothing(command, go, queue, client):
    go.publish(due=1)
    queue.publish({})

    assert "What programs in Go run, nobody tells." in command("running", "orders", "--layout", "hdt3213").out
    assert "Go" not in command("running", "q").out


@pytest.mark.parametrize(("name", "layout"), EACH_NAME, ids=str)
def test_a_queue_that_is_no_more_is_forgotten(command, buried, client, name, layout):
    queue = buried(name, layout)
    client.hset(QUEUES_KEY, queue.keys.entry, 1)

    ran = command("forget", name, "--layout", layout, "--letters", "--yes")

    assert (ran.code, ran.err) == (0, "")
    assert [key for key in client.scan_iter() if client.ttl(key) < 0] == []
    assert command("account", name, "--layout", layout).code == 2
