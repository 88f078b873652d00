"""A process is killed while it runs a message: the message is redelivered, and its key is not blocked."""

import os
import signal

import pytest
from waiting import eventually

pytestmark = pytest.mark.slow


def test_key_of_a_killed_process_is_served_when_the_lease_ends(jobs, program, client):
    """Without a supervisor, another process takes the message back when its lease expires."""
    jobs.ORDERED.publish("held", key="a")
    jobs.ORDERED.publish("after", key="a")
    code = "from jobs import consumer; consumer.run(queues=['ordered'])"
    first = program(code)
    eventually(lambda: client.sismember("note:started", "held 1"), "the first message runs")
    program(code)
    first.kill()

    eventually(lambda: client.scard("note:done") == 2, "both are done")
    assert client.sismember("note:started", "held 2")
    assert jobs.ORDERED.counts().waiting == 0


@pytest.mark.parametrize("key", ["a", None])
def test_new_process_runs_the_message_of_its_dead_predecessor_at_once(worker, jobs, client, key):
    """The killed attempt spends a retry. The message waits neither for its lease of ten minutes nor for a third of it."""
    queue = jobs.KEPT if key else jobs.HELD
    queue.publish("held", key=key)
    if key:
        queue.publish("after", key=key)
    worker("--queue", queue.name, "--processes", "1")
    eventually(lambda: client.sismember("note:started", "held 1"), "the handler runs")
    eventually(lambda: client.exists("note:pid"), "it has said in which process")
    assert client.scard("note:done") == 0

    (pid,) = client.smembers("note:pid")
    os.kill(int(pid), signal.SIGKILL)

    eventually(lambda: client.scard("note:done") == 1 + bool(key), "a new process runs all messages")
    assert client.sismember("note:started", "held 2")
