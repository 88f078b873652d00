"""Check a queue beside Go programs, whose publish and ack are several commands: states in between are no faults."""

import pytest
from go_original import GoProgram
from transition import run_transition

from reliq import Admin, Layout, Queue
from reliq.admin.check import Checker, Findings
from reliq.admin.session import QueueSession
from reliq.keys import Keys
from reliq.redis.server import Connection

LAYOUTS = (Layout.hdt3213(), Layout.hdt3213(hash_tag=True))


@pytest.fixture(params=LAYOUTS, ids=str)
def layout(request):
    return request.param


@pytest.fixture
def go(client, layout):
    return GoProgram(client, Keys("orders", layout))


@pytest.fixture
def now(client):
    return client.time()[0]


@pytest.fixture
def check(url, go):
    """Check and repair; call `meanwhile` while the check waits. Return the report."""
    connection = Connection.to(url)

    def make(meanwhile=lambda: None):
        session = QueueSession(connection.wire(), go.keys)
        found = Findings()
        Checker(session, found, repair=True, progress=lambda *_: None, wait=meanwhile).run()
        return found.report(go.keys)

    yield make
    connection.close()


def runs_with_a_check_between_each_step(steps, check):
    """Take the steps; run a check from each step to the next step."""
    steps = iter(steps)

    def make_the_next():
        next(steps, int)()

    for step in steps:
        step()
        report = check(make_the_next)
        assert (report.faults, report.is_sound) == ((), True)


@pytest.mark.parametrize("first_alone", [True, False], ids=["from its second step", "from its first step"])
def test_ack_of_go_during_a_check_is_not_a_fault(go, now, check, client, first_alone):
    for _ in range(2):
        go.publish(due=now)
    go.promote(now)
    id = go.claim(now)
    steps = go.acking(id)
    if first_alone:
        steps.pop(0)()

    runs_with_a_check_between_each_step(steps, check)

    assert client.hkeys(go.keys.retries_left) != []
    assert client.exists(go.keys.dead, go.keys.totals, go.keys.msg(id)) == 0


def test_every_step_of_go_during_a_check_is_not_a_fault(go, now, check, client):
    """Send all commands of a message's life, with a check from each command to the next."""
    first, id = go.publishing(due=now, retries=1)
    steps = [
        *first,
        lambda: go.promote(now),
        lambda: go.claim(now),
        lambda: go.nack(id, now),
        lambda: go.reclaim(now),
        lambda: go.claim(now, again=True),
        lambda: go.nack(id, now),
        lambda: go.reclaim(now),
        lambda: client.delete(go.keys.msg(id)),
        lambda: client.srem(go.keys.garbage, id),
    ]
    go.publish(b"beside", due=now + 60)
    runs_with_a_check_between_each_step(steps, check)
    steps[0]()
    runs_with_a_check_between_each_step(steps[1:], check)

    assert client.exists(go.keys.dead, go.keys.totals) == 0


def test_half_a_publish_and_half_an_ack_of_go_are_repaired(go, now, check, client):
    """A publisher died before its last command, and a consumer died within an ack."""
    published, lost = go.publishing(b"half published", due=now)
    for step in published[:2]:
        step()
    acked = go.publish(b"half acked", due=now)
    go.promote(now)
    go.acking(go.claim(now))[0]()

    report = check()

    [fault] = report.faults
    assert (fault.name, fault.count, fault.mended) == ("lost", 2, 2)
    letters = {fields[b"id"].decode(): fields[b"value"] for _, fields in client.xrange(go.keys.dead)}
    assert letters == {lost: b"half published", acked: b"half acked"}
    assert check().is_sound


def test_fault_of_another_kind_after_the_wait_is_not_repaired(go, now, check, client):
    go.publish(b"beside", due=now + 60)
    id = go.publish(due=now)
    go.promote(now)
    zrem, delete, _ = go.acking(go.claim(now))
    zrem()

    report = check(delete)

    assert report.faults == ()
    assert client.hexists(go.keys.retries_left, id)


def test_state_word_left_by_a_go_consumer_is_reported_as_passing(go, now, check, claim, client, url):
    queue = Queue("orders", bytes, url=url, layout=go.keys.layout)
    queue.publish(b"body", id="m")
    run_transition(queue, "nack", [(*claim(queue), 0, "failed 1 x", b"")])
    client.zadd(go.keys.unack, {"m": now})
    go.ack("m")
    queue.publish(b"beside")

    report = Admin(url, layout=go.keys.layout).check("orders", patience=0)

    assert [(fault.name, fault.passes) for fault in report.faults] == [("stray-word", True)]
    assert report.is_sound
    assert [(fault.name, fault.mended) for fault in check().faults] == [("stray-word", 1)]
    assert check().faults == ()
    queue.close()
