"""`reliq bench` measures what `reliq worker` runs: what a supervisor is told of a process costs both the same."""

import threading

from reliq import Consumer, Queue
from reliq.bench import child
from reliq.bench.jobs import Diary
from reliq.consumer.board import Board, BoardView
from reliq.consumer.signals import SignalNotes
from reliq.process import main
from reliq.process.plan import ChildPlan


class NeverRun(Consumer):
    """A consumer that is made ready for its work, and has none."""

    def run(self, *_args, **_options):
        return 0


def told(consumer):
    """What is told of the messages of a consumer, and by what."""
    return [type(one) for one in consumer.observers], consumer.before_call.__func__


def test_a_process_of_a_benchmark_is_watched_as_one_of_a_supervisor_is(url, tmp_path, monkeypatch):
    made, queue = [], Queue("q", dict, url=url)

    class Kept(child.CountedConsumer):
        def __init__(self, url):
            super().__init__(url)
            made.append(self)

    monkeypatch.setattr(child, "CountedConsumer", Kept)
    monkeypatch.setattr(child, "_answer_looks", lambda *_: None)
    child._work(url, queue, "plain", Diary())

    supervised = NeverRun(url)
    supervised.handler(queue)(lambda body: None)
    BoardView(tmp_path / "board", ["q"], 16)
    facts = {"consumer": "", "queues": (), "grace": 1.0, "max_jobs": None, "burst": False, "allow_eviction": True}
    plan = ChildPlan(**facts, concurrency=16, log_level="info", board=str(tmp_path / "board"), report=str(tmp_path))
    main._work(supervised, plan, SignalNotes(), threading.Event())

    assert told(made[0]) == told(supervised)
    assert told(supervised)[1] is Board.begins
