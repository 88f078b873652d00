"""`publish_many` sends in a thread while it makes the next call: what that must not change."""

import subprocess
import sys
import textwrap

import pytest

from reliq import BodyError, PublishFailed


def test_a_thread_that_outlives_the_main_one_publishes_everything(queue, url):
    script = """
        import sys, threading
        from reliq import Queue

        def items():
            yield from ({"n": n} for n in range(10))
            threading.main_thread().join()  # Python lets no new thread of an executor start from now on
            yield from ({"n": n} for n in range(10, 40))

        queue = Queue("q", url=sys.argv[1])
        threading.Thread(target=lambda: print(queue.publish_many(items(), chunk=10).published)).start()
    """

    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), url], capture_output=True, text=True, timeout=60, check=False
    )

    assert (ran.stdout, ran.stderr) == ("40\n", "")
    assert queue.counts().ready == 40


def test_the_failure_of_a_call_comes_before_that_of_a_later_item(queue, call, client):
    client.set(queue.keys.ready, "not a list")

    with pytest.raises(PublishFailed) as failed:
        call(queue, "publish_many", [{"n": 1}, {"n": 2}, object()], chunk=2)

    assert (failed.value.outcome, failed.value.confirmed) == ("refused", 0)


def test_what_was_sent_before_a_wrong_item_is_published(queue, call):
    with pytest.raises(BodyError):
        call(queue, "publish_many", [{"n": 1}, {"n": 2}, {"n": 3}, object()], chunk=2)

    assert queue.counts().ready == 2
