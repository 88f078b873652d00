"""Observers declare the kinds of events that they read; events without a reader are not created."""

import ast
import inspect
import logging
import threading

import pytest
from begun import begun

from reliq import Consumer, Nack, Queue
from reliq.events import RedisUnavailable, Started, wanting
from reliq.logs import LogObserver
from reliq.metrics.process import ProcessMetrics, PublishMetrics
from reliq.worker.health import Pulse
from reliq.worker.runner import Runner


@pytest.mark.parametrize("observer", [LogObserver, ProcessMetrics, PublishMetrics, Pulse])
def test_observer_names_exactly_the_kinds_that_it_reads(observer):
    tree = ast.parse(inspect.getsource(observer))
    cases = [node.cls for node in ast.walk(tree) if isinstance(node, ast.MatchClass)]
    tests = [
        node.args[1] for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance"
    ]
    read = {ast.unparse(one).removeprefix("events.") for one in cases + tests}

    assert {kind.__name__ for kind in observer.kinds} == read


def test_observer_without_kinds_gets_every_event():
    def everything(event): ...

    pulse = Pulse()

    assert wanting([everything, pulse], RedisUnavailable) == [everything, pulse]
    assert wanting([everything, pulse], Started) == [everything]
    assert wanting([LogObserver(), pulse], Started) == []


def test_success_is_an_event_for_the_log_only_at_level_debug(caplog):
    """A success is logged at DEBUG; a nack also at INFO."""
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
