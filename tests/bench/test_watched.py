"""`reliq bench` measures processes that report to a supervisor as those of `reliq worker` do."""

import threading

from reliq import Consumer, Queue
from reliq.bench import child
from reliq.bench.bench import Diary
from reliq.consumer import SignalNotes
from reliq.supervisor import main
from reliq.supervisor.plan import ChildPlan
from reliq.supervisor.status import ProcessStatus, ProcessStatusView


def reporting(consumer):
    """The kinds of a consumer's observers, and its callback before a handler."""
    return [type(one) for one in consumer.observers], consumer.before_call.__func__


def test_bench_process_has_the_observers_of_a_supervised_process(url, tmp_path, monkeypatch):
    made, queue = [], Queue("q", dict, url=url)

    class Kept(child.CountedConsumer):
        def __init__(self, url):
            super().__init__(url)
            made.append(self)

    monkeypatch.setattr(child, "CountedConsumer", Kept)
    monkeypatch.setattr(child, "_answer_looks", lambda *_: None)
    child._work(url, queue, "plain", Diary())

    supervised = Consumer(url)
    monkeypatch.setattr(supervised, "run", lambda *_args, **_options: 0)
    supervised.handler(queue)(lambda body: None)
    ProcessStatusView(tmp_path / "board", ["q"], 16)
    facts = {"consumer": "", "queues": (), "grace": 1.0, "max_jobs": None, "burst": False, "allow_eviction": True}
    plan = ChildPlan(**facts, concurrency=16, log_level="info", board=str(tmp_path / "board"), report=str(tmp_path))
    main._work(supervised, plan, SignalNotes(), threading.Event())

    assert reporting(made[0]) == reporting(supervised)
    assert reporting(supervised)[1] is ProcessStatus.begins
