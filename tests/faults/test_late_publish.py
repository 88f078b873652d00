"""A publish timed out and its message was cancelled: when the publish arrives later, the message does not run."""

import threading

import pytest
from broken import stopped

from reliq import PublishFailed
from reliq.lua.transitions import CallNumber


def test_a_publish_still_in_a_socket_buffer_meets_its_cancel(queue_at, server):
    queue, another = queue_at(server.url), queue_at(server.url)
    queue.publish("the connection is there, and the script known")
    with queue.receive():
        pass
    answers = []
    cancelling = threading.Thread(target=lambda: answers.append(queue.cancel("late", tombstone=60)))

    with stopped(server.pid):
        with pytest.raises(PublishFailed) as failure:
            queue.publish("late", id="late")
        cancelling.start()
    cancelling.join()

    assert failure.value.outcome == "unknown"
    assert answers[0] in ("cancelled", "not_found")
    # Repeating the same publish returns its outcome; a publish by another client is refused.
    assert queue.publish("late", id="late").status in ("published", "tombstoned")
    assert another.publish("late", id="late").status == "tombstoned"
    with queue.receive() as jobs:
        assert jobs == []
    assert (queue.counts().alive, queue.counts().missing) == (0, 0)


def test_a_stale_answer_leaves_a_publish_unknown(queue_at, server):
    """A lane is only behind if its process went back in time: a machine restored from a snapshot."""
    queue = queue_at(server.url)
    for number in range(3):
        queue.publish(str(number))
    queue._lanes._free = [CallNumber(lane.lane, 1) for lane in queue._lanes._free]

    with pytest.raises(PublishFailed) as failure:
        queue.publish("again", id="again")

    assert failure.value.outcome == "unknown"
    assert queue.counts().ready == 3
