"""What is decided about a delivery right before its handler would begin."""

import threading
import time

import pytest

from reliq.message import Claimed
from reliq.worker.flight import Flight
from reliq.worker.outcome import RELEASED
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
def flight(consumer, begin):
    """A message claimed so many seconds ago and not renewed since."""
    return lambda ago: Flight(Claimed("m", "n:5000", 3), consumer.handlers[0], time.monotonic() - ago)


def test_what_is_held_under_its_lease_begins(begin, flight, settled):
    assert begin(flight(0.0))
    assert settled == []


def test_what_has_outlived_its_lease_does_not_begin_and_goes_back(begin, flight, settled):
    late = flight(LEASE + 0.1)

    assert not begin(late)
    assert settled == [([late], RELEASED)]


def test_what_was_lost_meanwhile_does_not_begin_and_goes_back(begin, flight, settled):
    lost = flight(0.0)
    lost.lost = True

    assert not begin(lost)
    assert settled == [([lost], RELEASED)]
