"""`reliq worker --reload`: after a source change the worker stops gracefully and starts again."""

import os
import signal
from contextlib import closing
from importlib.util import find_spec

import pytest
from required import must_run_in_ci
from waiting import eventually
from worker_process import Worker, environment_for

from reliq import Queue

pytestmark = pytest.mark.slow

JOBS = """
import words
from reliq import Consumer, Queue

consumer = Consumer()


@consumer.handler(Queue("q"))
def work(body):
    print(words.WORD, "begins", body["n"], flush=True)
    if body["n"] == 1:
        open("gate").read()  # until the test has opened its other end
    print(words.WORD, "ends", body["n"], flush=True)
"""


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM], ids=str)
def test_reload_restarts_the_worker_and_waits_for_a_broken_source(tmp_path, url, stop):
    if find_spec("watchfiles") is None:
        must_run_in_ci("watchfiles is not installed")
    os.mkfifo(tmp_path / "gate")
    (tmp_path / "jobs.py").write_text(JOBS)
    (tmp_path / "words.py").write_text("WORD = 'one'")
    queue = Queue("q", url=url)
    environment = {
        **environment_for(tmp_path, url),
        "RELIQ_RELOAD": "1",
    }  # like --reload, which the new worker must not get again
    with closing(Worker("jobs:consumer", tmp_path, environment)) as worker:
        queue.publish({"n": 1})
        eventually(lambda: worker.said("one begins 1"), "the first version works")

        # Change the length too: Python takes a source with the same second and length for the compiled source.
        (tmp_path / "words.py").write_text("WORD = 'two'  # changed")
        eventually(lambda: worker.said("words.py changed: restarting"), "the change is noticed")
        eventually(lambda: worker.said("worker: stopping; waiting"), "the first version stops")
        (tmp_path / "gate").write_text("")
        # The old worker may claim until it has stopped.
        eventually(
            lambda: sum("worker: ready; working on q" in line for line in worker.lines) == 2,
            "the second version begins",
        )
        queue.publish({"n": 2})
        eventually(lambda: worker.said("two ends 2"), "the second version works")
        assert worker.said("one ends 1")
        eventually(lambda: queue.counts().totals["acked"] == 2, "both were acked")

        (tmp_path / "jobs.py").write_text("consumer = (")
        eventually(lambda: worker.said("SyntaxError"), "the mistake is shown")
        (tmp_path / "jobs.py").write_text(JOBS.replace("words.WORD", "'three'"))
        queue.publish({"n": 3})
        eventually(lambda: worker.said("three ends 3"), "the third version works")

        assert worker.stop(stop) == 0
    assert queue.counts().unack == 0
