"""`reliq pause` and `reliq resume`."""

import getpass
import socket
import time

from reliq import Admin


def test_a_queue_is_paused_by_somebody_for_a_while_and_a_reason(command, queue, url, client):
    queue.publish({})

    ran = command("pause", "q", "--reason", "the gateway is away", "--for", "30m")

    pause = Admin(url).paused("q")
    assert (ran.code, ran.out) == (0, "q is paused for 30m\n")
    assert (pause.by, pause.reason) == (f"{getpass.getuser()}@{socket.gethostname()}", "the gateway is away")
    assert 1790 < client.ttl(queue.keys.paused) <= 1800
    with queue.receive() as jobs:
        assert jobs == []
    assert queue.publish({}).status == "published"


def test_json_says_all_of_it(command, queue):
    queue.publish({})

    said = command("pause", "q", "--reason", "a deploy", "--json").json

    assert (said["reason"], said["until"]) == ("a deploy", None)


def test_queue_without_keys_that_a_handler_put_to_sleep_is_shown_and_resumed(command, queue, client):
    """A message without a key puts the whole queue to sleep: every screen shows it, and `resume` ends it."""
    queue.publish({"number": 2}, key="a")
    client.zadd(queue.keys.asleep, {"": time.time() + 3000})

    assert "`reliq resume q` wakes it" in command("queues").out
    checked = command("check", "q")
    assert checked.code == 0
    assert "passes   asleep: 1" in checked.out
    with queue.receive() as jobs:
        assert jobs == []
    assert command("resume", "q").out == "q is resumed\n"
    with queue.receive() as jobs:
        assert [job.body for job in jobs] == [{"number": 2}]
    assert command("resume", "q").out == "q was not paused\n"


def test_a_queue_is_resumed_once(command, queue):
    queue.publish({})
    command("pause", "q")

    first, second = command("resume", "q"), command("resume", "q")

    assert (first.code, first.out) == (0, "q is resumed\n")
    assert (second.code, second.out) == (0, "q was not paused\n")
    assert command("resume", "q", "--json").json == {"was_paused": False}
    with queue.receive() as jobs:
        assert len(jobs) == 1
