"""`reliq worker --reload`: a change of a source stops the worker as a deploy does, and begins it anew."""

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
        open("gate").read()  # until somebody has opened its other end
    print(words.WORD, "ends", body["n"], flush=True)
"""


def test_reload_restarts_the_worker_and_waits_for_a_broken_source(tmp_path, url):
    """One process all the time: its number stays, for a debugger or a terminal."""
    if find_spec("watchfiles") is None:
        must_run_in_ci("watchfiles is not installed")
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    here.mkdir()
    elsewhere.mkdir()
    os.mkfifo(here / "gate")
    (here / "jobs.py").write_text(JOBS)
    (elsewhere / "words.py").write_text("WORD = 'one'")
    queue = Queue("q", url=url)
    with closing(Worker("jobs:consumer", here, environment_for(elsewhere, url), "--reload")) as worker:
        queue.publish({"n": 1})
        eventually(lambda: worker.said("one begins 1"), "the first version works")

        # Of another length: Python takes a source of the same second and length for the one that it has compiled.
        (elsewhere / "words.py").write_text("WORD = 'two'  # changed")
        eventually(lambda: worker.said("elsewhere/words.py changed: restarting"), "a module from elsewhere is watched")
        (here / "gate").write_text("")
        # The first version may claim until it has stopped.
        eventually(
            lambda: sum("ready: working on q" in line for line in worker.lines) == 2, "the second version begins"
        )
        queue.publish({"n": 2})
        eventually(lambda: worker.said("two ends 2"), "the second version works")
        assert worker.said("one ends 1")
        eventually(lambda: queue.counts().totals["acked"] == 2, "both were acked")

        (here / "jobs.py").write_text("consumer = (")
        eventually(lambda: worker.said("it begins anew when a source changes"), "it waits for the end of a mistake")
        assert worker.said("SyntaxError")
        (here / "jobs.py").write_text(JOBS.replace("words.WORD", "'three'"))
        queue.publish({"n": 3})
        eventually(lambda: worker.said("three ends 3"), "the third version works")

        assert worker.stop(signal.SIGINT) == 0
