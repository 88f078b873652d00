"""A system that gives no more threads holds a worker up; it does not lose what the worker has claimed."""

import threading

import pytest

from reliq.events import Acked, Claimed

#: More than there are addresses for: no thread with such a stack can start.
TOO_LARGE = 1 << 46


@pytest.fixture
def no_threads():
    """Let no new thread start; call it to let them start again."""
    threading.stack_size(TOO_LARGE)
    yield lambda: threading.stack_size(0)
    threading.stack_size(0)


def test_a_thread_that_cannot_start_is_retried_and_loses_no_message(queue, consumer, start, recorder, caplog, request):
    consumer.handler(queue, lease=60)(lambda body: None)
    start()
    allow = request.getfixturevalue("no_threads")
    with pytest.raises(RuntimeError, match="can't start new thread"):
        threading.Thread(target=print).start()

    queue.publish("x", id="x")
    recorder.wait_for(Claimed, timeout=30)
    while "can't start new thread" not in caplog.text:
        threading.Event().wait(0.01)
    allow()

    recorder.wait_for(Acked, timeout=30)
    assert recorder.ids(Acked) == ["x"]
    assert queue.counts().totals.get("retried_lease", 0) == 0
