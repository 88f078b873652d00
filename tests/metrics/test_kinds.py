"""What an observer says it wants is what it reads: an event it does not name is not made for it."""

import ast
import inspect

import pytest

from reliq.events import RedisAway, Started, wanting
from reliq.health import Pulse
from reliq.logs.observer import LogObserver
from reliq.metrics.process import ProcessMetrics
from reliq.metrics.producers import PublishMetrics
from reliq.process.main import Board


@pytest.mark.parametrize("observer", [LogObserver, ProcessMetrics, PublishMetrics, Pulse, Board])
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
