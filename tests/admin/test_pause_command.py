"""`reliq pause` and `reliq resume`."""

import getpass
import socket
import time


def test_pause_stops_claims_until_resume(command, queue, admin, client):
    queue.publish({})

    ran = command("pause", "q", "--reason", "the gateway is away", "--for", "30m")

    pause = admin.paused("q")
    assert ran[:2] == (0, "q is paused for 30m\n")
    assert (pause.by, pause.reason) == (f"{getpass.getuser()}@{socket.gethostname()}", "the gateway is away")
    assert 1790 < client.ttl(queue.keys.paused) <= 1800
    with queue.receive() as jobs:
        assert jobs == []
    assert queue.publish({}).status == "published"
    said = command("pause", "q", "--reason", "a deploy", "--json").json
    assert (said["reason"], said["until"]) == ("a deploy", None)

    assert command("resume", "q")[:2] == (0, "q is resumed\n")
    assert command("resume", "q")[:2] == (0, "q was not paused\n")
    assert command("resume", "q", "--json").json == {"was_paused": False}
    with queue.receive(limit=2) as jobs:
        assert len(jobs) == 2
    assert command("pause", "q").out == "q is paused; `reliq resume q` ends it\n"


def test_sleeping_queue_is_shown_and_resumed(command, queue, client):
    """A message without a key puts the whole queue to sleep: every screen shows it, and `resume` ends it."""
    queue.publish({"number": 2}, key="a")
    client.zadd(queue.keys.asleep, {"": time.time() + 3000})

    assert "`reliq resume q` resumes it" in command("queues").out
    checked = command("check", "q")
    assert checked.code == 0
    assert "passes   asleep: 1" in checked.out
    with queue.receive() as jobs:
        assert jobs == []
    assert command("resume", "q").out == "q is resumed\n"
    with queue.receive() as jobs:
        assert [job.body for job in jobs] == [{"number": 2}]
    assert command("resume", "q").out == "q was not paused\n"
