"""What is decided about a delivery right before its handler would begin."""

import logging
import threading
import time

import pytest
from tenacity import wait_fixed

from reliq import Nack, Reject
from reliq.events import Acked, Handled, Nacked
from reliq.logs.observer import LogObserver
from reliq.message import Claimed
from reliq.settlement import RELEASED
from reliq.worker.delivery import HandlerCall, deliveries_of
from reliq.worker.runner import Runner

LEASE = 5.0


@pytest.fixture
def settled():
    return []


@pytest.fixture
def begin(consumer, queue, settled):
    consumer.handler(queue, lease=LEASE)(lambda body: None)
    running = Runner(lambda deliveries, outcome: settled.append((deliveries, outcome)), (), (), threading.Event())
    return running.begin


@pytest.fixture
def a_run(consumer, begin):
    """A run, to begin now, of messages each claimed so many seconds ago and not renewed since."""

    def make(*ages):
        now, handler = time.monotonic(), consumer.handlers[0]
        deliveries = [one for ago in ages for one in deliveries_of([Claimed("m", "n:5000", 3)], handler, now - ago)]
        return HandlerCall(deliveries, handler, now, None)

    return make


def test_what_is_held_under_its_lease_begins(begin, a_run, settled):
    assert begin(a_run(0.0))
    assert settled == []


def test_what_has_outlived_its_lease_does_not_begin_and_goes_back(begin, a_run, settled):
    late = a_run(LEASE + 0.1)

    assert not begin(late)
    assert settled == [(late.deliveries, RELEASED)]


def test_what_was_lost_meanwhile_does_not_begin_and_goes_back(begin, a_run, settled):
    lost = a_run(0.0)
    lost.deliveries[0].lost = True

    assert not begin(lost)
    assert settled == [(lost.deliveries, RELEASED)]


def test_of_a_batch_only_what_has_a_lease_begins(begin, a_run, settled):
    batch = a_run(0.0, LEASE + 0.1, 0.0)

    assert begin(batch)
    assert settled == [([batch.deliveries[1]], RELEASED)]


class Unbound:
    """A proxy that stands for nothing, as those of web frameworks outside a request."""

    @property
    def __class__(self):
        raise RuntimeError("working outside of the request, with secret-7")


class WordlessError(Exception):
    def __str__(self):
        raise ValueError("secret-7")


class Nameless(type):
    @property
    def __name__(cls):
        raise ValueError("secret-7")


class MisnamedError(Exception, metaclass=Nameless):
    """An error whose class raises when it is asked for its name."""


def raising(error):
    raise error


class ExitWithoutNameError(SystemExit, metaclass=Nameless):
    """The same, that no `except Exception` meets."""


#: What handlers answer that makes no sense: refused, delivered again, and no thread or slot is lost.
NONSENSE = {
    "a class": lambda: Reject,
    "an unbound proxy": Unbound,
    "no delay": lambda: Nack(delay="soon"),
    "an endless delay": lambda: Nack(delay=10**400),
    "no words": lambda: raising(WordlessError()),
    "no name": lambda: raising(MisnamedError()),
    "an exit": lambda: raising(SystemExit(3)),
    "an error that is no reason": lambda: Nack(reason=Unbound()),
}


@pytest.mark.parametrize("retries", [0, 1])
@pytest.mark.parametrize("kind", ["plain", "async", "batch"])
def test_an_answer_that_makes_no_sense_is_a_failure_and_costs_no_slot(
    make_queue, consumer, start, recorder, caplog, kind, retries
):
    caplog.set_level(logging.DEBUG)
    queue = make_queue(retries=retries)
    consumer.observers.append(LogObserver())
    consumer.observers.append(lambda event: raising(SystemExit(3)))

    def handle(body):
        return NONSENSE[body]() if body in NONSENSE else None

    async def ahandle(body):
        return handle(body)

    if kind == "batch":
        consumer.handler(queue, batch=5, backoff=wait_fixed(60))(lambda bodies: list(map(handle, bodies)))
    else:
        consumer.handler(queue, backoff=wait_fixed(60))(ahandle if kind == "async" else handle)
    # What one message of a batch raises is raised for its neighbours too: another matter.
    bodies = [one for one in NONSENSE if kind != "batch" or one not in ("no words", "no name", "an exit")]
    queue.publish_many(bodies)
    engine = start(concurrency=2)
    recorder.wait_for(Nacked, len(bodies))
    queue.publish_many(["good"] * 50)

    recorder.wait_for(Acked, 50)
    assert len(set(recorder.ids(Handled, outcome="nack"))) == len(bodies)  # one may come again after a second
    assert engine.dead_parts() == []
    assert "secret-7" not in caplog.text


@pytest.mark.parametrize(
    "answer", [lambda n: (Nack() for _ in range(n)), lambda n: map(str, [Nack()] * n), lambda n: Reject]
)
def test_a_batch_that_answers_with_what_nobody_has_computed_is_not_acked(queue, consumer, start, recorder, answer):
    consumer.handler(queue, batch=3)(lambda bodies: answer(len(bodies)))
    queue.publish_many(["x"] * 3)

    start()

    recorder.wait_for(Nacked, 3)
    assert all(event.error.startswith("ConfigurationError: a") for event in recorder.of(Handled))
    assert recorder.of(Acked) == []


class Fragile:
    """A body whose decoding runs foreign code, which raises what it likes."""

    @classmethod
    def model_json_schema(cls):
        return {}

    @classmethod
    def model_validate_json(cls, payload):
        return (
            payload
            if payload == b"good"
            else raising({b"exit": SystemExit(3), b"name": ExitWithoutNameError()}[payload])
        )


def test_a_body_whose_decoding_raises_anything_harms_no_other_of_its_batch(make_queue, consumer, start, recorder):
    queue, worked = make_queue(body=Fragile, retries=0), []
    consumer.handler(queue, batch=4)(worked.extend)
    make_queue(body=bytes, retries=0).publish_many([b"good", b"exit", b"name", b"good"])

    start(concurrency=1)

    recorder.wait_for(Acked, 2)
    recorder.wait_for(Nacked, 2)
    assert worked == [b"good", b"good"]
