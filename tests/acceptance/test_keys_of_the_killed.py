"""A process is killed while it runs a message: the message is redelivered, and its key is not blocked."""

import os
import signal
import time

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
def test_supervisor_ends_the_lease_of_a_message_in_a_dead_process(worker, jobs, client, key):
    """The killed attempt spends a retry; the message is redelivered without waiting for its lease of ten minutes."""
    queue = jobs.KEPT if key else jobs.HELD
    id = queue.publish("held", key=key).id
    if key:
        queue.publish("after", key=key)
    worker("--queue", queue.name)
    eventually(lambda: client.sismember("note:started", "held 1"), "the handler runs")
    eventually(lambda: client.exists("note:pid"), "it has said in which process")
    until = client.zscore(queue.keys.unack, id)

    (pid,) = client.smembers("note:pid")
    os.kill(int(pid), signal.SIGKILL)

    eventually(lambda: client.zscore(queue.keys.unack, id) < time.time() + 1 < until, "its lease is over")
    assert client.scard("note:done") == 0
