"""What is decided about a delivery right before its handler would begin."""

import threading
import time

import pytest

from reliq.message import Claimed
from reliq.worker.flight import flights_of
from reliq.worker.outcome import RELEASED
from reliq.worker.run import Run
from reliq.worker.running import Running

LEASE = 5.0


@pytest.fixture
def settled():
    return []


@pytest.fixture
def begin(consumer, queue, settled):
    consumer.handler(queue, lease=LEASE)(lambda body: None)
    running = Running(lambda flights, outcome: settled.append((flights, outcome)), (), (), threading.Event())
    return running.begin


@pytest.fixture
def a_run(consumer, begin):
    """A run, to begin now, of messages each claimed so many seconds ago and not renewed since."""

    def make(*ages):
        now, handler = time.monotonic(), consumer.handlers[0]
        flights = [one for ago in ages for one in flights_of([Claimed("m", "n:5000", 3)], handler, now - ago)]
        return Run(flights, handler, now, None)

    return make


def test_what_is_held_under_its_lease_begins(begin, a_run, settled):
    assert begin(a_run(0.0))
    assert settled == []


def test_what_has_outlived_its_lease_does_not_begin_and_goes_back(begin, a_run, settled):
    late = a_run(LEASE + 0.1)

    assert not begin(late)
    assert settled == [(late.flights, RELEASED)]


def test_what_was_lost_meanwhile_does_not_begin_and_goes_back(begin, a_run, settled):
    lost = a_run(0.0)
    lost.flights[0].lost = True

    assert not begin(lost)
    assert settled == [(lost.flights, RELEASED)]


def test_of_a_batch_only_what_has_a_lease_begins(begin, a_run, settled):
    batch = a_run(0.0, LEASE + 0.1, 0.0)

    assert begin(batch)
    assert settled == [([batch.flights[1]], RELEASED)]
