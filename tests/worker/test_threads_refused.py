"""A system that gives no more threads holds a worker up; it does not lose what the worker has claimed."""

import threading

import pytest
from waiting import eventually

from reliq.events import Acked, Claimed

#: More than there are addresses for: no thread with such a stack can start.
TOO_LARGE = 1 << 46


def test_a_thread_that_cannot_start_is_retried_and_loses_no_message(queue, acking, start, recorder, caplog):
    start()
    threading.stack_size(TOO_LARGE)
    try:
        with pytest.raises(RuntimeError, match="can't start new thread"):
            threading.Thread(target=print).start()
        queue.publish("x", id="x")
        recorder.wait_for(Claimed)
        eventually(lambda: "can't start new thread" in caplog.text, "the worker logs it")
    finally:
        threading.stack_size(0)

    recorder.wait_for(Acked)
    assert recorder.ids(Acked) == ["x"]
    assert queue.counts().totals.get("retried_lease", 0) == 0
