"""What an observer says it wants is what it reads: an event it does not name is not made for it."""

import ast
import inspect
import logging
import threading

import pytest
from begun import begun

from reliq import Consumer, Nack, Queue
from reliq.events import RedisAway, Started, wanting
from reliq.health import Pulse
from reliq.logs.observer import LogObserver
from reliq.metrics.process import ProcessMetrics
from reliq.metrics.producers import PublishMetrics
from reliq.worker.runner import Runner


@pytest.mark.parametrize("observer", [LogObserver, ProcessMetrics, PublishMetrics, Pulse])
def test_an_observer_names_exactly_the_kinds_that_it_reads(observer):
    tree = ast.parse(inspect.getsource(observer))
    cases = [node.cls for node in ast.walk(tree) if isinstance(node, ast.MatchClass)]
    tests = [
        node.args[1] for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance"
    ]
    read = {ast.unparse(one).removeprefix("events.") for one in cases + tests}

    assert {kind.__name__ for kind in observer.kinds} == read


def test_whoever_names_no_kinds_is_told_everything():
    def everything(event): ...

    pulse = Pulse()

    assert wanting([everything, pulse], RedisAway) == [everything, pulse]
    assert wanting([everything, pulse], Started) == [everything]
    assert wanting([LogObserver(), pulse], Started) == []


def test_a_success_is_no_event_for_the_log_unless_its_level_is_debug_at_that_moment(caplog):
    """Everything else is one: what a handler answers is logged at INFO."""
    caplog.set_level(logging.INFO, "reliq")
    consumer, told = Consumer(), []

    class Log(LogObserver):
        def __call__(self, event, /):
            told.append(event.outcome)
            super().__call__(event)

    consumer.handler(Queue("q", bytes))(lambda body: None)
    runner = Runner(lambda deliveries, outcome: None, (), [Log()], threading.Event())
    runner.run(begun(consumer.handlers[0], "quiet"))
    runner.end(begun(consumer.handlers[0], "answered"), Nack(), None)
    caplog.set_level(logging.DEBUG, "reliq")
    runner.run(begun(consumer.handlers[0], "told"))

    assert told == ["nack", "ack"]
    assert [record.reliq["id"] for record in caplog.records] == ["answered", "told"]
