"""The doctor's findings of queues with keys: who cannot serve them, what holds them up, and what takes most of one."""

import pytest

from reliq import Outgoing, Queue
from reliq.admin import Admin
from reliq.admin.doctor.of_keys import MANY_MESSAGES
from reliq.keys import Keys, Layout


@pytest.fixture
def found(url):
    """What the doctor finds of keys: verdicts and texts."""
    admin = Admin(url)
    yield lambda: [(one.verdict, one.what, one.mend) for one in admin.doctor() if one.name == "keys"]
    admin.close()


@pytest.fixture
def keyed(queue):
    """Two messages of a key."""
    queue.publish_many([Outgoing(body={}, id=id, key="a") for id in ("a1", "a2")])
    return queue


def test_queues_without_keys_have_no_finding(queue, found):
    queue.publish({})

    assert found() == []


def test_a_queue_whose_keys_are_served_is_well(keyed, found):
    assert found() == [("ok", "queues with keys or limits: 1, and nothing holds them up", "")]


def test_a_line_that_stands_points_to_the_repair_that_frees_it(keyed, found, client, command):
    client.zrem(keyed.keys.ring, "a")

    [(verdict, what, mend)] = found()

    assert (verdict, mend) == ("bad", "reliq check q --repair")
    assert "key 'a' with 2 messages" in what
    command("check", "q", "--repair")
    assert [one[0] for one in found()] == ["ok"]


def test_limits_that_let_nothing_through_are_told(keyed, found, client):
    client.hset(keyed.keys.limits, "per_key", "0")

    [(verdict, what, mend)] = found()

    assert (verdict, mend) == ("bad", "reliq limits q --clear NAME")
    assert "per_key" in what


def test_a_queue_that_sleeps_for_long_is_told(keyed, found, client):
    client.zadd(keyed.keys.asleep, {"": client.time()[0] + 7200})

    [(verdict, what, _)] = found()

    assert verdict == "warning"
    assert what.startswith(("q sleeps for 2h", "q sleeps for 1h59m"))


def test_a_key_that_takes_most_of_a_queue_is_told(keyed, found):
    keyed.publish_many(Outgoing(body={}, key="noisy") for _ in range(MANY_MESSAGES))

    [(verdict, what, _)] = found()

    assert verdict == "warning"
    assert "key 'noisy' has 1,000 of the 1,002 messages" in what


def test_limits_left_over_in_the_go_layout_or_in_a_queue_of_shards_are_told(url, found, client):
    go = Keys("x;reboot", Layout.hdt3213())
    client.hset(go.limits, mapping={"on": 1, "per_key": 0})
    client.hset("reliq:queues", go.entry, 1)
    sharded = Queue("wide", dict, url=url)
    sharded.publish({})
    Admin(url).resize("wide", 2)
    client.hset(sharded.keys.limits, "on", 1)

    told = {what.partition(":")[0]: mend for _, what, mend in found()}

    limits = "the limits of x;reboot make no sense"
    assert set(told) == {"x;reboot has limits in the Go layout", limits, "wide has keys or limits, and 2 shards"}
    assert told[limits] == "reliq limits 'x;reboot' --clear NAME"
    assert told["wide has keys or limits, and 2 shards"] == "reliq shards wide 1"
